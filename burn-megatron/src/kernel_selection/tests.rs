use insta::assert_snapshot;

use super::*;

fn selection(choices: &str) -> Result<KernelSelection, KernelChoiceError> {
    let mut all = KernelChoices::default();
    all.set(choices)?;
    KernelSelection::new(&all, &Device::flex(), DType::F32)
}

#[test]
fn choices_are_read_and_reasons_are_given() {
    let mut selection = selection("unfused,norm=fused,loss=auto").unwrap();
    assert!(selection.is_fused(Operation::Norm) && selection.is_fused(Operation::Loss));
    assert!(!selection.is_fused(Operation::Attention));
    assert_snapshot!(
        selection,
        @"fused: norm (requested); fused: loss (the device has the kernel); unfused: activation, \
          dropout, rope, attention, softmax, linear, optimizer (requested)"
    );
    selection
        .keep_unfused(Operation::Loss, "of a test")
        .unwrap();
    assert!(!selection.is_fused(Operation::Loss));
    assert!(
        selection
            .to_string()
            .ends_with("; unfused: loss (of a test)")
    );
    // A requested kernel is kept, and an automatic kernel is not.
    selection.prefer_unfused(Operation::Norm, "slower");
    selection.prefer_unfused(Operation::Loss, "slower");
    assert!(selection.is_fused(Operation::Norm));
    assert!(selection.to_string().ends_with("; unfused: loss (slower)"));
}

#[test]
fn an_invalid_choice_is_an_error() {
    let error = |text| selection(text).unwrap_err().to_string();
    assert!(error("nrom=fused").starts_with("invalid operation \"nrom\": expected norm, "));
    assert!(error("norm=on").starts_with("invalid kernel choice \"on\": expected auto, fused"));
    let error = selection("attention=fused")
        .unwrap()
        .keep_unfused(Operation::Attention, "of a test")
        .unwrap_err();
    assert_snapshot!(error, @"kernels: attention cannot be fused: of a test; use auto or unfused");
    let choices = KernelChoices {
        loss: KernelChoice::Unfused,
        loss_chunk_size: Some(64),
        ..KernelChoices::default()
    };
    let error = KernelSelection::new(&choices, &Device::flex(), DType::F32).unwrap_err();
    assert_snapshot!(
        error,
        @"kernels: loss_chunk_size = 64 requires the fused loss, but loss is unfused (requested): remove \
          loss_chunk_size, or set loss = fused"
    );
}

#[test]
fn operations_are_in_the_order_of_their_numbers() {
    for (i, operation) in Operation::ALL.iter().copied().enumerate() {
        assert_eq!(operation as usize, i);
        let mut choices = KernelChoices::default();
        choices
            .set(&format!("{}=unfused", operation.name()))
            .unwrap();
        assert_eq!(choices.of(operation), KernelChoice::Unfused);
        assert_ne!(choices, KernelChoices::default());
    }
}

#[test]
fn an_attention_engine_is_a_choice_of_attention_only() {
    let mut choices = KernelChoices::default();
    for engine in EngineKind::ALL {
        choices.set(&format!("unfused,attention={engine}")).unwrap();
        assert_eq!(choices.attention, AttentionChoice::Engine(engine));
        assert_eq!(choices.of(Operation::Attention), KernelChoice::Fused);
        let text = serde_json::to_string(&choices).unwrap();
        assert!(
            text.contains(&format!("\"attention\":\"{engine}\"")),
            "{text}"
        );
        assert_eq!(
            serde_json::from_str::<KernelChoices>(&text).unwrap(),
            choices
        );
    }
    let error = |text| KernelChoices::default().set(text).unwrap_err().to_string();
    assert_snapshot!(
        error("attention=cmma"),
        @"invalid kernel choice \"cmma\" of attention: expected auto, fused, unfused, mma or portable"
    );
    assert!(error("norm=portable").starts_with("invalid kernel choice \"portable\""));
    let missing = KernelChoiceError::NoEngine {
        engine: EngineKind::Mma,
        reason: "mma: of a test".into(),
    };
    assert_snapshot!(
        missing,
        @"kernels: attention cannot use mma: of a test; use auto or portable"
    );
}

#[test]
fn the_attention_engine_is_shown_with_its_reason() {
    let mut selection = selection("norm=unfused").unwrap();
    assert!(selection.attention_engines().is_empty());
    for _ in 0..2 {
        selection.add_attention_engine(EngineKind::Portable, "of a test");
    }
    assert_snapshot!(
        selection,
        @"fused: activation, dropout, rope, softmax, loss, linear, optimizer (the device has the \
          kernel); fused: attention by portable (of a test); unfused: norm (requested)"
    );
    selection.add_attention_engine(EngineKind::Mma, "wide heads");
    let shown = "; fused: attention by portable and mma (of a test; wide heads); ";
    assert!(selection.to_string().contains(shown), "{selection}");
    assert_eq!(
        selection.summary(),
        "fused except norm; attention by portable and mma"
    );
    selection
        .keep_unfused(Operation::Attention, "dropout")
        .unwrap();
    assert_eq!(selection.summary(), "fused except norm, attention");
    assert!(
        selection
            .to_string()
            .ends_with("; unfused: attention (dropout)")
    );
}

#[test]
fn epilogues_are_a_bool_or_measured() {
    let read = |json: &str| serde_json::from_str::<KernelChoices>(json);
    for (value, choice) in [
        ("true", EpilogueFusion::On),
        ("false", EpilogueFusion::Off),
        ("\"measured\"", EpilogueFusion::Measured),
    ] {
        let json = format!("{{\"epilogue_fusion\":{value}}}");
        let choices = read(&json).unwrap();
        assert_eq!(choices.epilogue_fusion, choice);
        let written = serde_json::to_value(&choices).unwrap();
        assert_eq!(written["epilogue_fusion"].to_string(), value);
        let table = format!("epilogue_fusion = {value}");
        assert_eq!(toml::from_str::<KernelChoices>(&table).unwrap(), choices);
        let mut set = KernelChoices::default();
        let text = value.trim_matches('"');
        set.set(&format!("epilogue_fusion={text}")).unwrap();
        assert_eq!(set, choices);
        assert_eq!(
            set.check_measured().is_ok(),
            choice != EpilogueFusion::Measured
        );
    }
    assert_eq!(
        read("{}").unwrap().epilogue_fusion,
        EpilogueFusion::Off,
        "by default"
    );
    let error = read("{\"epilogue_fusion\":\"fast\"}").unwrap_err();
    let expected = "invalid epilogue_fusion \"fast\": expected true, false or measured";
    assert!(error.to_string().starts_with(expected), "{error}");
    let error = read("{\"epilogue_fusion\":1}").unwrap_err().to_string();
    assert!(error.contains("true, false or \"measured\""), "{error}");
}

#[test]
fn layers_have_no_epilogues_until_they_are_measured() {
    let mut measured = selection("epilogue_fusion=measured").unwrap();
    assert!(!measured.epilogue_fusion());
    measured.set_epilogue_fusion(EpilogueFusion::On);
    assert!(measured.epilogue_fusion());
    let text = measured.to_string();
    assert!(
        text.contains("activation as epilogues of cuBLASLt"),
        "{text}"
    );
}

#[test]
fn a_summary_has_no_reasons() {
    assert_eq!(selection("fused").unwrap().summary(), "fused");
    assert_eq!(selection("unfused").unwrap().summary(), "unfused");
}

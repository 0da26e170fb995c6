use super::*;
use burn_megatron::choice::Choice;

fn error(change: impl FnOnce(&mut TransformerConfig), tensor: usize) -> String {
    let mut config = TransformerConfig::llama();
    change(&mut config);
    config.check(tensor, true).unwrap_err().to_string()
}

#[test]
fn what_would_fit_is_said() {
    assert_eq!(
        error(|config| config.heads = 12, 8),
        "heads 12 cannot be split over tensor = 8; 1, 2, 3, 4, 6, 12 can",
    );
    assert_eq!(
        error(|config| config.groups = Some(3), 1),
        "model: 4 heads cannot share 3 groups of keys and values; 1, 2, 4 groups can serve them",
    );
    assert_eq!(
        error(|config| config.hidden = 6, 1),
        "model: hidden 6 cannot be shared by 4 heads; set head_width",
    );
    let hidden_42 = |config: &mut TransformerConfig| {
        config.hidden = 42;
        config.positions = Positions::Learned;
    };
    // Not 1, 3, 7 and 21, which two groups and two ranks cannot share.
    assert_eq!(
        error(hidden_42, 2),
        "model: hidden 42 cannot be shared by 4 heads; 2, 6, 14, 42 heads can, or set head_width",
    );
    let twelve_heads = |config: &mut TransformerConfig| {
        config.heads = 12;
        config.groups = Some(5);
    };
    // Not 3, which four ranks can neither share nor hold each.
    assert_eq!(
        error(twelve_heads, 4),
        "model: 12 heads cannot share 5 groups of keys and values; 1, 2, 4, 12 groups can serve them",
    );
    assert_eq!(
        error(|config| config.head_width = Some(5), 1),
        "model: a head width of 5 cannot be used; an even one above 0 can",
    );
    assert_eq!(
        error(|c| c.layers = 0, 1),
        "model: layers = 0 makes no model; 1 and more do"
    );
    assert!(error(|config| config.context = 6, 4).starts_with("context 6 cannot be split"));
    assert!(error(|config| config.dropout = 1.0, 1).contains("dropout = 1 makes no sense"));
}

#[test]
fn numbers_and_sizes_that_no_model_has_are_refused() {
    for (change, says) in [
        (
            (|c| c.norm_epsilon = 0.0) as fn(&mut TransformerConfig),
            "norm_epsilon = 0 makes",
        ),
        (|c| c.norm_epsilon = f64::NAN, "norm_epsilon = NaN makes"),
        (|c| c.norm_epsilon = 1e-60, "norm_epsilon = 0.0000"),
        (|c| c.z_loss = -1.0, "z_loss = -1 makes"),
        (|c| c.z_loss = f64::INFINITY, "z_loss = inf makes"),
        (|c| c.init_std = -0.02, "init_std = -0.02 makes"),
        (|c| c.init_std = f64::NAN, "init_std = NaN makes"),
        (|c| c.layers = 1 << 30, "at most 16384 fit"),
        (
            |c| (c.hidden, c.heads) = (1 << 30, 1 << 20),
            "parameters, and nothing holds it",
        ),
        (
            |c| c.head_width = Some(1 << 30),
            "a head width of 1073741824 cannot be used; at most 65536 can",
        ),
        (|c| c.vocabulary_divisible_by = 1 << 30, ""),
    ] {
        let mut config = TransformerConfig::llama();
        change(&mut config);
        let found = config.check(1, false).map_err(|error| error.to_string());
        match says {
            "" => assert_eq!(found, Ok(32)),
            says => assert!(
                found.as_ref().is_err_and(|e| e.contains(says)),
                "{says}: {found:?}"
            ),
        }
    }
}

#[test]
fn a_kernel_that_the_model_cannot_use_is_refused_at_once() {
    let config = TransformerConfig {
        attention_dropout: 0.1,
        ..TransformerConfig::llama()
    };
    let check = |choice| config.check_kernels(&Choices::all(choice), &Device::flex(), DType::F32);
    let error = check(Choice::Fused).unwrap_err().to_string();
    assert!(
        error.starts_with("kernels: attention cannot be fused"),
        "{error}"
    );
    assert!(!check(Choice::Auto).unwrap().is_fused(Operation::Attention));
}

#[test]
fn fewer_groups_than_ranks_fit_if_they_divide_them() {
    let config = |groups, heads| TransformerConfig {
        groups: Some(groups),
        heads,
        head_width: Some(8),
        ..TransformerConfig::llama()
    };
    assert_eq!(config(2, 4).check(4, false).unwrap(), 8);
    assert_eq!(config(1, 4).check(4, false).unwrap(), 8);
    assert!(config(3, 12).check(4, false).is_err());
}

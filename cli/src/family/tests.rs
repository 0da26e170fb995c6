use burn_megatron_models::hf::HfConfig;

use super::*;

fn table(text: &str) -> Table {
    text.parse().unwrap()
}

#[test]
fn a_family_gives_the_settings_that_a_recipe_leaves_out() {
    let families = Families::transformers();
    let settings = |text: &str| serde_json::to_value(families.model(table(text)).unwrap()).unwrap();
    let first = settings("layers = 2");
    assert_eq!(
        (&first["family"], &first["layers"]),
        (&"gpt2".into(), &2.into())
    );
    let expected = TransformerConfig {
        layers: 2,
        ..TransformerConfig::default()
    };
    let expected = serde_json::to_value(expected).unwrap();
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&first[key], value, "{key}");
    }
    let qwen = settings("family = \"qwen3\"\nheads = 8");
    assert_eq!(
        (&qwen["qk_norm"], &qwen["heads"], &qwen["norm"]),
        (&true.into(), &8.into(), &"rms".into())
    );
}

/// Checks that the defaults of each family describe the model that Hugging Face computes under its name.
#[test]
fn the_defaults_are_of_their_families() {
    for family in ModelFamily::ALL {
        let config = HfConfig::<ModelFamily>::of(&family.defaults()).unwrap();
        assert_eq!(config.family, *family);
    }
}

#[test]
fn what_no_family_has_is_refused() {
    let families = Families::transformers();
    for (text, wanted) in [
        (
            "family = \"mamba\"",
            "invalid family \"mamba\": expected gpt2, llama, mistral, qwen2, qwen3, mixtral, \
             qwen3_moe, olmoe, gemma2, gemma3_text, deepseek_v2, deepseek_v3, gpt_oss",
        ),
        ("family = 3", "invalid family = 3: expected a string"),
        ("layer = 3", "unknown field `layer`, expected one of"),
        (
            "layers = \"two\"",
            "invalid type: string \"two\", expected usize",
        ),
    ] {
        let error = families.model(table(text)).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let none = Families::none().model(Table::new()).unwrap_err();
    insta::assert_snapshot!(none, @"this command has no model family");
}

/// Checks text and JSON, where settings without a value are null.
#[test]
fn a_model_is_read_as_it_was_written() {
    let families = Families::transformers();
    let text = "family = \"llama\"\nwindow = 5\npositions = { rotary = { base = 5e5, scaling = \
                { llama3 = { factor = 8.0, low = 1.0, high = 4.0, original = 32 } } } }";
    let model = families.model(table(text)).unwrap();
    let written = toml::to_string(&model).unwrap();
    assert_eq!(families.model(table(&written)).unwrap(), model, "{written}");
    let json = serde_json::to_value(&model).unwrap();
    assert_eq!(json["mlp_width"], Value::Null);
    assert_eq!(families.model_of_json(&json).unwrap(), model);
    assert_ne!(families.model(Table::new()).unwrap(), model);
    // The default of the family is not null.
    let mut json =
        serde_json::to_value(families.model(table("family = \"mistral\"")).unwrap()).unwrap();
    assert_eq!(json["window"].take(), 64);
    let model = families.model_of_json(&json).unwrap();
    assert_eq!(serde_json::to_value(&model).unwrap(), json);
}

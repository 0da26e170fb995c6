use burn_megatron::nn::QkNorm;
use serde_json::{Value, json};

use crate::{Positions, TransformerConfig};

#[test]
fn norms_of_queries_and_keys_are_named_or_switched() {
    let with = |value: Value| {
        let mut settings = json!(TransformerConfig::llama());
        settings["qk_norm"] = value;
        serde_json::from_value::<TransformerConfig>(settings)
    };
    for (value, wanted, written) in [
        (json!(false), None, json!(false)),
        (json!(true), Some(QkNorm::Heads), json!(true)),
        (json!("heads"), Some(QkNorm::Heads), json!(true)),
        (json!("whole"), Some(QkNorm::Whole), json!("whole")),
    ] {
        let config = with(value).unwrap();
        assert_eq!(config.qk_norm, wanted);
        assert_eq!(json!(config)["qk_norm"], written);
    }
    for (value, wanted) in [
        (
            json!("all"),
            "unknown variant `all`, expected `heads` or `whole`",
        ),
        (json!(1), "expected true, false, \"heads\" or \"whole\""),
    ] {
        let error = with(value).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn settings_of_layers_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut TransformerConfig)| {
        let mut config = TransformerConfig::llama();
        change(&mut config);
        config.check(1, false).unwrap_err().to_string()
    };
    assert_eq!(
        refused(|config| config.layer_windows = vec![4, 0]),
        "model: 2 layer_windows for 4 layers: expected one for each, with 0 for a layer without a window"
    );
    assert_eq!(
        refused(|config| (config.window, config.layer_windows) = (Some(4), vec![4, 0, 4, 0])),
        "model: window beside layer_windows: expected one of the two"
    );
    assert_eq!(
        refused(|config| config.local_base = Some(1.0)),
        "model: invalid local_base = 1: expected a finite number above 1"
    );
    assert_eq!(
        refused(|config| {
            (config.local_base, config.positions) = (Some(10.0), Positions::Learned)
        }),
        "model: local_base beside learned positions: expected rotary ones"
    );
    assert_eq!(
        refused(|config| config.logit_soft_cap = Some(f64::NAN)),
        "model: invalid logit_soft_cap = NaN: expected a number above 0 and finite in f32"
    );
}

#[test]
fn windows_are_those_of_each_layer() {
    let config = TransformerConfig {
        layer_windows: vec![3, 0, 5, 0],
        ..TransformerConfig::llama()
    };
    assert_eq!(config.windows(), [Some(3), None, Some(5), None]);
    let config = TransformerConfig {
        window: Some(7),
        ..TransformerConfig::llama()
    };
    assert_eq!(config.windows(), [Some(7); 4]);
}

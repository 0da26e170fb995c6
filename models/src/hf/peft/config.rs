//! Reads and writes `adapter_config.json`.

use std::path::{Path, PathBuf};

use burn_megatron::nn::lora::{LoraConfig, LoraTarget};
use burn_megatron::regular_file::is_there;
use serde_json::{Map, Value, json};

use super::super::shard::read_text;
use super::super::{HfConfigError, HfError};
use super::{CONFIG, WEIGHTS};

/// Keys that do not change what an adapter computes.
const IGNORED: [&str; 15] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Values of `init_lora_weights` that keep the weights of the base model.
const PLAIN_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Returns whether a folder contains a LoRA adapter in the format of `peft`.
pub fn is_peft_folder(path: &Path) -> bool {
    is_there(&path.join(CONFIG))
}

/// Returns the settings as an `adapter_config.json`. `base` is the adapted model.
pub(super) fn write(lora: &LoraConfig, targets: &[LoraTarget], base: Option<&Path>) -> String {
    let targets: Vec<_> = targets.iter().map(|target| target.name()).collect();
    let alpha = match lora.alpha {
        whole if whole.fract() == 0.0 && whole < 1e9 => json!(whole as u64),
        alpha => json!(alpha),
    };
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    format!("{config:#}\n")
}

/// Reads the settings of a folder. The targets follow from the tensors, and are not read here.
pub(super) fn read(path: &Path) -> Result<LoraConfig, HfError> {
    let path = path.join(CONFIG);
    let parsed = serde_json::from_slice(&read_text(&path)?).map_err(HfConfigError::Json);
    let config = parsed.and_then(parse);
    config.map_err(|source| HfError::Config { path, source })
}

/// Returns the path of the base model of an adapter (`base_model_name_or_path`), or `None` if `adapter_config.json` has
/// no path.
///
/// # Errors
///
/// [`HfError`] if `adapter_config.json` cannot be read.
pub fn adapted_model(folder: &Path) -> Result<Option<PathBuf>, HfError> {
    Ok(read(folder)?.base_model)
}

fn parse(mut keys: Map<String, Value>) -> Result<LoraConfig, HfConfigError> {
    let invalid = |key: &str, value: &Value, fits: &str| HfConfigError::Value {
        key: key.into(),
        value: value.to_string(),
        fits: fits.into(),
    };
    let base = keys.get("base_model_name_or_path").and_then(Value::as_str);
    let base = base.filter(|base| !base.is_empty()).map(PathBuf::from);
    for key in IGNORED {
        keys.remove(key);
    }
    let mut take = |key: &str| keys.remove(key).unwrap_or(Value::Null);
    for (key, wanted) in [("peft_type", "LORA"), ("bias", "none")] {
        match take(key) {
            Value::Null if key == "bias" => {}
            Value::String(found) if found == wanted => {}
            other => return Err(invalid(key, &other, &format!("{wanted:?}"))),
        }
    }
    let init = take("init_lora_weights");
    if !keeps_base(&init) {
        let fits = "true, false, \"gaussian\", \"eva\", \"orthogonal\" or \"mica\"; this method changes the weights of the base \
                    model too, and the folder does not contain them: convert the adapter with peft's \
                    save_pretrained(path_initial_model_for_weight_conversion=..)";
        return Err(invalid("init_lora_weights", &init, fits));
    }
    let defaults = LoraConfig::default();
    let rank = match take("r") {
        Value::Null => defaults.rank,
        value => value
            .as_u64()
            .filter(|rank| *rank > 0)
            .and_then(|rank| usize::try_from(rank).ok())
            .ok_or_else(|| invalid("r", &value, "a whole number above 0"))?,
    };
    let mut number = |key: &str, default: f64| match take(key) {
        Value::Null => Ok(default),
        value => value
            .as_f64()
            .ok_or_else(|| invalid(key, &value, "a number")),
    };
    let config = LoraConfig {
        rank,
        alpha: number("lora_alpha", defaults.alpha)?,
        dropout: number("lora_dropout", 0.0)?,
        rslora: match take("use_rslora") {
            Value::Null => false,
            value => value
                .as_bool()
                .ok_or_else(|| invalid("use_rslora", &value, "true or false"))?,
        },
        base_model: base,
        ..defaults
    };
    // The other keys are settings that are not supported, so they must be off.
    let is_off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(table) => table.is_empty(),
        _ => false,
    };
    if let Some((key, value)) = keys.iter().find(|(_, value)| !is_off(value)) {
        return Err(invalid(key, value, "null, false or an empty one"));
    }
    let checked = config.check();
    checked.map_err(|error| HfConfigError::Sizes(error.to_string()))?;
    Ok(config)
}

/// Returns whether an initialization keeps the weights of the base model. Other initializations, such as `pissa` and
/// `olora`, subtract the initial product of the factors from the weights.
fn keeps_base(init: &Value) -> bool {
    match init {
        Value::Null | Value::Bool(_) => true,
        Value::String(name) => PLAIN_INITS.contains(&&name.to_ascii_lowercase()[..]),
        _ => false,
    }
}

/// Returns the path of the file with the factors in a folder.
pub(super) fn weights(path: &Path) -> PathBuf {
    path.join(WEIGHTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_change_what_is_computed_are_refused() {
        let read = |text: &str| {
            let keys = serde_json::from_str(text).unwrap();
            parse(keys).map_err(|error| error.to_string())
        };
        let config = read(
            r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": true, "bias": "none", "use_dora": false,
               "rank_pattern": {}, "modules_to_save": null, "base_model_name_or_path": "base", "peft_version": "0.18"}"#,
        );
        let config = config.unwrap();
        assert_eq!((config.rank, config.alpha, config.rslora), (4, 8.0, true));
        assert_eq!(config.base_model, Some("base".into()));
        for (key, wanted) in [
            (
                r#""use_dora": true"#,
                "invalid use_dora = true: expected null, false or an empty one",
            ),
            (
                r#""rank_pattern": {"q_proj": 2}"#,
                "invalid rank_pattern = {\"q_proj\":2}: expected null",
            ),
            (
                r#""bias": "all""#,
                "invalid bias = \"all\": expected \"none\"",
            ),
            (
                r#""r": 0"#,
                "invalid r = 0: expected a whole number above 0",
            ),
            (r#""new_key": 3"#, "invalid new_key = 3"),
            (
                r#""use_bdlora": {"nblocks": 2}"#,
                "invalid use_bdlora = {\"nblocks\":2}: expected null",
            ),
            (
                r#""layers_to_transform": 0"#,
                "invalid layers_to_transform = 0: expected null",
            ),
        ] {
            let error = read(&format!(r#"{{"peft_type": "LORA", {key}}}"#)).unwrap_err();
            assert!(error.starts_with(wanted), "{error}");
        }
        let init = |init: &str| {
            read(&format!(
                r#"{{"peft_type": "LORA", "init_lora_weights": {init}}}"#
            ))
        };
        for plain in [
            "null",
            "true",
            "false",
            r#""gaussian""#,
            r#""eva""#,
            r#""orthogonal""#,
            r#""mica""#,
        ] {
            assert!(init(plain).is_ok(), "{plain}");
        }
        for other in [
            "pissa",
            "pissa_niter_16",
            "olora",
            "OLoRA",
            "corda",
            "loftq",
            "lora_ga",
            "new",
        ] {
            let error = init(&format!("\"{other}\"")).unwrap_err();
            let wanted = format!(
                "invalid init_lora_weights = \"{other}\": expected true, false, \"gaussian\""
            );
            assert!(error.starts_with(&wanted), "{error}");
        }
        let error = read(r#"{"peft_type": "IA3"}"#).unwrap_err();
        insta::assert_snapshot!(error, @"invalid peft_type = \"IA3\": expected \"LORA\"");
    }
}

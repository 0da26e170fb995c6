//! The keys that every family has: names, special tokens and the dtype of the weights.

use burn_megatron::checkpoint::ElementType;
use serde_json::{Map, Value, json};

use super::{ConfigKeys, HfConfig, SpecialTokenIds};
use crate::hf::{HfConfigError, HfFamily};

/// Returns the dtype of the weights, from the old or the new key.
pub(super) fn dtype(keys: &mut ConfigKeys) -> Result<Option<ElementType>, HfConfigError> {
    let (old, new) = (keys.text("torch_dtype")?, keys.text("dtype")?);
    let Some(name) = new.or(old) else {
        return Ok(None);
    };
    match name.trim_start_matches("torch.") {
        "float64" => Ok(Some(ElementType::F64)),
        "float32" => Ok(Some(ElementType::F32)),
        "float16" => Ok(Some(ElementType::F16)),
        "bfloat16" => Ok(Some(ElementType::Bf16)),
        _ => {
            let fits = "float64, float32, float16 or bfloat16";
            Err(keys.refused("torch_dtype", &json!(name), fits))
        }
    }
}

pub(super) fn tokens(keys: &mut ConfigKeys) -> Result<SpecialTokenIds, HfConfigError> {
    let eos = match keys.take("eos_token_id") {
        Some(Value::Array(several)) => several,
        one => one.into_iter().collect(),
    };
    let token = |keys: &ConfigKeys, key: &str, value: &Value| {
        let token = value.as_i64();
        match token.and_then(|token| u32::try_from(token).ok()) {
            Some(token) => Ok(Some(token)),
            // Some files use -1 if there is no such token.
            None if token == Some(-1) => Ok(None),
            None => Err(keys.refused(key, value, "a token id")),
        }
    };
    let mut single = |key: &str| match keys.take(key) {
        Some(value) => token(keys, key, &value),
        None => Ok(None),
    };
    let (bos, pad) = (single("bos_token_id")?, single("pad_token_id")?);
    let eos = eos.iter().map(|value| token(keys, "eos_token_id", value));
    Ok(SpecialTokenIds {
        bos,
        eos: eos
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?,
        pad,
    })
}

/// Returns the keys of a configuration, including the keys of its family.
pub(super) fn keys<F: HfFamily>(config: &HfConfig<F>) -> Map<String, Value> {
    let names = config.family.names();
    let mut keys = config.family.write(&config.model);
    let mut add = |key: &str, value: Value| keys.insert(key.into(), value);
    add("model_type", json!(names.model_type));
    add("architectures", json!([names.architecture]));
    add("bos_token_id", json!(config.tokens.bos));
    add("pad_token_id", json!(config.tokens.pad));
    let eos = match &config.tokens.eos[..] {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    };
    add("eos_token_id", eos);
    let dtype = config.dtype.and_then(|dtype| match dtype {
        ElementType::F64 => Some("float64"),
        ElementType::F32 => Some("float32"),
        ElementType::F16 => Some("float16"),
        ElementType::Bf16 => Some("bfloat16"),
        ElementType::I64 | ElementType::I32 | ElementType::U8 => None,
    });
    if let Some(dtype) = dtype {
        add("torch_dtype", json!(dtype));
    }
    keys
}

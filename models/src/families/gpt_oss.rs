//! gpt-oss, with attention sinks, sliding windows in every second block, and experts with biases.

use burn_megatron::nn::Activation;
use serde_json::{Map, Value, json};

use super::{Family, experts, rope, sizes, windows};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MoeConfig, TransformerConfig};

/// The clamp limit of gate and value in [`Activation::ClampedSwiGlu`], followed by the scale factor of the gate.
const LIMIT: f64 = 7.0;
const ALPHA: f64 = 1.702;

/// The window that is written if no layer has a window, because the class in `transformers` requires a number.
const WINDOW: usize = 128;

pub(super) struct GptOss;

impl Family for GptOss {
    fn defaults(&self) -> TransformerConfig {
        TransformerConfig {
            activation: Activation::ClampedSwiGlu,
            bias: true,
            sinks: true,
            layer_windows: vec![32, 0],
            moe: Some(MoeConfig {
                router_bias: true,
                ..MoeConfig::default()
            }),
            ..TransformerConfig::llama()
        }
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        let sizes = sizes::read(keys, self.defaults())?;
        let per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
        keys.only("experts_per_token", per_token)?;
        keys.only("swiglu_limit", LIMIT)?;
        keys.only("swiglu_alpha", ALPHA)?;
        keys.only("hidden_act", "silu")?;
        keys.only("attention_bias", true)?;
        // The RoPE scaling contains the same value.
        keys.take("initial_context_length");
        let (window, layer_windows) = layer_windows(keys, sizes.layers)?;
        Ok(TransformerConfig {
            groups: Some(keys.needed("num_key_value_heads", ConfigKeys::size)?),
            head_width: Some(keys.needed("head_dim", ConfigKeys::size)?),
            positions: rope::read(keys, sizes.context, false)?,
            window,
            layer_windows,
            moe: Some(MoeConfig {
                experts: keys.needed("num_local_experts", ConfigKeys::size)?,
                experts_per_token: per_token,
                normalized: experts::normalized(per_token, true),
                router_bias: true,
                ..MoeConfig::default()
            }),
            ..sizes
        })
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        let moe = model.moe.clone().unwrap_or_default();
        let own = json!({
            "head_dim": model.width_of_heads(),
            "hidden_act": "silu",
            "attention_bias": true,
            "sliding_window": windows::size(model).unwrap_or(WINDOW),
            "layer_types": windows::types(model),
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "swiglu_limit": LIMIT,
        });
        let mut keys = sizes::write(model, own);
        if keys.get("rope_scaling").is_some_and(Value::is_null) {
            // The class in `transformers` would replace null with its default scaling.
            let scaling = json!({ "rope_type": "default" });
            keys.insert("rope_scaling".into(), scaling);
        }
        keys
    }
}

/// Returns a window in every second layer, starting with the first, unless `layer_types` differs.
fn layer_windows(keys: &mut ConfigKeys, layers: usize) -> Result<windows::Windows, HfConfigError> {
    if let Some(window) = keys.size("sliding_window")? {
        return windows::by_step(keys, layers, window, 2);
    }
    // Earlier versions of this crate wrote folders without `sliding_window`, in which no layer has a window.
    match windows::layer_types(keys, layers, false)? {
        Some(_) => Ok((None, vec![])),
        None => Err(keys.missing("sliding_window")),
    }
}

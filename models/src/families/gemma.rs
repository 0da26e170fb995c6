//! Gemma 2 has sliding windows in every second block, soft caps, and norms after attention and after the MLP. The text
//! model of Gemma 3 normalizes the queries and keys of each head. Its blocks with a sliding window have a different
//! RoPE base.

use burn_megatron::nn::{Activation, QkNorm};
use serde_json::{Map, Value, json};

use super::{Conditions, Family, biases, rope, sizes, windows};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, TransformerConfig};

/// The only activation that these models were trained with.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The window that is written if no layer has a window, because the classes in `transformers` require a number.
const WINDOW: usize = 4096;

pub(super) struct Gemma {
    is_gemma3: bool,
}

pub(super) const GEMMA2: Gemma = Gemma { is_gemma3: false };

pub(super) const GEMMA3: Gemma = Gemma { is_gemma3: true };

impl Family for Gemma {
    fn defaults(&self) -> TransformerConfig {
        let gemma = TransformerConfig {
            norm_zero_centered: true,
            norm_epsilon: 1e-6,
            activation: Activation::GeGlu,
            layer_windows: vec![64, 0],
            post_norms: true,
            scaled_embedding: true,
            tied: true,
            ..TransformerConfig::llama()
        };
        if self.is_gemma3 {
            TransformerConfig {
                qk_norm: Some(QkNorm::Heads),
                qk_norm_zero_centered: true,
                positions: Positions::rotary(1e6),
                local_base: Some(1e4),
                layer_windows: vec![64, 64, 64, 0],
                ..gemma
            }
        } else {
            TransformerConfig {
                attention_soft_cap: Some(50.0),
                logit_soft_cap: Some(30.0),
                ..gemma
            }
        }
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        let sizes = sizes::read(keys, self.defaults())?;
        let head_width = keys.needed("head_dim", ConfigKeys::size)?;
        for key in ["hidden_activation", "hidden_act"] {
            keys.only(key, ACTIVATION)?;
        }
        let attention_bias = biases::attention(keys, false)?;
        keys.only("use_bidirectional_attention", false)?;
        // This key selects how `transformers` stores keys and values in its KV cache.
        keys.take("cache_implementation");
        let (positions, local_base) = if self.is_gemma3 {
            let (positions, local) = rope::read_by_window(keys, sizes.context)?;
            (positions, Some(local))
        } else {
            (rope::read(keys, sizes.context, false)?, None)
        };
        let window = keys.needed("sliding_window", ConfigKeys::size)?;
        let step = self.window_step(keys)?;
        let (window, layer_windows) = windows::by_step(keys, sizes.layers, window, step)?;
        // Attention of Gemma 3 in `transformers` does not use the soft cap.
        let attention_soft_cap = keys.positive("attn_logit_softcapping")?;
        let scalar = keys.needed("query_pre_attn_scalar", ConfigKeys::size)?;
        Ok(TransformerConfig {
            groups: Some(keys.needed("num_key_value_heads", ConfigKeys::size)?),
            head_width: Some(head_width),
            positions,
            local_base,
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            window,
            layer_windows,
            attention_scale: (scalar != head_width).then(|| scale(scalar)),
            attention_soft_cap: attention_soft_cap.filter(|_| !self.is_gemma3),
            logit_soft_cap: keys.positive("final_logit_softcapping")?,
            ..sizes
        })
    }

    fn conditions(&self, model: &TransformerConfig) -> Conditions {
        vec![(
            "attention_scale = 1 / sqrt(n) for a whole number n",
            scalar(model).is_some(),
        )]
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        let own = json!({
            "head_dim": model.width_of_heads(),
            "hidden_activation": ACTIVATION,
            "attention_bias": model.has_qkv_bias(),
            "query_pre_attn_scalar": scalar(model),
            "attn_logit_softcapping": model.attention_soft_cap,
            "final_logit_softcapping": model.logit_soft_cap,
            "sliding_window": windows::size(model).unwrap_or(WINDOW),
            "layer_types": windows::types(model),
        });
        let mut keys = sizes::write(model, own);
        if let Some(base) = model.local_base {
            keys.insert("rope_local_base_freq".into(), json!(base));
        }
        keys
    }
}

impl Gemma {
    /// Returns the interval of the layers without a window, for old files without `layer_types`.
    fn window_step(&self, keys: &mut ConfigKeys) -> Result<usize, HfConfigError> {
        if !self.is_gemma3 {
            return Ok(2);
        }
        keys.not_null("sliding_window_pattern", "a number of layers")?;
        let patterns = ["sliding_window_pattern", "_sliding_window_pattern"];
        let [given, other] = patterns.map(|key| keys.size(key));
        Ok(given?.or(other?).unwrap_or(6))
    }
}

fn scale(scalar: usize) -> f64 {
    (scalar as f64).powf(-0.5)
}

/// Returns the integer value of `query_pre_attn_scalar` for the attention scale of the model, or `None` if no integer
/// gives this scale.
fn scalar(model: &TransformerConfig) -> Option<usize> {
    let Some(given) = model.attention_scale else {
        return Some(model.width_of_heads());
    };
    let scalar = (given * given).recip().round();
    let scalar = (1.0..1e9).contains(&scalar).then_some(scalar as usize)?;
    ((scale(scalar) / given - 1.0).abs() < 1e-12).then_some(scalar)
}

//! Gemma 2 and 3, as keys of a `config.json`.

use burn_megatron::nn::{Activation, NormKind, QkNorm};
use serde_json::{Map, Value, json};

use super::read::{attention_bias, init_std};
use super::write::map;
use super::{ModelFamily, rope, windows};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, TransformerConfig};

/// The only activation that they have been trained with.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The window that is written if no layer has one, as the classes of `transformers` require a number.
const WINDOW: usize = 4096;

pub(super) fn read(
    family: ModelFamily,
    keys: &mut ConfigKeys,
) -> Result<TransformerConfig, HfConfigError> {
    let is_gemma3 = family == ModelFamily::Gemma3Text;
    let layers = keys.needed("num_hidden_layers", ConfigKeys::size)?;
    let head_width = keys.needed("head_dim", ConfigKeys::size)?;
    let context = keys.needed("max_position_embeddings", ConfigKeys::size)?;
    for key in ["hidden_activation", "hidden_act"] {
        keys.only(key, ACTIVATION)?;
    }
    let attention_bias = attention_bias(keys, false)?;
    keys.only("use_bidirectional_attention", false)?;
    // How transformers stores keys and values.
    keys.take("cache_implementation");
    let (positions, local_base) = if is_gemma3 {
        let (positions, local) = rope::read_by_window(keys, context)?;
        (positions, Some(local))
    } else {
        (rope::read(family, keys, context)?, None)
    };
    let (window, layer_windows) = windows_of_layers(keys, layers, is_gemma3)?;
    // The attention of Gemma 3 in transformers does not use the cap.
    let attention_soft_cap = keys.positive("attn_logit_softcapping")?;
    let attention_soft_cap = attention_soft_cap.filter(|_| !is_gemma3);
    let logit_soft_cap = keys.positive("final_logit_softcapping")?;
    let scalar = keys.needed("query_pre_attn_scalar", ConfigKeys::size)?;
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        context,
        hidden: keys.needed("hidden_size", ConfigKeys::size)?,
        layers,
        heads: keys.needed("num_attention_heads", ConfigKeys::size)?,
        groups: Some(keys.needed("num_key_value_heads", ConfigKeys::size)?),
        head_width: Some(head_width),
        mlp_width: Some(keys.needed("intermediate_size", ConfigKeys::size)?),
        norm_epsilon: keys.needed("rms_norm_eps", ConfigKeys::number)?,
        positions,
        local_base,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        window,
        layer_windows,
        attention_scale: (scalar != head_width).then(|| scale(scalar)),
        attention_soft_cap,
        logit_soft_cap,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: init_std(keys)?,
        ..defaults(is_gemma3)
    })
}

/// A small model, of bytes.
pub(super) fn defaults(is_gemma3: bool) -> TransformerConfig {
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
    if is_gemma3 {
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

fn scale(scalar: usize) -> f64 {
    (scalar as f64).powf(-0.5)
}

/// `query_pre_attn_scalar`, if the scale of a model is that of one.
fn scalar(model: &TransformerConfig) -> Option<usize> {
    let Some(given) = model.attention_scale else {
        return Some(model.width_of_heads());
    };
    let scalar = (given * given).recip().round();
    let scalar = (1.0..1e9).contains(&scalar).then_some(scalar as usize)?;
    ((scale(scalar) / given - 1.0).abs() < 1e-12).then_some(scalar)
}

/// By `layer_types`, or by the pattern of old files: every second layer of Gemma 2 has no window, and every sixth of
/// Gemma 3.
fn windows_of_layers(
    keys: &mut ConfigKeys,
    layers: usize,
    is_gemma3: bool,
) -> Result<windows::Windows, HfConfigError> {
    let window = keys.needed("sliding_window", ConfigKeys::size)?;
    let mut pattern = 2;
    if is_gemma3 {
        keys.not_null("sliding_window_pattern", "a number of layers")?;
        let patterns = ["sliding_window_pattern", "_sliding_window_pattern"];
        let [given, other] = patterns.map(|key| keys.size(key));
        pattern = given?.or(other?).unwrap_or(6);
    }
    let listed = windows::layer_types(keys, layers, true)?;
    let by_pattern = || {
        (1..=layers)
            .map(|number| !number.is_multiple_of(pattern))
            .collect()
    };
    Ok(windows::of_layers(
        &listed.unwrap_or_else(by_pattern),
        window,
    ))
}

/// Returns the conditions that a model must meet.
pub(super) fn conditions(
    family: ModelFamily,
    model: &TransformerConfig,
) -> Vec<(&'static str, bool)> {
    let is_gemma3 = family == ModelFamily::Gemma3Text;
    let (is_one_size, _) = windows::size(model);
    let qk_norm = is_gemma3.then_some(QkNorm::Heads);
    vec![
        (
            "norm = rms with norm_zero_centered",
            model.norm == NormKind::Rms && model.norm_zero_centered,
        ),
        ("activation = ge-glu", model.activation == Activation::GeGlu),
        (
            "scaled_embedding, post_norms, and no biases or qkv_bias with output_bias",
            model.scaled_embedding
                && model.post_norms
                && !model.bias
                && model.has_qkv_bias() == model.has_output_bias(),
        ),
        ("no sinks", !model.sinks),
        (
            "qk_norm of heads with qk_norm_zero_centered and local_base, or none of them",
            model.qk_norm == qk_norm
                && model.qk_norm_zero_centered == is_gemma3
                && model.local_base.is_some() == is_gemma3,
        ),
        ("windows of one size", is_one_size),
        (
            "attention_soft_cap without qk_norm alone, as the attention of Gemma 3 has no cap",
            !is_gemma3 || model.attention_soft_cap.is_none(),
        ),
        (
            "attention_scale = 1 / sqrt(n) for a whole number n",
            scalar(model).is_some(),
        ),
    ]
}

pub(super) fn write(family: ModelFamily, model: &TransformerConfig) -> Map<String, Value> {
    let (_, window) = windows::size(model);
    let mut keys = map(json!({
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width(),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups(),
        "head_dim": model.width_of_heads(),
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_activation": ACTIVATION,
        "attention_bias": model.has_qkv_bias(),
        "attention_dropout": model.attention_dropout,
        "query_pre_attn_scalar": scalar(model),
        "attn_logit_softcapping": model.attention_soft_cap,
        "final_logit_softcapping": model.logit_soft_cap,
        "sliding_window": window.unwrap_or(WINDOW),
        "layer_types": windows::types(model),
    }));
    rope::write(family, model, &mut keys);
    if let Some(base) = model.local_base {
        keys.insert("rope_local_base_freq".into(), json!(base));
    }
    keys
}

/// The requirement of other families: see [`is_absent`].
pub(super) const ABSENT: &str =
    "no soft caps, post_norms, scaled_embedding, local_base and attention_scale";

/// Whether a model has none of the settings that only Gemma has.
pub(super) fn is_absent(model: &TransformerConfig) -> bool {
    !model.post_norms
        && !model.scaled_embedding
        && model.attention_soft_cap.is_none()
        && model.logit_soft_cap.is_none()
        && model.attention_scale.is_none()
        && model.local_base.is_none()
}

//! gpt-oss, as keys of a `config.json`.

use burn_megatron::nn::moe::{RouterChoice, ScoreFunction};
use burn_megatron::nn::{Activation, NormKind};
use serde_json::{Map, Value, json};

use super::read::init_std;
use super::write::map;
use super::{ModelFamily, experts, gemma, rope, windows};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MoeConfig, Positions, TransformerConfig};

/// The bound of gate and value, and the factor of the gate, of [`Activation::ClampedSwiGlu`].
const LIMIT: f64 = 7.0;
const ALPHA: f64 = 1.702;

/// The window that is written if no layer has one, as the class of `transformers` requires a number.
const WINDOW: usize = 128;

pub(super) fn read(keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
    let layers = keys.needed("num_hidden_layers", ConfigKeys::size)?;
    let context = keys.needed("max_position_embeddings", ConfigKeys::size)?;
    let heads = keys.needed("num_attention_heads", ConfigKeys::size)?;
    let per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
    keys.only("experts_per_token", per_token)?;
    keys.only("swiglu_limit", LIMIT)?;
    keys.only("swiglu_alpha", ALPHA)?;
    keys.only("hidden_act", "silu")?;
    keys.only("attention_bias", true)?;
    // The scaling of positions has the value again.
    keys.take("initial_context_length");
    let (window, layer_windows) = layer_windows(keys, layers)?;
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        context,
        hidden: keys.needed("hidden_size", ConfigKeys::size)?,
        layers,
        heads,
        groups: Some(keys.needed("num_key_value_heads", ConfigKeys::size)?),
        head_width: Some(keys.needed("head_dim", ConfigKeys::size)?),
        mlp_width: Some(keys.needed("intermediate_size", ConfigKeys::size)?),
        norm_epsilon: keys.needed("rms_norm_eps", ConfigKeys::number)?,
        activation: Activation::ClampedSwiGlu,
        positions: rope::read(ModelFamily::GptOss, keys, context)?,
        bias: true,
        sinks: true,
        window,
        layer_windows,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: init_std(keys)?,
        moe: Some(MoeConfig {
            experts: keys.needed("num_local_experts", ConfigKeys::size)?,
            experts_per_token: per_token,
            normalized: experts::normalized(per_token, true),
            router_bias: true,
            ..MoeConfig::default()
        }),
        ..TransformerConfig::llama()
    })
}

/// A small model of bytes.
pub(super) fn defaults() -> TransformerConfig {
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

/// The window of every second layer, from the first, unless `layer_types` has others.
fn layer_windows(keys: &mut ConfigKeys, layers: usize) -> Result<windows::Windows, HfConfigError> {
    let window = keys.size("sliding_window")?;
    let types = windows::layer_types(keys, layers, window.is_some())?;
    match (window, types) {
        // Folders of earlier versions of this crate: no layer has a window.
        (None, Some(_)) => Ok((None, vec![])),
        (None, None) => Err(keys.missing("sliding_window")),
        (Some(window), types) => {
            let types = types.unwrap_or_else(|| (0..layers).map(|layer| layer % 2 == 0).collect());
            Ok(windows::of_layers(&types, window))
        }
    }
}

/// Returns the conditions that a model of the family must meet.
pub(super) fn conditions(model: &TransformerConfig) -> Vec<(&'static str, bool)> {
    let (is_one_size, _) = windows::size(model);
    let Some(moe) = &model.moe else {
        return vec![("experts", false)];
    };
    let all = (0..model.layers).all(|number| moe.is_in(number));
    vec![
        (
            "norm = rms, rotary positions, activation = clamped-swiglu, sinks and biases",
            model.norm == NormKind::Rms
                && matches!(model.positions, Positions::Rotary { .. })
                && model.activation == Activation::ClampedSwiGlu
                && model.sinks
                && model.bias
                && model.has_qkv_bias()
                && model.has_output_bias(),
        ),
        (
            "no norm_zero_centered, qk_norm and mla",
            !model.norm_zero_centered && model.qk_norm.is_none() && model.mla.is_none(),
        ),
        (gemma::ABSENT, gemma::is_absent(model)),
        ("windows of one size", is_one_size),
        (
            "experts of the width of the MLP in all blocks, with router_bias, chosen by scores alone with weights that are normalized and score = softmax",
            all && moe.width(model) == model.mlp_width()
                && moe.router_bias
                && moe.choice == RouterChoice::Scores
                && moe.score == ScoreFunction::Softmax
                && moe.is_normalized()
                && moe.factor == 1.0
                && moe.groups.is_none()
                && moe.bias_update_rate.is_none()
                && moe.capacity.is_none()
                && moe.shared_width.is_none(),
        ),
    ]
}

pub(super) fn write(model: &TransformerConfig) -> Map<String, Value> {
    let (_, window) = windows::size(model);
    let moe = model.moe.clone().unwrap_or_default();
    let mut keys = map(json!({
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width(),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups(),
        "head_dim": model.width_of_heads(),
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": model.attention_dropout,
        "attention_bias": true,
        "sliding_window": window.unwrap_or(WINDOW),
        "layer_types": windows::types(model),
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "swiglu_limit": LIMIT,
    }));
    rope::write(ModelFamily::GptOss, model, &mut keys);
    keys
}

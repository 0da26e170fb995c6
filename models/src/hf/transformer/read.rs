//! Converts the keys of a `config.json` to a model.

use burn_megatron::nn::{Activation, NormKind, QkNorm};
use serde_json::{Value, json};

use super::{ModelFamily, experts, rope, windows};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, TransformerConfig};

/// The names of supported activations; the first of each is the one that is written.
pub(super) const ACTIVATIONS: &[(&str, Activation)] = &[
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("quick_gelu", Activation::QuickGelu),
    ("relu2", Activation::SquaredRelu),
];

/// The names of the activations of gated MLPs.
pub(super) const GATED: &[(&str, Activation)] = &[
    ("silu", Activation::SwiGlu),
    ("swish", Activation::SwiGlu),
    ("gelu_pytorch_tanh", Activation::GeGlu),
    ("gelu_new", Activation::GeGlu),
    ("gelu_fast", Activation::GeGlu),
    ("quick_gelu", Activation::QuickGeGlu),
];

pub(super) fn gpt2(keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
    let hidden = keys.needed("n_embd", ConfigKeys::size)?;
    let context = keys.needed("n_positions", ConfigKeys::size)?;
    keys.only("n_ctx", context)?;
    keys.only("scale_attn_weights", true)?;
    keys.only("scale_attn_by_inverse_layer_idx", false)?;
    let dropout = keys.number("resid_pdrop")?.unwrap_or(0.1);
    let embedding = keys.number("embd_pdrop")?.unwrap_or(0.1);
    if embedding != dropout {
        let fits = format!("{dropout}, as resid_pdrop");
        return Err(keys.refused("embd_pdrop", &json!(embedding), fits));
    }
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        context,
        hidden,
        layers: keys.needed("n_layer", ConfigKeys::size)?,
        heads: keys.needed("n_head", ConfigKeys::size)?,
        mlp_width: Some(keys.size("n_inner")?.unwrap_or(4 * hidden)),
        norm: NormKind::Layer,
        norm_epsilon: keys.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: activation(keys, "activation_function", ACTIVATIONS)?,
        positions: Positions::Learned,
        bias: true,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(true),
        dropout,
        attention_dropout: keys.number("attn_pdrop")?.unwrap_or(0.1),
        init_std: init_std(keys)?,
        ..TransformerConfig::gpt2()
    })
}

pub(super) fn llama_like(
    family: ModelFamily,
    keys: &mut ConfigKeys,
) -> Result<TransformerConfig, HfConfigError> {
    let layers = keys.needed("num_hidden_layers", ConfigKeys::size)?;
    let heads = keys.needed("num_attention_heads", ConfigKeys::size)?;
    let hidden = keys.needed("hidden_size", ConfigKeys::size)?;
    // Without it, families other than these use a default that is unrelated to the heads.
    let is_of_heads = matches!(family, ModelFamily::Llama | ModelFamily::Olmoe);
    if !is_of_heads && !keys.has("num_key_value_heads") {
        return Err(keys.missing("num_key_value_heads"));
    }
    let groups = keys.size("num_key_value_heads")?.unwrap_or(heads);
    let head_width = match keys.size("head_dim")? {
        Some(width) => width,
        None if family == ModelFamily::Qwen3 => return Err(keys.missing("head_dim")),
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let fits = "a multiple of num_attention_heads, or any size with head_dim";
            return Err(keys.refused("hidden_size", &json!(hidden), fits));
        }
    };
    let context = keys.needed("max_position_embeddings", ConfigKeys::size)?;
    keys.only("pretraining_tp", 1)?;
    if family == ModelFamily::Olmoe {
        keys.only("clip_qkv", Value::Null)?;
    }
    let (window, layer_windows) = windows::read(family, keys, layers)?;
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        context,
        hidden,
        layers,
        heads,
        groups: Some(groups),
        head_width: Some(head_width),
        mlp_width: Some(keys.needed("intermediate_size", ConfigKeys::size)?),
        norm: NormKind::Rms,
        norm_epsilon: keys.number("rms_norm_eps")?.unwrap_or(match family {
            ModelFamily::Mixtral | ModelFamily::Olmoe => 1e-5,
            _ => 1e-6,
        }),
        activation: activation(keys, "hidden_act", GATED)?,
        positions: rope::read(keys, context)?,
        bias: biases(family, keys)?,
        qkv_bias: (family == ModelFamily::Qwen2).then_some(true),
        qk_norm: qk_norm(family),
        window,
        layer_windows,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: init_std(keys)?,
        moe: experts::read(family, keys, layers)?,
        ..TransformerConfig::llama()
    })
}

/// The norm of queries and keys.
pub(super) fn qk_norm(family: ModelFamily) -> Option<QkNorm> {
    match family {
        ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => Some(QkNorm::Heads),
        ModelFamily::Olmoe => Some(QkNorm::Whole),
        _ => None,
    }
}

/// The standard deviation of weights that are not loaded.
pub(super) fn init_std(keys: &mut ConfigKeys) -> Result<f64, HfConfigError> {
    Ok(keys.number("initializer_range")?.unwrap_or(0.02))
}

pub(super) fn activation(
    keys: &mut ConfigKeys,
    key: &str,
    known: &[(&str, Activation)],
) -> Result<Activation, HfConfigError> {
    let name = keys.text(key)?.unwrap_or_else(|| known[0].0.into());
    match known.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            let fits = names.join(", ");
            Err(keys.refused(key, &json!(name), fits))
        }
    }
}

/// Whether all linear layers have biases.
fn biases(family: ModelFamily, keys: &mut ConfigKeys) -> Result<bool, HfConfigError> {
    if family != ModelFamily::Llama {
        keys.only("attention_bias", false)?;
        keys.only("mlp_bias", false)?;
        return Ok(false);
    }
    let attention = keys.flag("attention_bias")?.unwrap_or(false);
    let mlp = keys.flag("mlp_bias")?.unwrap_or(false);
    if attention == mlp {
        Ok(mlp)
    } else {
        let fits = format!("{attention}, as attention_bias");
        Err(keys.refused("mlp_bias", &json!(mlp), fits))
    }
}

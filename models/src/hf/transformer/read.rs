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
    let dropout = keys.needed("resid_pdrop", ConfigKeys::number)?;
    let embedding = keys.needed("embd_pdrop", ConfigKeys::number)?;
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
        norm_epsilon: keys.needed("layer_norm_epsilon", ConfigKeys::number)?,
        activation: activation(keys, "activation_function", ACTIVATIONS)?,
        positions: Positions::Learned,
        bias: true,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
        dropout,
        attention_dropout: keys.needed("attn_pdrop", ConfigKeys::number)?,
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
    let groups = keys.size("num_key_value_heads")?.unwrap_or(heads);
    // These classes have no such attribute. They would use null.
    let has_no_width = matches!(
        family,
        ModelFamily::Qwen2 | ModelFamily::Qwen3Moe | ModelFamily::Olmoe
    );
    if has_no_width {
        keys.not_null("head_dim", "a size, or no such key")?;
    }
    let head_width = match keys.size("head_dim")? {
        Some(width) => width,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let fits = "a multiple of num_attention_heads, or any size with head_dim";
            return Err(keys.refused("hidden_size", &json!(hidden), fits));
        }
    };
    let context = keys.needed("max_position_embeddings", ConfigKeys::size)?;
    // Only the order of the computation depends on it.
    keys.take("pretraining_tp");
    if family == ModelFamily::Olmoe {
        keys.only("clip_qkv", Value::Null)?;
    }
    let (window, layer_windows) = windows::read(family, keys, layers)?;
    let (qkv_bias, output_bias, bias) = biases(family, keys)?;
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
        norm_epsilon: keys.needed("rms_norm_eps", ConfigKeys::number)?,
        activation: activation(keys, "hidden_act", GATED)?,
        positions: rope::read(family, keys, context)?,
        bias,
        qkv_bias,
        output_bias,
        qk_norm: qk_norm(family),
        window,
        layer_windows,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
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
    keys.needed("initializer_range", ConfigKeys::number)
}

pub(super) fn activation(
    keys: &mut ConfigKeys,
    key: &str,
    known: &[(&str, Activation)],
) -> Result<Activation, HfConfigError> {
    let name = keys.needed(key, ConfigKeys::text)?;
    match known.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            let fits = names.join(", ");
            Err(keys.refused(key, &json!(name), fits))
        }
    }
}

/// The biases of queries, keys and values, of the output of attention, and of all other linear layers.
type Biases = (Option<bool>, Option<bool>, bool);

fn biases(family: ModelFamily, keys: &mut ConfigKeys) -> Result<Biases, HfConfigError> {
    let mlp = match family {
        ModelFamily::Llama => keys.needed("mlp_bias", ConfigKeys::flag)?,
        _ => keys.only("mlp_bias", false).map(|()| false)?,
    };
    match family {
        ModelFamily::Qwen2 | ModelFamily::Mistral | ModelFamily::Mixtral => {
            keys.only("attention_bias", false)?;
            Ok(((family == ModelFamily::Qwen2).then_some(true), None, mlp))
        }
        _ => {
            let attention = attention_bias(keys, mlp)?;
            Ok((attention, attention, mlp))
        }
    }
}

/// Returns whether all projections of attention have biases, or `None` if this equals the other linear layers.
pub(super) fn attention_bias(
    keys: &mut ConfigKeys,
    others: bool,
) -> Result<Option<bool>, HfConfigError> {
    let attention = keys.needed("attention_bias", ConfigKeys::flag)?;
    Ok((attention != others).then_some(attention))
}

//! From the keys of a `config.json` to a model.

use burn_megatron::checkpoint::ElementType;
use burn_megatron::nn::{Activation, NormKind};
use serde_json::{Value, json};

use super::{Family, Keys, SpecialTokens, rope};
use crate::hf::HfConfigError;
use crate::{Positions, TransformerConfig};

/// The names of activations that are computed here, the one that is written first.
pub(super) const ACTIVATIONS: &[(&str, Activation)] = &[
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("quick_gelu", Activation::QuickGelu),
    ("relu2", Activation::SquaredRelu),
];

/// The same for gated MLPs.
pub(super) const GATED: &[(&str, Activation)] = &[
    ("silu", Activation::SwiGlu),
    ("swish", Activation::SwiGlu),
    ("gelu_pytorch_tanh", Activation::GeGlu),
    ("gelu_new", Activation::GeGlu),
    ("gelu_fast", Activation::GeGlu),
    ("quick_gelu", Activation::QuickGeGlu),
];

pub(super) fn gpt2(keys: &mut Keys) -> Result<TransformerConfig, HfConfigError> {
    let hidden = keys.needed("n_embd", Keys::size)?;
    let context = keys.needed("n_positions", Keys::size)?;
    keys.only("n_ctx", context)?;
    keys.only("scale_attn_weights", true)?;
    keys.only("scale_attn_by_inverse_layer_idx", false)?;
    let dropout = keys.number("resid_pdrop")?.unwrap_or(0.1);
    let embedding = keys.number("embd_pdrop")?.unwrap_or(0.1);
    if embedding != dropout {
        let fits = format!("{dropout}, as resid_pdrop, can");
        return Err(keys.refused("embd_pdrop", &json!(embedding), fits));
    }
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", Keys::size)?,
        context,
        hidden,
        layers: keys.needed("n_layer", Keys::size)?,
        heads: keys.needed("n_head", Keys::size)?,
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
    family: Family,
    keys: &mut Keys,
) -> Result<TransformerConfig, HfConfigError> {
    let layers = keys.needed("num_hidden_layers", Keys::size)?;
    let heads = keys.needed("num_attention_heads", Keys::size)?;
    let hidden = keys.needed("hidden_size", Keys::size)?;
    // Where it is left out, other families than Llama take a number that has nothing to do with the heads.
    if family != Family::Llama && !keys.has("num_key_value_heads") {
        return Err(keys.missing("num_key_value_heads"));
    }
    let groups = keys.size("num_key_value_heads")?.unwrap_or(heads);
    let head_width = match keys.size("head_dim")? {
        Some(width) => width,
        None if family == Family::Qwen3 => return Err(keys.missing("head_dim")),
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let fits = "a multiple of num_attention_heads can, or any beside head_dim";
            return Err(keys.refused("hidden_size", &json!(hidden), fits));
        }
    };
    let context = keys.needed("max_position_embeddings", Keys::size)?;
    keys.only("pretraining_tp", 1)?;
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", Keys::size)?,
        context,
        hidden,
        layers,
        heads,
        groups: Some(groups),
        head_width: Some(head_width),
        mlp_width: Some(keys.needed("intermediate_size", Keys::size)?),
        norm: NormKind::Rms,
        norm_epsilon: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
        activation: activation(keys, "hidden_act", GATED)?,
        positions: rope::read(keys, context)?,
        bias: biases(family, keys)?,
        qkv_bias: (family == Family::Qwen2).then_some(true),
        qk_norm: family == Family::Qwen3,
        window: window(family, keys, layers)?,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: init_std(keys)?,
        ..TransformerConfig::llama()
    })
}

/// What weights that are not loaded begin with.
fn init_std(keys: &mut Keys) -> Result<f64, HfConfigError> {
    Ok(keys.number("initializer_range")?.unwrap_or(0.02))
}

fn activation(
    keys: &mut Keys,
    key: &str,
    known: &[(&str, Activation)],
) -> Result<Activation, HfConfigError> {
    let name = keys.text(key)?.unwrap_or_else(|| known[0].0.into());
    match known.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            let fits = format!("{} can", names.join(", "));
            Err(keys.refused(key, &json!(name), fits))
        }
    }
}

/// Whether all linear layers have biases.
fn biases(family: Family, keys: &mut Keys) -> Result<bool, HfConfigError> {
    if family != Family::Llama {
        keys.only("attention_bias", false)?;
        keys.only("mlp_bias", false)?;
        return Ok(false);
    }
    let attention = keys.flag("attention_bias")?.unwrap_or(false);
    let mlp = keys.flag("mlp_bias")?.unwrap_or(false);
    match attention == mlp {
        true => Ok(mlp),
        false => {
            let fits = format!("{attention}, as attention_bias, can");
            Err(keys.refused("mlp_bias", &json!(mlp), fits))
        }
    }
}

/// The window that every layer has, if any; layers that differ are refused.
fn window(family: Family, keys: &mut Keys, layers: usize) -> Result<Option<usize>, HfConfigError> {
    match family {
        Family::Gpt2 | Family::Llama => Ok(None),
        // Where the key is left out, there is a window of 4096.
        Family::Mistral if !keys.has("sliding_window") => Err(keys.missing("sliding_window")),
        Family::Mistral => keys.size("sliding_window"),
        Family::Qwen2 | Family::Qwen3 => qwen_window(keys, layers),
    }
}

fn qwen_window(keys: &mut Keys, layers: usize) -> Result<Option<usize>, HfConfigError> {
    let on = keys.flag("use_sliding_window")?.unwrap_or(false);
    let first = keys.take("max_window_layers");
    let types = keys.take("layer_types");
    let window = match on {
        true => Some(keys.needed("sliding_window", Keys::size)?),
        // It is not looked at.
        false => keys.take("sliding_window").and(None),
    };
    let all = |kind: &str| {
        types
            .as_ref()
            .is_some_and(|types| is_all(types, kind, layers))
    };
    let first_of = |first: &Value| first.as_u64().unwrap_or(u64::MAX);
    match (&types, window) {
        (Some(_), _) if all("full_attention") => Ok(None),
        (Some(_), Some(window)) if all("sliding_attention") => Ok(Some(window)),
        (Some(types), window) => {
            let kind = match window {
                Some(_) => "full_attention or sliding_attention",
                None => "full_attention",
            };
            let fits = format!("{layers} times {kind} can");
            Err(keys.refused("layer_types", types, fits))
        }
        (None, None) => Ok(None),
        (None, window) => match first.as_ref().map(first_of) {
            Some(0) => Ok(window),
            Some(first) if first >= layers as u64 => Ok(None),
            _ => {
                let fits = format!("0 or {layers} and more, so that all layers are alike, can");
                Err(keys.refused("max_window_layers", &first.unwrap_or_default(), fits))
            }
        },
    }
}

fn is_all(types: &Value, kind: &str, layers: usize) -> bool {
    let types = types.as_array();
    types.is_some_and(|types| types.len() == layers && types.iter().all(|found| found == kind))
}

/// The type of the weights, in either spelling.
pub(super) fn dtype(keys: &mut Keys) -> Result<Option<ElementType>, HfConfigError> {
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
            let fits = "float64, float32, float16 and bfloat16 can";
            Err(keys.refused("torch_dtype", &json!(name), fits))
        }
    }
}

pub(super) fn tokens(keys: &mut Keys) -> Result<SpecialTokens, HfConfigError> {
    let eos = match keys.take("eos_token_id") {
        Some(Value::Array(several)) => several,
        one => one.into_iter().collect(),
    };
    let token = |keys: &Keys, key: &str, value: &Value| {
        let token = value.as_i64();
        match token.and_then(|token| u32::try_from(token).ok()) {
            Some(token) => Ok(Some(token)),
            // Some files write -1 where there is none.
            None if token == Some(-1) => Ok(None),
            None => Err(keys.refused(key, value, "the number of a token can")),
        }
    };
    let mut single = |key: &str| match keys.take(key) {
        Some(value) => token(keys, key, &value),
        None => Ok(None),
    };
    let (bos, pad) = (single("bos_token_id")?, single("pad_token_id")?);
    let eos = eos.iter().map(|value| token(keys, "eos_token_id", value));
    Ok(SpecialTokens {
        bos,
        eos: eos
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?,
        pad,
    })
}

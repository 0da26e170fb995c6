//! Converts a model to the keys of a `config.json`.

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, NormKind, QkNorm};
use serde_json::{Map, Value, json};

use super::read::{ACTIVATIONS, GATED, qk_norm};
use super::{ModelFamily, deepseek, experts, gemma, gpt_oss, rope, windows};
use crate::hf::{HfConfigError, HfFamily};
use crate::{MoeConfig, Positions, TransformerConfig};

/// The family that computes a model, if any does; see [`check`].
pub(super) fn family(model: &TransformerConfig) -> ModelFamily {
    let (_, window) = windows::size(model);
    let sigmoid = |moe: &MoeConfig| moe.score == ScoreFunction::Sigmoid;
    match (&model.positions, model.qk_norm, window) {
        (Positions::Learned, _, _) => ModelFamily::Gpt2,
        _ if model.mla.is_some() && model.moe.as_ref().is_some_and(sigmoid) => {
            ModelFamily::DeepseekV3
        }
        _ if model.mla.is_some() => ModelFamily::DeepseekV2,
        _ if model.sinks => ModelFamily::GptOss,
        (_, None, _) if model.post_norms => ModelFamily::Gemma2,
        (_, Some(QkNorm::Heads), _) if model.post_norms => ModelFamily::Gemma3Text,
        (_, Some(QkNorm::Whole), _) => ModelFamily::Olmoe,
        (_, Some(QkNorm::Heads), _) if model.moe.is_some() => ModelFamily::Qwen3Moe,
        _ if model.moe.is_some() => ModelFamily::Mixtral,
        (_, Some(QkNorm::Heads), _) => ModelFamily::Qwen3,
        _ if !model.bias && model.has_qkv_bias() && !model.has_output_bias() => ModelFamily::Qwen2,
        (_, None, Some(_)) => ModelFamily::Mistral,
        (_, None, None) => ModelFamily::Llama,
    }
}

/// Checks that the family computes the model.
pub(super) fn check(family: ModelFamily, model: &TransformerConfig) -> Result<(), HfConfigError> {
    let conditions = match family {
        ModelFamily::DeepseekV2 | ModelFamily::DeepseekV3 => deepseek::conditions(family, model),
        ModelFamily::GptOss => gpt_oss::conditions(model),
        ModelFamily::Gemma2 | ModelFamily::Gemma3Text => [
            gemma::conditions(family, model),
            experts::conditions(family, model),
        ]
        .concat(),
        _ => [
            conditions(family, model),
            experts::conditions(family, model),
        ]
        .concat(),
    };
    match conditions.into_iter().find(|(_, fits)| !fits) {
        None => Ok(()),
        Some((needs, _)) => Err(HfConfigError::NoFamily(format!(
            "{} requires {needs}",
            family.name()
        ))),
    }
}

/// Returns the conditions that a model of the other families must meet.
fn conditions(family: ModelFamily, model: &TransformerConfig) -> Vec<(&'static str, bool)> {
    let is_gpt2 = family == ModelFamily::Gpt2;
    let biases = (model.has_qkv_bias(), model.has_output_bias());
    let head_width = model.head_width.unwrap_or(model.hidden / model.heads);
    let norm = if is_gpt2 {
        NormKind::Layer
    } else {
        NormKind::Rms
    };
    let has_window = matches!(
        family,
        ModelFamily::Mistral
            | ModelFamily::Mixtral
            | ModelFamily::Qwen2
            | ModelFamily::Qwen3
            | ModelFamily::Qwen3Moe
    );
    let has_layers = matches!(family, ModelFamily::Qwen2 | ModelFamily::Qwen3);
    let (is_one_size, window) = windows::size(model);
    let is_alike = model.windows().iter().all(|own| *own == window);
    vec![
        (
            "norm and positions that fit: layer with learned positions, rms with rotary ones",
            model.norm == norm && is_gpt2 == matches!(model.positions, Positions::Learned),
        ),
        (
            "an activation with a gate beside rotary positions, one without beside learned ones, and \
             one that has a name",
            name_of(model.activation, is_gpt2).is_some(),
        ),
        ("norm_zero_centered = false", !model.norm_zero_centered),
        (
            "no mla, sinks and qk_norm_zero_centered",
            model.mla.is_none() && !model.sinks && !model.qk_norm_zero_centered,
        ),
        (gemma::ABSENT, gemma::is_absent(model)),
        (
            "bias = true beside learned positions",
            !is_gpt2 || model.bias,
        ),
        (
            "bias = false with a window, with qkv_bias alone, or with qk_norm",
            !model.bias || matches!(family, ModelFamily::Gpt2 | ModelFamily::Llama),
        ),
        (
            "qkv_bias as output_bias, or true without the others and without qk_norm; neither with a window or experts \
             and without qk_norm",
            match family {
                ModelFamily::Gpt2 => biases == (true, true),
                ModelFamily::Qwen2 => biases == (true, false),
                ModelFamily::Mistral | ModelFamily::Mixtral => biases == (false, false),
                _ => biases.0 == biases.1,
            },
        ),
        (
            "qk_norm of heads, or of all heads with experts, beside rotary positions and no biases",
            model.qk_norm == qk_norm(family),
        ),
        (
            "a window beside rotary positions",
            window.is_none() || has_window,
        ),
        (
            "windows of one size, and in all layers unless it has qkv_bias alone or qk_norm and no experts",
            is_one_size && (is_alike || has_layers),
        ),
        (
            "head_width = hidden / heads with qk_norm of all heads",
            family != ModelFamily::Olmoe || head_width * model.heads == model.hidden,
        ),
        (
            "as many groups as heads, and head_width = hidden / heads, beside learned positions",
            !is_gpt2 || (model.groups() == model.heads && head_width * model.heads == model.hidden),
        ),
    ]
}

pub(super) fn name_of(activation: Activation, is_gpt2: bool) -> Option<&'static str> {
    let known = if is_gpt2 { ACTIVATIONS } else { GATED };
    let found = known.iter().find(|(_, known)| *known == activation);
    found.map(|(name, _)| *name)
}

/// The keys of a model.
pub(super) fn keys(family: ModelFamily, model: &TransformerConfig) -> Map<String, Value> {
    let mut keys = match family {
        ModelFamily::Gpt2 => gpt2(model),
        ModelFamily::Gemma2 | ModelFamily::Gemma3Text => gemma::write(family, model),
        ModelFamily::DeepseekV2 | ModelFamily::DeepseekV3 => deepseek::write(family, model),
        ModelFamily::GptOss => gpt_oss::write(model),
        _ => llama_like(family, model),
    };
    keys.extend(map(json!({
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
    })));
    keys
}

fn gpt2(model: &TransformerConfig) -> Map<String, Value> {
    map(json!({
        "n_embd": model.hidden,
        "n_positions": model.context,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.mlp_width(),
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": name_of(model.activation, true),
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }))
}

fn llama_like(family: ModelFamily, model: &TransformerConfig) -> Map<String, Value> {
    let head_width = model.head_width.unwrap_or(model.hidden / model.heads);
    let mut keys = map(json!({
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width(),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups(),
        "head_dim": head_width,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": name_of(model.activation, false),
        "attention_dropout": model.attention_dropout,
    }));
    rope::write(family, model, &mut keys);
    // Configurations of Qwen 2 do not have it, those of Mixtral need not.
    let implies_width = matches!(
        family,
        ModelFamily::Qwen2 | ModelFamily::Mixtral | ModelFamily::Olmoe
    );
    if implies_width && model.hidden == model.heads * head_width {
        keys.remove("head_dim");
    }
    let more = match family {
        ModelFamily::Llama => {
            json!({ "attention_bias": model.has_qkv_bias(), "mlp_bias": model.bias })
        }
        _ if model.qk_norm.is_some() => json!({ "attention_bias": model.has_qkv_bias() }),
        _ => json!({}),
    };
    keys.extend(map(more));
    keys.extend(windows::write(family, model));
    keys.extend(experts::write(family, model));
    keys
}

pub(super) fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

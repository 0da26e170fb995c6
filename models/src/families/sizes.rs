//! The keys that all families except GPT-2 share.

use serde_json::{Map, Value, json};

use super::{map, rope};
use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// Returns `base` with the sizes and numbers that every family has.
pub(super) fn read(
    keys: &mut ConfigKeys,
    base: TransformerConfig,
) -> Result<TransformerConfig, HfConfigError> {
    Ok(TransformerConfig {
        layers: keys.needed("num_hidden_layers", ConfigKeys::size)?,
        heads: keys.needed("num_attention_heads", ConfigKeys::size)?,
        hidden: keys.needed("hidden_size", ConfigKeys::size)?,
        context: keys.needed("max_position_embeddings", ConfigKeys::size)?,
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        mlp_width: Some(keys.needed("intermediate_size", ConfigKeys::size)?),
        norm_epsilon: keys.needed("rms_norm_eps", ConfigKeys::number)?,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: keys.needed("initializer_range", ConfigKeys::number)?,
        ..base
    })
}

/// Reads the width of a head. By default, it is the width of the residual stream divided by the number of heads.
pub(super) fn head_width(
    keys: &mut ConfigKeys,
    sizes: &TransformerConfig,
) -> Result<usize, HfConfigError> {
    let (hidden, heads) = (sizes.hidden, sizes.heads);
    match keys.size("head_dim")? {
        Some(width) => Ok(width),
        None if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        None => {
            let fits = "a multiple of num_attention_heads, or any size with head_dim";
            Err(keys.refused("hidden_size", &json!(hidden), fits))
        }
    }
}

/// Returns the keys of a model, including the family's own keys.
pub(super) fn write(model: &TransformerConfig, own: Value) -> Map<String, Value> {
    let mut keys = map(json!({
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width(),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups(),
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
    }));
    rope::write(model, &mut keys);
    keys.extend(map(own));
    keys
}

//! The biases of linear layers, as keys of a `config.json`.

use serde_json::{Map, Value, json};

use super::map;
use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// The linear layers that may have biases in the models of a family.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Biases {
    /// All linear layers can have biases. The keys `attention_bias` and `mlp_bias` enable them.
    All,
    /// The projections of attention can have biases. The key `attention_bias` enables them.
    Attention,
    /// The projections of queries, keys and values always have biases.
    Queries,
    /// No linear layer has a bias.
    None,
}

/// Returns `base` with the biases of a family.
pub(super) fn read(
    kind: Biases,
    keys: &mut ConfigKeys,
    base: TransformerConfig,
) -> Result<TransformerConfig, HfConfigError> {
    let bias = match kind {
        Biases::All => keys.needed("mlp_bias", ConfigKeys::flag)?,
        _ => keys.only("mlp_bias", false).map(|()| false)?,
    };
    let (qkv_bias, output_bias) = match kind {
        Biases::All | Biases::Attention => [attention(keys, bias)?; 2].into(),
        Biases::Queries | Biases::None => {
            keys.only("attention_bias", false)?;
            ((kind == Biases::Queries).then_some(true), None)
        }
    };
    Ok(TransformerConfig {
        bias,
        qkv_bias,
        output_bias,
        ..base
    })
}

/// Returns whether all projections of attention have biases. Returns `None` if they have biases exactly when the other
/// linear layers have biases.
pub(super) fn attention(
    keys: &mut ConfigKeys,
    others: bool,
) -> Result<Option<bool>, HfConfigError> {
    let attention = keys.needed("attention_bias", ConfigKeys::flag)?;
    Ok((attention != others).then_some(attention))
}

pub(super) fn write(kind: Biases, model: &TransformerConfig) -> Map<String, Value> {
    match kind {
        Biases::All => map(json!({
            "attention_bias": model.has_qkv_bias(),
            "mlp_bias": model.bias,
        })),
        Biases::Attention => map(json!({ "attention_bias": model.has_qkv_bias() })),
        Biases::Queries | Biases::None => Map::new(),
    }
}

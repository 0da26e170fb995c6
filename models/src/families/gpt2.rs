//! GPT-2, with LayerNorm, learned positions, biases and a joint query-key-value projection.

use serde_json::{Map, Value, json};

use super::activation::{self, PLAIN};
use super::{Conditions, Family, map};
use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

pub(super) struct Gpt2;

impl Family for Gpt2 {
    fn defaults(&self) -> TransformerConfig {
        TransformerConfig::gpt2()
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
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
            norm_epsilon: keys.needed("layer_norm_epsilon", ConfigKeys::number)?,
            activation: activation::read(keys, "activation_function", PLAIN)?,
            tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
            dropout,
            attention_dropout: keys.needed("attn_pdrop", ConfigKeys::number)?,
            init_std: keys.needed("initializer_range", ConfigKeys::number)?,
            ..TransformerConfig::gpt2()
        })
    }

    fn conditions(&self, model: &TransformerConfig) -> Conditions {
        vec![activation::condition(model, PLAIN)]
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        map(json!({
            "n_embd": model.hidden,
            "n_positions": model.context,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.mlp_width(),
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": activation::name(model, PLAIN),
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.attention_dropout,
        }))
    }
}

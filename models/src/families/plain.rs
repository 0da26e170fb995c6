//! Llama, and the families that differ from it by a few settings.

use burn_megatron::nn::QkNorm;
use burn_megatron::nn::moe::ScoreFunction;
use serde_json::{Map, Value, json};

use super::activation::{self, GATED};
use super::experts::{self, ExpertKeys};
use super::windows::{self, WindowKeys};
use super::{Conditions, Family, map, rope, sizes};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MoeConfig, TransformerConfig};

/// The linear layers of a family that may have biases.
#[derive(Clone, Copy, PartialEq)]
enum Biases {
    /// All, by `attention_bias` and `mlp_bias`.
    All,
    /// The projections of attention, by `attention_bias`.
    Attention,
    /// The projections of queries, keys and values, always.
    Queries,
    /// None.
    None,
}

/// A family, by its differences from Llama.
pub(super) struct Plain {
    /// The norm of queries and keys.
    qk_norm: Option<QkNorm>,
    biases: Biases,
    windows: WindowKeys,
    experts: Option<ExpertKeys>,
    /// Whether the class of `transformers` has no attribute `head_dim`, and would use null.
    refuses_null_width: bool,
    /// Whether `head_dim` is left out if it follows from the other sizes.
    omits_width: bool,
}

pub(super) const LLAMA: Plain = Plain {
    qk_norm: None,
    biases: Biases::All,
    windows: WindowKeys::None,
    experts: None,
    refuses_null_width: false,
    omits_width: false,
};

pub(super) const MISTRAL: Plain = Plain {
    biases: Biases::None,
    windows: WindowKeys::Whole,
    ..LLAMA
};

pub(super) const QWEN2: Plain = Plain {
    biases: Biases::Queries,
    windows: WindowKeys::ByLayer,
    refuses_null_width: true,
    omits_width: true,
    ..LLAMA
};

pub(super) const QWEN3: Plain = Plain {
    qk_norm: Some(QkNorm::Heads),
    biases: Biases::Attention,
    windows: WindowKeys::ByLayer,
    ..LLAMA
};

pub(super) const MIXTRAL: Plain = Plain {
    experts: Some(ExpertKeys::Mixtral),
    omits_width: true,
    ..MISTRAL
};

pub(super) const QWEN3_MOE: Plain = Plain {
    windows: WindowKeys::Checked,
    experts: Some(ExpertKeys::Qwen3),
    refuses_null_width: true,
    ..QWEN3
};

pub(super) const OLMOE: Plain = Plain {
    qk_norm: Some(QkNorm::Whole),
    biases: Biases::Attention,
    experts: Some(ExpertKeys::Olmoe),
    refuses_null_width: true,
    omits_width: true,
    ..LLAMA
};

impl Family for Plain {
    fn defaults(&self) -> TransformerConfig {
        let has_window = self.windows == WindowKeys::Whole && self.experts.is_none();
        let score = match self.experts {
            Some(ExpertKeys::Olmoe) => ScoreFunction::PreSoftmax,
            _ => ScoreFunction::Softmax,
        };
        TransformerConfig {
            qk_norm: self.qk_norm,
            qkv_bias: (self.biases == Biases::Queries).then_some(true),
            window: has_window.then_some(64),
            moe: self.experts.map(|_| MoeConfig {
                score,
                ..MoeConfig::default()
            }),
            ..TransformerConfig::llama()
        }
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        let sizes = sizes::read(keys, TransformerConfig::llama())?;
        let groups = keys.size("num_key_value_heads")?.unwrap_or(sizes.heads);
        let head_width = self.head_width(keys, &sizes)?;
        // Only the order of the computation depends on it.
        keys.take("pretraining_tp");
        if self.experts == Some(ExpertKeys::Olmoe) {
            keys.only("clip_qkv", Value::Null)?;
        }
        let (window, layer_windows) = windows::read(self.windows, keys, sizes.layers)?;
        let bias = match self.biases {
            Biases::All => keys.needed("mlp_bias", ConfigKeys::flag)?,
            _ => keys.only("mlp_bias", false).map(|()| false)?,
        };
        let (qkv_bias, output_bias) = match self.biases {
            Biases::All | Biases::Attention => [attention_bias(keys, bias)?; 2].into(),
            Biases::Queries | Biases::None => {
                keys.only("attention_bias", false)?;
                ((self.biases == Biases::Queries).then_some(true), None)
            }
        };
        Ok(TransformerConfig {
            groups: Some(groups),
            head_width: Some(head_width),
            activation: activation::read(keys, "hidden_act", GATED)?,
            positions: rope::read(keys, sizes.context, false)?,
            bias,
            qkv_bias,
            output_bias,
            qk_norm: self.qk_norm,
            window,
            layer_windows,
            moe: match self.experts {
                Some(kind) => Some(experts::read(kind, keys, sizes.layers)?),
                None => None,
            },
            ..sizes
        })
    }

    fn conditions(&self, model: &TransformerConfig) -> Conditions {
        let head_width = model.head_width.unwrap_or(model.hidden / model.heads);
        let has_usual_width = head_width * model.heads == model.hidden;
        vec![
            activation::condition(model, GATED),
            (
                "head_width = hidden / heads with qk_norm of all heads",
                self.experts != Some(ExpertKeys::Olmoe) || has_usual_width,
            ),
        ]
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        let head_width = model.head_width.unwrap_or(model.hidden / model.heads);
        let mut keys = sizes::write(model);
        keys.insert("hidden_act".into(), json!(activation::name(model, GATED)));
        if !(self.omits_width && model.hidden == model.heads * head_width) {
            keys.insert("head_dim".into(), json!(head_width));
        }
        if matches!(self.biases, Biases::All | Biases::Attention) {
            keys.insert("attention_bias".into(), json!(model.has_qkv_bias()));
        }
        if self.biases == Biases::All {
            keys.insert("mlp_bias".into(), json!(model.bias));
        }
        keys.extend(windows::write(self.windows, model));
        if let (Some(kind), Some(moe)) = (self.experts, &model.moe) {
            keys.extend(map(experts::write(kind, moe, model)));
        }
        keys
    }
}

impl Plain {
    fn head_width(
        &self,
        keys: &mut ConfigKeys,
        sizes: &TransformerConfig,
    ) -> Result<usize, HfConfigError> {
        let (hidden, heads) = (sizes.hidden, sizes.heads);
        if self.refuses_null_width {
            keys.not_null("head_dim", "a size, or no such key")?;
        }
        match keys.size("head_dim")? {
            Some(width) => Ok(width),
            None if hidden.is_multiple_of(heads) => Ok(hidden / heads),
            None => {
                let fits = "a multiple of num_attention_heads, or any size with head_dim";
                Err(keys.refused("hidden_size", &json!(hidden), fits))
            }
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

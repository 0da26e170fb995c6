//! Llama, and the families that differ from it by a few settings.

use burn_megatron::nn::QkNorm;
use serde_json::{Map, Value, json};

use super::activation::{self, GATED};
use super::biases::{self, Biases};
use super::experts::{self, ExpertKeys};
use super::windows::{self, WindowKeys};
use super::{Conditions, Family, map, rope, sizes};
use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// A family that is described by its differences from Llama.
pub(super) struct Plain {
    /// The norm of queries and keys.
    qk_norm: Option<QkNorm>,
    biases: Biases,
    windows: WindowKeys,
    experts: Option<ExpertKeys>,
    /// Whether the configuration class in `transformers` has no attribute `head_dim`, so that it would use a null value
    /// of this key.
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
        TransformerConfig {
            qk_norm: self.qk_norm,
            qkv_bias: (self.biases == Biases::Queries).then_some(true),
            window: has_window.then_some(64),
            moe: self.experts.map(ExpertKeys::defaults),
            ..TransformerConfig::llama()
        }
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        let sizes = sizes::read(keys, TransformerConfig::llama())?;
        let groups = keys.size("num_key_value_heads")?.unwrap_or(sizes.heads);
        if self.refuses_null_width {
            keys.not_null("head_dim", "a size, or no such key")?;
        }
        let head_width = sizes::head_width(keys, &sizes)?;
        // `pretraining_tp` only affects the order of the computation.
        keys.take("pretraining_tp");
        if self.experts == Some(ExpertKeys::Olmoe) {
            keys.only("clip_qkv", Value::Null)?;
        }
        let (window, layer_windows) = windows::read(self.windows, keys, sizes.layers)?;
        let sizes = biases::read(self.biases, keys, sizes)?;
        let activation = activation::read(keys, "hidden_act", GATED)?;
        let positions = rope::read(keys, sizes.context, false)?;
        let experts = self.experts;
        let moe = experts.map(|kind| experts::read(kind, keys, sizes.layers));
        Ok(TransformerConfig {
            groups: Some(groups),
            head_width: Some(head_width),
            activation,
            positions,
            qk_norm: self.qk_norm,
            window,
            layer_windows,
            moe: moe.transpose()?,
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
        let activation = json!({ "hidden_act": activation::name(model, GATED) });
        let mut keys = sizes::write(model, activation);
        if !(self.omits_width && model.hidden == model.heads * head_width) {
            keys.insert("head_dim".into(), json!(head_width));
        }
        keys.extend(biases::write(self.biases, model));
        keys.extend(windows::write(self.windows, model));
        if let (Some(kind), Some(moe)) = (self.experts, &model.moe) {
            keys.extend(map(experts::write(kind, moe, model)));
        }
        keys
    }
}

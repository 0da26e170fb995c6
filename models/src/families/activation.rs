//! The names of activations.

use burn_megatron::nn::Activation;
use serde_json::json;

use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// Names of activations. The first name of each activation is used for writing.
pub(super) type Names = &'static [(&'static str, Activation)];

/// The names of the activations of MLPs without a gate.
pub(super) const PLAIN: Names = &[
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("quick_gelu", Activation::QuickGelu),
    ("relu2", Activation::SquaredRelu),
];

/// The names of the activations of gated MLPs.
pub(super) const GATED: Names = &[
    ("silu", Activation::SwiGlu),
    ("swish", Activation::SwiGlu),
    ("gelu_pytorch_tanh", Activation::GeGlu),
    ("gelu_new", Activation::GeGlu),
    ("gelu_fast", Activation::GeGlu),
    ("quick_gelu", Activation::QuickGeGlu),
];

pub(super) fn read(
    keys: &mut ConfigKeys,
    key: &str,
    known: Names,
) -> Result<Activation, HfConfigError> {
    let name = keys.needed(key, ConfigKeys::text)?;
    match known.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            Err(keys.refused(key, &json!(name), names.join(", ")))
        }
    }
}

/// Returns the name of the activation of a model, if it has one.
pub(super) fn name(model: &TransformerConfig, known: Names) -> Option<&'static str> {
    let mut known = known.iter();
    let found = known.find(|(_, activation)| *activation == model.activation);
    found.map(|(name, _)| *name)
}

/// Returns the condition that the activation of a model has a name.
pub(super) fn condition(model: &TransformerConfig, known: Names) -> (&'static str, bool) {
    let what = "an activation that transformers has, with a gate if positions are rotary, and without one if they are learned";
    (what, name(model, known).is_some())
}

//! The names of activation functions in `transformers`.

use burn_megatron::nn::Activation;
use serde_json::json;

use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// A list of activation functions with their names. If an activation function has several names, the first is written.
pub(super) type Names = &'static [(&'static str, Activation)];

/// The names of the activation functions of MLPs without a gate.
pub(super) const PLAIN: Names = &[
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("quick_gelu", Activation::QuickGelu),
    ("relu2", Activation::SquaredRelu),
];

/// The names of the activation functions of gated MLPs.
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

/// Returns the name of the model's activation function in `transformers`, or `None` if `transformers` does not have
/// this function.
pub(super) fn name(model: &TransformerConfig, known: Names) -> Option<&'static str> {
    let mut known = known.iter();
    let found = known.find(|(_, activation)| *activation == model.activation);
    found.map(|(name, _)| *name)
}

/// Returns the condition that the model's activation function has a name in `transformers`.
pub(super) fn condition(model: &TransformerConfig, known: Names) -> (&'static str, bool) {
    let what = "an activation that transformers has, with a gate if positions are rotary, and without one if they are learned";
    (what, name(model, known).is_some())
}

//! In which settings two models differ.

use serde_json::{Value, json};

use crate::{Positions, TransformerConfig};

/// A setting that two models have otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Its key in a recipe's `[model]`.
    pub setting: String,
    /// The value of the one.
    pub own: Value,
    /// The value of the other.
    pub other: Value,
}

impl TransformerConfig {
    /// The settings in which another model computes something else with its weights, or has others.
    ///
    /// What only training knows and what only the layout does are none: dropout, initial values, terms of
    /// the loss, padding of the vocabulary. How long sequences can be is one where positions are learned.
    /// What is not given counts as what follows from the others.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (own, other) = (json!(plain(self)), json!(plain(other)));
        let settings = own.as_object().into_iter().flatten();
        let differing = settings.filter_map(|(setting, own)| {
            let other = &other[setting];
            (!alike(own, other)).then(|| Difference {
                setting: setting.clone(),
                own: own.clone(),
                other: other.clone(),
            })
        });
        differing.collect()
    }
}

/// The same model, with what follows written out, and without what does not count.
fn plain(model: &TransformerConfig) -> TransformerConfig {
    TransformerConfig {
        groups: Some(model.groups()),
        head_width: model.head_width.or(model.hidden.checked_div(model.heads)),
        mlp_width: Some(model.mlp_width()),
        qkv_bias: Some(model.qkv_bias.unwrap_or(model.bias)),
        vocabulary_divisible_by: 1,
        dropout: 0.0,
        attention_dropout: 0.0,
        init_std: 0.0,
        label_smoothing: 0.0,
        z_loss: 0.0,
        context: match model.positions {
            Positions::Learned => model.context,
            Positions::Rotary { .. } => 0,
        },
        ..model.clone()
    }
}

/// Whether two values are equal; numbers that were written as text and read again may differ in their last
/// bit.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * a.abs(),
            _ => a == b,
        },
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, value)| b.get(key).is_some_and(|other| alike(value, other));
            a.len() == b.len() && a.iter().all(same)
        }
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(a: &TransformerConfig, b: &TransformerConfig) -> Vec<String> {
        let found = a.differences(b).into_iter();
        found.map(|difference| difference.setting).collect()
    }

    #[test]
    fn settings_that_compute_something_else_are_named() {
        let llama = TransformerConfig::llama();
        let other = TransformerConfig {
            layers: llama.layers + 1,
            norm_epsilon: 2.0 * llama.norm_epsilon,
            positions: Positions::rotary(77.0),
            window: Some(5),
            ..llama.clone()
        };
        let found = named(&llama, &other);
        assert_eq!(found, ["layers", "norm_epsilon", "positions", "window"]);
        let layers = &llama.differences(&other)[0];
        assert_eq!(layers.own, llama.layers);
        assert_eq!(layers.other, other.layers);
    }

    #[test]
    fn what_is_the_same_in_the_end_is_no_difference() {
        for (model, context) in [
            (TransformerConfig::llama(), false),
            (TransformerConfig::gpt2(), true),
        ] {
            let same = TransformerConfig {
                dropout: 0.5,
                init_std: 0.5,
                vocabulary_divisible_by: 64,
                groups: Some(model.groups()),
                mlp_width: Some(model.mlp_width()),
                norm_epsilon: model.norm_epsilon * (1.0 + 1e-14),
                ..model.clone()
            };
            assert_eq!(model.differences(&same), []);
            let longer = TransformerConfig {
                context: model.context + 1,
                ..model.clone()
            };
            assert_eq!(named(&model, &longer).contains(&"context".into()), context);
        }
    }
}

//! Compares the configurations of two transformers.

use burn_megatron::nn::moe::DispatcherKind;

use crate::{MoeConfig, Positions, TransformerConfig};

/// Returns the model configuration with explicit values for all defaults, and without settings that affect only
/// training or the parallel layout. These settings are dropout, initialization, loss terms, the dispatcher of experts
/// and its dtype, and the padding of the vocabulary. `context` is kept only with learned positions.
pub(crate) fn plain(model: &TransformerConfig) -> TransformerConfig {
    let windows = model.windows();
    let uniform = windows
        .first()
        .copied()
        .flatten()
        .filter(|window| windows.iter().all(|other| *other == Some(*window)));
    TransformerConfig {
        groups: Some(model.groups()),
        head_width: model.head_width.or(model.hidden.checked_div(model.heads)),
        mlp_width: Some(model.mlp_width()),
        qkv_bias: Some(model.has_qkv_bias()),
        output_bias: Some(model.has_output_bias()),
        window: uniform,
        layer_windows: if uniform.is_some() || windows.iter().all(Option::is_none) {
            vec![]
        } else {
            let windows = windows.iter();
            windows.map(|window| window.unwrap_or(0)).collect()
        },
        vocabulary_divisible_by: 1,
        dropout: 0.0,
        attention_dropout: 0.0,
        init_std: 0.0,
        scaled_output_init: true,
        label_smoothing: 0.0,
        z_loss: 0.0,
        context: match model.positions {
            Positions::Learned => model.context,
            Positions::Rotary { .. } => 0,
        },
        moe: model.moe.as_ref().map(|moe| MoeConfig {
            expert_width: Some(moe.width(model)),
            normalized: Some(moe.is_normalized()),
            losses: vec![],
            dispatcher: DispatcherKind::AllToAll,
            fp8_dispatch: None,
            ..moe.clone()
        }),
        ..model.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::model::ModelConfig;

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

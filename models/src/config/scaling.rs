//! Checks the settings of RoPE scaling.

use burn_megatron::kernels::KernelError;
use burn_megatron::kernels::rope::RopeConfig;
use burn_megatron::nn::BuildError;

use super::Positions;
use crate::RotaryScaling;

/// Checks that dynamic RoPE scaling has no effect. It would have an effect on sequences that are longer than the
/// original context.
pub(crate) fn check_dynamic(positions: &Positions, context: usize) -> Result<(), BuildError> {
    match positions {
        Positions::Rotary {
            scaling: RotaryScaling::Dynamic { original, .. },
            ..
        } if context > *original => Err(BuildError::Config {
            path: "model.positions.rotary.scaling.dynamic".into(),
            message: format!(
                "context = {context} exceeds original = {original}: set model.context to at most {original}, or set \
                 another scaling"
            ),
        }),
        _ => Ok(()),
    }
}

/// Checks the settings of the RoPE table before the ranks build it.
pub(crate) fn check(rope: &RopeConfig) -> Result<(), BuildError> {
    let Err(error) = rope.frequencies() else {
        return Ok(());
    };
    let path = String::from("model.positions.rotary");
    Err(match error {
        KernelError::Option {
            name, value, fits, ..
        } => BuildError::Config {
            path: match (name, &rope.scaling) {
                ("base", _) | (_, RotaryScaling::None) => path,
                (_, RotaryScaling::Dynamic { .. }) => path + ".scaling.dynamic",
                (_, RotaryScaling::Llama3 { .. }) => path + ".scaling.llama3",
                (_, RotaryScaling::Yarn { .. }) => path + ".scaling.yarn",
                (_, RotaryScaling::Linear { .. }) => path + ".scaling.linear",
                (_, RotaryScaling::LongRope { .. }) => path + ".scaling.longrope",
            },
            message: format!("invalid {name} = {value}: expected {fits}"),
        },
        error => BuildError::Config {
            path,
            message: error.to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TransformerConfig;

    #[test]
    fn rotary_positions_are_refused_with_their_path() {
        let rotary = |base, scaling| {
            let config = TransformerConfig {
                positions: Positions::Rotary { base, scaling },
                ..TransformerConfig::llama()
            };
            config.check(1, false).unwrap_err().to_string()
        };
        insta::assert_snapshot!(
            rotary(1.0, RotaryScaling::None),
            @"model.positions.rotary: invalid base = 1: expected a finite number above 1"
        );
        let llama3 = |factor, low| RotaryScaling::Llama3 {
            factor,
            low,
            high: 4.0,
            original: 64,
        };
        let path = "model.positions.rotary.scaling.llama3";
        for (scaling, wanted) in [
            (
                llama3(0.5, 1.0),
                "invalid factor = 0.5: expected a finite number of at least 1",
            ),
            (
                llama3(8.0, -1.0),
                "invalid low = -1: expected a finite number above 0",
            ),
            (
                llama3(8.0, 5.0),
                "invalid high = 4: expected a finite number above low",
            ),
        ] {
            assert_eq!(rotary(1e4, scaling), format!("{path}: {wanted}"));
        }
        let yarn = RotaryScaling::Yarn {
            factor: f64::NAN,
            original: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            truncate: true,
            attention_factor: None,
        };
        assert!(
            rotary(1e4, yarn)
                .starts_with("model.positions.rotary.scaling.yarn: invalid factor = NaN")
        );
        let features = TransformerConfig::llama().width_of_heads();
        let long_rope = RotaryScaling::LongRope {
            short_factor: vec![1.0; features / 2],
            long_factor: vec![1.0; features],
            original: 64,
            attention_factor: 1.0,
        };
        assert_eq!(
            rotary(1e4, long_rope),
            format!(
                "model.positions.rotary.scaling.longrope: invalid long_factor = {features} factors for {features} \
                 features: expected one factor for each pair of features"
            )
        );
    }
}

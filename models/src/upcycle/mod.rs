//! Upcycling: converts a dense model to a mixture of experts that has the same outputs before its first training step.
//!
//! With `E` experts and granularity `G`, an MLP of width `f` is cut into `G` slices of width `f / G`. Expert `e` has
//! slice `e mod G`. The router uses the first `E / G` columns of a random router, and repeats each column `G` times.
//! The slices of a copy of the MLP then have equal scores, and are chosen together if the number `k` of experts per
//! token is a multiple of `G`.
//!
//! If weights are normalised over the chosen experts, the weights of the copies of a slice sum to `1 / G`. So the
//! output of an expert must be `G` times the output of its slice. Weights of [`PreSoftmax`](ScoreFunction::PreSoftmax)
//! are not normalised. For equal scores the weight of an expert is `1 / E`, and the factor is `E G / k`.
//!
//! The factor is spread over the matrices whose product is the output. The values of a gated MLP get its square root,
//! and the up projection before a squared ReLU gets its cube root, as the nearest power of two. The down projection
//! gets the rest. So weights are not rounded if the factor is a power of two.
//!
//! The method is "Upcycling Large Language Models into Mixture of Experts" (He et al. 2024, arXiv:2410.07524). The
//! paper multiplies gate, values and down projection by the cube root. That is exact only for an activation that
//! multiplies with its input, such as a squared ReLU, but not for SiLU.

mod experts;
mod save;
mod source;
#[cfg(test)]
mod tests;

use std::fmt;

use burn_megatron::checkpoint::CheckpointError;
use burn_megatron::mesh::{ParallelConfig, divisors_near};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, BuildError};

use crate::config::refused;
use crate::{MoeConfig, TransformerConfig};

pub use save::save;
pub use source::Upcycled;

/// Configuration of upcycling.
#[derive(Clone, Debug, PartialEq)]
pub struct UpcycleConfig {
    /// The experts. Their number `E` must be a multiple of the granularity. The number `k` of experts per token must be
    /// at least 2, except with [`PreSoftmax`](ScoreFunction::PreSoftmax), because the weight of a single expert is not
    /// normalised. The expert width follows from the granularity.
    pub moe: MoeConfig,
    /// The number `G` of slices per MLP. With 1, each expert is a copy of the MLP.
    pub granularity: usize,
    /// The seed of the router's weights.
    pub seed: u64,
}

/// An error of upcycling.
#[derive(Debug, thiserror::Error)]
pub enum UpcycleError {
    /// The settings do not fit the model.
    #[error(transparent)]
    Config(#[from] BuildError),
    /// The tensors do not belong to the model, or cannot be read or written.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
}

/// The difference between the outputs of experts before their first step and the outputs of the MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutputDifference {
    /// The smallest and the largest factor of a slice in the output, for equal scores; 1 if `k` is a multiple of `G`.
    pub slices: [f64; 2],
    /// `E / k`, if the weights are not normalised. The output is then multiplied by `E / k` times the sum of the chosen
    /// scores, which is 1 for equal scores.
    pub per_score: Option<f64>,
}

/// The factors of the parameters of an MLP.
#[derive(Clone, Debug, PartialEq)]
struct Factors {
    /// The up projection, or its gate and its values.
    up: Vec<f64>,
    down: f64,
    down_bias: f64,
}

impl UpcycleConfig {
    /// Returns the configuration of the model with experts.
    ///
    /// ```
    /// use burn_megatron_models::upcycle::UpcycleConfig;
    /// use burn_megatron_models::{MoeConfig, TransformerConfig};
    ///
    /// let upcycle = UpcycleConfig { moe: MoeConfig::default(), granularity: 1, seed: 0 };
    /// let model = upcycle.model(&TransformerConfig::llama())?;
    /// assert_eq!(model.moe.as_ref().map(|moe| moe.experts), Some(8));
    /// // A model with experts cannot be upcycled again.
    /// assert!(upcycle.model(&model).is_err());
    /// # Ok::<(), burn_megatron::nn::BuildError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BuildError`] for a model that already has experts, and for sizes that do not fit each other.
    pub fn model(&self, dense: &TransformerConfig) -> Result<TransformerConfig, BuildError> {
        let (experts, granularity) = (self.moe.experts, self.granularity);
        if let Some(moe) = &dense.moe {
            return Err(refused(format!(
                "it has {} experts already: expected a dense model",
                moe.experts
            )));
        }
        dense.check_layout(&ParallelConfig::new())?;
        let width = dense.mlp_width();
        if granularity == 0 || !width.is_multiple_of(granularity) {
            return Err(refused(format!(
                "an MLP of width {width} cannot be cut into granularity = {granularity} slices: expected {}",
                divisors_near(width, granularity, |_| true)
            )));
        }
        if !experts.is_multiple_of(granularity) {
            let below = experts / granularity * granularity;
            let above = below.saturating_add(granularity);
            let fits = match below {
                0 => above.to_string(),
                _ => format!("{below} or {above}"),
            };
            return Err(refused(format!(
                "{experts} experts are not a multiple of granularity = {granularity}: expected {fits}"
            )));
        }
        if self.moe.experts_per_token == 1 && self.is_normalised() {
            return Err(refused(
                "the weight of 1 expert per token is its score, which is not normalised: expected the score \
                 pre-softmax, or at least 2 experts per token"
                    .into(),
            ));
        }
        let moe = MoeConfig {
            expert_width: Some(width / granularity),
            ..self.moe.clone()
        };
        let model = TransformerConfig {
            moe: Some(moe.clone()),
            ..dense.clone()
        };
        model.check_layout(&ParallelConfig::new())?;
        moe.check_blocks(dense.layers)?;
        let all = (0..model.layers).all(|number| moe.is_in(number));
        Ok(TransformerConfig {
            // In a model like Mixtral, whose MLPs are all experts, it is the width of an expert.
            mlp_width: Some(if all { width / granularity } else { width }),
            ..model
        })
    }

    /// Returns the difference between the outputs of experts before their first step and the outputs of the MLP; `None`
    /// if they are equal, up to rounding.
    pub fn difference(&self) -> Option<OutputDifference> {
        let (granularity, k) = (self.granularity as f64, self.moe.experts_per_token as f64);
        let copies = k / granularity;
        let per_score = (!self.is_normalised()).then(|| self.moe.experts as f64 / k);
        let slices = [copies.floor(), copies.ceil()].map(|chosen| chosen / copies);
        let equal = slices == [1.0; 2] && per_score.is_none();
        (!equal).then_some(OutputDifference { slices, per_score })
    }

    /// Returns whether the weights of a token's experts sum to 1.
    fn is_normalised(&self) -> bool {
        self.moe.score != ScoreFunction::PreSoftmax
    }

    fn factors(&self, activation: Activation) -> Factors {
        // The sum of the weights of a token's experts, for equal scores.
        let weights = if self.is_normalised() {
            1.0
        } else {
            self.moe.experts_per_token as f64 / self.moe.experts as f64
        };
        let whole = self.granularity as f64 / weights;
        let power_of_two = |factor: f64| factor.log2().round().exp2();
        let (up, down) = match activation {
            // This activation is not linear in its values.
            Activation::ClampedSwiGlu => (vec![1.0; 2], whole),
            _ if activation.is_gated() => {
                let value = power_of_two(whole.sqrt());
                (vec![1.0, value], whole / value)
            }
            Activation::SquaredRelu => {
                let up = power_of_two(whole.cbrt());
                (vec![up], whole / up.powi(2))
            }
            _ => (vec![1.0], whole),
        };
        Factors {
            up,
            down,
            down_bias: 1.0 / weights,
        }
    }
}

impl fmt::Display for OutputDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [least, most] = self.slices;
        let mut parts = vec![];
        if least != most {
            parts.push(format!(
                "slices of an MLP count {least:.2} and {most:.2} times for equal scores, because the experts per token \
                 are not a multiple of the granularity"
            ));
        }
        if let Some(factor) = self.per_score {
            parts.push(format!(
                "outputs are multiplied by {factor:.2} times the sum of the chosen scores, which is 1 for equal scores \
                 and larger otherwise"
            ));
        }
        f.write_str(&parts.join("; "))
    }
}

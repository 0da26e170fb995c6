//! Upcycling: converts a dense model to a mixture-of-experts model that computes the same outputs before it is trained
//! further.
//!
//! With `E` experts and granularity `G`, each MLP of width `f` is split into `G` slices of width `f / G`. Expert `e` is
//! a copy of slice `e mod G`, so that every `G` consecutive experts form one copy of the MLP. The router has `E / G`
//! random columns, and each column is repeated `G` times. All experts of one copy of the MLP therefore have equal
//! scores. They are selected together if the number `k` of experts per token is a multiple of `G`.
//!
//! If expert weights are normalized over the selected experts, the weights of all selected copies of one slice sum to
//! `1 / G`. The output of each expert must therefore be multiplied by `G`. With
//! [`PreSoftmax`](ScoreFunction::PreSoftmax), expert weights are not normalized. If all scores are equal, each expert
//! has the weight `1 / E`, and the output of each expert must be multiplied by `E G / k`.
//!
//! The factor is distributed over the weights of the expert. In a gated MLP, the up projection is multiplied by about
//! the square root of the factor. In an MLP with squared ReLU, it is multiplied by about the cube root. Both roots are
//! rounded to a power of two. The down projection is multiplied by the remaining factor. If the factor is a power of
//! two, the weights are therefore not rounded.
//!
//! The method is described in "Upcycling Large Language Models into Mixture of Experts" (He et al. 2024,
//! arXiv:2410.07524). The paper multiplies the gate projection, the up projection and the down projection by the cube
//! root of the factor. This is exact only if a scaled input scales the output of the activation, as with squared ReLU.
//! It is not exact for SiLU.

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

/// Configuration of the conversion of a dense model to a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct UpcycleConfig {
    /// The configuration of the experts. The number of experts `E` must be a multiple of the granularity. The number of
    /// experts per token `k` must be at least 2, except with [`PreSoftmax`](ScoreFunction::PreSoftmax), because the
    /// weight of a single expert is not normalized. The width of an expert is set from the granularity.
    pub moe: MoeConfig,
    /// The granularity `G`: the number of slices into which each MLP is split. With 1, each expert is a copy of the
    /// MLP.
    pub granularity: usize,
    /// The seed for the random weights of the router.
    pub seed: u64,
}

/// An error of the conversion of a dense model to a mixture of experts.
#[derive(Debug, thiserror::Error)]
pub enum UpcycleError {
    /// The configuration is invalid for the model.
    #[error(transparent)]
    Config(#[from] BuildError),
    /// The tensors do not belong to the model, or they cannot be read or written.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
}

/// A description of how the outputs of the upcycled experts, before any training, differ from the outputs of the dense
/// MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutputDifference {
    /// The smallest and the largest weight of a slice in the output, relative to the dense MLP, if all scores are
    /// equal. Both are 1 if `k` is a multiple of `G`.
    pub slices: [f64; 2],
    /// `E / k` if the expert weights are not normalized, and `None` otherwise. The output is multiplied by `E / k`
    /// times the sum of the scores of the selected experts. This product is 1 if all scores are equal.
    pub per_score: Option<f64>,
}

/// The factors that the parameters of an MLP are multiplied with.
#[derive(Clone, Debug, PartialEq)]
struct Factors {
    /// The factor of the up projection, or the factors of the gate projection and the up projection.
    up: Vec<f64>,
    down: f64,
    down_bias: f64,
}

impl UpcycleConfig {
    /// Returns the configuration of the mixture-of-experts model.
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
    /// [`BuildError`] if the model already has experts, or if the sizes are inconsistent.
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
            // If all blocks have experts, as in Mixtral, the width of an expert is stored as the width of the MLP.
            mlp_width: Some(if all { width / granularity } else { width }),
            ..model
        })
    }

    /// Describes how the outputs of the upcycled experts, before any training, differ from the outputs of the dense
    /// MLP. Returns `None` if the outputs are equal except for rounding.
    pub fn difference(&self) -> Option<OutputDifference> {
        let (granularity, k) = (self.granularity as f64, self.moe.experts_per_token as f64);
        let copies = k / granularity;
        let per_score = (!self.is_normalised()).then(|| self.moe.experts as f64 / k);
        let slices = [copies.floor(), copies.ceil()].map(|chosen| chosen / copies);
        let equal = slices == [1.0; 2] && per_score.is_none();
        (!equal).then_some(OutputDifference { slices, per_score })
    }

    /// Returns whether the expert weights of each token sum to 1.
    fn is_normalised(&self) -> bool {
        self.moe.score != ScoreFunction::PreSoftmax
    }

    fn factors(&self, activation: Activation) -> Factors {
        // The sum of the expert weights of a token, if all scores are equal.
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
                "slices of an MLP are weighted by {least:.2} and {most:.2} for equal scores, because the experts per \
                 token are not a multiple of the granularity"
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

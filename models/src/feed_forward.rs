//! The feed-forward part of a block, which processes each token independently.

use burn::tensor::Tensor;
use burn_megatron::nn::moe::{MoeForward, MoeMlp};
use burn_megatron::nn::{BuildError, ModelBuilder, Norm, ParallelMlp, Residual};

use crate::{FeedForwardSpec, PartOutput, module_enum};

/// The feed-forward part of a [`Block`](crate::Block).
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// An MLP.
    Dense(ParallelMlp),
    /// A mixture of experts.
    Experts(MoeMlp),
}

module_enum!(FeedForward { Dense, Experts });

impl FeedForward {
    /// Returns the name that the paths of the parameters contain.
    pub(crate) fn name(spec: &FeedForwardSpec) -> &'static str {
        match spec {
            FeedForwardSpec::Dense(_) => "mlp",
            FeedForwardSpec::Experts(_) => "moe",
        }
    }

    pub(crate) fn init(spec: &FeedForwardSpec, builder: &ModelBuilder) -> Result<Self, BuildError> {
        Ok(match spec {
            FeedForwardSpec::Dense(mlp) => Self::Dense(mlp.init(builder)?),
            FeedForwardSpec::Experts(experts) => Self::Experts(experts.init(builder)?),
        })
    }

    /// Normalizes the residual stream and computes the feed-forward part. Returns the output, and the residual stream
    /// with its pending addition completed.
    pub(crate) fn forward(
        &self,
        norm: &Norm,
        x: Residual,
        experts: MoeForward<'_>,
    ) -> (PartOutput, Tensor<3>) {
        match self {
            Self::Dense(mlp) => mlp.forward_normalized(norm, x),
            Self::Experts(moe) => {
                let (fed, stream) = moe.forward_normalized(norm, x, experts);
                ((fed, None), stream)
            }
        }
    }
}

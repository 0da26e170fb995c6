//! RMSNorm of queries and keys.

use burn::config::Config;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::wide::wide;
use super::{
    BuildError, ModelBuilder, Norm, NormConfig, NormKind, OutputSection, Placement, Section,
    anchored_value,
};
use crate::collective::{self, Comm};

/// The features over which the norm of queries and keys is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QkNorm {
    /// Each head is normalized separately. All heads share one weight, as in Qwen 3.
    Heads,
    /// All heads of a token are normalized together, as in OLMoE. The mean square is computed over all tensor ranks.
    Whole,
}

/// Configuration of the RMSNorm of queries and keys, which is applied before the rotary embedding.
///
/// ```
/// use burn::tensor::Device;
/// use burn_megatron::nn::{ParallelAttentionConfig, QkNorm, QkNormConfig};
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let qk_norm = QkNormConfig::new(QkNorm::Heads, 1e-6);
/// let attention = ParallelAttentionConfig::new(8, 2, 2, 4)
///     .with_qk_norm(Some(qk_norm))
///     .init(&builder)?;
/// // One weight of the width of a head, for all heads.
/// assert_eq!(attention.q_norm.unwrap().weight.val().dims(), [4]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Config, Debug)]
pub struct QkNormConfig {
    /// The features over which the norm is computed.
    pub kind: QkNorm,
    /// The constant that is added to the mean square.
    pub epsilon: f64,
    /// Whether the weight is stored as its difference from 1. Weight decay then pulls the effective weight towards 1.
    #[config(default = false)]
    pub zero_centered: bool,
}

impl QkNormConfig {
    /// Builds the norm of the queries or of the keys. `units` is their output section.
    pub(super) fn init(
        &self,
        units: &OutputSection,
        builder: &ModelBuilder,
    ) -> Result<Norm, BuildError> {
        let place = builder.place();
        let norm = |width| {
            NormConfig::new(NormKind::Rms, width, self.epsilon)
                .with_zero_centered(self.zero_centered)
        };
        match self.kind {
            // Ranks have different heads, so the gradient is summed over the tensor axis.
            QkNorm::Heads => {
                let builder = builder.with_sequence_parallel(place.size > 1);
                Ok(norm(units.width).init(&builder))
            }
            QkNorm::Whole => {
                let section = units.split(place.size)?;
                let placement = Placement::Split {
                    dim: 0,
                    sections: vec![section],
                };
                Ok(norm(section.size).init_placed(placement, builder))
            }
        }
    }

    /// Returns the norms over all tensor ranks, or `None` if each rank computes its norms separately.
    pub(super) fn over_ranks(
        &self,
        units: [&OutputSection; 2],
        builder: &ModelBuilder,
    ) -> Result<Option<WholeNorm>, BuildError> {
        let ranks = builder.place().size;
        if self.kind == QkNorm::Heads || ranks == 1 {
            return Ok(None);
        }
        let [queries, keys] = units;
        Ok(Some(WholeNorm {
            sections: [queries.split(ranks)?, keys.split(ranks)?],
            epsilon: self.epsilon,
            zero_centered: self.zero_centered,
            comm: builder.groups().tensor().clone(),
        }))
    }
}

/// RMSNorm of queries and keys, whose features are split over tensor ranks.
#[derive(Clone, Debug)]
pub(super) struct WholeNorm {
    /// The sections of the queries and of the keys.
    sections: [Section; 2],
    epsilon: f64,
    zero_centered: bool,
    comm: Comm,
}

impl WholeNorm {
    /// Computes `x / sqrt(mean of x^2 + epsilon) * weight` for this rank's queries and keys, each
    /// `[batch, seq, features]`. The means are computed over all ranks. The forward pass and the backward pass have one
    /// collective each.
    ///
    /// On each rank, the gradients of the means only contain the contribution of the rank's heads. These gradients are
    /// therefore also summed over the ranks.
    pub fn forward(&self, parts: [Tensor<3>; 2], norms: [&Norm; 2]) -> [Tensor<3>; 2] {
        let dtype = parts[0].dtype();
        let wide = wide(dtype);
        let parts = parts.map(|x| x.cast(wide));
        let share = |index: usize| {
            let (x, section) = (parts[index].clone(), self.sections[index]);
            // Replicas of a part are counted once.
            let counted = section.size * section.replicas(self.comm.size());
            // Burn's backward of div_scalar computes in f32.
            (x.clone() * x).sum_dim(2).mul_scalar(1.0 / counted as f64)
        };
        let shares = Tensor::cat(vec![share(0), share(1)], 2);
        let means = collective::all_reduce(shares, &self.comm);
        let roots = means.add_scalar(self.epsilon).sqrt();
        let normal = |index: usize| {
            let x = &parts[index];
            let weight = anchored_value(&norms[index].weight, x).cast(wide);
            let weight = if self.zero_centered {
                weight.add_scalar(1.0)
            } else {
                weight
            };
            let normal = x.clone() / roots.clone().narrow(2, index, 1);
            (normal * weight.unsqueeze()).cast(dtype)
        };
        [normal(0), normal(1)]
    }
}

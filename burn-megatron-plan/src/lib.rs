//! Estimates the cost of a parallel layout before a training run: the memory per rank, and the step time on given
//! hardware. It also searches for the fastest layout.
//!
//! - [`flops`]: the FLOPs of a model, counted as in published tables.
//! - [`hardware`]: the compute throughput, the memory bandwidth and the links of a device.
//! - [`profile`]: the computation, the communication and the saved tensors of the layers of a rank.
//! - [`time`]: the time of a training step, and how it is divided into parts.
//! - [`search`]: the search for the fastest layout of a model on a number of devices.
//! - [`accuracy`]: a comparison of planned and measured step times.

pub mod accuracy;
mod axis_bytes;
mod candidate;
pub mod fit;
pub mod flops;
pub mod hardware;
mod link;
pub mod memory;
mod mesh_links;
mod model_profile;
pub mod profile;
pub mod recorded_step;
pub mod search;
pub mod time;

pub use axis_bytes::AxisBytes;
pub use candidate::Candidate;
pub use link::{GroupLinks, sent_bytes};
pub use mesh_links::MeshLinks;
pub use model_profile::{BlockProfile, GridElements, ModelProfile};

use serde::{Deserialize, Serialize};

use burn_megatron::nn::{ActivationOffload, RecomputeConfig, RecomputeMethod, RecomputeModule};

/// The kind of activation recomputation (activation checkpointing): the part of the forward that the backward
/// recomputes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Recomputes nothing. All activations are kept.
    #[default]
    None,
    /// Recomputes the outputs of norms and activation functions.
    Selective,
    /// Recomputes every layer from its input.
    Full,
    /// Recomputes every layer from its input, which is offloaded to the host until the backward.
    FullOffloaded,
}

/// The maximum number of bytes of activations that a rank offloads to the host.
const OFFLOADED_BYTES: u64 = 1 << 40;

impl Recompute {
    /// All variants, ordered from the least to the most recomputation.
    pub const ALL: [Self; 4] = [Self::None, Self::Selective, Self::Full, Self::FullOffloaded];

    /// Returns whether every layer is recomputed from its input.
    pub const fn is_full(self) -> bool {
        matches!(self, Self::Full | Self::FullOffloaded)
    }

    /// Returns the recomputation settings for a model.
    pub fn settings(self) -> RecomputeConfig {
        match self {
            Self::None => RecomputeConfig::default(),
            Self::Selective => {
                RecomputeConfig::selective([RecomputeModule::Norm, RecomputeModule::Activation])
            }
            Self::Full => RecomputeConfig::full(RecomputeMethod::Uniform, 1),
            Self::FullOffloaded => RecomputeConfig {
                offload: ActivationOffload {
                    bytes: OFFLOADED_BYTES,
                    ..ActivationOffload::default()
                },
                ..Self::Full.settings()
            },
        }
    }

    /// Returns the name of the variant in recipes and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
            Self::FullOffloaded => "full-offloaded",
        }
    }
}

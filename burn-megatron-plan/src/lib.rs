//! The cost of a layout before it runs: its memory and its time on given hardware, and the search for the best layout.
//!
//! - [`flops`]: the operations of a model, as published tables count them.
//! - [`hardware`]: what a device computes, moves and exchanges per second.
//! - [`profile`]: what the layers of a rank compute, send and keep.
//! - [`time`]: the time of a step, by part.
//! - [`search`]: all layouts of a number of devices, by time.
//! - [`accuracy`]: planned times against measured ones.

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

/// The part of the forward that is computed again in the backward, instead of being kept.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Norms and activations.
    Selective,
    /// Every layer, from its input.
    Full,
    /// Every layer, from its input, which is on the host meanwhile.
    FullOffloaded,
}

/// The most bytes of activations of a rank on the host.
const OFFLOADED_BYTES: u64 = 1 << 40;

impl Recompute {
    /// All of them, the least recomputation first.
    pub const ALL: [Self; 4] = [Self::None, Self::Selective, Self::Full, Self::FullOffloaded];

    /// Whether every layer is.
    pub const fn is_full(self) -> bool {
        matches!(self, Self::Full | Self::FullOffloaded)
    }

    /// Returns the settings of a model.
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

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
            Self::FullOffloaded => "full-offloaded",
        }
    }
}

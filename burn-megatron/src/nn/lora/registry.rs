//! The layers of a model that have adapters.

use super::{LoraConfig, LoraTarget};
use crate::comm::ParallelContext;
use crate::nn::BuildError;
use crate::nn::of_all_stages::of_all_stages;

/// A layer with an adapter, as built on this rank. Sizes cover all tensor ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedLayer {
    /// The kind of layer.
    pub target: LoraTarget,
    /// The path of the adapted weight `[in, ..]`.
    pub weight: String,
    /// The first column of the layer in the weight.
    pub offset: usize,
    /// The number of input and output features.
    pub size: [usize; 2],
    /// The path of the adapter, which has the parameters `a` and `b`.
    pub adapter: String,
}

/// The adapters of this rank's part of a model, and their settings.
#[derive(Clone, Debug)]
pub struct LoraLayers {
    /// The settings.
    pub config: LoraConfig,
    /// The layers, in the order in which they were built.
    pub layers: Vec<AdaptedLayer>,
}

impl LoraLayers {
    /// Checks that the model has each named target. Collective: call it on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for a target without a layer. [`BuildError::Comm`] if the collective fails.
    pub fn check_targets(&self, groups: &ParallelContext) -> Result<(), BuildError> {
        let own: Vec<_> = self.layers.iter().map(|layer| layer.target).collect();
        self.check_found(&of_all_stages(&own, |_| 0, groups)?)
    }

    /// Checks that a model without pipeline parallelism has each named target.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for a target without a layer.
    pub fn check_whole_model(&self) -> Result<(), BuildError> {
        let found = self.layers.iter().map(|layer| layer.target);
        self.check_found(&found.collect::<Vec<_>>())
    }

    fn check_found(&self, found: &[LoraTarget]) -> Result<(), BuildError> {
        let has = |target: &LoraTarget| found.contains(target);
        let targets = self.config.targets();
        let missing = targets.iter().find(|target| !has(target));
        let missing = missing.filter(|_| self.config.names_targets() || !targets.iter().any(has));
        let Some(missing) = missing else {
            return Ok(());
        };
        let present: Vec<_> = LoraTarget::ALL.into_iter().filter(has).collect();
        let present: Vec<_> = present.iter().map(|target| target.name()).collect();
        Err(BuildError::Config {
            path: "lora".into(),
            message: format!(
                "target_modules has {missing}, but the model has no such layer that can have an adapter; it has {}",
                if present.is_empty() {
                    "none".into()
                } else {
                    present.join(", ")
                }
            ),
        })
    }
}

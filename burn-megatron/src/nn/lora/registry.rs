//! The layers of a model that have adapters.

use super::{LoraConfig, LoraTarget};
use crate::comm::ParallelContext;
use crate::nn::BuildError;
use crate::nn::of_all_stages::of_all_stages;

/// A layer of this rank that has a LoRA adapter. The sizes describe the full layer over all tensor ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedLayer {
    /// The kind of layer.
    pub target: LoraTarget,
    /// The path of the adapted weight `[in, ..]`.
    pub weight: String,
    /// The index of the first column of the layer in the weight. It can be greater than 0 if the weight is fused, such
    /// as the QKV weight.
    pub offset: usize,
    /// The number of input features and the number of output features.
    pub size: [usize; 2],
    /// The path of the adapter, which has the parameters `a` and `b`.
    pub adapter: String,
}

/// The layers with LoRA adapters in this rank's part of a model, and the LoRA settings.
#[derive(Clone, Debug)]
pub struct LoraLayers {
    /// The LoRA settings.
    pub config: LoraConfig,
    /// The layers, in the order in which they were built.
    pub layers: Vec<AdaptedLayer>,
}

impl LoraLayers {
    /// Checks that the model has each target that is listed by name. This call is collective: make it on all ranks of
    /// the pipeline.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the model has no layer for a target. [`BuildError::Comm`] if the collective fails.
    pub fn check_targets(&self, groups: &ParallelContext) -> Result<(), BuildError> {
        let own: Vec<_> = self.layers.iter().map(|layer| layer.target).collect();
        self.check_found(&of_all_stages(&own, |_| 0, groups)?)
    }

    /// Checks that a model without pipeline parallelism has each target that is listed by name.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the model has no layer for a target.
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

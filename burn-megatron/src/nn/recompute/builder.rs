//! The recomputation regions of the modules that a model builder creates.

use super::{RecomputeGranularity, RecomputeModule, RecomputeRegion};
use crate::kernel_selection::Operation;
use crate::nn::{BuildError, ModelBuilder};

impl ModelBuilder {
    /// Returns the recomputation region of this module. The region is recomputed if the settings contain `module`, or a
    /// pattern that matches the path of this module. Any module can have a region. It runs its forward pass with
    /// [`RecomputeRegion::run`].
    pub fn recompute_region(&self, module: Option<RecomputeModule>) -> RecomputeRegion {
        self.recompute()
            .region(self.path(), module, self.position())
    }

    /// Returns the recomputation region of a layer that is not in the list of
    /// [`StageBuilder::layers_in_runs`](crate::model::StageBuilder::layers_in_runs). The region is recomputed if a
    /// pattern in the settings matches its path, and also if the settings recompute whole layers.
    pub fn recompute_layer_region(&self) -> RecomputeRegion {
        let recompute = self.recompute();
        match recompute.config().granularity {
            RecomputeGranularity::Full => recompute.region_if(true, self.position()),
            _ => self.recompute_region(None),
        }
    }

    /// Returns the region of a part of this module that has a name but no path.
    pub(in crate::nn) fn recompute_part(&self, module: RecomputeModule) -> RecomputeRegion {
        let recompute = self.recompute();
        recompute.region_if(recompute.takes(module), self.position())
    }

    /// Returns the region of a part whose recomputation requires the fused form of `operation`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the part is recomputed but the operation is not fused.
    pub(in crate::nn) fn recompute_fused(
        &self,
        module: RecomputeModule,
        operation: Operation,
    ) -> Result<RecomputeRegion, BuildError> {
        let region = self.recompute_part(module);
        if region.is_on() && !self.is_fused(operation) {
            let (name, operation) = (module.name(), operation.name());
            return Err(self.error(format!(
                "recomputing {name:?} requires the fused kernel of the {operation}, which this model does not use: set \
                 kernels.{operation} = \"fused\", or do not recompute {name:?}"
            )));
        }
        Ok(region)
    }
}

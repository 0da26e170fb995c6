//! The questions of a module to its builder.

use super::{RecomputeGranularity, RecomputeModule, RecomputeRegion};
use crate::kernel_selection::Operation;
use crate::nn::{BuildError, ModelBuilder};

impl ModelBuilder {
    /// The region of this module, which is recomputed if the settings have a pattern that matches its path, or the
    /// name of `module`, if it is one of those. Any module may have one, and call its forward through
    /// [`RecomputeRegion::run`].
    pub fn recompute_region(&self, module: Option<RecomputeModule>) -> RecomputeRegion {
        self.recompute()
            .region(self.path(), module, self.position())
    }

    /// The region of this module as a layer beside those of
    /// [`StageBuilder::layers_in_runs`](crate::model::StageBuilder::layers_in_runs): also recomputed where the settings
    /// recompute whole layers.
    pub fn recompute_layer_region(&self) -> RecomputeRegion {
        let recompute = self.recompute();
        match recompute.config().granularity {
            RecomputeGranularity::Full => recompute.region_if(true, self.position()),
            _ => self.recompute_region(None),
        }
    }

    /// The region of a part of this module, which has a name and no path.
    pub(in crate::nn) fn recompute_part(&self, module: RecomputeModule) -> RecomputeRegion {
        let recompute = self.recompute();
        recompute.region_if(recompute.takes(module), self.position())
    }

    /// The same for a part whose recomputation needs the fused form of `operation`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the part is recomputed, and the operation is not fused.
    pub(in crate::nn) fn recompute_fused(
        &self,
        module: RecomputeModule,
        operation: Operation,
    ) -> Result<RecomputeRegion, BuildError> {
        let region = self.recompute_part(module);
        if region.is_on() && !self.is_fused(operation) {
            let (name, operation) = (module.name(), operation.name());
            return Err(self.error(format!(
                "recomputing {name:?} needs the fused kernel of the {operation}, which this model does not use: \
                 request it (kernels.{operation} = \"fused\"), or do not recompute {name:?}"
            )));
        }
        Ok(region)
    }
}

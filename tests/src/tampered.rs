//! A model with a change that `verify` must find.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data::Samples;
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel,
};
use burn_megatron::nn::{BuildError, ParallelModule, ParameterEntry};
use burn_megatron::verify::{Layout, Rounding, Subject};

/// A subject with other entries in its parameter table, or other groups in its data-parallel wrapper.
pub struct Tampered<S> {
    inner: S,
    entry: fn(&mut ParameterEntry),
    groups: fn(&ParallelContext) -> ParallelContext,
}

impl<S> Tampered<S> {
    /// Changes every entry of the parameter table.
    pub fn table(inner: S, entry: fn(&mut ParameterEntry)) -> Self {
        let groups = ParallelContext::clone;
        Self {
            inner,
            entry,
            groups,
        }
    }

    /// Changes the groups of the data-parallel wrapper.
    pub fn groups(inner: S, groups: fn(&ParallelContext) -> ParallelContext) -> Self {
        let entry = |_: &mut ParameterEntry| ();
        Self {
            inner,
            entry,
            groups,
        }
    }
}

impl<S: Subject> Subject for Tampered<S> {
    type Model = S::Model;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<S::Model>, BuildError> {
        let mut model = self.inner.build(groups, device)?;
        model.table.entries_mut().iter_mut().for_each(self.entry);
        Ok(model)
    }

    fn wrap(
        &self,
        model: ParallelModule<S::Model>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<S::Model>, DataParallelError> {
        self.inner.wrap(model, &(self.groups)(groups), config)
    }

    fn dtype(&self) -> DType {
        self.inner.dtype()
    }

    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        self.inner.rounding(layout)
    }

    fn samples(&self) -> usize {
        self.inner.samples()
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        self.inner.data(groups)
    }

    fn depends_on_micro_batches(&self) -> bool {
        self.inner.depends_on_micro_batches()
    }

    fn layers(&self) -> usize {
        self.inner.layers()
    }
}

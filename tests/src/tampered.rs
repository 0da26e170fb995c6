//! A model with a modification that `verify` must find.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel,
};
use burn_megatron::nn::{BuildError, ParallelModule, ParameterEntry};
use burn_megatron_data::Samples;
use burn_megatron_verify::{Layout, Rounding, Subject};

/// A subject with modified entries in its parameter table, or with other groups in its layers or its data-parallel
/// wrapper.
pub struct Tampered<S> {
    inner: S,
    entry: fn(&mut ParameterEntry),
    layers: fn(&ParallelContext) -> ParallelContext,
    groups: fn(&ParallelContext) -> ParallelContext,
}

impl<S> Tampered<S> {
    /// Changes every entry of the parameter table.
    pub fn table(inner: S, entry: fn(&mut ParameterEntry)) -> Self {
        Self {
            entry,
            ..Self::unchanged(inner)
        }
    }

    /// Changes the groups of the layers.
    pub fn layers(inner: S, layers: fn(&ParallelContext) -> ParallelContext) -> Self {
        Self {
            layers,
            ..Self::unchanged(inner)
        }
    }

    /// Changes the groups of the data-parallel wrapper.
    pub fn groups(inner: S, groups: fn(&ParallelContext) -> ParallelContext) -> Self {
        Self {
            groups,
            ..Self::unchanged(inner)
        }
    }

    fn unchanged(inner: S) -> Self {
        Self {
            inner,
            entry: |_| (),
            layers: ParallelContext::clone,
            groups: ParallelContext::clone,
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
        let mut model = self.inner.build(&(self.layers)(groups), device)?;
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

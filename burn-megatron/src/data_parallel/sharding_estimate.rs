//! Computes the buffer layout and the memory of a module on one rank before memory is allocated.

use burn::module::Module;

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::frozen;
use super::layout::BufferLayout;
use super::memory::MemoryPlan;
use super::offload::OffloadPlan;
use super::plan_builder::{build_plan, quantizers};
use crate::comm::ParallelContext;
use crate::nn::ParallelModule;

/// An estimate of the buffer layout and the memory of a module that is wrapped in a
/// [`DistributedDataParallel`](super::DistributedDataParallel).
///
/// Only the shapes of the parameters are read, so the module may be built as an
/// [`outline`](crate::nn::ModelBuilder::outline). No collective is called, so the [`ParallelContext`] may be
/// [offline](ParallelContext::offline).
#[derive(Clone, Debug)]
pub struct ShardingEstimate {
    /// The buffers of the trained parameters and their gradients.
    pub layout: BufferLayout,
    /// The planned memory of the rank.
    pub memory: MemoryPlan,
    /// The buckets whose optimizer state is in host memory.
    pub offload: OffloadPlan,
}

impl ShardingEstimate {
    /// Computes the layout and the memory for one rank.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] for settings that are invalid for the ranks or the module.
    pub fn of<M: Module>(
        model: &ParallelModule<M>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let config = &config.in_layout(groups.config())?;
        let (module, mut table) = (&model.module, model.table.clone());
        frozen::freeze(&mut table, &config.freeze)?;
        let table = &table;
        let quantizers = quantizers(table, config, model.fp8.weights())?;
        let plan = build_plan(module, (table, false), groups, config, quantizers)?;
        Ok(Self {
            memory: plan
                .memory()?
                .plus(&frozen::memory(module, table, groups, config)?),
            offload: plan.offload,
            layout: plan.layout,
        })
    }
}

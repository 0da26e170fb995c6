//! What a rank will hold of a module, before it holds it.

use burn::module::Module;

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::layout::BufferLayout;
use super::memory::MemoryPlan;
use super::{Plan, build};
use crate::comm::Groups;
use crate::nn::ParallelModule;

/// What [`DistributedDataParallel`](super::DistributedDataParallel) would make of a module.
///
/// Only the shapes of the module are read, so it may be built as an
/// [`outline`](crate::nn::Scope::outline), and nobody is called, so the rank may be one
/// [without a world](Groups::without_world).
#[derive(Clone, Debug)]
pub struct Outline {
    /// Where parameters and gradients will lie.
    pub layout: BufferLayout,
    /// What the rank will hold.
    pub memory: MemoryPlan,
}

impl Outline {
    /// The outline of a module on one rank.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] for settings that do not fit the ranks or the module.
    pub fn of<M: Module>(
        model: &ParallelModule<M>,
        groups: &Groups,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let (module, table) = (&model.module, &model.table);
        let quantizers = build::quantizers(table, config, model.fp8.weights())?;
        let plan: Plan = build::plan(module, table, groups, config, quantizers)?;
        Ok(Self {
            memory: plan.memory()?,
            layout: plan.layout,
        })
    }
}

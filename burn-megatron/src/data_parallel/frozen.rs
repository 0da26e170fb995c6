//! Frozen parameters, which are not trained. Their values have the dtype of the model and are sharded with ZeRO-3. They
//! have no gradients and no master weights. [Running states](super::running_state) are frozen parameters, too.

use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use parking_lot::{Mutex, MutexGuard};

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::memory::MemoryPlan;
use super::memory_usage::MemoryUsage;
use super::parameter_buckets::ParameterBuckets;
use super::plan_builder::{Quantizers, build_plan};
use super::sharding_plan::ShardingPlan;
use crate::collective::first_on_all;
use crate::comm::ParallelContext;
use crate::glob::{Glob, nearest};
use crate::mesh::ZeroStage;
use crate::nn::ParameterTable;
use crate::nn::hook::{GradientSink, ParameterValue, Pass};

/// Freezes the parameters of `table` whose paths match one of `patterns`. Returns the indices of the patterns that
/// match no parameter.
///
/// # Errors
///
/// [`DataParallelError::FreezePattern`] for a pattern with a syntax error.
pub fn freeze(
    table: &mut ParameterTable,
    patterns: &[String],
) -> Result<Vec<usize>, DataParallelError> {
    let mut unmatched = vec![];
    for (number, pattern) in patterns.iter().enumerate() {
        let glob = parse(pattern)?;
        let mut matches = 0;
        for entry in table.entries_mut() {
            if glob.matches(&entry.path) {
                entry.frozen = true;
                matches += 1;
            }
        }
        if matches == 0 {
            unmatched.push(number);
        }
    }
    Ok(unmatched)
}

fn parse(pattern: &str) -> Result<Glob, DataParallelError> {
    Glob::parse(pattern).map_err(|fault| DataParallelError::FreezePattern {
        pattern: pattern.into(),
        fault,
    })
}

/// Freezes the parameters of a table whose paths match one of `patterns`, like [`freeze`]. Each pattern must match a
/// parameter of at least one pipeline stage, and at least one parameter must not be frozen. Collective: call on all
/// ranks of the pipeline.
///
/// # Errors
///
/// [`DataParallelError::FreezePattern`] for a pattern with a syntax error, [`DataParallelError::FreezeUnmatched`] for a
/// pattern that matches no parameter, or [`DataParallelError::AllFrozen`] if all parameters are frozen.
pub fn freeze_in_all_stages(
    table: &mut ParameterTable,
    patterns: &[String],
    groups: &ParallelContext,
) -> Result<(), DataParallelError> {
    if patterns.is_empty() {
        return Ok(());
    }
    let unmatched = freeze(table, patterns)?;
    let is_trained = table.entries().iter().any(|entry| !entry.frozen);
    let unmatched = (0..patterns.len()).map(|number| unmatched.contains(&number));
    let flags = unmatched.chain([!is_trained]);
    match first_on_all(flags, groups.pipeline())? {
        None => Ok(()),
        Some(number) if number == patterns.len() => Err(DataParallelError::AllFrozen),
        Some(number) => {
            let pattern = patterns[number].clone();
            let paths = table.entries().iter().map(|entry| &entry.path[..]);
            let nearest = nearest(&parse(&pattern)?, paths);
            Err(DataParallelError::FreezeUnmatched { pattern, nearest })
        }
    }
}

/// The frozen parameters of one rank. It is the sink of their hooks and receives no gradients.
pub(super) struct FrozenParameters {
    pub plan: Arc<ShardingPlan>,
    pub table: ParameterTable,
    buckets: Mutex<ParameterBuckets>,
}

impl fmt::Debug for FrozenParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} frozen parameters", self.plan.parameters.len())
    }
}

impl FrozenParameters {
    /// Lays out the frozen parameters of `table`, if there are any. Values are zero until they are
    /// [written](ParameterBuckets::write). Collective: call on all ranks.
    pub fn new<M: Module>(
        module: &M,
        table: &ParameterTable,
        groups: &ParallelContext,
        config: &DataParallelConfig,
        usage: &MemoryUsage,
    ) -> Result<Option<Self>, DataParallelError> {
        let Some(mut plan) = plan(module, table, groups, config)? else {
            return Ok(None);
        };
        plan.usage = usage.clone();
        let plan = Arc::new(plan);
        Ok(Some(Self {
            buckets: Mutex::new(ParameterBuckets::new(&plan)),
            table: table.filtered(true),
            plan,
        }))
    }

    /// Returns the buckets, which store the frozen parameters in the dtype of the model.
    pub fn buckets(&self) -> MutexGuard<'_, ParameterBuckets> {
        self.buckets.lock()
    }

    /// Returns this rank's shard of each bucket.
    pub fn shards(&self) -> impl Iterator<Item = Tensor<1>> {
        (0..self.plan.buckets()).map(|number| self.buckets().master_shard(number))
    }
}

impl GradientSink for FrozenParameters {
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        Some(self.buckets().value(index, pass))
    }

    fn path(&self, index: usize) -> Option<String> {
        Some(self.plan.parameters[index].path.clone())
    }

    fn expect(&self, index: usize) {
        unreachable!("frozen parameter {index} has no gradient")
    }

    fn accumulate(&self, index: usize, _gradient: Tensor<1>) {
        unreachable!("frozen parameter {index} has no gradient")
    }
}

/// Returns the layout of the frozen parameters of a table, if there are any.
fn plan<M: Module>(
    module: &M,
    table: &ParameterTable,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<Option<ShardingPlan>, DataParallelError> {
    if !table.entries().iter().any(|entry| entry.frozen) {
        return Ok(None);
    }
    let mut own = DataParallelConfig {
        precision: config.precision,
        bucket_size: config.bucket_size,
        ..DataParallelConfig::default()
    };
    if config.zero_stage == ZeroStage::Parameters {
        own = DataParallelConfig {
            zero_stage: config.zero_stage,
            hsdp: config.hsdp,
            keep_gathered: config.keep_gathered,
            pad_buckets: config.pad_buckets,
            ..own
        };
    }
    let plan = build_plan(module, (table, true), groups, &own, Quantizers::new())?;
    Ok(Some(plan))
}

/// Returns the memory of the frozen parameters of a table.
pub(super) fn memory<M: Module>(
    module: &M,
    table: &ParameterTable,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<MemoryPlan, DataParallelError> {
    let plan = plan(module, table, groups, config)?;
    plan.map_or(Ok(MemoryPlan::default()), |plan| plan.frozen_memory())
}

//! Parameters that are not trained: values in the dtype of the model, sharded with ZeRO-3, and nothing else. They include
//! [running states](super::running_state).

use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};
use parking_lot::Mutex;

use super::bucket_step::{BucketShard, SteppedBucket};
use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::layout::BufferLayout;
use super::memory::{MemoryPlan, MemoryRules, ZeroStage};
use super::memory_usage::MemoryUsage;
use super::parameter_buckets::ParameterBuckets;
use super::sharding_plan::ShardingPlan;
use super::{DistributedDataParallel, build};
use crate::comm::{ParallelContext, ReduceOp};
use crate::glob::{Glob, nearest};
use crate::nn::ParameterTable;
use crate::nn::hook::{GradientSink, ParameterValue, Pass};

/// Freezes the parameters of a table whose paths match one of `patterns`. Returns the indices of the patterns that match
/// none.
///
/// # Errors
///
/// [`DataParallelError::FreezePattern`].
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

/// [`freeze`], where each pattern must match a parameter of some stage, and some parameter must be left. Collective: call
/// on all ranks of the pipeline.
///
/// # Errors
///
/// [`DataParallelError::FreezePattern`], [`DataParallelError::FreezeUnmatched`] or [`DataParallelError::AllFrozen`].
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
    let mut flags: Vec<u8> = (0..patterns.len())
        .map(|number| u8::from(unmatched.contains(&number)))
        .collect();
    flags.push(u8::from(!is_trained));
    let everywhere = groups.pipeline().all_reduce(flags.into(), ReduceOp::Min)?;
    let everywhere: Vec<u8> = everywhere.into_vec();
    match everywhere.iter().position(|flag| *flag == 1) {
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

/// The frozen parameters of one rank, as the sink of their hooks, to which no gradient comes.
pub(super) struct FrozenParameters {
    plan: Arc<ShardingPlan>,
    buckets: Mutex<ParameterBuckets>,
    table: ParameterTable,
}

impl fmt::Debug for FrozenParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} frozen parameters", self.plan.parameters.len())
    }
}

impl FrozenParameters {
    /// Lays out the frozen parameters of `table`, if there are any. Values are zero until they are
    /// [written](Self::write). Collective: call on all ranks.
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

    pub fn plan(&self) -> &ShardingPlan {
        &self.plan
    }

    /// Sets a parameter to `value`, flat and in its dtype, on this rank only.
    pub fn write(&self, index: usize, value: &Tensor<1>) {
        self.buckets.lock().write(index, value, &self.plan);
    }

    /// The memory of the parameters that are not sharded.
    pub fn memory_ids(&self) -> Vec<Option<usize>> {
        self.buckets.lock().memory_ids()
    }

    pub fn begin_forward(&self) {
        self.buckets.lock().prefetch.begin_forward();
    }

    /// Called after the last backward of a step. Returns the fingerprint of the order in which units were gathered.
    pub fn end_step(&self) -> u64 {
        self.buckets.lock().end_step(&self.plan)
    }

    /// This rank's shard of a bucket.
    fn shard(&self, number: usize) -> Tensor<1> {
        self.buckets.lock().master_shard(number, &self.plan)
    }

    /// Frees gathered parameters; with ZeRO-3 only.
    pub fn reshard(&self) {
        self.buckets.lock().reshard(&self.plan);
    }

    /// Replaces this rank's shard of each bucket. Collective: call on all ranks.
    fn replace(&self, shards: Vec<Tensor<1>>) {
        let mut buckets = self.buckets.lock();
        for (number, master) in shards.into_iter().enumerate().rev() {
            let model = None;
            let step = |_, _| SteppedBucket { master, model };
            buckets.step(number, step, &self.plan);
        }
        buckets.wait(&self.plan);
    }
}

impl GradientSink for FrozenParameters {
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        Some(self.buckets.lock().value(index, pass, &self.plan))
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

/// The dtype of the masters of a model in this dtype.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// The layout of the frozen parameters of a table, if there are any.
fn plan<M: Module>(
    module: &M,
    table: &ParameterTable,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<Option<ShardingPlan>, DataParallelError> {
    if !table.entries().iter().any(|entry| entry.frozen) {
        return Ok(None);
    }
    let is_sharded = config.zero_stage == ZeroStage::Parameters;
    let own = DataParallelConfig {
        precision: config.precision,
        bucket_size: config.bucket_size,
        ..DataParallelConfig::default()
    };
    let own = if is_sharded {
        DataParallelConfig {
            zero_stage: config.zero_stage,
            hsdp: config.hsdp,
            keep_gathered: config.keep_gathered,
            pad_buckets: config.pad_buckets,
            ..own
        }
    } else {
        own
    };
    let quantizers = build::Quantizers::new();
    let plan = build::build_plan(module, (table, true), groups, &own, quantizers)?;
    Ok(Some(plan))
}

/// The memory of the frozen parameters of a table, if there are any.
pub(super) fn memory<M: Module>(
    module: &M,
    table: &ParameterTable,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<MemoryPlan, DataParallelError> {
    plan(module, table, groups, config)?.map_or(Ok(MemoryPlan::default()), |plan| memory_of(&plan))
}

fn memory_of(plan: &ShardingPlan) -> Result<MemoryPlan, DataParallelError> {
    let rules = MemoryRules::of(&plan.config);
    Ok(MemoryPlan::of_frozen(&plan.layout, &rules)?)
}

impl<M: Module> DistributedDataParallel<M> {
    /// All parameters of the module, in its order: those of [`table`](Self::table), and the frozen ones.
    pub fn whole_table(&self) -> &ParameterTable {
        &self.whole
    }

    /// The parameters that are not trained, if there are any.
    pub fn frozen_table(&self) -> Option<&ParameterTable> {
        self.buffers.frozen.as_ref().map(|frozen| &frozen.table)
    }

    /// Returns the value of each frozen parameter, gathered over the data axis: `[elements]` of this model-parallel rank's
    /// part, in the order of [`frozen_table`](Self::frozen_table). Running states are averaged first. Collective: call on
    /// all ranks of the data axis.
    pub fn frozen_parameters(&self) -> Vec<Tensor<1>> {
        self.average_running_states();
        self.gathered_frozen_parameters()
    }

    /// Returns the values of [`frozen_parameters`](Self::frozen_parameters) without averaging the running states.
    pub(super) fn gathered_frozen_parameters(&self) -> Vec<Tensor<1>> {
        let Some(frozen) = &self.buffers.frozen else {
            return vec![];
        };
        let plan = &frozen.plan;
        let gather = |number| super::gathered::gather(plan, number, frozen.shard(number));
        let buckets: Vec<_> = (0..plan.buckets()).map(gather).collect();
        let value = |index| {
            let (number, range) = plan.location(index);
            buckets[number].clone().slice([range])
        };
        (0..plan.parameters.len()).map(value).collect()
    }

    /// The layout of the frozen parameters that checkpoints have, if there are any: not of those of a model with
    /// adapters, which are loaded from elsewhere.
    pub fn saved_frozen(&self) -> Option<&BufferLayout> {
        let frozen = self.buffers.frozen.as_ref();
        let frozen = frozen.filter(|_| self.saves_frozen);
        frozen.map(|frozen| &frozen.plan.layout)
    }

    /// This rank's shard of each bucket of frozen parameters, and its values in the dtype of checkpoints.
    pub fn frozen_shards(&self) -> Vec<(BucketShard, Tensor<1>)> {
        let Some(frozen) = &self.buffers.frozen else {
            return vec![];
        };
        let value = |(number, shard): (usize, BucketShard)| {
            let value = frozen.shard(number);
            let wide = FloatDType::from(wide(value.dtype()));
            (shard, value.cast(wide))
        };
        let shards = BucketShard::all(&frozen.plan).into_iter().enumerate();
        shards.map(value).collect()
    }

    /// The dtype of each frozen parameter in checkpoints: that of a master.
    pub(crate) fn frozen_dtypes(&self) -> Vec<DType> {
        let parameters = self
            .buffers
            .frozen
            .iter()
            .flat_map(|frozen| &frozen.plan.parameters);
        parameters.map(|own| wide(own.model_dtype)).collect()
    }

    /// Replaces what [`frozen_shards`](Self::frozen_shards) returns, rounded to the dtype of the model. Collective: call on all ranks.
    pub fn replace_frozen(&mut self, shards: Vec<Tensor<1>>) {
        if let Some(frozen) = &self.buffers.frozen {
            let number = |(number, shard): (usize, Tensor<1>)| {
                let (model, _) = frozen.plan.model_and_main_dtypes(number);
                shard.cast(FloatDType::from(model))
            };
            frozen.replace(shards.into_iter().enumerate().map(number).collect());
            self.restore_running_states();
            self.fp8.invalidate_weights();
        }
    }

    /// The memory of the frozen parameters, as computed from their layout.
    pub(super) fn frozen_memory(&self) -> Result<MemoryPlan, DataParallelError> {
        let frozen = self.buffers.frozen.as_ref();
        frozen.map_or(Ok(MemoryPlan::default()), |frozen| memory_of(&frozen.plan))
    }
}

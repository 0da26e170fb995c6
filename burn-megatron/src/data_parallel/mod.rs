//! Data parallelism for any Burn module. Parameters and gradients are stored in flat buffers, replicated or
//! sharded over the ranks. Gradients leave backward through the parameters' hooks, are summed over the
//! micro-batches and the ranks, and divided by the number of tokens.
//!
//! ```text
//! let mut ddp = DistributedDataParallel::new(model, &groups)?;
//! for batch in micro_batches {
//!     let loss = ddp.forward(&device, |model| model.loss(batch));   // summed over the tokens
//!     ddp.backward(loss);                                           // backward_last for the last
//! }
//! let gradients = ddp.reduce(tokens)?;                              // tokens of this rank
//! ```
//!
//! The way of a weight gradient, from the layer to the weight of the next step:
//!
//! 1. `nn::linear`: the backward passes the product `x^T dy`, not computed yet, to the sink of the weight's hook
//!    (`nn::hook`). Fused operations do so for biases and norms, and the embedding for its rows; other parameters'
//!    gradients arrive there computed.
//! 2. `ParamAndGradBuffers`, the sink, takes the flat buffer of the weight's bucket, and the product is written or
//!    added to it.
//! 3. `gradient_buckets`: after the last gradient of a bucket, `reduction` sums it over the data-parallel group of
//!    its grid (context and data for dense parameters, the expert grid's data for experts), while backward goes on.
//! 4. [`reduce`](DistributedDataParallel::reduce) waits, sums what are partial sums on other axes (`gradients`),
//!    and returns [`Gradients`]; `optim::norm` reads them.
//! 5. `bucket_step` hands the optimizer each bucket's masters and gradient; `parameter_buckets` keeps the new
//!    masters and gathers the model's copy, which the hook returns in the next forward.
//!
//! [`DataParallelConfig`] sets what is sharded (ZeRO 1 to 3, HSDP), the dtype in which the model computes, and
//! what overlaps. With `fp8_param_gather` the weights of FP8 layers are gathered in FP8: their buckets have
//! one byte per element, and every rank keeps the two copies that the layers multiply with
//! ([`GradientSink::quantized`](crate::nn::hook::GradientSink::quantized)). The optimizer steps the f32
//! masters, which are sharded; they are what a checkpoint saves and the replica check compares. Weights are
//! quantised again after a skipped step too, as its amax may change the scales.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::collective::to_f64;
use crate::comm::ParallelContext;
use crate::kernel_selection::KernelSelection;
use crate::mesh::Grid;
use crate::nn::fp8::Fp8;
use crate::nn::hook::{DeferringSink, detach_hooks, with_anchor};
use crate::nn::moe::Routers;
use crate::nn::{AttentionLogits, DropoutPosition, ParallelModule, ParameterTable, Recompute};

mod bucket_step;
mod build;
mod captured;
mod coalesced_all_reduce;
mod config;
mod error;
mod freed_memory;
mod frozen;
mod fsdp_unit;
mod gathered;
mod gradient_buckets;
mod gradient_check;
mod gradient_tracker;
mod gradients;
pub mod layout;
mod memory;
mod memory_usage;
mod model_checks;
pub mod offload;
mod own_backward;
mod param_and_grad_buffers;
mod parameter_buckets;
mod prefetch_order;
mod quantized;
mod reduction;
mod replicas;
mod running_state;
mod segments;
mod sharding_estimate;
mod sharding_groups;
mod sharding_plan;
#[cfg(test)]
mod tests;

pub use bucket_step::{AfterStep, BucketShard, BucketStep, StepFn, SteppedBucket};
use build::NamedWeight;
pub use config::{DataParallelConfig, Moments, ParameterGather, Precision};
pub use error::{DataParallelConfigError, DataParallelError};
use frozen::FrozenParameters;
pub use frozen::{freeze, freeze_in_all_stages};
pub use gradient_buckets::MicroBatchUses;
pub use gradient_check::InvalidGradient;
pub use gradients::Gradients;
use gradients::ModelParallelAllReduce;
pub use gradients::ReductionRecord;
pub use memory::host_memory;
pub use memory::{
    MemoryError, MemoryPlan, MemoryRules, ParseZeroStageError, ZeroStage, format_bytes,
};
pub use memory_usage::{MemoryCategory, MemoryUsage, TrackedAllocation};
use offload::HostStepper;
pub use offload::{OffloadConfig, OffloadError, OffloadPlan};
use param_and_grad_buffers::ParamAndGradBuffers;
pub use running_state::running_states;
pub(crate) use segments::{ElementMask, ShardSegment};
pub use sharding_estimate::ShardingEstimate;
pub use sharding_groups::ShardingGroups;
pub(crate) use sharding_groups::partition_index;
use sharding_plan::ShardingPlan;

/// A module whose parameters and gradients are replicated or sharded over the data axis.
///
/// The module itself holds placeholders: its layers get the parameters through their hooks, by
/// [`Param::val`](burn::module::Param::val). [`to_module`](Self::to_module) returns a module that holds
/// them.
#[derive(Debug)]
pub struct DistributedDataParallel<M> {
    module: M,
    /// The parameters that are trained.
    table: Arc<ParameterTable>,
    /// All parameters, in the order of the module.
    whole: Arc<ParameterTable>,
    position: DropoutPosition,
    groups: ParallelContext,
    buffers: Arc<ParamAndGradBuffers>,
    model_parallel: ModelParallelAllReduce,
    shards: Vec<BucketShard>,
    unique_segments: Vec<ShardSegment>,
    /// See [`GradientCheck::shares`].
    measured_shares: Vec<(Grid, Tensor<1>)>,
    kernels: KernelSelection,
    fp8: Fp8,
    recompute: Recompute,
    routers: Routers,
    attention_logits: AttentionLogits,
    after_step: Option<AfterStep>,
    /// `None` where no bucket is offloaded.
    host: Option<HostStepper>,
    /// See [`saved_frozen`](Self::saved_frozen).
    saves_frozen: bool,
    /// For each parameter of `whole`, whether it is a [running state](running_state).
    running: Vec<bool>,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Wraps a module with the [default settings](DataParallelConfig): nothing is sharded.
    ///
    /// # Errors
    ///
    /// See [`with`](Self::with).
    pub fn new(
        model: ParallelModule<M>,
        groups: &ParallelContext,
    ) -> Result<Self, DataParallelError> {
        Self::with(model, groups, &DataParallelConfig::default())
    }

    /// Wraps a module. The ZeRO stage and `hsdp` are those of the layout of `groups` or of `config`.
    /// Collective: call on all ranks. Parameters are broadcast from the first rank that holds
    /// them, so the ranks need not build them from one seed. Only sections that are replicated over some
    /// ranks of an axis must be equal already, as [`ModelBuilder`](crate::nn::ModelBuilder) builds them.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Config`] for settings that are invalid for the ranks or the model,
    /// [`DataParallelError::ModelMismatch`] when the tables of the ranks differ,
    /// [`DataParallelError::NoExperts`] for a layout that splits experts, of which the model has none.
    pub fn with(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let weights = model.fp8.weights();
        Self::with_weights(model, groups, config, weights)
    }

    /// The same with the FP8 weights of the model.
    fn with_weights(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
        weights: Vec<NamedWeight>,
    ) -> Result<Self, DataParallelError> {
        let config = &config.in_layout(groups.config())?;
        let ParallelModule {
            module,
            mut table,
            position,
            kernels,
            fp8,
            recompute,
            routers,
            attention_logits,
            lora,
        } = model;
        let running = running_states(&module);
        for (entry, is_running) in table.entries_mut().iter_mut().zip(&running) {
            entry.frozen |= is_running;
        }
        let module = if running.contains(&true) {
            running_state::unshared(&module)
        } else {
            module
        };
        frozen::freeze_in_all_stages(&mut table, &config.freeze, groups)?;
        let saves_frozen = lora.is_none();
        model_checks::check_same_table(&table, groups)?;
        model_checks::check_experts(&table, groups)?;
        model_checks::check_tied_parameters(&table, groups)?;
        let targets = lora.map_or(Ok(()), |lora| lora.check_targets(groups));
        targets.map_err(|error| DataParallelError::Lora(Box::new(error)))?;
        fp8.check_layers(groups)?;
        recompute.check_regions(groups)?;
        // Under ZeRO-3 layers must not cache quantised copies of weights, which would stay unsharded.
        fp8.cache_quantized_weights(config.zero_stage != ZeroStage::Parameters);
        // Invalid settings are reported before errors that follow from them.
        config.check(build::data_ranks(groups, Grid::Dense))?;
        let quantizers = build::quantizers(&table, config, weights)?;
        build::check_quantizers(&quantizers, groups, config)?;
        let whole = Arc::new(table);
        let plan = build::build_plan(&module, (&whole, false), groups, config, quantizers)?;
        let frozen = FrozenParameters::new(&module, &whole, groups, config, &plan.usage)?;
        let table = match &frozen {
            Some(_) => Arc::new(whole.filtered(false)),
            None => whole.clone(),
        };
        let buffers = Arc::new(ParamAndGradBuffers::new(plan, frozen.map(Arc::new)));
        let stores = build::Stores::new(&whole, &running, &buffers);
        let module = build::move_parameters(module, groups, stores)?;
        buffers.plan.reserve_pool();
        buffers.finish_gathers();
        let plan = &buffers.plan;
        let model_parallel = ModelParallelAllReduce::new(plan, &table, groups)?;
        let unique_segments = segments::unique_segments(plan, &table, groups.mesh_rank());
        let check = plan.check.as_ref().filter(|_| model_parallel.is_empty());
        let shares = check.and_then(|check| check.shares(plan, &unique_segments));
        let host = (plan.offload.buckets > 0).then(|| HostStepper::start(plan));
        let host = host.transpose()?;
        Ok(Self {
            measured_shares: shares.unwrap_or_default(),
            model_parallel,
            shards: BucketShard::all(plan),
            unique_segments,
            module,
            table,
            whole,
            position,
            groups: groups.clone(),
            buffers,
            kernels,
            fp8,
            recompute,
            routers,
            attention_logits,
            after_step: None,
            host,
            saves_frozen,
            running,
        })
    }

    /// The module. Outside of [`forward`](Self::forward) it evaluates without recording gradients.
    ///
    /// Only `Param::val` returns its parameters. Module visitors bypass the hooks and see placeholders of
    /// NaN; use [`to_module`](Self::to_module) for them.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The parameters that are trained, and how they are placed on the ranks: all, unless some are
    /// [frozen](Self::frozen_table). What is numbered by parameter, such as gradients, is so in the order of this table.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// Which operations are fused.
    pub fn kernels(&self) -> &KernelSelection {
        &self.kernels
    }

    /// The FP8 layers.
    pub fn fp8(&self) -> &Fp8 {
        &self.fp8
    }

    /// Returns the layers that are recomputed in the backward.
    pub fn recompute(&self) -> &Recompute {
        &self.recompute
    }

    /// The routers of experts.
    pub fn routers(&self) -> &Routers {
        &self.routers
    }

    /// The layers with attention, and their largest logits.
    pub fn attention_logits(&self) -> &AttentionLogits {
        &self.attention_logits
    }

    /// The process groups.
    pub fn groups(&self) -> &ParallelContext {
        &self.groups
    }

    /// The settings.
    pub fn config(&self) -> &DataParallelConfig {
        &self.buffers.plan.config
    }

    /// The layout of parameters and gradients in buckets.
    pub fn layout(&self) -> &layout::BufferLayout {
        &self.buffers.plan.layout
    }

    /// The sink of gradients, for code that runs the backward itself.
    pub fn sink(&self) -> Arc<dyn DeferringSink> {
        self.buffers.clone()
    }

    /// The position of the module's random streams.
    pub fn position(&self) -> &DropoutPosition {
        &self.position
    }

    /// The memory of this rank, as measured.
    pub fn usage(&self) -> &MemoryUsage {
        &self.buffers.plan.usage
    }

    /// The memory of this rank, as computed from the layout.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Memory`] if the bytes overflow.
    pub fn memory_plan(&self) -> Result<MemoryPlan, DataParallelError> {
        let trained = self.buffers.plan.memory()?;
        Ok(trained.plus(&self.frozen_memory()?))
    }

    /// Runs a forward that records gradients of the parameters.
    ///
    /// `device` is the device of the inputs, with or without autodiff.
    pub fn forward<T>(&self, device: &Device, body: impl FnOnce(&M) -> T) -> T {
        self.buffers.begin_forward(None);
        let device = device.clone().inner().autodiff();
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        with_anchor(&anchor, || body(&self.module))
    }

    /// Runs the backward of `loss`, which must be a sum over tokens, and accumulates its gradients.
    ///
    /// Returns Burn's gradients of other leaves, such as inputs.
    pub fn backward(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        let _span = tracing::debug_span!("backward").entered();
        let leaves = loss.backward();
        self.buffers.gradients().tracker.end_backward();
        leaves
    }

    /// Runs the backward of the last micro-batch of a step. Since no forward follows, each bucket is reduced
    /// as soon as its gradients are final, while backward goes on.
    pub fn backward_last(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        let plan = &self.buffers.plan;
        self.buffers.gradients().end_forwards(None, plan);
        self.backward(loss)
    }

    /// Ends the step: sums the gradients over the ranks and divides them by the tokens of all ranks.
    ///
    /// `tokens` is the number of tokens in the micro-batches of *this* rank, so ranks with more tokens weigh
    /// more. Collective: call on all ranks; a rank that ran no micro-batch passes 0 and contributes zeros. A
    /// parameter that the loss does not depend on has a gradient of zeros; a warning names it once.
    ///
    /// A failed step ends as well: its gradients are discarded, and later ones are ignored.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] if a backward is missing, the ranks ran differently, or a collective fails.
    pub fn reduce(&mut self, tokens: u64) -> Result<Gradients, DataParallelError> {
        let (mut gradients, record) = self.reduce_unscaled()?;
        gradients.tokens = self.total_tokens(tokens, record.fingerprints)?;
        gradients.scale(1.0 / gradients.tokens.max(1) as f64);
        let measured = record.measured.map(to_f64);
        gradients.invalid_gradients =
            measured.map_or(vec![], |measured| self.invalid_gradients(&measured));
        Ok(gradients)
    }

    /// As [`reduce`](Self::reduce), without exchanging the tokens or reading anything from the device: the
    /// gradients have the factor 1, and neither tokens nor invalid gradients.
    pub fn reduce_unscaled(&mut self) -> Result<(Gradients, ReductionRecord), DataParallelError> {
        let _span = tracing::debug_span!("reduce_gradients").entered();
        let plan = &self.buffers.plan;
        let prefetches = self.buffers.parameters().end_step(plan);
        let frozen = self.buffers.frozen.as_ref();
        let of_frozen = frozen.map_or(0, |frozen| frozen.end_step());
        let prefetches = prefetches ^ of_frozen.rotate_left(1);
        let mut reduced = self.buffers.gradients().finish(plan)?;
        self.model_parallel.apply(&mut reduced.shards);
        let record = ReductionRecord {
            measured: reduced.measured,
            fingerprints: [prefetches, reduced.fingerprint],
        };
        Ok((Gradients::unscaled(reduced.shards), record))
    }

    /// The tokens of all ranks. From ZeRO-2 on, `fingerprints` must be equal on all of them.
    fn total_tokens(&self, tokens: u64, fingerprints: [u64; 2]) -> Result<u64, DataParallelError> {
        let data = &self.buffers.plan.dense.data;
        let own = [tokens, fingerprints[0], fingerprints[1]].map(|x| x as i64);
        let all: Vec<i64> = data.all_gather(own.to_vec().into())?.into_vec();
        let differs = |other: &[i64]| other[1..] != own[1..];
        if let Some(other) = all.chunks(3).position(differs) {
            self.check_order(data.group().ranks()[other])?;
        }
        Ok(all.chunks(3).map(|rank| rank[0] as u64).sum())
    }

    /// Fails if this rank may not use its parameters in another order than rank `other` of the data axis.
    pub(crate) fn check_order(&self, other: usize) -> Result<(), DataParallelError> {
        let (rank, stage) = (self.groups.rank(), self.config().zero_stage);
        if stage < ZeroStage::Gradients {
            return Ok(());
        }
        Err(DataParallelError::OrderMismatch { rank, other, stage })
    }

    /// Returns a module without hooks that holds the [masters](Self::parameters). Running states, such as the mean of a
    /// batch norm, are averaged over the data axis, in this wrapper too. Collective: call on all ranks of the data axis.
    pub fn to_module(&self) -> M {
        let (mut trained, mut frozen) = (
            self.parameters().into_iter(),
            self.frozen_parameters().into_iter(),
        );
        let mut entries = self.whole.entries().iter();
        let values = std::iter::from_fn(|| {
            if entries.next()?.frozen {
                frozen.next()
            } else {
                trained.next()
            }
        });
        let module = detach_hooks(self.module.clone()).map(&mut build::ParameterFiller(values));
        if self.running.contains(&true) {
            running_state::unshared(&module)
        } else {
            module
        }
    }

    /// Replaces the parameters by those that `change` returns. Collective: call on all ranks of the data axis,
    /// and of the tensor axis with `fp8_param_gather`, with the same change. FP8 weights are quantised again,
    /// with the scales that their layers have then.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        let module = change(self.to_module());
        self.set_running_states(self.running_states_of(&module));
        self.set_parameters(&module);
    }

    /// Checks that all replicas of a parameter have the same bits, on the data, tensor and pipeline axes.
    /// Collective: call on all ranks.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::ReplicaMismatch`] names a parameter that differs, and two ranks.
    pub fn check_replicas(&self) -> Result<(), DataParallelError> {
        replicas::check(&self.buffers, &self.table, &self.groups)
    }
}

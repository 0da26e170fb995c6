//! Constructs the wrapper and moves the parameters of a module into its buffers.

use std::sync::Arc;

use burn::module::Module;

use super::DistributedDataParallel;
use crate::comm::ParallelContext;
use crate::data_parallel::bucket_step::BucketShard;
use crate::data_parallel::config::DataParallelConfig;
use crate::data_parallel::error::DataParallelError;
use crate::data_parallel::frozen::{self, FrozenParameters};
use crate::data_parallel::gradients::ModelParallelAllReduce;
use crate::data_parallel::offload::host_stepper::HostStepper;
use crate::data_parallel::param_and_grad_buffers::ParamAndGradBuffers;
use crate::data_parallel::plan_builder::{self, NamedWeight};
use crate::data_parallel::stores::{self, Stores};
use crate::data_parallel::{model_checks, running_state, segments};
use crate::mesh::{Grid, ZeroStage};
use crate::nn::ParallelModule;

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

    /// Wraps a module. The ZeRO stage and `hsdp` can be set in the layout of `groups` or in `config`. Collective: call
    /// on all ranks.
    ///
    /// Each parameter is broadcast from the first rank that holds it, so the initial values on the ranks may differ.
    /// The exception is a section of a parameter that only some ranks of an axis replicate. The initial values of such
    /// a section must already be equal, which [`ModelBuilder`](crate::nn::ModelBuilder) ensures.
    ///
    /// # Errors
    ///
    /// - [`DataParallelError::Config`] for settings that are invalid for the ranks or the model.
    /// - [`DataParallelError::ModelMismatch`] if the parameter tables of the ranks differ.
    /// - [`DataParallelError::NoExperts`] if the layout splits experts, but the model has no experts.
    pub fn with(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let weights = model.fp8.weights();
        Self::with_weights(model, groups, config, weights)
    }

    /// Wraps a module with the given FP8 weights.
    pub(in crate::data_parallel) fn with_weights(
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
        let running = running_state::running_states(&module);
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
        // With ZeRO-3, layers must not cache quantized copies of weights, which would stay unsharded.
        fp8.cache_quantized_weights(config.zero_stage != ZeroStage::Parameters);
        // Reports invalid settings before errors that result from them.
        config.check(plan_builder::data_ranks(groups, Grid::Dense))?;
        let quantizers = plan_builder::quantizers(&table, config, weights)?;
        plan_builder::check_quantizers(&quantizers, groups, config)?;
        let whole = Arc::new(table);
        let plan = plan_builder::build_plan(&module, (&whole, false), groups, config, quantizers)?;
        let frozen = FrozenParameters::new(&module, &whole, groups, config, &plan.usage)?;
        let table = match &frozen {
            Some(_) => Arc::new(whole.filtered(false)),
            None => whole.clone(),
        };
        let buffers = Arc::new(ParamAndGradBuffers::new(plan, frozen.map(Arc::new)));
        let stores = Stores::new(&whole, &running, &buffers);
        let module = stores::move_parameters(module, groups, stores)?;
        buffers.plan.reserve_pool();
        buffers.finish_gathers();
        let plan = &buffers.plan;
        let model_parallel = ModelParallelAllReduce::new(plan, &table, groups)?;
        let unique_segments = segments::unique_segments(plan, &table, groups.mesh_rank());
        let check = buffers.gradients().check.clone();
        let check = check.filter(|_| model_parallel.is_empty());
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
}

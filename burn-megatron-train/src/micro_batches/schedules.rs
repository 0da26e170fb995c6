//! The schedules of a run, keyed by the number of micro-batches per step, and the runner that executes them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::adamw::SumOrder;

use super::stages::{RunLosses, TrainStages};
use super::upload::{further_tokens, matrix, tokens};
use crate::TrainError;
use crate::losses::losses_of_step;
use burn_megatron::comm::CommError;
use burn_megatron::data_parallel::{DataParallelError, DistributedDataParallel};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::optim::order_of_squares;
use burn_megatron::pipeline::engine::{
    ActionEvent, DeferredWgrad, Engine, ForwardOptions, P2pConfig, ShapeCache, forward_only,
};
use burn_megatron::pipeline::schedule::Schedule;
use burn_megatron::pipeline::schedule_of;
use burn_megatron_data::Batch;

/// Runs the pipeline stages of this rank.
pub(crate) struct MicroBatchRunner {
    /// Schedules, keyed by the number of micro-batches of a step.
    schedules: BTreeMap<usize, StepSchedule>,
    deferred_wgrad: Option<DeferredWgrad>,
    /// The shapes of activations between stages in earlier steps and evaluations.
    shapes: ShapeCache,
    /// The timed actions of this rank in the last step.
    pub events: Vec<ActionEvent>,
    /// The reports of the routers on this rank about the last step.
    pub router_step: RouterStep,
}

/// The schedule of steps with a given number of micro-batches.
pub(crate) struct StepSchedule {
    pub schedule: Schedule,
    /// The number of micro-batches in flight per stage: see [`Schedule::in_flight`].
    pub in_flight: Vec<usize>,
    /// See [`order_of_squares`].
    pub squares: Arc<SumOrder>,
}

impl MicroBatchRunner {
    pub fn new<M: LanguageModel>(
        schedules: Vec<Schedule>,
        deferred_wgrad: Option<DeferredWgrad>,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, TrainError> {
        let schedules = schedules.into_iter().map(|schedule| {
            let micro_batches = schedule.micro_batches();
            Ok((micro_batches, StepSchedule::new(schedule, ddp)?))
        });
        Ok(Self {
            schedules: schedules.collect::<Result<_, TrainError>>()?,
            deferred_wgrad,
            shapes: ShapeCache::default(),
            events: vec![],
            router_step: RouterStep::new(1.0.into()),
        })
    }

    /// Returns the schedule of steps with `micro_batches` micro-batches.
    pub fn scheduled(&self, micro_batches: usize) -> &StepSchedule {
        &self.schedules[&micro_batches]
    }

    /// Adds a schedule of `micro_batches` micro-batches unless it exists. The number of micro-batches depends on the
    /// documents of a step.
    pub fn schedule<M: LanguageModel>(
        &mut self,
        micro_batches: usize,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<(), TrainError> {
        if let Entry::Vacant(entry) = self.schedules.entry(micro_batches) {
            let schedule = schedule_of(ddp.groups().config(), micro_batches)?;
            entry.insert(StepSchedule::new(schedule, ddp)?);
        }
        Ok(())
    }

    /// Returns the pipeline rank of each stage.
    pub fn placement(&self) -> Vec<usize> {
        // All schedules have the same placement.
        let schedule = self.schedules.values().next();
        let of_stages = schedule.map(|StepSchedule { schedule, .. }| {
            let stages = 0..schedule.stages();
            stages.map(|stage| schedule.rank_of(stage)).collect()
        });
        of_stages.unwrap_or_default()
    }

    /// Runs the micro-batches of a step. Collective: call on all ranks of the pipeline.
    pub fn run<M: LanguageModel>(
        &self,
        stages: &TrainStages<'_, M>,
    ) -> Result<RunLosses, TrainError> {
        let (ddp, schedule) = (stages.ddp, &self.scheduled(stages.batches.len()).schedule);
        let (groups, device) = (ddp.groups(), stages.device.clone().inner());
        let engine = Engine::new(schedule, groups.pipeline(), &device, ddp.sink())?
            .with_deferred_wgrad(self.deferred_wgrad)
            .with_p2p(P2pConfig::of(groups.config()))
            .with_shape_cache(&self.shapes)
            .with_loss_scale(stages.loss_scale.clone());
        let run = engine.run(stages)?;
        Ok((run.losses, run.events))
    }

    /// Returns the output of the last stage for a batch, without autodiff. Ranks without the last stage return `None`.
    pub fn hidden<M: LanguageModel>(
        &self,
        batch: &Batch,
        ddp: &DistributedDataParallel<M>,
        device: &Device,
    ) -> Result<Option<Tensor<3>>, CommError> {
        let (module, groups) = (ddp.module(), ddp.groups());
        let placement = self.placement();
        let options = ForwardOptions {
            shape_key: [batch.rows, batch.seq],
            p2p: P2pConfig::of(groups.config()),
            shapes: self.shapes.clone(),
        };
        let forward = |stage, input| {
            let mut tokens = tokens(batch, matrix(batch.tokens(), batch, device));
            if stage + 1 == placement.len() {
                tokens.further = further_tokens(batch, device);
            }
            module.hidden(stage, input, tokens)
        };
        forward_only(&placement, groups.pipeline(), device, options, forward)
    }
}

impl StepSchedule {
    fn new<M: LanguageModel>(
        schedule: Schedule,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, TrainError> {
        let in_flight = schedule.in_flight();
        let recompute = ddp.recompute().config().check_in_flight(&in_flight);
        recompute.map_err(DataParallelError::from)?;
        if ddp.groups().config().overlap_moe_expert_parallel_comm {
            let recompute = ddp.recompute().config().check_moe_overlap();
            recompute.map_err(DataParallelError::from)?;
        }
        let losses = losses_of_step(&schedule, ddp.module().loss_terms());
        Ok(Self {
            squares: Arc::new(order_of_squares(ddp, losses)),
            schedule,
            in_flight,
        })
    }
}

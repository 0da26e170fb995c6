//! Runs the micro-batches of a step in the order of the schedule.

use std::cell::RefCell;

use burn::tensor::{Device, Tensor};

use super::MicroBatchRunner;
use super::upload::{DeviceBatch, further_tokens, tokens};
use crate::TrainError;
use crate::hooks::{StepContext, StepInput, StepRun};
use crate::losses::{check_parts, losses_of_step, parts_of};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::fingerprint;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::nn::{BatchPosition, LossFactor, ScheduleNodes};
use burn_megatron::pipeline::engine::{ActionEvent, ShapeKey, Stage, StageOutput};
use burn_megatron_data::Batch;

/// The losses of micro-batches, `[1]` each, and the timed actions of this rank.
pub(crate) type RunLosses = (Vec<Tensor<1>>, Vec<ActionEvent>);

impl<M: LanguageModel> StepContext<'_, M> {
    /// Runs the forwards and the backwards of a step in the order of the schedule, and the reduction.
    pub(crate) fn run(&mut self, input: &StepInput<'_>) -> Result<StepRun, TrainError> {
        self.run_with(input, MicroBatchRunner::run)
    }

    /// Runs the forwards and the backwards of a step by `run`, and the reduction. The loss scale is that on the device
    /// or, if there is none, that of the scaler.
    pub(crate) fn run_with(
        &mut self,
        input: &StepInput<'_>,
        run: impl FnOnce(&MicroBatchRunner, &TrainStages<'_, M>) -> Result<RunLosses, TrainError>,
    ) -> Result<StepRun, TrainError> {
        let (step, batches) = (input.step, input.batches);
        let loss_scale = match &input.loss_scale {
            Some(scale) => LossFactor::from(scale.clone()),
            None => self.scaler.scale().into(),
        };
        let router_step = RouterStep::new(loss_scale.clone());
        let scheduled = self.runner.scheduled(batches.len());
        let stages = TrainStages {
            ddp: self.ddp,
            device: self.device.clone().autodiff(),
            batches,
            step: step as u64,
            first_micro_batch: self.plan.first_micro_batch(step, input.data_rank),
            in_flight: &scheduled.in_flight,
            last: scheduled.schedule.stages() - 1,
            loss_scale,
            router_step: router_step.clone(),
            parts: RefCell::default(),
        };
        let (mut losses, events) = run(self.runner, &stages)?;
        let terms = self.ddp.module().loss_terms();
        let count = losses_of_step(&scheduled.schedule, terms);
        for parts in stages.parts.into_inner() {
            check_parts(parts.as_ref(), parts_of(terms));
            losses.extend(parts);
        }
        self.runner.events = events;
        self.runner.router_step = router_step;
        let (gradients, record) = self.ddp.reduce_unscaled()?;
        Ok(StepRun {
            losses: StepLosses { losses, count },
            gradients,
            record,
        })
    }
}

/// The losses of the micro-batches of a step, without autodiff: their objectives, `[1]` each, then the parts of each.
pub(crate) struct StepLosses {
    /// None on ranks without the last stage.
    pub losses: Vec<Tensor<1>>,
    /// The elements of the losses on a rank with the last stage.
    pub count: usize,
}

/// The stages of this rank on the micro-batches of a step, as the engine runs them.
pub(crate) struct TrainStages<'a, M> {
    pub ddp: &'a DistributedDataParallel<M>,
    /// With autodiff.
    pub device: Device,
    pub batches: &'a [Batch],
    step: u64,
    first_micro_batch: usize,
    in_flight: &'a [usize],
    last: usize,
    /// The factor by which the engine multiplies the losses.
    pub loss_scale: LossFactor,
    /// For routers of experts.
    router_step: RouterStep,
    /// By micro-batch, the sums of the parts of the losses, read after the run.
    pub parts: RefCell<Vec<Option<Tensor<1>>>>,
}

impl<M: LanguageModel> Stage for TrainStages<'_, M> {
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        let batch = &self.batches[micro_batch];
        [batch.rows, batch.seq]
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        let uploaded = self.upload(stage, micro_batch);
        self.forward_in((stage, micro_batch), input, uploaded, None)
    }

    fn forward_nodes(
        &self,
        stage: usize,
        micro_batch: usize,
        input: Option<Tensor<3>>,
        nodes: &ScheduleNodes,
    ) -> StageOutput {
        let uploaded = self.upload(stage, micro_batch);
        self.forward_in((stage, micro_batch), input, uploaded, Some(nodes))
    }
}

impl<M: LanguageModel> TrainStages<'_, M> {
    fn upload(&self, stage: usize, micro_batch: usize) -> DeviceBatch {
        DeviceBatch::new(&self.batches[micro_batch], stage == self.last, &self.device)
    }

    /// The forward of a stage and a micro-batch, in nodes if they are given.
    pub fn forward_in(
        &self,
        (stage, micro_batch): (usize, usize),
        input: Option<Tensor<3>>,
        uploaded: DeviceBatch,
        nodes: Option<&ScheduleNodes>,
    ) -> StageOutput {
        fingerprint::note_micro_batch(micro_batch);
        let (batch, model) = (&self.batches[micro_batch], self.ddp.module());
        let before = match &batch.shard {
            // It knows the place of each token in the global batch.
            Some(shard) if shard.is_in_global_batch() => 0,
            _ => (self.first_micro_batch + micro_batch) * batch.rows,
        };
        self.ddp.position().set_batch(BatchPosition {
            step: self.step,
            first_sample: before as u64,
            shard: batch.shard.clone(),
        });
        let recompute = self.ddp.recompute();
        recompute.begin_micro_batch(micro_batch, self.in_flight[stage]);
        let mut tokens = tokens(batch, uploaded.ids);
        tokens.nodes = nodes.cloned();
        tokens.router_step = Some(
            self.router_step
                .of_micro_batch(batch.counted_of_rows() as usize),
        );
        if stage == self.last {
            tokens.further = further_tokens(batch, &self.device);
        }
        let hidden = model.hidden(stage, input, tokens);
        let Some(targets) = uploaded.targets else {
            return StageOutput::Activation(hidden);
        };
        let losses = model.loss_sums_of(hidden, targets, &self.loss_scale);
        let parts = losses.parts.map(|parts| {
            if parts.is_autodiff() {
                parts.inner()
            } else {
                parts
            }
        });
        self.parts.borrow_mut().push(parts);
        StageOutput::Loss(losses.objective)
    }
}

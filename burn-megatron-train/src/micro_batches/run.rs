//! Runs the micro-batches of a step in the order of the schedule.

use std::cell::RefCell;

use super::MicroBatchRunner;
use super::stages::{RunLosses, StepLosses, TrainStages};
use crate::TrainError;
use crate::hooks::{StepContext, StepInput, StepRun};
use crate::losses::{check_parts, losses_of_step, parts_of};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::LossFactor;
use burn_megatron::nn::moe::RouterStep;

impl<M: LanguageModel> StepContext<'_, M> {
    /// Runs the forward and backward passes of a step in the order of the schedule, then reduces the gradients.
    pub(crate) fn run(&mut self, input: &StepInput<'_>) -> Result<StepRun, TrainError> {
        self.run_with(input, MicroBatchRunner::run)
    }

    /// Runs the forward and backward passes of a step with `run`, then reduces the gradients. The loss scale is the
    /// scale on the device if the device has one, or else the scale of the scaler.
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

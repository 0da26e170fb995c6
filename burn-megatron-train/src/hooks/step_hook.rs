//! The interface of a hook.

use std::any::Any;

use super::{
    AddedStatistics, BatchPlan, StepContext, StepDecision, StepInput, StepReport, StepRun,
    StepUpdate,
};
use crate::{TrainError, TrainOutcome};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::data_parallel::Gradients;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::TooManySkips;

/// A technique that changes a training step.
///
/// All methods except [`name`](Self::name) have a default that does nothing. A step calls the methods of its hooks in
/// this order:
///
/// 1. [`batches`](Self::batches): assigns samples to the micro-batches of the step.
/// 2. [`wrap_run`](Self::wrap_run): wraps the forward pass, the backward pass and the gradient reduction. The first
///    hook is the outermost wrapper.
/// 3. [`statistics`](Self::statistics): adds tensors to the statistics of the step.
/// 4. [`decide`](Self::decide): decides whether the step is skipped.
/// 5. [`before_update`](Self::before_update): called after the observer has received the gradients, before the weights
///    are updated.
/// 6. [`after_update`](Self::after_update): called after the weights are updated. The last hook is called first.
/// 7. [`metrics`](Self::metrics): called when the host has read the statistics of the step. If readings are
///    [deferred](crate::Trainer::defer_readings), this is after the next step was launched.
///
/// **Collectives.** Each method is called on every rank, in the same order of methods and hooks. A hook may call a
/// collective if all ranks of the process group have the hook, and if all of them call the collective.
pub trait StepHook<M: LanguageModel>: Any {
    /// Returns the name of the hook, which is unique in a trainer.
    fn name(&self) -> &str;

    /// Checks that the trainer supports the hook. This method is called once, when the hook is added.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the trainer does not support the hook. All ranks must return the same error.
    fn check(&self, context: &StepContext<'_, M>) -> Result<(), TrainError> {
        let _ = context;
        Ok(())
    }

    /// Changes the assignment of samples to micro-batches. The method must make the same changes in each step, because
    /// samples are read ahead.
    fn batches(&self, plan: &mut BatchPlan) {
        let _ = plan;
    }

    /// Wraps the forward pass, the backward pass and the gradient reduction of a step. `next` runs the hooks after this
    /// hook and then the step. `next` does not change the weights or the optimizer state, so it can be called several
    /// times. In a step that the `replay` hook checks, this method is called several times.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        next.run(context, input)
    }

    /// Adds tensors to the statistics of the step. The hook must reduce these tensors over the ranks.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        let _ = (context, added);
        Ok(())
    }

    /// Decides whether the step is skipped. `next` runs the step again with the hooks after this hook.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        decision: &mut StepDecision<'_>,
        next: RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        let _ = (context, decision, next);
        Ok(())
    }

    /// Called before the optimizer step, even if the step is skipped. The gradients are reduced but not yet clipped.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        gradients: &Gradients,
    ) -> Result<(), TrainError> {
        let _ = (context, update, gradients);
        Ok(())
    }

    /// Called after the optimizer step, even if the step is skipped. Hooks are called in reverse order.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        let _ = (context, update);
        Ok(())
    }

    /// Completes the metrics of a step when the host has read its statistics. Steps are reported in order.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run.
    fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let _ = (context, report);
        Ok(())
    }

    /// Called before [`fit`](crate::Trainer::fit) evaluates held-out text.
    fn before_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }

    /// Called after [`fit`](crate::Trainer::fit) has evaluated held-out text. Hooks are called in reverse order.
    fn after_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }

    /// Called before a checkpoint is saved.
    ///
    /// # Errors
    ///
    /// [`TrainError`], which ends the run. The checkpoint is not saved.
    fn before_save(&mut self, context: &mut StepContext<'_, M>) -> Result<(), TrainError> {
        let _ = context;
        Ok(())
    }

    /// Adds the state of the hook to a checkpoint. A custom hook adds its state to [`RunState::hooks`] under its name.
    fn save_state(&self, state: &mut RunState) {
        let _ = state;
    }

    /// Restores the state of the hook from a checkpoint. The weights and the optimizer state are already restored.
    /// `state` is `None` if only weights were loaded to start a new run.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the state is invalid.
    fn load_state(
        &mut self,
        context: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        let _ = (context, state);
        Ok(())
    }

    /// Adds the results of the hook to the outcome of a run.
    fn outcome(&self, outcome: &mut TrainOutcome) {
        let _ = outcome;
    }

    /// Explains why too many steps were skipped: returns a more precise error for the run, which ends at `step`.
    /// Returns `None` if this hook has not found the reason.
    fn explain_skips(&self, step: usize, skips: &TooManySkips) -> Option<TrainError> {
        let _ = (step, skips);
        None
    }

    /// Returns an error if the hook reads the statistics of each step before the update. In this case, the trainer
    /// cannot [defer the readings](crate::Trainer::defer_readings) of statistics.
    fn deferral_error(&self) -> Option<TrainError> {
        None
    }

    /// Called when the hook is removed from a trainer.
    fn removed(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }
}

/// The hooks after the current hook, which wrap the forward pass, the backward pass and the gradient reduction of a
/// step.
pub struct RemainingHooks<'a, M>(pub(super) &'a mut [Box<dyn StepHook<M>>]);

impl<M: LanguageModel> RemainingHooks<'_, M> {
    /// Runs the remaining hooks, and then the forward pass, the backward pass and the gradient reduction of the step.
    /// Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the step or a hook fails.
    pub fn run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
    ) -> Result<StepRun, TrainError> {
        match self.0.split_first_mut() {
            Some((hook, rest)) => hook.wrap_run(context, input, RemainingHooks(rest)),
            None => context.run(input),
        }
    }
}

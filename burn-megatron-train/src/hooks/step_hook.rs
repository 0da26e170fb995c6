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
/// All methods have a default that does nothing. A step calls them in this order:
///
/// 1. [`batches`](Self::batches): assigns samples to the micro-batches of the step.
/// 2. [`wrap_run`](Self::wrap_run): runs the forward, backward and reduction. The first hook is the outermost.
/// 3. [`statistics`](Self::statistics): adds tensors that are read with the statistics of the step.
/// 4. [`decide`](Self::decide): decides whether the step is skipped.
/// 5. [`before_update`](Self::before_update): called after the observer received the gradients.
/// 6. [`after_update`](Self::after_update): called in reverse order, the last hook first.
/// 7. [`metrics`](Self::metrics): called once the step is read. If readings are
///    [deferred](crate::Trainer::defer_readings), this is after the launch of the next step.
///
/// **Collectives.** Each method is called on every rank, in the same order of methods and hooks. A hook may call
/// collectives if all ranks have the hook and decide in the same way whether to call the collective. For a collective
/// of one process group, all members of the group must fulfil this condition.
pub trait StepHook<M: LanguageModel>: Any {
    /// Returns the name of the hook, which is unique in a trainer.
    fn name(&self) -> &str;

    /// Checks that the trainer supports the hook. Called once, when the hook is added.
    ///
    /// # Errors
    ///
    /// [`TrainError`], the same on all ranks.
    fn check(&self, context: &StepContext<'_, M>) -> Result<(), TrainError> {
        let _ = context;
        Ok(())
    }

    /// Changes the assignment of samples to micro-batches. Must return the same plan in each step, because samples are
    /// read ahead.
    fn batches(&self, plan: &mut BatchPlan) {
        let _ = plan;
    }

    /// Runs the forward, backward and reduction of a step. `next` runs the hooks after this one. It does not change the
    /// weights or the optimizer state, so it can be called several times. In a step that `replay` checks, this method
    /// is called several times.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        next.run(context, input)
    }

    /// Adds tensors to the statistics of the step. The hook must reduce them over the ranks.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        let _ = (context, added);
        Ok(())
    }

    /// Decides whether the step is skipped. `next` runs the step again with the hooks after this one.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        decision: &mut StepDecision<'_>,
        next: RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        let _ = (context, decision, next);
        Ok(())
    }

    /// Called before the optimizer, even if the step is skipped. The gradients are reduced but not yet clipped.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        gradients: &Gradients,
    ) -> Result<(), TrainError> {
        let _ = (context, update, gradients);
        Ok(())
    }

    /// Called after the optimizer, even if the step is skipped. Hooks are called in reverse order.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        let _ = (context, update);
        Ok(())
    }

    /// Completes the metrics of a step once they are read. Steps are reported in order.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run.
    fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let _ = (context, report);
        Ok(())
    }

    /// Called before held-out text is evaluated by [`fit`](crate::Trainer::fit).
    fn before_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }

    /// Called after held-out text is evaluated by [`fit`](crate::Trainer::fit), in reverse order.
    fn after_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }

    /// Called before a checkpoint is saved.
    ///
    /// # Errors
    ///
    /// [`TrainError`] ends the run, and nothing is saved.
    fn before_save(&mut self, context: &mut StepContext<'_, M>) -> Result<(), TrainError> {
        let _ = context;
        Ok(())
    }

    /// Adds the state of the hook to a checkpoint. A custom hook adds it to [`RunState::hooks`] under its name.
    fn save_state(&self, state: &mut RunState) {
        let _ = state;
    }

    /// Restores the state of the hook from a checkpoint, after the weights and the optimizer. `None` means that only
    /// weights were loaded to start a new run.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for a state that is invalid.
    fn load_state(
        &mut self,
        context: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        let _ = (context, state);
        Ok(())
    }

    /// Completes the outcome of a run.
    fn outcome(&self, outcome: &mut TrainOutcome) {
        let _ = outcome;
    }

    /// Returns the error of a run that ends at `step` because too many steps were skipped. `None` if this hook has not
    /// found the reason.
    fn explain_skips(&self, step: usize, skips: &TooManySkips) -> Option<TrainError> {
        let _ = (step, skips);
        None
    }

    /// Returns an error if the hook reads each step before its update. Readings then cannot be
    /// [deferred](crate::Trainer::defer_readings).
    fn deferral_error(&self) -> Option<TrainError> {
        None
    }

    /// Called when the hook is removed from a trainer.
    fn removed(&mut self, context: &mut StepContext<'_, M>) {
        let _ = context;
    }
}

/// The remaining hooks of a step, and the run of the step.
pub struct RemainingHooks<'a, M>(pub(super) &'a mut [Box<dyn StepHook<M>>]);

impl<M: LanguageModel> RemainingHooks<'_, M> {
    /// Runs the forward, backward and reduction of a step, with the remaining hooks. Collective: call on all ranks of
    /// the world.
    ///
    /// # Errors
    ///
    /// [`TrainError`].
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

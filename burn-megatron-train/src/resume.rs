//! Saves the state of a trainer and resumes a run from a checkpoint.

use std::collections::BTreeMap;

use super::module_state::{self, Scales};
use super::{Observer, SavedCheckpoint, Saver, TrainError, Trainer};
use burn_megatron::checkpoint::state::{ModelKeys, RunState, StateError, agree};
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance, TensorSource, load_weights};
use burn_megatron::model::LanguageModel;

impl<M: LanguageModel> Trainer<M> {
    /// Sets the saver of the trainer. [`fit`](Self::fit) then saves checkpoints at the interval that the saver
    /// specifies, when the run is stopped, and at the end of the run.
    pub fn save_with(&mut self, saver: Saver) {
        self.saver = Some(saver);
    }

    /// Saves a checkpoint, or starts to save it in the background. Rank 0 returns the checkpoints that were published
    /// since the last call, which may be earlier checkpoints. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] on every rank if any rank failed to write this checkpoint or the previous checkpoint. Also
    /// the errors that [hooks](crate::hooks::StepHook::before_save) return before the checkpoint is saved.
    pub fn save(&mut self) -> Result<Vec<SavedCheckpoint>, TrainError> {
        let _span = tracing::info_span!("save", step = self.position.count.made()).entered();
        let (hooks, mut context) = self.split(self.steps());
        hooks.before_save(&mut context)?;
        let Some(mut saver) = self.saver.take() else {
            return Err(StateError::NoSaver.into());
        };
        let (state, config) = (self.state(), saver.saving().config.clone());
        let saved = saver.save_module(&self.ddp, &self.optimizer, &state, config);
        self.saver = Some(saver);
        self.position.saved_at = self.position.count.made();
        Ok(saved?)
    }

    /// Waits until the checkpoint that is saved in the background is published. Collective: call on all ranks of the
    /// world.
    ///
    /// # Errors
    ///
    /// The errors of [`save`](Self::save).
    pub fn finish_saving(&mut self) -> Result<Option<SavedCheckpoint>, TrainError> {
        Ok(self.saver.as_mut().map_or(Ok(None), Saver::wait)?)
    }

    /// Loads a checkpoint to resume its run. The checkpoint may have been saved with another parallel layout.
    /// Collective: call on all ranks of the world.
    ///
    /// If an error is returned, the trainer must not be used any more.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] if a tensor is missing or unexpected or has another shape, if its values would have to be
    /// rounded, if the seed differs, or if data cannot be read.
    pub fn load(
        &mut self,
        checkpoint: &Checkpoint,
        leniency: LoadTolerance,
    ) -> Result<(), TrainError> {
        let _span = tracing::info_span!("load").entered();
        let names = module_state::names(&self.ddp)?;
        let checked = self.check(checkpoint, &names, leniency);
        let (state, scales) = agree(checked, &**self.ddp.groups().world())?;
        let taken = state.count.taken;
        module_state::restore(
            &mut self.ddp,
            &mut self.optimizer,
            checkpoint,
            (&scales, taken),
            leniency,
        )?;
        if let Some(state) = state.loss_scaler.filter(|_| self.scaler.state().is_some()) {
            self.scaler.restore(state).map_err(StateError::from)?;
        }
        self.position.count = state.count;
        self.position.samples = state.samples;
        self.position.saved_at = state.count.made();
        let (hooks, mut context) = self.split(self.steps());
        hooks.load_state(&mut context, Some(&state))
    }

    /// Loads only the weights of a checkpoint, to start a new run with these weights: see [`load_weights`]. Collective:
    /// call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] if the weights cannot be loaded.
    pub fn load_weights(
        &mut self,
        source: &dyn TensorSource,
        leniency: LoadTolerance,
    ) -> Result<(), TrainError> {
        load_weights(&mut self.ddp, source, leniency)?;
        let (hooks, mut context) = self.split(self.steps());
        hooks.load_state(&mut context, None)
    }

    /// Returns whether a checkpoint is due after `steps` steps.
    pub(super) fn is_save_due(&self, steps: u64) -> bool {
        self.saver.as_ref().is_some_and(|saver| saver.is_due(steps))
    }

    /// Reports published checkpoints, and saves a new checkpoint if `is_due`.
    pub(super) fn save_if(
        &mut self,
        is_due: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let finished = self.saver.as_mut().and_then(Saver::take_finished);
        report_saved(finished, observer)?;
        if is_due {
            report_saved(self.save()?, observer)
        } else {
            Ok(())
        }
    }

    /// Saves the last step if it is not saved yet, and waits until it is written.
    pub(super) fn save_final(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        if self.saver.is_some() && self.position.saved_at != self.position.count.made() {
            report_saved(self.save()?, observer)?;
        }
        report_saved(self.finish_saving()?, observer)
    }

    /// Returns the state of the run, except tensors and FP8 scales.
    pub fn state(&self) -> RunState {
        let mut state = RunState {
            count: self.position.count,
            samples: self.position.samples,
            seed: self.config.seed,
            loss_scaler: self.scaler.state(),
            spikes: None,
            hooks: BTreeMap::new(),
        };
        self.hooks.save_state(&mut state);
        state
    }

    /// Performs all checks that do not read tensors.
    fn check(
        &self,
        checkpoint: &Checkpoint,
        names: &ModelKeys,
        leniency: LoadTolerance,
    ) -> Result<(RunState, Scales), StateError> {
        let of = || checkpoint.name();
        let state = RunState::of(checkpoint)?;
        if state.seed != self.config.seed {
            return Err(StateError::Seed {
                of: of(),
                found: state.seed,
                wanted: self.config.seed,
            });
        }
        match (state.loss_scaler, self.scaler.state()) {
            (None, Some(_)) if !leniency.missing => {
                return Err(StateError::NoLossScale { of: of() });
            }
            (Some(state), own) if own.is_some() || !leniency.unexpected => {
                self.scaler.clone().restore(state)?;
            }
            _ => {}
        }
        let scales =
            module_state::check_tensors(&self.ddp, &self.optimizer, checkpoint, names, leniency)?;
        Ok((state, scales))
    }
}

fn report_saved(
    published: impl IntoIterator<Item = SavedCheckpoint>,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    published
        .into_iter()
        .try_for_each(|saved| observer.saved(&saved))
        .map_err(TrainError::Observer)
}

//! The work at the end of an epoch: validation, checkpoints and early stopping.

use std::sync::Arc;

use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, LearnerEvent, LearnerModel,
    LearningCheckpointer, TrainLoader, TrainingItem, ValidLoader,
};

use crate::error::LearnerError;
use crate::rank::RankTraining;

/// The components that only rank 0 has.
pub(crate) struct MainRank<M: LearnerModel> {
    pub valid: ValidLoader<M>,
    pub checkpointer: Option<LearningCheckpointer<M>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub event_store: Arc<EventStoreClient>,
}

impl<M: LearnerModel> RankTraining<'_, M> {
    /// Trains one epoch, then validates and saves checkpoints. Returns whether the run should stop. `main` is passed
    /// only on rank 0. Collective: call on all ranks.
    pub fn epoch(
        &mut self,
        epoch: usize,
        train: &TrainLoader<M>,
        mut main: Option<&mut MainRank<M>>,
    ) -> Result<bool, LearnerError> {
        let run = self.run;
        let note = |event| {
            let processed = run.events.lock().process_train(event);
            run.interrupter.fail_on_error(processed);
        };
        if main.is_some() {
            note(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: self.run.items,
            });
        }
        let stop = self.train_epoch(train)?;
        if main.is_some() {
            note(LearnerEvent::EndSplit(epoch));
        }
        if stop {
            return Ok(true);
        }
        let module = self.update_learner();
        match main.as_deref_mut() {
            Some(main) => self.validate(epoch, &module.valid(), main)?,
            // Rank 0 reports each batch, so that the other ranks do not time out during a long validation.
            None => while self.told(0)? == ANOTHER_BATCH {},
        }
        drop(module);
        self.save(epoch)?;
        let stop = main.map_or(0, |main| i64::from(self.stops_after(epoch, main)));
        Ok(self.told(stop)? == 1)
    }

    /// Runs the validation on rank 0.
    fn validate(&self, epoch: usize, model: &M, main: &MainRank<M>) -> Result<(), LearnerError> {
        let run = self.run;
        let note = |event| {
            let processed = run.events.lock().process_valid(event);
            run.interrupter.fail_on_error(processed);
        };
        note(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: main.valid.num_items(),
        });
        let mut batches = main.valid.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch = batch.map_err(|error| self.data_error(error))?;
            iteration += 1;
            note(LearnerEvent::ProcessedItem(TrainingItem {
                item: InferenceStep::step(model, batch),
                progress: batches.progress(),
                iteration: Some(iteration),
                lr: None,
            }));
            if run.interrupter.should_stop() {
                break;
            }
            self.told(ANOTHER_BATCH)?;
        }
        note(LearnerEvent::EndSplit(epoch));
        let processed = run
            .events
            .lock()
            .process_train(LearnerEvent::EndEpoch(epoch));
        run.interrupter.fail_on_error(processed);
        self.told(0)?;
        Ok(())
    }

    /// Saves Burn's checkpoint on rank 0. Returns whether early stopping ends the run.
    fn stops_after(&self, epoch: usize, main: &mut MainRank<M>) -> bool {
        let interrupter = &self.run.interrupter;
        if main.checkpointer.is_some() || main.early_stopping.is_some() {
            interrupter.fail_on_error(self.run.events.lock().flush());
        }
        if interrupter.should_stop() {
            return true;
        }
        if let Some(checkpointer) = &mut main.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, &main.event_store);
        }
        let store = &main.event_store;
        let early = main.early_stopping.as_mut();
        early.is_some_and(|early| early.should_stop(epoch, store))
    }

    /// Broadcasts a value from rank 0 to the other ranks. Collective: call on all ranks.
    fn told(&self, of_main: i64) -> Result<i64, LearnerError> {
        Ok(self.groups.world().broadcast_scalar(of_main, 0)?)
    }
}

/// The code that rank 0 broadcasts after each validation batch.
const ANOTHER_BATCH: i64 = 2;

//! The implementation of Burn's training strategy trait.

use burn::train::train::WorkerFailure;
use burn::train::{
    EventProcessorTraining, Learner, LearnerModel, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingError, ValidLoader,
};
use burn_megatron::comm::{Rank, WorldError};
use burn_megatron::data_parallel::ZeroStage;
use parking_lot::Mutex;

use crate::batches::split;
use crate::error::LearnerError;
use crate::rank::{RankTraining, Run};
use crate::settings::MegatronStrategy;
use crate::validation::MainRank;

impl<M: LearnerModel> SupervisedLearningStrategy<M> for MegatronStrategy<M> {
    /// Trains like Burn's default strategy on rank 0. The other ranks report nothing.
    fn train(
        &self,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.is_main() {
            let main = Reporting(self);
            return main.train(learner, dataloader_train, dataloader_valid, components);
        }
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let (model, events) = self.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        );
        LearningResult {
            model: model.valid(),
            renderer: events.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let interrupter = components.interrupter.clone();
        let restored = components.checkpointer.is_some();
        let items = dataloader_train.num_items();
        let checked = self.check(items, &components);
        let events = Mutex::new(components.event_processor);
        let run = Run {
            strategy: self,
            events: &events,
            interrupter: interrupter.clone(),
            items,
            accumulation: components.grad_accumulation.unwrap_or(1),
            resumes: components.checkpoint.map(|epoch| (epoch, restored)),
        };
        let main = MainRank {
            valid: dataloader_valid,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            event_store: components.event_store,
        };
        let untrained = learner.model();
        let trained = checked.map_err(|error| failure(0, &error)).and_then(|()| {
            let parts = Parts {
                train: split(&dataloader_train, self.world.size()),
                learner: Mutex::new(learner),
                main: Mutex::new(Some(main)),
                epochs: (starting_epoch, components.num_epochs),
            };
            let ran = self.world.run(|rank| parts.train(&run, rank));
            ran.map_err(|error| failure(rank_of(&error), &error))
        });
        let model = match trained {
            Ok(models) => models.into_iter().next().unwrap_or(untrained),
            Err(failure) => {
                interrupter.fail(TrainingError::Workers(vec![failure]));
                untrained
            }
        };
        (model, events.into_inner())
    }
}

/// A wrapper that uses Burn's default `train` method, which reports the start and the end of the training.
struct Reporting<'a, M: LearnerModel>(&'a MegatronStrategy<M>);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Reporting<'_, M> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        )
    }
}

/// The components of the `Learner` that all ranks of this process use.
struct Parts<M: LearnerModel> {
    /// The training data of each rank of the world.
    train: Vec<TrainLoader<M>>,
    learner: Mutex<Learner<M>>,
    main: Mutex<Option<MainRank<M>>>,
    /// The first and the last epoch.
    epochs: (usize, usize),
}

impl<M: LearnerModel> Parts<M> {
    /// Runs the training loop of one rank.
    fn train(&self, run: &Run<'_, M>, rank: Rank) -> Result<M, LearnerError> {
        let number = rank.rank();
        let mut main = self.main.lock().take_if(|_| number == 0);
        let learner = self.learner.lock().clone();
        let mut training = RankTraining::new(run, rank, learner)?;
        let train = self.train[number].to_device(&training.device.clone().autodiff());
        if let Some(main) = &mut main {
            main.valid = main.valid.to_device(&training.device);
        }
        let (first, last) = self.epochs;
        for epoch in first..=last {
            if training.epoch(epoch, &train, main.as_mut())? {
                break;
            }
        }
        Ok(training.into_model())
    }
}

impl<M: LearnerModel> MegatronStrategy<M> {
    /// Checks the settings that can be checked before the ranks start.
    fn check(&self, items: usize, components: &TrainingComponents<M>) -> Result<(), LearnerError> {
        let (ranks, stage) = (self.world.size(), self.config.zero_stage);
        if items < ranks {
            return Err(LearnerError::TooFewItems { items, ranks });
        }
        if self.clip.is_nan() || self.clip <= 0.0 {
            return Err(LearnerError::Clip(self.clip));
        }
        if components.grad_accumulation == Some(0) {
            return Err(LearnerError::NoMicroBatches);
        }
        if self.optimizer.is_some() {
            return match components.checkpoint.filter(|_| self.checkpoints.is_none()) {
                Some(epoch) => Err(LearnerError::NotResumable(epoch)),
                None => Ok(()),
            };
        }
        if stage != ZeroStage::Replicated {
            return Err(LearnerError::RequiresOptimizer(stage));
        }
        if self.checkpoints.is_some() {
            let reason = "the optimizer of the Learner is in Burn's own checkpoints";
            return Err(LearnerError::NotSaved(reason));
        }
        Ok(())
    }
}

fn failure(rank: usize, error: &dyn std::error::Error) -> WorkerFailure {
    WorkerFailure {
        device_id: rank,
        message: error.to_string(),
    }
}

fn rank_of(error: &WorldError) -> usize {
    match error {
        WorldError::RankFailed { rank, .. } => *rank,
        _ => 0,
    }
}

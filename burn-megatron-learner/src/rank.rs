//! The training loop of a rank.

use burn::data::dataloader::Progress;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use burn::train::{
    EventProcessorTraining, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainLoader, TrainOutput, TrainStep, TrainingItem,
};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::data_parallel::{DistributedDataParallel, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{LossScaler, StepCount, global_norm};
use burn_megatron_train::Saver;
use parking_lot::Mutex;

use crate::batches::{Announced, Announcement, Batch, Batches};
use crate::checkpoints;
use crate::error::LearnerError;
use crate::loss_scale::with_loss_scale;
use crate::optimizer::{Update, check_one_rate};
use crate::settings::MegatronStrategy;

/// The processor of the events from which Burn computes its metrics. Ranks that are threads share it.
pub(crate) type Events<M> = Mutex<SupervisedTrainingEventProcessor<M>>;

/// The state that all ranks of this process share.
pub(crate) struct Run<'a, M: LearnerModel> {
    pub strategy: &'a MegatronStrategy<M>,
    pub events: &'a Events<M>,
    pub interrupter: Interrupter,
    /// The total number of training items of all ranks.
    pub items: usize,
    /// The number of micro-batches per step.
    pub accumulation: usize,
    /// The epoch from which the run resumes, or `None`, and whether Burn's checkpoints have restored the `Learner`.
    pub resumes: Option<(usize, bool)>,
}

/// The training state of a rank.
pub(crate) struct RankTraining<'a, M: LearnerModel> {
    pub run: &'a Run<'a, M>,
    pub rank: Rank,
    pub groups: ParallelContext,
    /// The device of the rank, without autodiff.
    pub device: Device,
    /// The `Learner` of the rank. With Burn's optimizer, its model has the weights after the last step. With an
    /// optimizer of this library, its model has the weights after the last epoch.
    pub learner: Learner<M>,
    pub ddp: DistributedDataParallel<M>,
    update: Update<M>,
    scaler: LossScaler,
    count: StepCount,
    /// The number of items that all ranks have processed so far.
    samples: u64,
    saver: Option<Saver>,
}

impl<'a, M: LearnerModel> RankTraining<'a, M> {
    /// Wraps the model of a `Learner` for data-parallel training. Collective: call on all ranks.
    pub fn new(
        run: &'a Run<'a, M>,
        rank: Rank,
        mut learner: Learner<M>,
    ) -> Result<Self, LearnerError> {
        let strategy = run.strategy;
        let layout = ParallelConfig::new().with_data(rank.size());
        let groups = ParallelContext::new(&layout, &rank)?;
        let device = match strategy.devices.len() {
            0 => first_device(&learner.model()),
            devices => strategy.devices[rank.rank() % devices].clone(),
        };
        let device = device.inner();
        learner.fork(&device.clone().autodiff());
        let model = with_frozen(ParallelModule::replicated(learner.model()))?;
        let ddp = DistributedDataParallel::with(model, &groups, &strategy.config)?;
        let mut update = match &strategy.optimizer {
            None => Update::OfLearner,
            Some(build) => {
                let optimizer = build(&ddp)?;
                // The copy of the weights in the `Learner` is not needed on the device, but cannot be removed from it.
                learner.fork(&Device::flex().autodiff());
                Update::Sharded(optimizer)
            }
        };
        if strategy.checkpoints.is_some() && update.as_saved().is_none() {
            return Err(LearnerError::NotSaved(NO_STATE));
        }
        let checkpoints = strategy.checkpoints.as_ref();
        let saver = checkpoints.map(|checkpoints| checkpoints.saver(&groups));
        let mut training = Self {
            scaler: LossScaler::new(&strategy.loss_scale)?,
            saver: saver.transpose()?,
            count: StepCount::default(),
            samples: 0,
            run,
            rank,
            groups,
            device,
            learner,
            ddp,
            update,
        };
        training.resume()?;
        // In other processes, the ranks were initialized with different values than rank 0.
        training.update_learner();
        Ok(training)
    }

    /// Loads the sharded checkpoint if the run resumes from a sharded checkpoint.
    fn resume(&mut self) -> Result<(), LearnerError> {
        let (settings, saver) = (&self.run.strategy.checkpoints, &self.saver);
        let (Some((epoch, restored)), Some(settings), Some(saver)) =
            (self.run.resumes, settings, saver)
        else {
            return Ok(());
        };
        let Some(optimizer) = self.update.as_saved() else {
            return Err(LearnerError::NotSaved(NO_STATE));
        };
        let state = settings.load(epoch, &mut self.ddp, optimizer, saver)?;
        self.count = state.count;
        self.samples = state.samples;
        if let Some(state) = state.loss_scaler {
            self.scaler.restore(state)?;
        }
        if !restored {
            // The scheduler of a `Learner` cannot be restored, only stepped.
            (0..self.count.taken).for_each(|_| self.learner.lr_step());
        }
        Ok(())
    }

    /// Trains for one epoch on this rank's part of the data. Returns whether the run should stop. Collective: call on
    /// all ranks.
    pub fn train_epoch(&mut self, train: &TrainLoader<M>) -> Result<bool, LearnerError> {
        let run = self.run;
        let mut batches = Batches::new(&**train).map_err(|error| self.data_error(error))?;
        let (mut in_step, mut items, mut number) = (0, 0, self.rank.rank() + 1);
        loop {
            let own = batches.advance().map_err(|error| self.data_error(error))?;
            let all = self.announce(own.as_ref(), batches.has_next())?;
            if all.stop && !run.interrupter.should_stop() {
                run.interrupter
                    .stop(Some("another rank, or the launcher, asked to stop"));
            }
            if all.stop || !all.has_batch {
                return Ok(all.stop);
            }
            items += all.items;
            self.samples += all.items as u64;
            in_step += 1;
            let is_last = in_step == run.accumulation || !all.has_next;
            let output = self.run_batch(own, all.share, is_last, train)?;
            if is_last {
                self.step()?;
                in_step = 0;
            }
            if let Some(item) = output.filter(|_| self.reports_batches()) {
                let event = LearnerEvent::ProcessedItem(TrainingItem {
                    item,
                    progress: Progress::new(items, run.items, Some("items".into())),
                    iteration: Some(number),
                    lr: Some(self.learner.lr_current()),
                });
                let processed = run.events.lock().process_train(event);
                run.interrupter.fail_on_error(processed);
            }
            number += if run.strategy.process.is_none() {
                self.rank.size()
            } else {
                1
            };
        }
    }

    /// Runs the forward and backward pass of a micro-batch. Returns `None` if this rank has no batch.
    fn run_batch(
        &mut self,
        own: Option<Batch<<M as TrainStep>::Input>>,
        share: f64,
        is_last: bool,
        train: &TrainLoader<M>,
    ) -> Result<Option<<M as TrainStep>::Output>, LearnerError> {
        let is_own = own.is_some();
        let input = match own {
            Some(batch) => batch.input,
            // With sharded gradients, every rank must call the same collectives.
            None if self.ddp.config().zero_stage >= ZeroStage::Gradients => {
                let first = train.iter().next().transpose();
                match first.map_err(|error| self.data_error(error))? {
                    Some(input) => input,
                    None => return Ok(None),
                }
            }
            None => return Ok(None),
        };
        let (ddp, device) = (&self.ddp, &self.device);
        let step = |model: &M| -> TrainOutput<_> { TrainStep::step(model, input) };
        let run = || ddp.forward_and_backward(device, share, is_last, step);
        let output = with_loss_scale(self.scaler.scale(), run)?;
        Ok(is_own.then_some(output.item))
    }

    /// Ends a step: reduces and clips the gradients, and updates the weights. Skips the update if a gradient on any
    /// rank is not finite.
    fn step(&mut self) -> Result<(), LearnerError> {
        let ranks = self.groups.data().size() as f64;
        // `reduce` divides by a total of 1, because the gradients are already weighted. The mean over ranks is taken below.
        let mut gradients = self.ddp.reduce(u64::from(self.groups.data().rank() == 0))?;
        gradients.scale(1.0 / (ranks * self.scaler.scale()));
        for invalid in &gradients.invalid_gradients {
            tracing::warn!(step = self.count.made() + 1, "{invalid}");
        }
        let norm = global_norm(&gradients, &self.ddp)?;
        let is_taken = norm.is_finite();
        tracing::debug!(norm, is_taken, "step");
        if is_taken {
            let clip = self.run.strategy.clip;
            if norm > clip {
                gradients.scale(clip / norm);
            }
            self.learner.lr_step();
            if self.count.taken == 0 && matches!(self.update, Update::Sharded(_)) {
                check_one_rate(&self.learner, &self.ddp)?;
            }
            self.update
                .step(&mut self.learner, &mut self.ddp, gradients);
        }
        self.scaler.update(!is_taken);
        self.count.record(is_taken);
        Ok(self.count.check(StepCount::DEFAULT_LIMIT)?)
    }

    fn announce(
        &self,
        own: Option<&Batch<<M as TrainStep>::Input>>,
        has_next: bool,
    ) -> Result<Announced, LearnerError> {
        let weight = |batch: &Batch<_>| match &self.run.strategy.weight {
            Some(weight) => weight(&batch.input),
            None => batch.items as u64,
        };
        let announcement = Announcement {
            weight: own.map_or(0, weight),
            items: own.map_or(0, |batch| batch.items as u64),
            has_batch: own.is_some(),
            has_next,
            stop: self.run.interrupter.should_stop() || self.rank.stop_requested(),
        };
        Ok(announcement.exchange(self.groups.data())?)
    }

    /// Copies the trained weights to the model of the `Learner`. Collective: call on all ranks.
    pub fn update_learner(&mut self) -> M {
        let module = self.ddp.to_module();
        self.learner.load_model(module.clone().into_record());
        module
    }

    /// Saves a sharded checkpoint if sharded checkpoints are enabled. Collective: call on all ranks.
    pub fn save(&mut self, epoch: usize) -> Result<(), LearnerError> {
        let Some(saver) = &mut self.saver else {
            return Ok(());
        };
        let state = RunState {
            count: self.count,
            samples: self.samples,
            seed: 0,
            loss_scaler: self.scaler.state(),
            spikes: None,
            hooks: Default::default(),
        };
        match self.update.as_saved() {
            Some(optimizer) => checkpoints::save(saver, epoch, &self.ddp, optimizer, &state),
            None => Err(LearnerError::NotSaved(NO_STATE)),
        }
    }

    /// Returns the trained model on the device of this rank. Collective: call on all ranks.
    pub fn into_model(mut self) -> M {
        self.update_learner();
        self.learner.fork(&self.device.clone().autodiff());
        self.learner.model()
    }

    pub fn is_main(&self) -> bool {
        self.rank.rank() == 0
    }

    /// Returns whether Burn's training metrics include this rank's batches.
    fn reports_batches(&self) -> bool {
        self.is_main() || self.run.strategy.process.is_none()
    }

    pub fn data_error(&self, error: burn::data::dataset::DatasetError) -> LearnerError {
        let text = error.to_string();
        self.run.interrupter.fail(error);
        LearnerError::Data(text)
    }
}

/// The reason why the state of an optimizer cannot be saved in sharded checkpoints.
const NO_STATE: &str = "the optimizer of this strategy keeps its state to itself";

fn first_device<M: Module>(model: &M) -> Device {
    let devices = model.devices();
    devices.into_iter().next().unwrap_or_else(Device::flex)
}

/// Marks the parameters that require no gradient as frozen in the parameter table.
fn with_frozen<M: Module>(mut model: ParallelModule<M>) -> Result<ParallelModule<M>, LearnerError> {
    let mut trained = Trained(vec![]);
    model.module.visit(&mut trained);
    if !trained.0.contains(&true) {
        return Err(LearnerError::NothingToTrain);
    }
    for (entry, trained) in model.table.entries_mut().iter_mut().zip(trained.0) {
        entry.frozen = !trained;
    }
    Ok(model)
}

/// A visitor that collects whether each parameter requires a gradient.
struct Trained(Vec<bool>);

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.is_require_grad());
    }
}

//! The training loop of one rank.

use std::slice;

use burn::tensor::Device;

use super::clock::StepClock;
use super::config::TrainConfig;
use super::error::TrainError;
use super::hooks::Hooks;
use super::hooks::cuda_graphs::{CudaGraphStats, CudaGraphs};
use super::losses::LossSums;
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use super::micro_batches::{BatchPlan, ContextPart, MicroBatchRunner, targets};
use super::position::RunPosition;
use super::step::{FinishedStep, LaunchedStep};
use super::{Observer, ReplayCost, Saver, Verdict};
use burn_megatron::collective::Comm;
use burn_megatron::comm::{CommError, ReduceOp};
use burn_megatron::data_parallel::{DistributedDataParallel, ZeroStage};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::LossFactor;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::optim::{LossScaler, ParallelOptimizer, all_finite};
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_data::{Batch, DataError, Dataset, Padding, Samples, Sampling};
use burn_megatron_generate::{GenerateConfig, GenerateError, GenerationOutput, Generator};

/// Trains the shard of a model on one rank; every rank of the mesh has a trainer.
pub struct Trainer<M: LanguageModel> {
    pub(super) ddp: DistributedDataParallel<M>,
    pub(super) optimizer: ParallelOptimizer,
    pub(super) scaler: LossScaler,
    pub(super) position: RunPosition,
    pub(super) config: TrainConfig,
    pub(super) device: Device,
    pub(super) runner: MicroBatchRunner,
    pub(super) hooks: Hooks<M>,
    /// The bytes per token of the training data; 1 if unknown.
    pub(super) bytes_per_token: f64,
    pub(super) saver: Option<Saver>,
    /// See [`Trainer::defer_readings`].
    pub(super) defers: bool,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainOutcome {
    /// The number of steps, including skipped ones and those before a resumed checkpoint.
    pub steps: usize,
    /// The number of skipped steps: a loss or a gradient was not finite or a spike, or there were no targets.
    pub skipped: usize,
    /// The number of skipped steps without targets.
    pub without_targets: usize,
    /// The number of skipped steps that were spikes.
    pub spikes: usize,
    /// The step, from 1, since which no loss has been finite; `None` if the last loss is finite.
    pub diverged: Option<usize>,
    /// Set to [`Verdict::DataOrSoftware`] if a bad loss was computed again on another rank, with the same result; see
    /// [`check_replay_every`](TrainConfig::check_replay_every).
    pub bad_loss: Option<Verdict>,
    /// The time that the checks have taken on this rank; `None` without
    /// [`check_replay_every`](TrainConfig::check_replay_every).
    pub replay_cost: Option<ReplayCost>,
    /// The statistics of the micro-batches since the start or the checkpoint on this rank; `None` without CUDA graphs.
    pub cuda_graphs: Option<CudaGraphStats>,
    /// The padding of documents in the steps since the start or the checkpoint; none but with a split
    /// [per document](burn_megatron::mesh::ContextSplit::ZigzagPerDocument) or hybrid context parallelism.
    pub padding: Padding,
    /// Whether the run was stopped before its last step.
    pub stopped: bool,
    /// The held-out loss at the end; `None` if nothing is held out, or [`held_out_samples`](TrainConfig::held_out_samples) is
    /// 0.
    pub held_out: Option<HeldOutMetrics>,
}

impl TrainOutcome {
    /// Whether the last training loss or the held-out loss is not finite.
    pub fn has_diverged(&self) -> bool {
        let held_out = self.held_out.as_ref();
        let is_bad = |held_out: &HeldOutMetrics| held_out.tokens > 0 && !held_out.loss.is_finite();
        self.diverged.is_some() || held_out.is_some_and(is_bad)
    }
}

impl<M: LanguageModel> Trainer<M> {
    /// The model and its parameters.
    pub fn model(&self) -> &DistributedDataParallel<M> {
        &self.ddp
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The loss scale of the next step.
    pub fn scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// The timed actions of this rank in the last step, in order.
    pub fn events(&self) -> &[ActionEvent] {
        &self.runner.events
    }

    /// Returns the reports of this rank's routers of experts about the last step.
    pub fn router_step(&self) -> &RouterStep {
        &self.runner.router_step
    }

    /// Returns the statistics of the micro-batches; `None` without [`cuda_graph`](TrainConfig::cuda_graph).
    pub fn cuda_graphs(&self) -> Option<CudaGraphStats> {
        self.hook::<CudaGraphs>().map(|graphs| graphs.stats)
    }

    /// Sets whether [`fit`](Self::fit) reads the metrics of a step one step later, so that the host never waits for
    /// the step that it launches. Weights, metrics and checkpoints are the same. The default is true on GPUs, where
    /// the optimizer is fused; on the CPU there is nothing to wait for.
    ///
    /// Whether a step is skipped is then decided on the device: a skipped step still gathers the parameters. Saving,
    /// evaluation and the end of the run wait for the last step. [`step`](Self::step) waits for its own.
    ///
    /// # Errors
    ///
    /// [`TrainError::Unfused`] for true with an optimizer that is not the fused AdamW, and
    /// [`TrainError::Deferred`] where spikes are skipped or steps are replayed, and the error of a hook of yours that reads
    /// each step.
    pub fn defer_readings(&mut self, defers: bool) -> Result<(), TrainError> {
        if defers && !self.optimizer.is_fused() {
            return Err(TrainError::Unfused);
        }
        if let Some(error) = self.hooks.deferral_error().filter(|_| defers) {
            return Err(error);
        }
        self.defers = defers;
        Ok(())
    }

    /// The number of finished steps, including those before a resumed checkpoint.
    pub fn steps(&self) -> usize {
        self.position.steps()
    }

    /// Trains to the last step, or until the observer of any rank stops the run; after
    /// [`load`](Self::load), from the step of the checkpoint. With a [saver](Self::save_with), the last step
    /// is saved too. Collective: call on all ranks of the world.
    ///
    /// The evaluation after a stop is not reported to the observer if there is a saver: a resumed run does
    /// not have it.
    ///
    /// # Errors
    ///
    /// [`TrainError`]; the other ranks fail in their next collective.
    pub fn fit(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<TrainOutcome, TrainError> {
        let left = self.config.steps.saturating_sub(self.steps());
        self.bytes_per_token = data.bytes_per_token();
        let (plan, before) = (self.batch_plan(), self.position.samples);
        let ahead = self.steps()..self.steps() + left;
        let samples = data.training(&Sampling {
            seq: plan.sample_length(),
            seed: self.config.seed,
            samples: before + plan.samples_in(ahead.clone()),
        })?;
        let samples = plan.read_ahead(samples, ahead, before)?;
        let has_held_out = self.has_held_out(data)?;
        let (mut stopped, mut evaluated) = (false, None);
        let (mut steps, mut pending) = (self.steps(), None);
        let mut clock = StepClock::start();
        while steps < self.config.steps && !stopped {
            let stop = self.defers && observer.stop();
            let launched = self.launch(&samples, observer, pending.as_ref(), stop)?;
            clock.launch();
            steps += 1;
            if let Some(before) = pending.replace(launched) {
                stopped = self.report(before, &mut clock, observer)?;
            }
            let last = steps == self.config.steps;
            let is_due = |every: usize| steps.is_multiple_of(every);
            let evaluates = has_held_out && !last && self.config.evaluate_every.is_some_and(is_due);
            let saves = !last && self.is_save_due(steps as u64);
            // What follows needs to know whether the step was taken.
            if (!self.defers || last || stopped || evaluates || saves)
                && let Some(launched) = pending.take()
            {
                stopped |= self.report(launched, &mut clock, observer)?;
            }
            evaluated = if evaluates {
                Some(self.report_held_out(data, observer)?)
            } else {
                None
            };
            self.save_if(saves, observer)?;
            if evaluates || saves {
                clock = StepClock::start();
            }
            stopped = !last
                && if self.defers {
                    stopped
                } else {
                    !all_finite(!observer.stop(), self.ddp.groups())?
                };
            if stopped && let Some(launched) = pending.take() {
                self.report(launched, &mut clock, observer)?;
            }
        }
        tracing::debug!(waits = ?samples.stats(), "read ahead");
        self.save_final(observer)?;
        let held_out = match (evaluated, stopped && self.saver.is_some()) {
            (Some(held_out), _) => Some(held_out),
            (None, _) if !has_held_out => None,
            (None, true) => Some(self.evaluate_average(data)?),
            (None, false) => Some(self.report_held_out(data, observer)?),
        };
        let Padding { added, all } = self.position.padding;
        let padding = vec![added as f64, all as f64];
        let padding = if plan.splits_steps() {
            self.sum_over_data(padding)?
        } else {
            self.sum(padding, self.ddp.groups().data())?
        };
        let count = self.position.count;
        let mut outcome = TrainOutcome {
            padding: Padding {
                added: padding[0] as u64,
                all: padding[1] as u64,
            },
            steps: self.steps(),
            skipped: count.skipped as usize,
            without_targets: count.without_targets as usize,
            spikes: count.spikes as usize,
            diverged: self.position.diverged,
            bad_loss: None,
            cuda_graphs: None,
            replay_cost: None,
            stopped,
            held_out,
        };
        self.hooks.outcome(&mut outcome);
        Ok(outcome)
    }

    /// Whether there are held-out samples to evaluate on.
    fn has_held_out(&self, data: &dyn Dataset) -> Result<bool, TrainError> {
        let most = self.config.held_out_samples.min(1);
        Ok(most > 0 && !data.held_out(self.sequence_length(), most)?.is_empty())
    }

    fn report_held_out(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<HeldOutMetrics, TrainError> {
        let held_out = self.evaluate_average(data)?;
        observer.held_out(&held_out).map_err(TrainError::Observer)?;
        Ok(held_out)
    }

    /// [`evaluate`](Self::evaluate) after the steps so far, with the average of the weights where
    /// [`ema.evaluate`](burn_megatron::optim::EmaConfig::evaluate) says so. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn evaluate_average(&mut self, data: &dyn Dataset) -> Result<HeldOutMetrics, TrainError> {
        let (hooks, mut context) = self.split(self.steps());
        hooks.before_evaluation(&mut context);
        let held_out = self.evaluate(data, self.steps());
        let (hooks, mut context) = self.split(self.steps());
        hooks.after_evaluation(&mut context);
        held_out
    }

    /// One update: all micro-batches, the reduction, clipping and the optimizer. `samples` are those of the
    /// whole run; the step reads the next ones. Of the observer only
    /// [`gradients`](Observer::gradients) is called. Collective: call on all ranks of the world.
    ///
    /// All ranks skip the update if a loss or a gradient is not finite on any rank, or if all targets of the
    /// global batch are masked; the latter does not change the loss scale.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn step(
        &mut self,
        samples: &dyn Samples,
        observer: &mut dyn Observer,
    ) -> Result<StepMetrics, TrainError> {
        let launched = self.launch(samples, observer, None, false)?;
        Ok(self.finish(launched)?.metrics)
    }

    /// The mean loss on held-out text after `steps` updates. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn evaluate(&self, data: &dyn Dataset, steps: usize) -> Result<HeldOutMetrics, TrainError> {
        let _span = tracing::info_span!("evaluate", steps).entered();
        let windows = data.held_out(self.sequence_length(), self.config.held_out_samples)?;
        let (axis, size) = (self.ddp.groups().data(), self.config.micro_batch_size);
        let own = windows.iter().skip(axis.rank()).step_by(axis.size());
        let own: Vec<_> = own.cloned().collect();
        let mut batches: Vec<_> = own.chunks(size).map(|own| (own, true)).collect();
        let sharded = self.ddp.config().zero_stage == ZeroStage::Parameters;
        if let Some(first) = windows.first()
            && (sharded || self.ddp.groups().config().splits_experts())
        {
            // Every rank must call collectives equally often: a rank with fewer windows repeats one.
            let rounds = windows.len().div_ceil(axis.size()).div_ceil(size);
            batches.resize(rounds, (slice::from_ref(first), false));
        }
        let terms = self.ddp.module().loss_terms();
        let depths = self.ddp.module().further_depths();
        let context = ContextPart::of(self.ddp.groups(), depths);
        let (mut losses, mut tokens) = (LossSums::new(terms), 0.0);
        for (windows, counts) in batches {
            let batch = context.of_batch(Batch::new(windows.iter().cloned())?)?;
            let weight = if counts { 1.0 } else { 0.0 };
            tokens += weight * batch.counted() as f64;
            let Some(hidden) = self.runner.hidden(&batch, &self.ddp, &self.device)? else {
                continue;
            };
            let targets = targets(&batch, &self.device);
            let module = self.ddp.module();
            let sums = module.loss_sums_of(hidden, targets, &LossFactor::Number(1.0));
            losses.add_losses(sums, weight);
        }
        let tokens = self.sum_over_data(vec![tokens])?[0];
        let mean = LossSums(self.sum_over_model(losses.0)?).over(tokens, terms);
        Ok(HeldOutMetrics {
            step: steps,
            loss: mean.loss,
            bits_per_byte: mean.bits_per_byte(data.bytes_per_token()),
            minimised: mean.minimised,
            tokens: tokens as u64,
        })
    }

    pub(super) fn sequence_length(&self) -> usize {
        self.config
            .sequence_length
            .unwrap_or(self.ddp.module().context())
    }

    /// Returns how samples become micro-batches.
    pub(super) fn batch_plan(&self) -> BatchPlan {
        let mut plan = BatchPlan::new(&self.config, &self.ddp);
        self.hooks.batches(&mut plan);
        plan
    }

    /// Returns the micro-batches of this rank in the next [`step`](Self::step) of the same samples.
    ///
    /// # Errors
    ///
    /// [`DataError`] if samples cannot be read, or do not fit the layout.
    pub fn next_batches(&self, samples: &dyn Samples) -> Result<Vec<Batch>, DataError> {
        let next = (self.steps(), self.position.samples);
        self.batch_plan().own_batches(next, samples)
    }

    /// Generates text after a prompt, the same on all ranks. The default seed is that of the run.
    /// Collective: call on all ranks of the tensor, pipeline and context axes, with full sharding or split experts also
    /// of the data axis.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for invalid settings, a tokenizer that does not fit the model, and communication
    /// errors.
    pub fn generate(
        &self,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
    ) -> Result<GenerationOutput, TrainError> {
        let mut config = config.clone();
        config.seed = config.seed.or(Some(self.config.seed));
        let prompt = config.prompt_tokens(tokenizer);
        let prompt = prompt.map_err(GenerateError::from)?;
        let mut generator = Generator::new(self.ddp.module(), self.ddp.groups(), &self.device)
            .with_placement(self.runner.placement());
        let generated = generator.generate(&prompt, &config, tokenizer, &mut |_| Ok(()));
        Ok(generated?)
    }

    /// Sums over pipeline, context and data axis; values are zero on all but one rank of each pipeline.
    fn sum_over_model(&self, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.sum_over_data(self.sum(values, self.ddp.groups().pipeline())?)
    }

    /// Sums over the ranks with other tokens.
    fn sum_over_data(&self, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        let groups = self.ddp.groups();
        self.sum(self.sum(values, groups.context())?, groups.data())
    }

    fn sum(&self, values: Vec<f64>, comm: &Comm) -> Result<Vec<f64>, CommError> {
        Ok(comm.all_reduce(values.into(), ReduceOp::Sum)?.into_vec())
    }

    /// Finishes a step, and reports it to the observer; returns whether any rank asked to stop the run.
    fn report(
        &mut self,
        launched: LaunchedStep,
        clock: &mut StepClock,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let FinishedStep {
            metrics,
            experts,
            stop,
        } = self.finish(launched)?;
        let timing = self.timing(&metrics, clock.lap());
        let reported = observer.step(&metrics, &timing);
        let reported = reported.and_then(|()| match &experts {
            Some(experts) => observer.experts(experts),
            None => Ok(()),
        });
        reported.map_err(TrainError::Observer)?;
        Ok(stop)
    }

    fn timing(&self, metrics: &StepMetrics, seconds: f64) -> StepTiming {
        let tokens_per_second = metrics.tokens as f64 / seconds;
        let length = self.batch_plan().row_length(metrics.step - 1);
        let flops = self.ddp.module().flops_per_token(length);
        StepTiming {
            step: metrics.step,
            seconds,
            tokens_per_second,
            flops_per_second: tokens_per_second * flops,
        }
    }
}

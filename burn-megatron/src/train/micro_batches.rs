//! The micro-batches of a step: one after the other, or in the order of a schedule.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::TrainConfig;
use super::losses::LossSums;
use super::{LanguageModel, Tokens, Trainer};
use crate::comm::CommError;
use crate::data::{Batch, DataError, ReadAhead, Samples};
use crate::data_parallel::DistributedDataParallel;
use crate::pipeline::engine::{Engine, EngineError, Event, Output, Stage, forward_only};
use crate::pipeline::schedule::Schedule;

impl<M: LanguageModel> Trainer<M> {
    /// The micro-batches of this rank.
    pub(super) fn batches(&self, samples: &dyn Samples) -> Result<Vec<Batch>, DataError> {
        let numbers = numbers(&self.config, self.own_samples(), self.samples, 1);
        numbers.map(|numbers| samples.batch(numbers)).collect()
    }

    /// The same samples, of which a thread prepares the micro-batches of two steps: those of the next
    /// `steps` steps.
    pub(super) fn read_ahead(
        &self,
        samples: Arc<dyn Samples>,
        steps: usize,
    ) -> Result<ReadAhead, DataError> {
        let own = self.own_samples();
        let ready = 2 * own.len().div_ceil(self.config.micro_batch_size);
        let numbers = numbers(&self.config, own, self.samples, steps);
        ReadAhead::new(samples, numbers, ready)
    }

    /// Forward and backward of one micro-batch after the other; the sums of their losses.
    pub(super) fn run_batches(&self, batches: &[Batch], step: usize) -> LossSums {
        let device = self.device.clone().autodiff();
        let firsts = self.own_samples().step_by(self.config.micro_batch_size);
        let last = batches.len().saturating_sub(1);
        let scale = self.scaler.scale();
        let mut sums = LossSums::new(self.ddp.module().loss_terms());
        for (number, (batch, first)) in batches.iter().zip(firsts).enumerate() {
            self.ddp.position().set(step as u64, first as u64);
            let (sum, parts) = {
                let _span = tracing::debug_span!("forward").entered();
                let tokens = tokens(batch, &device);
                let targets = matrix(&batch.targets, batch, &device);
                self.ddp.forward(&device, |model| {
                    let hidden = model.hidden(0, None, tokens, None);
                    let losses = model.losses_of(hidden, targets);
                    let parts = losses.sums_of_parts();
                    (losses.objective.sum(), parts)
                })
            };
            sums.add(sum.clone().into_scalar::<f64>(), parts, 1.0);
            let scaled = scaled(sum, scale);
            match number == last {
                true => self.ddp.backward_last(scaled),
                false => self.ddp.backward(scaled),
            };
        }
        sums
    }

    /// The same in the order of the schedule.
    pub(super) fn run_schedule(
        &self,
        schedule: &Schedule,
        batches: &[Batch],
        step: usize,
    ) -> Result<(LossSums, Vec<Event>), EngineError> {
        let sink = self.ddp.sink();
        let pipeline = self.ddp.groups().pipeline();
        let stages = Stages {
            ddp: &self.ddp,
            device: self.device.clone().autodiff(),
            batches,
            step: step as u64,
            first_sample: self.own_samples().start as u64,
            scale: self.scaler.scale(),
            last: schedule.stages() - 1,
            parts: RefCell::default(),
        };
        let engine = Engine::new(schedule, pipeline, &self.device, &*sink)?;
        let run = engine.with_put_off(self.put_off).run(&stages)?;
        let mut sums = LossSums::new(self.ddp.module().loss_terms());
        sums.0[0] = run.loss / stages.scale;
        for parts in stages.parts.into_inner() {
            sums.add_parts(Some(parts), 1.0);
        }
        Ok((sums, run.events))
    }

    /// The rank of the pipeline that has each stage.
    pub(super) fn placement(&self) -> Vec<usize> {
        match &self.schedule {
            Some(schedule) => (0..schedule.stages())
                .map(|stage| schedule.rank_of(stage))
                .collect(),
            None => vec![0],
        }
    }

    /// What the last stage gives for a batch, on the rank that holds it; nothing is recorded.
    pub(super) fn hidden(&self, batch: &Batch) -> Result<Option<Tensor<3>>, CommError> {
        let (module, pipeline) = (self.ddp.module(), self.ddp.groups().pipeline());
        forward_only(&self.placement(), pipeline, &self.device, |stage, input| {
            let tokens = tokens(batch, &self.device);
            module.hidden(stage, input, tokens, None)
        })
    }
}

/// The numbers of the samples in each micro-batch of the next `steps` steps, after `before` samples, on the
/// rank that runs `own` of each step.
fn numbers(
    config: &TrainConfig,
    own: Range<usize>,
    before: u64,
    steps: usize,
) -> impl Iterator<Item = Range<u64>> + use<> {
    let (batch, size) = (config.global_batch_size, config.micro_batch_size);
    let firsts = (0..steps).flat_map(move |step| {
        let firsts = own.clone().step_by(size);
        firsts.map(move |first| before + (step * batch + first) as u64)
    });
    firsts.map(move |first| first..first + size as u64)
}

/// `[rows, seq]`
pub(super) fn matrix(values: &[i32], batch: &Batch, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [batch.rows, batch.seq]),
        device,
    )
}

/// What the model reads.
fn tokens(batch: &Batch, device: &Device) -> Tokens {
    Tokens {
        ids: matrix(&batch.tokens, batch, device),
        documents: batch.documents.as_deref().map(Arc::from),
    }
}

/// The stages of this rank on the micro-batches of a step, as the engine runs them.
struct Stages<'a, M> {
    ddp: &'a DistributedDataParallel<M>,
    device: Device,
    batches: &'a [Batch],
    step: u64,
    first_sample: u64,
    /// What the loss is multiplied with.
    scale: f64,
    last: usize,
    /// The sums of the parts of the losses that there were, read when all is done.
    parts: RefCell<Vec<Tensor<1>>>,
}

impl<M: LanguageModel> Stage for Stages<'_, M> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> Output {
        let (batch, model) = (&self.batches[micro_batch], self.ddp.module());
        let before = (micro_batch * batch.rows) as u64;
        self.ddp
            .position()
            .set(self.step, self.first_sample + before);
        let tokens = tokens(batch, &self.device);
        let hidden = model.hidden(stage, input, tokens, None);
        if stage < self.last {
            return Output::Activation(hidden);
        }
        let targets = matrix(&batch.targets, batch, &self.device);
        let losses = model.losses_of(hidden, targets);
        self.parts.borrow_mut().extend(losses.sums_of_parts());
        Output::Loss(scaled(losses.objective.sum(), self.scale))
    }
}

/// The loss, multiplied where there is a factor.
fn scaled(loss: Tensor<1>, scale: f64) -> Tensor<1> {
    match scale == 1.0 {
        true => loss,
        false => loss.mul_scalar(scale),
    }
}

//! Runs the micro-batches of a step in the order of the schedule.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::batch_warmup::BatchSizes;
use super::losses::{check_parts, losses_of_step, parts_of};
use super::replay::StepInput;
use super::sequence_warmup::{SequenceWarmup, row_length};
use super::trainer::StepSchedule;
use super::{TrainError, Trainer};
use burn_megatron::comm::{CommError, ParallelContext};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::fingerprint;
use burn_megatron::mesh::{ContextSplit, ContextSplitError};
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron::nn::{BatchPosition, LossFactor, ScheduleNodes};
use burn_megatron::pipeline::engine::{
    Engine, ForwardOptions, P2pConfig, ShapeKey, Stage, StageOutput, forward_only,
};
use burn_megatron_data::{Batch, DataError, FurtherTokens, Prefetcher, Sample, Samples};

impl<M: LanguageModel> Trainer<M> {
    /// The micro-batches of this rank in the next [`step`](Self::step) of the same samples.
    ///
    /// # Errors
    ///
    /// [`DataError`] if samples cannot be read, or do not fit the layout.
    pub fn next_batches(&self, samples: &dyn Samples) -> Result<Vec<Batch>, DataError> {
        self.batches(self.steps(), samples)
    }

    /// The micro-batches of this rank in step `step`, the next one.
    pub(super) fn batches(
        &self,
        step: usize,
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, DataError> {
        let own = self.ddp.groups().data().rank();
        self.batches_from((step, self.samples), own, samples)
    }

    /// Returns the batches of a rank of the data axis in a step, before which there were `samples` samples.
    pub(super) fn batches_from(
        &self,
        (step, before): (usize, u64),
        data_rank: usize,
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, DataError> {
        let rows = self.sample_rows((step, before));
        let mut numbers = self.sample_numbers(step..step + 1, before, data_rank);
        if let Some(hybrid) = &self.hybrid_context {
            let all = numbers.next().unwrap_or(before..before);
            return hybrid.micro_batches(&rows.of_batch(all.start, samples.batch(all)?)?);
        }
        numbers
            .map(|numbers| rows.of_batch(numbers.start, samples.batch(numbers)?))
            .collect()
    }

    /// Reads the micro-batches of the next `steps` steps in a background thread, up to two steps ahead.
    pub(super) fn read_ahead(
        &self,
        samples: Arc<dyn Samples>,
        steps: usize,
    ) -> Result<Prefetcher, DataError> {
        let (first, before) = (self.steps(), self.samples);
        let own = self.ddp.groups().data().rank();
        let largest = self.samples_of(self.config.steps, own).len();
        let ready = match self.hybrid_context {
            Some(_) => 2,
            None => 2 * largest.div_ceil(self.config.micro_batch_size),
        };
        let numbers = self.sample_numbers(first..first + steps, before, own);
        let rows = self.sample_rows((first, before));
        Prefetcher::new(Arc::new(RankSamples { samples, rows }), numbers, ready)
    }

    /// The sample numbers of each micro-batch of a rank of the data axis in some steps, before which there were so many
    /// samples; under hybrid context parallelism those of each step, of which every rank reads all.
    fn sample_numbers(&self, steps: Range<usize>, before: u64, rank: usize) -> SampleNumbers {
        let (sizes, size) = (self.sizes(), self.config.micro_batch_size);
        let (first, ranks) = (steps.start, self.ddp.groups().data().size());
        if self.hybrid_context.is_some() {
            return Box::new(steps.map(move |step| {
                let start = before + sizes.sum(first..step);
                start..start + sizes.of(step) as u64
            }));
        }
        let starts = steps.flat_map(move |step| {
            let before = before + sizes.sum(first..step);
            let own = share_of(sizes.of(step), rank, ranks);
            own.step_by(size).map(move |start| before + start as u64)
        });
        Box::new(starts.map(move |start| start..start + size as u64))
    }

    /// From a step on, before which there were so many samples.
    fn sample_rows(&self, next: (usize, u64)) -> SampleRows {
        SampleRows {
            warmup: self.config.sequence_warmup.clone(),
            whole: self.sequence_length(),
            next,
            sizes: self.sizes(),
            context: ContextPart {
                // Documents are cut where all rows of a step are known.
                ranks: match self.hybrid_context {
                    Some(_) => 1,
                    None => self.ddp.groups().context().size(),
                },
                ..ContextPart::of(self.ddp.groups(), self.ddp.module().further_depths())
            },
        }
    }

    /// Runs the forwards and backwards of a step in the order of the schedule, with a loss scale on the device or,
    /// if there is none, that of the scaler; returns the losses on the rank of the last stage, none on others.
    pub(super) fn run_batches(&mut self, input: &StepInput<'_>) -> Result<StepLosses, TrainError> {
        let (step, batches) = (input.step, input.batches);
        let sink = self.ddp.sink();
        let loss_scale = match &input.loss_scale {
            Some(scale) => LossFactor::from(scale.clone()),
            None => self.scaler.scale().into(),
        };
        let router_step = RouterStep::new(loss_scale.clone());
        let scheduled = self.scheduled(batches.len());
        let stages = TrainStages {
            ddp: &self.ddp,
            device: self.device.clone().autodiff(),
            batches,
            step: step as u64,
            first_micro_batch: self.samples_of(step, input.data_rank).start
                / self.config.micro_batch_size,
            in_flight: &scheduled.in_flight,
            last: scheduled.schedule.stages() - 1,
            loss_scale: loss_scale.clone(),
            router_step: router_step.clone(),
            parts: RefCell::default(),
        };
        let (mut losses, events) = if let Some(graphs) = &self.cuda_graphs {
            graphs.borrow_mut().run(&stages)?
        } else {
            let pipeline = self.ddp.groups().pipeline();
            let engine = Engine::new(&scheduled.schedule, pipeline, &self.device, sink)?
                .with_deferred_wgrad(self.deferred_wgrad)
                .with_p2p(self.p2p())
                .with_shape_cache(&self.shapes)
                .with_loss_scale(loss_scale);
            let run = engine.run(&stages)?;
            (run.losses, run.events)
        };
        let terms = self.ddp.module().loss_terms();
        let count = losses_of_step(&scheduled.schedule, terms);
        for parts in stages.parts.into_inner() {
            check_parts(parts.as_ref(), parts_of(terms));
            losses.extend(parts);
        }
        self.events = events;
        self.router_step = router_step;
        Ok(StepLosses { losses, count })
    }

    /// Returns the settings for passing tensors between the stages.
    fn p2p(&self) -> P2pConfig {
        P2pConfig::of(self.ddp.groups().config())
    }

    /// By stage, its pipeline rank.
    pub(super) fn placement(&self) -> Vec<usize> {
        // The same in every step.
        let schedule = self.schedules.values().next();
        let of_stages = schedule.map(|StepSchedule { schedule, .. }| {
            let stages = 0..schedule.stages();
            stages.map(|stage| schedule.rank_of(stage)).collect()
        });
        of_stages.unwrap_or_default()
    }

    /// The output of the last stage for a batch, on the rank that holds it, without autodiff.
    pub(super) fn hidden(&self, batch: &Batch) -> Result<Option<Tensor<3>>, CommError> {
        let (module, pipeline) = (self.ddp.module(), self.ddp.groups().pipeline());
        let placement = self.placement();
        let options = ForwardOptions {
            shape_key: [batch.rows, batch.seq],
            p2p: self.p2p(),
            shapes: self.shapes.clone(),
        };
        forward_only(
            &placement,
            pipeline,
            &self.device,
            options,
            |stage, input| {
                let mut tokens = tokens(batch, matrix(batch.tokens(), batch, &self.device));
                if stage + 1 == placement.len() {
                    tokens.further = further_tokens(batch, &self.device);
                }
                module.hidden(stage, input, tokens)
            },
        )
    }
}

/// The part of each batch that a rank of a context group has.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextPart {
    split: ContextSplit,
    rank: usize,
    ranks: usize,
    /// The tensor ranks that share it.
    tensor: usize,
    /// Padded rows on the rank have a multiple of this number of tokens.
    multiple: usize,
    /// Of multi-token prediction.
    further_depths: usize,
}

impl ContextPart {
    pub fn of(groups: &ParallelContext, further_depths: usize) -> Self {
        let (config, context) = (groups.config(), groups.context());
        Self {
            split: config.context_split,
            rank: context.rank(),
            ranks: context.size(),
            tensor: if config.sequence_parallel {
                config.tensor
            } else {
                1
            },
            multiple: if config.sequence_parallel {
                sequence_multiple(config)
            } else {
                1
            },
            further_depths,
        }
    }

    /// Checks the length of a whole row. A split per document pads documents, so that any row of at least `2 context`
    /// tokens can be split.
    pub fn check(self, length: usize) -> Result<(), ContextSplitError> {
        match self.split {
            _ if self.ranks == 1 => Ok(()),
            ContextSplit::ZigzagPerDocument if length >= 2 * self.ranks => Ok(()),
            split => split.check(length, self.ranks, self.tensor),
        }
    }

    /// The part of a batch of whole rows, or of its rows that this is already.
    pub fn of_batch(self, batch: Batch) -> Result<Batch, DataError> {
        let batch = batch.with_further_tokens(self.further_depths);
        let tensor = match self.split {
            ContextSplit::ZigzagPerDocument => self.multiple,
            _ => self.tensor,
        };
        batch.in_context(self.split, (self.rank, self.ranks), tensor)
    }
}

/// The rows that a rank makes of samples.
#[derive(Clone, Debug)]
struct SampleRows {
    warmup: Vec<SequenceWarmup>,
    /// Tokens of a sample.
    whole: usize,
    /// A step and its first sample.
    next: (usize, u64),
    sizes: BatchSizes,
    context: ContextPart,
}

impl SampleRows {
    /// The rows of a batch of whole samples, whose first number is `first`; a batch of such rows as it is.
    fn of_batch(&self, first: u64, batch: Batch) -> Result<Batch, DataError> {
        let (step, sample) = self.next;
        let step = self.sizes.step_of(step, first - sample);
        let length = row_length(&self.warmup, step, self.whole);
        self.context.of_batch(batch.in_rows_of(length))
    }
}

/// Samples as the batches of a rank.
struct RankSamples {
    samples: Arc<dyn Samples>,
    rows: SampleRows,
}

impl Samples for RankSamples {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number)
    }

    fn batch(&self, numbers: Range<u64>) -> Result<Batch, DataError> {
        self.rows
            .of_batch(numbers.start, self.samples.batch(numbers)?)
    }
}

/// The losses of the micro-batches of a step, without autodiff: their objectives, `[1]` each, then the parts of each.
pub(super) struct StepLosses {
    /// None on ranks without the last stage.
    pub losses: Vec<Tensor<1>>,
    /// The elements of the losses on a rank with the last stage.
    pub count: usize,
}

/// The sample numbers of micro-batches.
type SampleNumbers = Box<dyn Iterator<Item = Range<u64>> + Send>;

/// The indices of the samples of a step, of which there are `samples`, on a rank of the data axis.
pub(super) fn share_of(samples: usize, rank: usize, ranks: usize) -> Range<usize> {
    let share = samples / ranks;
    rank * share..(rank + 1) * share
}

/// `[rows, seq]`
fn matrix(values: &[i32], batch: &Batch, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [batch.rows, batch.seq]),
        device,
    )
}

/// The targets of the rows, then those of each depth of multi-token prediction.
pub(super) fn targets(batch: &Batch, device: &Device) -> Tensor<2, Int> {
    let further = batch.further().iter().map(FurtherTokens::targets);
    let all = [&batch.targets[..]].into_iter().chain(further);
    let rows = batch.rows * (1 + batch.further().len());
    let data = TensorData::new(all.collect::<Vec<_>>().concat(), [rows, batch.seq]);
    Tensor::from_data(data, device)
}

/// The input of the model, of which the device has the ids.
fn tokens(batch: &Batch, ids: Tensor<2, Int>) -> Tokens {
    Tokens {
        ids,
        documents: batch.documents.as_deref().map(Arc::from),
        sorted: Some(batch.sorted().clone()),
        router_step: None,
        nodes: None,
        shard: batch.shard.clone(),
        real: batch.real().cloned(),
        further: vec![],
    }
}

/// Returns the inputs of multi-token prediction, on the rank of the last stage.
fn further_tokens(batch: &Batch, device: &Device) -> Vec<Tokens> {
    let of_depth = |own: &FurtherTokens| Tokens {
        sorted: Some(own.sorted().clone()),
        real: own.real().cloned(),
        ..matrix(own.tokens(), batch, device).into()
    };
    batch.further().iter().map(of_depth).collect()
}

/// The tensors of a micro-batch on the device, both `[rows, seq]`.
#[derive(Clone)]
pub(super) struct DeviceBatch {
    pub ids: Tensor<2, Int>,
    /// On the last stage.
    pub targets: Option<Tensor<2, Int>>,
}

impl DeviceBatch {
    pub fn new(batch: &Batch, is_last: bool, device: &Device) -> Self {
        Self {
            ids: matrix(batch.tokens(), batch, device),
            targets: is_last.then(|| targets(batch, device)),
        }
    }
}

/// The stages of this rank on the micro-batches of a step, as the engine runs them.
pub(super) struct TrainStages<'a, M> {
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

//! Training steps over a slow link, with a timeline of what each rank did.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::testing::{Link, SimulatedNetwork, Transfer};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, global_norm};
use burn_megatron_models::{Transformer, TransformerConfig};

use super::trace::{EventKind, TimelineEvent};
use burn_megatron_cli::internal::Error;

const SEED: u64 = 1;
const LEARNING_RATE: f64 = 1e-4;
/// The largest gradient norm.
const CLIP: f64 = 1.0;
/// The bandwidth inside of a node over that between nodes.
const INSIDE_A_NODE: f64 = 8.0;
/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// The model to train, and the duration.
pub struct OverlapSetup {
    pub model: TransformerConfig,
    /// Data-parallel ranks.
    pub ranks: usize,
    /// The ranks of a node, if there are nodes.
    pub ranks_per_node: Option<usize>,
    /// Samples of a rank and step, of the model's whole context.
    pub samples: usize,
    /// Elements per bucket; by default a twelfth of the model, or a block with ZeRO-3.
    pub bucket_size: Option<usize>,
    /// Steps that are not measured.
    pub warm_up: usize,
    /// Steps that are measured. One more follows, which waits for what they prefetch.
    pub steps: usize,
}

/// A ZeRO stage, with or without overlap.
#[derive(Clone, Copy, Debug)]
pub struct OverlapCase {
    pub stage: ZeroStage,
    pub overlap: bool,
}

/// The simulated link of each rank.
#[derive(Clone, Copy, Debug)]
pub struct LinkSpeed {
    pub latency: Duration,
    pub bytes_per_second: f64,
}

/// The activity of a rank and its link, over time.
pub struct RankTimeline {
    /// Phases, waits and transfers.
    pub events: Vec<TimelineEvent>,
    /// By step: its start and its end in seconds.
    pub steps: Vec<(f64, f64)>,
    /// By step: the transfers that were issued in it.
    pub transfers: Vec<Vec<Transfer>>,
}

impl OverlapSetup {
    /// Trains, and returns the timeline of each rank.
    pub fn run(&self, case: OverlapCase, wire: LinkSpeed) -> Result<Vec<RankTimeline>, Error> {
        let origin = Instant::now();
        let world = World::threads(self.ranks)?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        Ok(world.run(|rank| self.train(&rank, case, wire, origin))?)
    }

    fn train(
        &self,
        rank: &Rank,
        case: OverlapCase,
        wire: LinkSpeed,
        origin: Instant,
    ) -> Result<RankTimeline, Error> {
        let LinkSpeed {
            latency,
            bytes_per_second,
        } = wire;
        let layout = ParallelConfig::new().with_data(self.ranks);
        let (link, layout) = match self.ranks_per_node {
            None => (Link::new(latency, bytes_per_second)?, layout),
            Some(ranks) => {
                let inside = INSIDE_A_NODE * bytes_per_second;
                let link = Link::with_nodes(latency, bytes_per_second, ranks, inside)?;
                (link, layout.with_ranks_per_node(ranks))
            }
        };
        let groups = ParallelContext::new(&layout, rank)?;
        let data = SimulatedNetwork::over(groups.data().clone(), &link);
        let groups = groups.with_data(data);
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, SEED, DType::F32);
        let model = self.model.init_with(scope)?;
        let elements = model.table.local_elements(groups.mesh_rank());
        let settings = self.settings(case, elements);
        let ddp = DistributedDataParallel::with(model, &groups, &settings)?;
        let optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        let mut run = TrainingRun {
            setup: self,
            ddp,
            optimizer,
            events: vec![],
            origin,
        };
        // Transfers of building the model are not counted.
        link.take_transfers();
        let mut steps = vec![];
        for step in 0..self.warm_up + self.steps + 1 {
            let start = run.now();
            run.step(step)?;
            steps.push((start, run.now()));
        }
        let offset = link.epoch().duration_since(origin);
        Ok(record(run.events, steps, link.take_transfers(), offset))
    }

    fn settings(&self, case: OverlapCase, elements: usize) -> DataParallelConfig {
        use ZeroStage::{Gradients, Optimizer, Parameters};
        let twelfth = Some(elements.div_ceil(12)).filter(|_| case.stage != Parameters);
        DataParallelConfig {
            zero_stage: case.stage,
            hierarchical_reduce: case.stage == ZeroStage::Replicated
                && self.ranks_per_node.is_some(),
            hsdp: self
                .ranks_per_node
                .filter(|_| case.stage != ZeroStage::Replicated),
            bucket_size: self.bucket_size.or(twelfth),
            overlap_grad_reduce: case.overlap,
            overlap_param_gather: case.overlap && matches!(case.stage, Optimizer | Gradients),
            ..DataParallelConfig::default()
        }
    }
}

/// The training of one rank.
struct TrainingRun<'a> {
    setup: &'a OverlapSetup,
    ddp: DistributedDataParallel<Transformer>,
    optimizer: ParallelAdamW,
    events: Vec<TimelineEvent>,
    origin: Instant,
}

impl TrainingRun<'_> {
    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// One update, as the trainer makes it.
    fn step(&mut self, step: usize) -> Result<(), Error> {
        let rank = self.ddp.groups().rank();
        let (samples, context) = (self.setup.samples, self.setup.model.context);
        let device = Device::flex().autodiff();
        let batch = |key| {
            tokens(
                [samples, context],
                self.setup.model.vocabulary,
                key,
                &device,
            )
        };
        let key = 2 * (step * self.setup.ranks + rank);
        let (tokens, targets) = (batch(key), batch(key + 1));
        self.ddp
            .position()
            .set(step as u64, (rank * samples) as u64);

        let start = self.now();
        let forward = |model: &Transformer| model.losses(tokens, targets).sum();
        let loss = self.ddp.forward(&device, forward);
        let start = self.phase(EventKind::Compute, "forward", step, start);
        self.ddp.backward_last(loss);
        let start = self.phase(EventKind::Compute, "backward", step, start);
        let mut gradients = self.ddp.reduce((samples * context) as u64)?;
        let norm = global_norm(&gradients, &self.ddp)?;
        let start = self.phase(EventKind::Reduce, "reduce", step, start);
        if norm > CLIP {
            gradients.scale(CLIP / norm);
        }
        self.optimizer.step(LEARNING_RATE, &mut self.ddp, gradients);
        self.phase(EventKind::Compute, "optimizer", step, start);
        Ok(())
    }

    /// Ends a phase; returns the start of the next one.
    fn phase(&mut self, kind: EventKind, name: &str, step: usize, start: f64) -> f64 {
        let end = self.now();
        self.events.push(TimelineEvent {
            kind,
            name: name.into(),
            step,
            start,
            end,
        });
        end
    }
}

/// Pseudo-random tokens, different for each key.
fn tokens(shape: [usize; 2], vocabulary: usize, key: usize, device: &Device) -> Tensor<2, Int> {
    let token = |i: usize| ((i * i * 7 + key * 31 + i) % vocabulary) as i64;
    let tokens: Vec<_> = (0..shape[0] * shape[1]).map(token).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

/// Sorts the transfers by step; their times are relative to `offset`.
pub fn record(
    mut events: Vec<TimelineEvent>,
    steps: Vec<(f64, f64)>,
    all: Vec<Transfer>,
    offset: Duration,
) -> RankTimeline {
    let seconds = |time: Duration| (offset + time).as_secs_f64();
    let mut transfers = vec![vec![]; steps.len()];
    for transfer in all {
        let asked = seconds(transfer.asked);
        let step = steps.partition_point(|(start, _)| *start <= asked) - 1;
        let mut event = |kind, start, end| {
            let megabytes = transfer.bytes as f64 / 1e6;
            let name = format!("{} {megabytes:.2} MB", transfer.op);
            events.push(TimelineEvent {
                kind,
                name,
                step,
                start,
                end,
            });
        };
        let (started, done) = (seconds(transfer.started), seconds(transfer.done));
        event(EventKind::Transfer, started, done);
        if let Some(begin) = transfer.begin_wait {
            event(
                EventKind::Wait,
                seconds(begin),
                seconds(begin + transfer.waited),
            );
        }
        transfers[step].push(transfer);
    }
    RankTimeline {
        events,
        steps,
        transfers,
    }
}

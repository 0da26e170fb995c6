//! Runs training steps over a simulated slow link, and records a timeline of each rank.

use std::time::Instant;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, global_norm};
use burn_megatron_cli::internal::Error;
use burn_megatron_comm_testing::SimulatedNetwork;
use burn_megatron_models::{Transformer, TransformerConfig};

use super::args::OverlapArgs;
use crate::links::{LinkSpeed, on_threads};
use crate::timeline::{EventKind, RankTimeline, Recorder};

const SEED: u64 = 1;
const LEARNING_RATE: f64 = 1e-4;
/// The maximum gradient norm.
const CLIP: f64 = 1.0;

/// The model to train, and the flags.
pub struct OverlapSetup<'a> {
    pub args: &'a OverlapArgs,
    pub model: TransformerConfig,
}

/// A ZeRO stage, with or without overlap.
#[derive(Clone, Copy, Debug)]
pub struct OverlapCase {
    pub stage: ZeroStage,
    pub overlap: bool,
}

impl OverlapSetup<'_> {
    /// Trains the model, and returns the timeline of each rank. One additional step is run, which waits for the
    /// prefetches of the measured steps.
    pub fn run(&self, case: OverlapCase, speed: LinkSpeed) -> Result<Vec<RankTimeline>, Error> {
        let origin = Instant::now();
        on_threads(self.args.data_parallel, |rank| {
            self.train(rank, case, speed, Recorder::new(origin))
        })
    }

    fn train(
        &self,
        rank: &Rank,
        case: OverlapCase,
        speed: LinkSpeed,
        mut recorder: Recorder,
    ) -> Result<RankTimeline, Error> {
        let layout = ParallelConfig::new().with_data(self.args.data_parallel);
        let layout = match self.args.ranks_per_node {
            None => layout,
            Some(ranks) => layout.with_ranks_per_node(ranks),
        };
        let link = speed.link(self.args.ranks_per_node)?;
        let groups = ParallelContext::new(&layout, rank)?;
        let data = SimulatedNetwork::over(groups.data().clone(), &link);
        let groups = groups.with_data(data);
        let device = Device::flex();
        let builder = ModelBuilder::with(&groups, &device, SEED, DType::F32);
        let model = self.model.init_with(builder)?;
        let elements = model.table.local_elements(groups.mesh_rank());
        let settings = self.settings(case, elements);
        let ddp = DistributedDataParallel::with(model, &groups, &settings)?;
        let optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        let mut training = Training { ddp, optimizer };
        // Transfers that build the model are not counted.
        link.take_transfers();
        for step in 0..self.args.steps.warm_up + self.args.steps.steps + 1 {
            recorder.step(|recorder| self.step(step, &mut training, recorder))?;
        }
        Ok(recorder.finish(link.take_transfers(), link.epoch()))
    }

    /// Runs one step like the trainer.
    fn step(
        &self,
        step: usize,
        Training { ddp, optimizer }: &mut Training,
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        let rank = ddp.groups().rank();
        let (samples, context) = (self.args.micro_batch_size, self.model.context);
        let device = Device::flex().autodiff();
        let batch = |key| tokens([samples, context], self.model.vocabulary, key, &device);
        let key = 2 * (step * self.args.data_parallel + rank);
        let (tokens, targets) = (batch(key), batch(key + 1));
        ddp.position().set(step as u64, (rank * samples) as u64);

        recorder.start();
        let forward = |model: &Transformer| model.losses(tokens, targets).sum();
        let loss = ddp.forward(&device, forward);
        recorder.end(EventKind::Compute, "forward");
        ddp.backward_last(loss);
        recorder.end(EventKind::Compute, "backward");
        let mut gradients = ddp.reduce((samples * context) as u64)?;
        let norm = global_norm(&gradients, ddp)?;
        recorder.end(EventKind::Reduce, "reduce");
        if norm > CLIP {
            gradients.scale(CLIP / norm);
        }
        optimizer.step(LEARNING_RATE, ddp, gradients);
        recorder.end(EventKind::Compute, "optimizer");
        Ok(())
    }

    fn settings(&self, case: OverlapCase, elements: usize) -> DataParallelConfig {
        use ZeroStage::{Gradients, Optimizer, Parameters};
        let twelfth = Some(elements.div_ceil(12)).filter(|_| case.stage != Parameters);
        DataParallelConfig {
            zero_stage: case.stage,
            hierarchical_reduce: case.stage == ZeroStage::Replicated
                && self.args.ranks_per_node.is_some(),
            hsdp: self
                .args
                .ranks_per_node
                .filter(|_| case.stage != ZeroStage::Replicated),
            bucket_size: self.args.bucket_size.or(twelfth),
            overlap_grad_reduce: case.overlap,
            overlap_param_gather: case.overlap && matches!(case.stage, Optimizer | Gradients),
            ..DataParallelConfig::default()
        }
    }
}

/// The training of one rank.
struct Training {
    ddp: DistributedDataParallel<Transformer>,
    optimizer: ParallelAdamW,
}

/// Returns pseudo-random tokens that depend on the key.
fn tokens(shape: [usize; 2], vocabulary: usize, key: usize, device: &Device) -> Tensor<2, Int> {
    let token = |i: usize| ((i * i * 7 + key * 31 + i) % vocabulary) as i64;
    let tokens: Vec<_> = (0..shape[0] * shape[1]).map(token).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

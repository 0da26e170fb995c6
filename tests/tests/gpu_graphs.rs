//! Tests CUDA graphs of micro-batches. A graph gives the same results as separate launches, and a run with graphs the
//! same results as a run without graphs.
#![cfg(feature = "cuda")]

use burn::backend::{Backend, Dispatch};
use burn::tensor::{Device, Tensor};
use burn_megatron::comm::{Engine, ParallelContext, Rank, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, Precision, ZeroStage,
};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeGranularity};
use burn_megatron_comm_testing::join_as_threads;
use burn_megatron_data::TextData;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_test_support::skipped;
use burn_megatron_tests::{Text, gpu, small_gpt, small_llama};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{
    CudaGraphStats, Observer, ObserverError, SequenceWarmup, TrainConfig, Trainer,
};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const ROWS: usize = 2;

/// Returns the configuration with two layers and without dropout, whose masks differ between steps.
fn two_layers(config: &TransformerConfig) -> TransformerConfig {
    TransformerConfig {
        layers: 2,
        dropout: 0.0,
        attention_dropout: 0.0,
        ..config.clone()
    }
}

/// A model, and a micro-batch for the model.
struct Step {
    ddp: DistributedDataParallel<Transformer>,
    tokens: Tokens,
    device: Device,
}

impl Step {
    fn new(config: &TransformerConfig) -> Self {
        let device = gpu();
        let config = two_layers(config);
        let groups = ParallelContext::single();
        let model = config.init_with(ModelBuilder::new(&groups, &device.clone().autodiff()));
        let ids: Vec<i32> = (0..ROWS * config.context).map(|i| i as i32 % 7).collect();
        Self {
            ddp: DistributedDataParallel::new(model.unwrap(), &groups).unwrap(),
            tokens: Tokens::new(&ids, [ROWS, config.context], &device.clone().autodiff()),
            device,
        }
    }

    /// Runs the forward and backward pass of the micro-batch. Returns its loss.
    fn run(&self) -> Tensor<1> {
        let (tokens, targets) = (self.tokens.clone(), self.tokens.ids.clone());
        let forward = |model: &Transformer| model.losses(tokens, targets).sum();
        let loss = self.ddp.forward(&self.device, forward);
        self.ddp.backward(loss.clone());
        loss.inner()
    }

    /// Returns the gradients of all micro-batches since the last call.
    fn gradients(&mut self) -> Vec<Vec<f32>> {
        let gradients = self.ddp.reduce(1).unwrap();
        let all = self.ddp.full_gradients(&gradients).into_iter();
        all.map(values).collect()
    }
}

fn values(x: Tensor<1>) -> Vec<f32> {
    x.into_data().try_into_vec().unwrap()
}

/// A micro-batch does not read from the device, does not wait for it, and allocates no more memory than an earlier
/// micro-batch. Its products, attention and sums are all captured. A replay therefore adds the same gradients as
/// launches.
#[test]
fn a_micro_batch_is_captured_and_replayed() {
    for config in [small_gpt().config, small_llama().config] {
        let mut step = Step::new(&config);
        let losses: Vec<_> = (0..4).map(|_| values(step.run())).collect();
        let expected = step.gradients();

        step.run();
        let device = step.device.clone();
        let device = device.as_dispatch();
        Dispatch::graph_prepare(device).unwrap();
        step.run();
        Dispatch::graph_start_capture(device).unwrap();
        let loss = step.run();
        let graph = Dispatch::graph_stop_capture(device).unwrap();
        for _ in 0..2 {
            // SAFETY: the loss and the gradients are alive, and no other stream uses them.
            unsafe { Dispatch::graph_replay(device, &graph) }.unwrap();
        }
        assert_eq!(values(loss), losses[3]);
        assert!(step.gradients() == expected, "gradients of other bits");
    }
}

/// The metrics of a run as text, so that NaN equals itself.
#[derive(Default)]
struct Metrics(Vec<String>);

impl Observer for Metrics {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }
}

/// Ten steps of two micro-batches on each rank. The first four steps have shorter rows.
struct Run<'a> {
    config: TransformerConfig,
    data_parallel: DataParallelConfig,
    recompute: RecomputeConfig,
    ranks: usize,
    text: &'a TextData,
}

/// The metrics, the bits of the parameters, and how the micro-batches ran.
type Trained = (Vec<String>, Vec<u32>, Option<CudaGraphStats>);

impl Run<'_> {
    fn train(&self, rank: &Rank, cuda_graph: bool) -> Result<Trained, AnyError> {
        let layout = ParallelConfig::new().with_data(self.ranks);
        let groups = ParallelContext::new(&layout, rank)?;
        let precision = self.data_parallel.precision;
        let device = gpu();
        let builder = ModelBuilder::with(&groups, &device, 1, precision.master())
            .with_compute_dtype(precision.of(precision.master()))
            .with_recompute(&self.recompute)?;
        let train = TrainConfig {
            steps: 10,
            micro_batch_size: 2,
            global_batch_size: 4 * self.ranks,
            sequence_warmup: vec![SequenceWarmup {
                until_step: 4,
                length: self.config.context / 2,
            }],
            held_out_samples: 2,
            evaluate_every: Some(5),
            data_parallel: self.data_parallel.clone(),
            cuda_graph,
            ..TrainConfig::default()
        };
        // The tokens of the text are bytes.
        let config = TransformerConfig {
            vocabulary: 256,
            ..self.config.clone()
        };
        let mut trainer = Trainer::new(config.init_with(builder)?, &groups, &device, &train)?;
        let mut metrics = Metrics::default();
        trainer.fit(self.text, &mut metrics)?;
        let parameters = trainer.model().parameters().into_iter();
        let bits = parameters.flat_map(values).map(f32::to_bits).collect();
        Ok((metrics.0, bits, trainer.cuda_graphs()))
    }

    fn check(&self, name: &str, of_all: impl Fn(bool) -> Vec<Trained>) {
        let [plain, graphs] = [false, true].map(of_all);
        for (plain, graphs) in plain.into_iter().zip(graphs) {
            assert_eq!(plain.0, graphs.0, "{name}");
            assert!(plain.1 == graphs.1, "{name}: weights of other bits");
            // Steps 1 to 4 have one shape, and steps 5 to 10 have another shape.
            let expected = CudaGraphStats {
                captured: 2,
                replayed: 5 + 9,
                eager: 3 + 3,
            };
            assert_eq!((plain.2, graphs.2), (None, Some(expected)), "{name}");
        }
    }
}

fn bf16(zero_stage: ZeroStage) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage,
        precision: Precision::Bf16,
        bucket_size: Some(1000),
        ..DataParallelConfig::default()
    }
}

#[test]
fn a_run_of_graphs_has_the_bits_of_one_without() {
    let text = Text::new();
    let text = text.open();
    let recomputed = RecomputeConfig {
        granularity: RecomputeGranularity::Full,
        ..RecomputeConfig::default()
    };
    let plain = RecomputeConfig::default();
    let f32 = DataParallelConfig::default();
    for (name, config, data_parallel, recompute) in [
        ("gpt", small_gpt().config, f32.clone(), &plain),
        (
            "llama",
            small_llama().config,
            bf16(ZeroStage::Replicated),
            &plain,
        ),
        ("recomputed", small_llama().config, f32, &recomputed),
    ] {
        let run = Run {
            config: two_layers(&config),
            data_parallel,
            recompute: recompute.clone(),
            ranks: 1,
            text: &text,
        };
        run.check(name, |cuda_graph| {
            let train = |rank: Rank| run.train(&rank, cuda_graph);
            World::threads(1).unwrap().run(train).unwrap()
        });
    }
}

/// The ranks share a device, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE.
#[test]
fn two_ranks_over_nccl_replay_graphs() {
    if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_err() {
        skipped("needs NCCL_MULTI_RANK_GPU_ENABLE=1");
        return;
    }
    let text = Text::new();
    let text = text.open();
    for stage in [
        ZeroStage::Replicated,
        ZeroStage::Optimizer,
        ZeroStage::Gradients,
    ] {
        let run = Run {
            config: two_layers(&small_llama().config),
            data_parallel: bf16(stage),
            recompute: RecomputeConfig::default(),
            ranks: 2,
            text: &text,
        };
        run.check(&format!("ZeRO-{stage}"), |cuda_graph| {
            let joined = join_as_threads(2, |launch| {
                let world = World::processes(launch).engine(Engine::Nccl);
                world.run(|rank| run.train(&rank, cuda_graph)).unwrap()
            });
            joined.into_iter().flatten().collect()
        });
    }
}

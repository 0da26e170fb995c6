//! Burn's text generation, byte by byte, on this source file. The line marked `//*` makes it run on many ranks.
//!
//! ```text
//! cargo run --release -p burn-megatron-learner --example text_generation -- /tmp/text   # 2 threads
//! mpirun -n 2 target/release/examples/text_generation /tmp/text                         # built with --features mpi
//! ```
//!
//! A second argument is the epoch to resume from.

use std::env;
use std::error::Error;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron_learner::{MegatronStrategy, scale_loss};

const TEXT: &[u8] = include_bytes!("text_generation.rs");
const BYTES: usize = 256;
const CONTEXT: usize = 32;
const HIDDEN: usize = 32;

#[derive(Module, Debug)]
struct TextGeneration {
    bytes: Embedding,
    positions: Embedding,
    transformer: TransformerEncoder,
    output: Linear,
}

impl TextGeneration {
    fn new(device: &Device) -> Self {
        let transformer =
            TransformerEncoderConfig::new(HIDDEN, 4 * HIDDEN, 4, 2).with_norm_first(true);
        Self {
            bytes: EmbeddingConfig::new(BYTES, HIDDEN).init(device),
            positions: EmbeddingConfig::new(CONTEXT, HIDDEN).init(device),
            // Burn's dropout draws from one generator per process, which ranks that are threads would share.
            transformer: transformer.with_dropout(0.0).init(device),
            output: LinearConfig::new(HIDDEN, BYTES).init(device),
        }
    }

    fn forward(&self, batch: Rows) -> ClassificationOutput {
        let [rows, context] = batch.bytes.dims();
        let device = batch.bytes.device();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device).unsqueeze();
        let x = self.bytes.forward(batch.bytes) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(rows, context, &device);
        let x = self
            .transformer
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.output.forward(x).reshape([rows * context, BYTES]);
        let targets = batch.next.reshape([rows * context]);
        let loss = CrossEntropyLossConfig::new().init(&device);
        ClassificationOutput {
            loss: loss.forward(logits.clone(), targets.clone()),
            output: logits,
            targets,
        }
    }
}

impl TrainStep for TextGeneration {
    type Input = Rows;
    type Output = ClassificationOutput;

    fn step(&self, batch: Rows) -> TrainOutput<ClassificationOutput> {
        let output = self.forward(batch);
        // Returns the loss unchanged, unless the strategy sets a loss scale for f16.
        let gradients = scale_loss(output.loss.clone()).backward();
        TrainOutput::new(self, gradients, output)
    }
}

impl InferenceStep for TextGeneration {
    type Input = Rows;
    type Output = ClassificationOutput;

    fn step(&self, batch: Rows) -> ClassificationOutput {
        self.forward(batch)
    }
}

/// Rows of text `[batch, context]`, and the byte after each.
#[derive(Clone, Debug)]
struct Rows {
    bytes: Tensor<2, Int>,
    next: Tensor<2, Int>,
}

#[derive(Clone)]
struct RowBatcher;

impl Batcher<Vec<u8>, Rows> for RowBatcher {
    fn batch(&self, items: Vec<Vec<u8>>, device: &Device) -> Rows {
        let part = |start: usize| {
            let bytes = items.iter().flat_map(|item| &item[start..start + CONTEXT]);
            let bytes: Vec<_> = bytes.map(|byte| i64::from(*byte)).collect();
            Tensor::from_data(TensorData::new(bytes, [items.len(), CONTEXT]), device)
        };
        Rows {
            bytes: part(0),
            next: part(1),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().ok_or("expected the folder of the run")?;
    let resume = arguments.next().map(|epoch| epoch.parse()).transpose()?;
    run(&folder, resume)
}

/// Trains from the start, or from the end of an epoch.
pub fn run(folder: &str, resume: Option<usize>) -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let rows: Vec<_> = TEXT
        .windows(CONTEXT + 1)
        .step_by(9)
        .map(<[u8]>::to_vec)
        .collect();
    let loader = |rows: Vec<Vec<u8>>| {
        let builder = DataLoaderBuilder::new(RowBatcher).batch_size(16).shuffle(3);
        builder.build(InMemDataset::new(rows))
    };
    let held_out = rows.iter().step_by(10).cloned().collect();

    let mut training = SupervisedTraining::new(folder, loader(rows), loader(held_out))
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .with_default_checkpointers()
        .with_training_strategy(MegatronStrategy::from_env_or_threads(2)?.clip(1.0).into()) //*
        .num_epochs(4)
        .summary();
    if let Some(epoch) = resume {
        training = training.checkpoint(epoch);
    }
    let learner = Learner::new(
        TextGeneration::new(&device),
        AdamWConfig::new().init(),
        ConstantLr::new(1e-2),
    );
    let result = training.launch(learner);
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }

    let device = Device::flex();
    let first = vec![TEXT[..CONTEXT + 1].to_vec()];
    let loss = result.model.forward(RowBatcher.batch(first, &device)).loss;
    let loss = loss.into_scalar::<f32>();
    println!("loss {loss:.3} nats per byte");
    if loss < 2.5 {
        Ok(())
    } else {
        Err("expected a loss below 2.5".into())
    }
}

//! Tests that a model of burn-nn layers with full sharding and recomputation trains as plain Burn on one rank.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::{ParallelModule, recompute};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_tests::inputs::{fill, wave};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const RANKS: usize = 4;
const SAMPLES: usize = 8;
const SEQ: usize = 4;
const WIDTH: usize = 8;
const LAYERS: usize = 4;
const STEPS: usize = 5;
const LEARNING_RATE: f64 = 0.05;
const TOLERANCE: f64 = 1e-10;
/// Burn's AdamW rounds its settings to f32, but the library's AdamW does not, so these numbers are exact in f32. The
/// gradient of a key bias is zero except for rounding, which a small epsilon would amplify.
const EPSILON: f64 = 1.0 / 131_072.0;
const BETA: f64 = 0.5;

#[derive(Module, Debug)]
struct Model {
    input: Linear,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Model {
    /// Creates a model in f64. A different `phase` gives different weights.
    fn new(device: &Device, phase: f64) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 2, LAYERS).with_dropout(0.0);
        let model = Self {
            input: LinearConfig::new(3, WIDTH).init(device),
            encoder: encoder.init(device),
            output: LinearConfig::new(WIDTH, 2).init(device),
        };
        fill(model, phase)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = TransformerEncoderInput::new(self.input.forward(x));
        self.output.forward(self.encoder.forward(x))
    }

    /// Computes the same output with recomputation of each block.
    fn recomputed(&self, x: Tensor<3>) -> Tensor<3> {
        let Self { input, output, .. } = self.clone();
        let mut x = recompute(x, move |x| input.forward(x));
        for layer in &self.encoder.layers {
            let layer = layer.clone();
            x = recompute(x, move |x| layer.forward(x, None, None));
        }
        recompute(x, move |x| output.forward(x))
    }
}

/// Returns the squared error of some samples of a step, summed.
fn loss(
    step: usize,
    samples: Range<usize>,
    device: &Device,
    forward: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<1> {
    let part = |width: usize, phase: f64| {
        let shape = [samples.len(), SEQ, width];
        let all = samples.start * SEQ * width..samples.end * SEQ * width;
        let values: Vec<f64> = all.map(|i| wave(i, phase + step as f64)).collect();
        Tensor::<3>::from_data(TensorData::new(values, shape), (device, DType::F64))
    };
    let error = forward(part(3, 0.5)) - part(2, 7.0);
    (error.clone() * error).sum()
}

#[derive(Default)]
struct Weights(Vec<f64>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values: Vec<f64> = param.base().into_data().try_into_vec().unwrap();
        self.0.extend(values);
    }
}

fn weights(model: &Model) -> Vec<f64> {
    let mut weights = Weights::default();
    model.visit(&mut weights);
    weights.0
}

/// The loss of each step, and the weights after the last step.
type Run = (Vec<f64>, Vec<f64>);

fn plain() -> Run {
    let device = Device::flex().autodiff();
    let mut model = Model::new(&device, 0.0);
    let mut optimizer = BurnAdamWConfig::new()
        .with_beta_1(BETA as f32)
        .with_beta_2(BETA as f32)
        .with_epsilon(EPSILON as f32)
        .with_weight_decay(0.0)
        .init();
    let mut losses = vec![];
    for step in 0..STEPS {
        let loss = loss(step, 0..SAMPLES, &device, |x| model.forward(x));
        losses.push(loss.clone().into_scalar::<f64>());
        let loss = loss.mul_scalar(1.0 / SAMPLES as f64);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    (losses, weights(&model))
}

/// Trains on several ranks. Each rank runs its share of the samples in micro-batches. Also returns the peak number of
/// gathered blocks.
fn sharded(micro_batches: usize) -> Vec<(Run, u64)> {
    let mesh = ParallelConfig::new().with_data(RANKS);
    let config = DataParallelConfig {
        zero_stage: ZeroStage::Parameters,
        ..DataParallelConfig::default()
    };
    let settings = AdamWConfig {
        beta1: BETA,
        beta2: BETA,
        epsilon: EPSILON,
        weight_decay: 0.0,
        ..AdamWConfig::default()
    };
    let run = |rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex().autodiff();
        let model = Model::new(&Device::flex(), 100.0 * groups.rank() as f64);
        let model = ParallelModule::replicated(model);
        let mut ddp = DistributedDataParallel::with(model, &groups, &config)?;
        let mut optimizer = ParallelAdamW::new(&settings, &ddp)?;
        let (share, size) = (SAMPLES / RANKS, SAMPLES / RANKS / micro_batches);
        let first = share * groups.rank();
        let mut losses = vec![];
        for step in 0..STEPS {
            let mut sum = 0.0;
            for start in (first..first + share).step_by(size) {
                let samples = start..start + size;
                let found = ddp.forward(&device, |model| {
                    loss(step, samples, &device, |x| model.recomputed(x))
                });
                sum += found.clone().into_scalar::<f64>();
                if start + size == first + share {
                    ddp.backward_last(found)
                } else {
                    ddp.backward(found)
                };
            }
            losses.push(sum);
            let gradients = ddp.reduce(share as u64)?;
            optimizer.step(LEARNING_RATE, &mut ddp, gradients);
        }
        let weights = weights(&ddp.to_module());
        Ok::<_, AnyError>(((losses, weights), ddp.usage().peak_unsharded_units()))
    };
    World::threads(RANKS).unwrap().run(run).unwrap()
}

/// Asserts that values are equal up to the order of sums.
#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        let apart = (a - b).abs() / largest;
        assert!(
            apart < TOLERANCE,
            "{what} {index}: {a} is not {b} ({apart:e})"
        );
    }
}

#[test]
fn burn_nn_layers_are_trained_as_on_one_rank() {
    let (losses, trained) = plain();
    let initial = weights(&Model::new(&Device::flex(), 0.0));
    let moved = trained.iter().zip(&initial).filter(|(a, b)| a != b);
    assert!(
        moved.count() * 10 > 9 * trained.len(),
        "the weights are trained"
    );
    for micro_batches in [1, 2] {
        let ranks = sharded(micro_batches);
        let of_step = |step: usize| ranks.iter().map(|((losses, _), _)| losses[step]).sum();
        let sums: Vec<f64> = (0..STEPS).map(of_step).collect();
        assert_close("loss of step", &sums, &losses);
        for ((_, found), peak_unsharded_units) in &ranks {
            assert_close("weight", found, &trained);
            assert_eq!(*found, ranks[0].0.1, "ranks hold the same bits");
            assert_eq!(
                *peak_unsharded_units, 2,
                "the one at hand, and the next one"
            );
        }
    }
}

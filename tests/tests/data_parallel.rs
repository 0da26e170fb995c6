//! Tests that an unmodified burn-nn module gives the same results on several ranks as plain Burn on one rank.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_tests::inputs::{fill, wave};

const SAMPLES: usize = 6;
const SEQ: usize = 4;
const WIDTH: usize = 8;
const OUT: usize = 3;
const STEPS: usize = 3;
const LEARNING_RATE: f64 = 0.05;
/// A large epsilon. The gradient of a key bias is zero except for rounding, and a small epsilon would amplify the
/// rounding. Burn's AdamW rounds its settings to f32, so these numbers are exact in f32.
const EPSILON: f64 = 1.0 / 131_072.0;
const BETA: f64 = 0.5;

type RankError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Module, Debug)]
struct Model {
    encoder: TransformerEncoder,
    output: Linear,
}

impl Model {
    /// Creates a model in f64. A different `phase` gives different weights.
    fn new(device: &Device, phase: f64) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 2, 2).with_dropout(0.0);
        let model = Self {
            encoder: encoder.init(device),
            output: LinearConfig::new(WIDTH, OUT).init(device),
        };
        fill(model, phase)
    }

    /// Returns the squared error, summed over the counted tokens of `samples`.
    fn loss(&self, samples: Range<usize>, counts: [usize; SAMPLES], device: &Device) -> Tensor<1> {
        let rows = samples.len();
        let part = |shape: [usize; 3], phase: f64| {
            let len = shape[1] * shape[2];
            let all = samples.start * len..samples.end * len;
            let values: Vec<f64> = all.map(|i| wave(i, phase)).collect();
            Tensor::<3>::from_data(TensorData::new(values, shape), (device, DType::F64))
        };
        let counts = samples.clone().map(|sample| counts[sample]);
        let mask = counts.flat_map(|count| (0..SEQ).map(move |at| f64::from(at < count)));
        let mask = TensorData::new(mask.collect::<Vec<_>>(), [rows, SEQ, 1]);
        let mask = Tensor::<3>::from_data(mask, (device, DType::F64));
        let input = TransformerEncoderInput::new(part([rows, SEQ, WIDTH], 0.5));
        let y = self.output.forward(self.encoder.forward(input));
        let error = (y - part([rows, SEQ, OUT], 7.0)) * mask;
        (error.clone() * error).sum()
    }
}

/// The weights, or the gradients of the weights, in module order.
struct Elements<'a>(Option<&'a Gradients>, Vec<Vec<f64>>);

impl ModuleVisitor for Elements<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = match self.0 {
            Some(gradients) => param.base().grad(gradients).expect("a gradient"),
            None => param.base(),
        };
        self.1.push(values(value));
    }
}

fn elements<M: Module>(module: &M, gradients: Option<&Gradients>) -> Vec<Vec<f64>> {
    let mut elements = Elements(gradients, vec![]);
    module.visit(&mut elements);
    elements.1
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().try_into_vec().unwrap()
}

/// The result of a run: the gradients of the first step, and the weights after the last step.
#[derive(Debug)]
struct Run {
    gradients: Vec<Vec<f64>>,
    weights: Vec<Vec<f64>>,
}

/// Trains the full batch on one rank with plain Burn.
fn plain(counts: [usize; SAMPLES]) -> Run {
    let device = Device::flex().autodiff();
    let mut model = Model::new(&device, 0.0);
    let mut optimizer = BurnAdamWConfig::new()
        .with_beta_1(BETA as f32)
        .with_beta_2(BETA as f32)
        .with_epsilon(EPSILON as f32)
        .with_weight_decay(0.0)
        .init();
    let tokens = counts.iter().sum::<usize>() as f64;
    let mut gradients = vec![];
    for step in 0..STEPS {
        // The backward pass of `div_scalar` would round the factor to f32.
        let loss = model
            .loss(0..SAMPLES, counts, &device)
            .mul_scalar(1.0 / tokens);
        let found = loss.backward();
        if step == 0 {
            gradients = elements(&model, Some(&found));
        }
        let found = GradientsParams::from_grads(found, &model);
        model = optimizer.step(LEARNING_RATE, model, found);
    }
    Run {
        gradients,
        weights: elements(&model, None),
    }
}

/// Trains on several ranks. Each rank runs its share of the samples in micro-batches, with different initial weights.
fn parallel(data: usize, micro_batches: usize, counts: [usize; SAMPLES]) -> Vec<Run> {
    let config = ParallelConfig::new().with_data(data);
    let run = |rank| {
        let groups = ParallelContext::new(&config, &rank)?;
        let model = Model::new(&Device::flex(), 100.0 * groups.rank() as f64);
        let model = ParallelModule::replicated(model);
        let mut ddp = DistributedDataParallel::new(model, &groups)?;
        let settings = AdamWConfig {
            beta1: BETA,
            beta2: BETA,
            epsilon: EPSILON,
            weight_decay: 0.0,
            ..AdamWConfig::default()
        };
        let mut optimizer = ParallelAdamW::new(&settings, &ddp)?;
        let share = SAMPLES / data;
        let own = groups.rank() * share..(groups.rank() + 1) * share;
        let mut first_gradients = vec![];
        for step in 0..STEPS {
            let gradients = reduced(&mut ddp, own.clone(), micro_batches, counts)?;
            if step == 0 {
                let whole = ddp.full_gradients(&gradients).into_iter();
                first_gradients = whole.map(values).collect();
            }
            optimizer.step(LEARNING_RATE, &mut ddp, gradients);
        }
        Ok::<_, RankError>(Run {
            gradients: first_gradients,
            weights: elements(&ddp.to_module(), None),
        })
    };
    World::threads(data).unwrap().run(run).unwrap()
}

fn reduced(
    ddp: &mut DistributedDataParallel<Model>,
    own: Range<usize>,
    micro_batches: usize,
    counts: [usize; SAMPLES],
) -> Result<burn_megatron::data_parallel::Gradients, RankError> {
    let device = Device::flex().autodiff();
    // The last micro-batch may be smaller.
    let size = own.len().div_ceil(micro_batches);
    for first in own.clone().step_by(size) {
        let samples = first..own.end.min(first + size);
        let loss = ddp.forward(&device, |model| model.loss(samples, counts, &device));
        ddp.backward(loss);
    }
    let tokens = counts[own].iter().sum::<usize>();
    Ok(ddp.reduce(tokens as u64)?)
}

/// Asserts that values are equal up to the order of sums.
#[track_caller]
fn assert_close(what: &str, found: &[Vec<f64>], expected: &[Vec<f64>]) {
    assert_eq!(found.len(), expected.len());
    let all = expected.iter().flatten();
    let largest = all.fold(0.0, |max: f64, x| max.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            let apart = (a - b).abs() / largest;
            assert!(
                apart < 1e-11,
                "{what}, parameter {index}: {a} is not {b} ({apart:e})"
            );
        }
    }
}

#[track_caller]
fn assert_equals_one_rank(data: usize, micro_batches: usize, counts: [usize; SAMPLES]) {
    let one = plain(counts);
    let ranks = parallel(data, micro_batches, counts);
    for rank in &ranks {
        assert_close("gradient", &rank.gradients, &one.gradients);
        assert_close("weight", &rank.weights, &one.weights);
        assert_eq!(rank.weights, ranks[0].weights, "ranks hold the same bits");
    }
}

/// Numbers of tokens that differ between ranks and micro-batches.
const UNEVEN: [usize; SAMPLES] = [4, 1, 3, 4, 2, 1];

#[test]
fn one_rank() {
    assert_equals_one_rank(1, 1, UNEVEN);
    assert_equals_one_rank(1, 2, UNEVEN);
}

#[test]
fn two_ranks() {
    assert_equals_one_rank(2, 1, UNEVEN);
    assert_equals_one_rank(2, 2, UNEVEN);
}

#[test]
fn three_ranks() {
    assert_equals_one_rank(3, 1, UNEVEN);
    assert_equals_one_rank(3, 2, UNEVEN);
}

#[test]
fn a_rank_whose_tokens_do_not_count() {
    assert_equals_one_rank(2, 1, [4, 1, 3, 0, 0, 0]);
    assert_equals_one_rank(3, 2, [0, 0, 3, 1, 0, 2]);
}

#[test]
fn the_module_evaluates_as_the_plain_one() {
    let device = Device::flex();
    let model = Model::new(&device, 0.0);
    let expected = values(model.loss(0..SAMPLES, UNEVEN, &device));
    let ddp = DistributedDataParallel::new(
        ParallelModule::replicated(model),
        &ParallelContext::single(),
    );
    let mut ddp = ddp.unwrap();
    let loss = ddp.module().loss(0..SAMPLES, UNEVEN, &device);
    assert!(!loss.is_autodiff());
    assert_eq!(values(loss), expected);
    // If a parameter had used its hook, its missing backward pass would be reported.
    assert!(ddp.reduce(1).is_ok());
}

#[test]
fn evaluation_between_two_micro_batches_changes_nothing() {
    let gradients = |evaluate: bool| {
        let model = ParallelModule::replicated(Model::new(&Device::flex(), 0.0));
        let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single()).unwrap();
        let device = Device::flex().autodiff();
        for samples in [0..2, 2..SAMPLES] {
            let loss = ddp.forward(&device, |model| model.loss(samples, UNEVEN, &device));
            if evaluate {
                ddp.module().loss(0..1, UNEVEN, &Device::flex());
            }
            ddp.backward(loss);
        }
        let reduced = ddp.reduce(1).unwrap();
        ddp.full_gradients(&reduced)
            .into_iter()
            .map(values)
            .collect::<Vec<_>>()
    };
    assert_eq!(gradients(true), gradients(false));
}

//! Tests that the loss in chunks of tokens equals the loss of all logits, in f64, with every gradient.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{assemble, assert_close, autodiff, filled, leaf, over, part, values, wave};
use crate::comm::ParallelContext;
use crate::nn::hook::{GradientSink, attach_hooks, with_anchor};
use crate::nn::*;

const BATCH: usize = 2;
const SEQ: usize = 4;
const TOKENS: usize = BATCH * SEQ;

/// The tensor at which the backward pass starts.
#[derive(Clone, Copy, Debug)]
enum Backward {
    /// A weighted sum: the loss of each token times its index, counted from 1.
    PerToken,
    /// The sum of the losses, multiplied by `factor`. `told` is the factor that was passed to the forward pass. With
    /// `None` the backward pass starts at the losses.
    Sum { told: Option<Told>, factor: f64 },
}

#[derive(Clone, Copy, Debug)]
enum Told {
    Number(f64),
    Device(f64),
}

impl Told {
    fn factor(self) -> LossFactor {
        match self {
            Self::Number(number) => number.into(),
            Self::Device(number) => {
                Tensor::<1>::from_floats([number as f32], &Device::flex()).into()
            }
        }
    }
}

const SUM: Backward = Backward::Sum {
    told: Some(Told::Number(1.0)),
    factor: 1.0,
};

/// The test case of a loss on some ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    sequence_parallel: bool,
    chunk_size: Option<usize>,
    vocabulary: usize,
    hidden: usize,
    smoothing: f64,
    z_loss: f64,
    soft_cap: Option<f64>,
    backward: Backward,
}

impl Case {
    fn new(backward: Backward) -> Self {
        Self {
            ranks: 1,
            sequence_parallel: false,
            chunk_size: Some(0),
            vocabulary: 10,
            hidden: 6,
            smoothing: 0.0,
            z_loss: 0.0,
            soft_cap: None,
            backward,
        }
    }

    /// Returns the loss layer, the output layer, this rank's hidden states, and the targets. One target is ignored.
    fn build(
        &self,
        groups: &ParallelContext,
    ) -> (LinearCrossEntropy, OutputLayer, Tensor<3>, Tensor<2, Int>) {
        let place = groups.place();
        // With two ranks, the second rank has both tokens and padding.
        let vocabulary = Vocabulary::padded(self.vocabulary, 4, place.size);
        let loss = VocabParallelCrossEntropy::new(vocabulary, groups.tensor())
            .with_label_smoothing(self.smoothing)
            .with_z_loss(self.z_loss)
            .with_ignore(Some(-1));
        let builder = ModelBuilder::with(groups, &autodiff(), 7, DType::F64);
        let builder = builder.with_sequence_parallel(self.sequence_parallel);
        let output = OutputLayerConfig::new(vocabulary, self.hidden).init(&builder);
        let output = builder.finish(output.unwrap()).unwrap();
        let output = filled(output.module, &output.table, place);
        let x = wave([BATCH, SEQ, self.hidden], 0.5);
        let targets = (0..TOKENS).map(|i| match i {
            5 => -1,
            i => ((7 * i + 3) % self.vocabulary) as i64,
        });
        let targets = TensorData::new(targets.collect::<Vec<_>>(), [BATCH, SEQ]);
        (
            LinearCrossEntropy::new(loss, self.chunk_size).with_soft_cap(self.soft_cap),
            output,
            leaf(part(x, &self.input(), place)),
            Tensor::from_data(targets, &autodiff()),
        )
    }

    /// Returns the placement of the hidden states on the ranks.
    fn input(&self) -> Placement {
        if self.sequence_parallel {
            Placement::split(1, SEQ, self.ranks)
        } else {
            Placement::Replicated
        }
    }

    /// Returns the objective, the parts, and the gradients of hidden states and weight.
    fn run(&self) -> [Vec<f64>; 4] {
        let all = over(self.ranks, |groups| {
            let (loss, output, x, targets) = self.build(&groups);
            let (objective, parts, gradients) = match self.backward {
                Backward::PerToken => {
                    let losses = loss.losses(x.clone(), &output, None, targets);
                    let numbers = Tensor::<1, Int>::arange(1..TOKENS as i64 + 1, &autodiff());
                    let numbers = numbers.float().cast(DType::F64).reshape([BATCH, SEQ]);
                    let gradients = (losses.objective.clone() * numbers).sum().backward();
                    let parts = losses.parts.into_iter().flat_map(values).collect();
                    (values(losses.objective.inner()), parts, gradients)
                }
                Backward::Sum { told, factor } => {
                    let sums = match told {
                        Some(told) => loss.sums(x.clone(), &output, None, targets, &told.factor()),
                        None => loss.losses(x.clone(), &output, None, targets).sums(),
                    };
                    let gradients = sums.objective.clone().mul_scalar(factor).backward();
                    let parts = sums.parts.map(values).unwrap_or_default();
                    (values(sums.objective.inner()), parts, gradients)
                }
            };
            let weight = output.weight.unwrap().val().grad(&gradients).unwrap();
            let x = x.grad(&gradients).unwrap();
            [objective, parts, values(x), values(weight)]
        });
        let of = |i: usize| all.iter().map(|own| own[i].clone()).collect::<Vec<_>>();
        let padded = Vocabulary::padded(self.vocabulary, 4, self.ranks).padded;
        let weight = Placement::split(0, padded, self.ranks);
        let mut weight = assemble(&weight, &[padded, self.hidden], &of(3));
        let padding = weight.split_off(self.vocabulary * self.hidden);
        assert!(padding.iter().all(|x| *x == 0.0), "a gradient of padding");
        let x = assemble(&self.input(), &[BATCH, SEQ, self.hidden], &of(2));
        [all[0][0].clone(), all[0][1].clone(), x, weight]
    }

    /// Compares with the losses of one chunk on one rank.
    fn check(&self) {
        let whole = Self {
            ranks: 1,
            sequence_parallel: false,
            chunk_size: Some(0),
            backward: match self.backward {
                Backward::PerToken => Backward::PerToken,
                Backward::Sum { factor, .. } => Backward::Sum { told: None, factor },
            },
            ..*self
        };
        let names = ["objective", "parts", "input gradient", "weight gradient"];
        for ((name, found), expected) in names.iter().zip(self.run()).zip(whole.run()) {
            if expected.is_empty() {
                assert!(found.is_empty(), "{name} of {self:?}");
            } else {
                assert_close(&format!("{name} of {self:?}"), &found, &expected);
            }
        }
    }
}

/// Tests chunks of one token, chunks with a smaller last chunk, equal chunks, and a chunk that is larger than all
/// tokens.
#[test]
fn chunks_of_any_size_equal_the_whole() {
    for backward in [Backward::PerToken, SUM] {
        for chunk_size in [1, 3, 4, 7, 8, 100] {
            for (smoothing, z_loss, soft_cap) in [
                (0.0, 0.0, None),
                (0.1, 0.0, None),
                (0.0, 0.02, Some(0.7)),
                (0.1, 0.02, None),
            ] {
                Case {
                    soft_cap,
                    chunk_size: Some(chunk_size),
                    smoothing,
                    z_loss,
                    ..Case::new(backward)
                }
                .check();
            }
        }
    }
}

#[test]
fn chunks_on_tensor_ranks_equal_one_rank() {
    for backward in [Backward::PerToken, SUM] {
        for (ranks, sequence_parallel) in [(2, false), (2, true), (4, true)] {
            for (chunk_size, z_loss) in [(3, 0.02), (0, 0.02), (0, 0.0)] {
                Case {
                    ranks,
                    sequence_parallel,
                    chunk_size: Some(chunk_size),
                    smoothing: 5.0 * z_loss,
                    soft_cap: (z_loss > 0.0).then_some(0.7),
                    z_loss,
                    ..Case::new(backward)
                }
                .check();
            }
        }
    }
}

/// Also tests a forward pass with a different factor, and a single chunk.
#[test]
fn any_factor_of_the_sum_is_in_the_gradients() {
    for told in [
        Told::Number(1024.0),
        Told::Device(1024.0),
        Told::Number(3.0),
    ] {
        for factor in [1024.0, 0.3] {
            for (ranks, chunk_size) in [(1, 3), (2, 3), (1, 0), (2, 0)] {
                let told = Some(told);
                Case {
                    ranks,
                    chunk_size: Some(chunk_size),
                    ..Case::new(Backward::Sum { told, factor })
                }
                .check();
            }
        }
    }
}

/// The vocabulary of Qwen 2.5.
#[test]
fn a_large_vocabulary_in_chunks() {
    Case {
        vocabulary: 151_936,
        hidden: 2,
        chunk_size: Some(3),
        ..Case::new(SUM)
    }
    .check();
}

/// Small gradients are not lost in f16 if the loss scale is passed to the forward pass.
#[test]
fn the_loss_scale_is_in_the_gradients_of_logits() {
    let device = Device::flex();
    let vocabulary = Vocabulary::padded(2000, 1, 1);
    let groups = ParallelContext::single();
    let input_gradient = |dtype: DType, told: f64, chunk_size: usize| {
        let builder = ModelBuilder::with(&groups, &autodiff(), 7, dtype);
        let output = OutputLayerConfig::new(vocabulary, 16).init(&builder);
        let loss = VocabParallelCrossEntropy::new(vocabulary, groups.tensor());
        let x = leaf(wave([1, 8, 16], 0.5).cast(dtype));
        let targets = Tensor::<2, Int>::zeros([1, 8], &device);
        let loss = LinearCrossEntropy::new(loss, Some(chunk_size));
        let sums = loss.sums(x.clone(), &output.unwrap(), None, targets, &told.into());
        let factor = 1024.0;
        let gradients = sums.objective.mul_scalar(factor).backward();
        values(x.grad(&gradients).unwrap())
    };
    let expected = input_gradient(DType::F64, 1024.0, 3);
    for chunk_size in [3, 0] {
        let error = |told: f64| {
            let found = input_gradient(DType::F16, told, chunk_size);
            let both = found.iter().zip(&expected);
            let distance = both.map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            (distance / expected.iter().map(|x| x * x).sum::<f64>()).sqrt()
        };
        let (scaled, unscaled) = (error(1024.0), error(2f64.powi(-20)));
        assert!(scaled < 0.001 && unscaled > 0.01, "{scaled} {unscaled}");
    }
}

/// Receives gradients, and counts the announced gradients.
#[derive(Default)]
struct Received(Mutex<(usize, Vec<Vec<f64>>)>);

impl GradientSink for Received {
    fn expect(&self, _: usize) {
        self.0.lock().unwrap().0 += 1;
    }

    fn accumulate(&self, _: usize, gradient: Tensor<1>) {
        self.0.lock().unwrap().1.push(values(gradient));
    }
}

#[test]
fn the_weight_gradient_leaves_through_the_hook_in_the_backward() {
    for (backward, chunk_size) in [(Backward::PerToken, 3), (SUM, 3), (SUM, 0)] {
        let case = Case {
            chunk_size: Some(chunk_size),
            ..Case::new(backward)
        };
        let (loss, output, x, targets) = case.build(&ParallelContext::single());
        let sink = Arc::new(Received::default());
        let output = attach_hooks(output.valid(), sink.clone());
        let objective = with_anchor(&x, || match backward {
            Backward::PerToken => loss
                .losses(x.clone(), &output, None, targets)
                .objective
                .sum(),
            Backward::Sum { .. } => {
                let factor = 1.0.into();
                loss.sums(x.clone(), &output, None, targets, &factor)
                    .objective
            }
        });
        let (announced, received) = std::mem::take(&mut *sink.0.lock().unwrap());
        assert_eq!((announced, received.len()), (1, 0), "{case:?}");
        objective.backward();
        let (announced, received) = std::mem::take(&mut *sink.0.lock().unwrap());
        assert_eq!((announced, received.len()), (0, 1), "{case:?}");
        let [.., expected] = Case::new(SUM).run();
        assert_close("weight gradient", &received[0][..expected.len()], &expected);
    }
}

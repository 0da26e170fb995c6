//! The fused operations on random inputs, forward and backward. `check-gpu` compares them, and the benchmarks time
//! them.

mod subjects;
#[cfg(all(test, feature = "cuda"))]
mod traffic;

use std::str::FromStr;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_megatron::kernel_selection::Operation;
use burn_megatron::kernels::attention::AttentionEngine;
use burn_megatron::kernels::rope::{RopeConfig, RopeTable, Scaling};
use burn_megatron::kernels::{Function, apply};

use crate::error::Error;
use crate::timing::Work;

pub use subjects::{heads, subjects};

/// Operation on the inputs of a benchmark.
pub type OperationFn = fn(&mut Inputs) -> Tensor<1>;

/// Size of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The number of tokens, which is also the sequence length.
    pub rows: usize,
    /// The number of features, keys, or vocabulary entries.
    pub width: usize,
}

impl Shape {
    /// Returns `rows * width`.
    pub fn elements(&self) -> usize {
        self.rows * self.width
    }

    /// Returns the number of heads, of about 64 features, and the number of features per head.
    pub fn heads(&self) -> (usize, usize) {
        let heads = if self.width.is_multiple_of(64) {
            self.width / 64
        } else {
            1
        };
        (heads, self.width / heads)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = text.split_once('x');
        let sizes = sizes.and_then(|(rows, width)| Some((rows.parse().ok()?, width.parse().ok()?)));
        match sizes {
            Some((rows, width)) if rows > 0 && width > 0 => Ok(Self { rows, width }),
            _ => Err(format!(
                "invalid size `{text}`: expected rows x width, as in 4096x1024"
            )),
        }
    }
}

/// Benchmark of an operation.
pub struct KernelBenchmark {
    /// The name in the table.
    pub name: &'static str,
    /// The operation of the table `[kernels]` that the benchmark belongs to.
    pub operation: Operation,
    /// The number of elements of each leaf.
    pub leaves: fn(&Shape) -> Vec<usize>,
    /// The number of leaves, starting with the first, that the operation overwrites. Each run gets its own copies of
    /// these leaves, so that no copy is timed. The copies have no negative values.
    pub written: usize,
    /// The index of the first leaf that is f32 in every run, like accumulators and optimizer state.
    pub f32_from: usize,
    /// Returns whether the operation supports a size.
    pub takes: fn(&Shape) -> bool,
    /// The fused kernel.
    pub fused: OperationFn,
    /// The composition of Burn operations.
    pub composed: OperationFn,
    /// The minimum number of values in the type of the run that the forward and the backward must read and write.
    pub traffic: [fn(&Shape) -> usize; 2],
    /// The number of f32 values that the forward must read and write in addition.
    pub f32_traffic: fn(&Shape) -> usize,
}

impl KernelBenchmark {
    /// Returns the type of a leaf in a run of type `dtype`.
    pub fn dtype(&self, leaf: usize, dtype: DType) -> DType {
        if leaf < self.f32_from {
            dtype
        } else {
            DType::F32
        }
    }

    /// Returns the minimum number of bytes that a direction must read and write, or 0 if the direction does not
    /// exist.
    pub fn bytes(&self, direction: Direction, shape: &Shape, dtype: DType) -> usize {
        let [forward, backward] = self.traffic;
        match direction {
            Direction::Forward => {
                forward(shape) * dtype.size() + (self.f32_traffic)(shape) * DType::F32.size()
            }
            Direction::Backward => backward(shape) * dtype.size(),
        }
    }
}

/// Direction of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Computes the output.
    Forward,
    /// Computes the gradients of all leaves.
    Backward,
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::Forward, Self::Backward];

    /// Returns the name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

/// Random inputs of an operation.
pub struct Inputs {
    /// The size.
    pub shape: Shape,
    /// Flat float leaves.
    pub leaves: Vec<Tensor<1>>,
    /// The targets of shape `[rows]`, each an index below the width.
    pub targets: Tensor<1, Int>,
    /// The rotary angles for heads of this width.
    pub table: RopeTable,
    /// The engine of fused attention.
    pub attention: Arc<dyn AttentionEngine>,
}

impl Inputs {
    /// Draws random inputs for one size.
    pub fn draw(
        subject: &KernelBenchmark,
        shape: &Shape,
        (device, dtype): (&Device, DType),
        attention: Arc<dyn AttentionEngine>,
    ) -> Result<Self, Error> {
        let draw = |(leaf, len): (usize, usize)| {
            let draw = Tensor::<1>::random([len], Distribution::Normal(0.0, 1.0), device);
            draw.cast(subject.dtype(leaf, dtype))
        };
        let (_, width) = shape.heads();
        let last = Distribution::Uniform(0.0, shape.width as f64);
        Ok(Self {
            shape: *shape,
            leaves: (subject.leaves)(shape)
                .into_iter()
                .enumerate()
                .map(draw)
                .collect(),
            targets: Tensor::<1, Int>::random([shape.rows], last, device),
            table: table(width, shape.rows, device, dtype)?,
            attention,
        })
    }

    /// Returns a random gradient of the output.
    pub fn gradient(&self, subject: &KernelBenchmark) -> Tensor<1> {
        let output = (subject.fused)(&mut self.owning(subject.written));
        output.random_like(Distribution::Normal(0.0, 1.0))
    }

    /// Copies the inputs to another device, with the attention engine of that device.
    pub fn on(
        &self,
        (device, dtype): (&Device, DType),
        attention: Arc<dyn AttentionEngine>,
    ) -> Result<Self, Error> {
        let (_, width) = self.shape.heads();
        let leaf = |leaf: &Tensor<1>| {
            let data = leaf.clone().try_into_data()?;
            Ok(Tensor::from_data(data, (device, leaf.dtype())))
        };
        Ok(Self {
            shape: self.shape,
            leaves: self.leaves.iter().map(leaf).collect::<Result<_, Error>>()?,
            targets: Tensor::from_data(self.targets.clone().try_into_data()?, device),
            table: table(width, self.shape.rows, device, dtype)?,
            attention,
        })
    }

    /// Returns the inputs with other leaves.
    pub fn with_leaves(&self, leaves: Vec<Tensor<1>>) -> Self {
        Self {
            shape: self.shape,
            leaves,
            targets: self.targets.clone(),
            table: self.table.clone(),
            attention: Arc::clone(&self.attention),
        }
    }

    /// Returns the inputs with separate memory for the first `written` leaves.
    pub fn owning(&self, written: usize) -> Self {
        let mut leaves = self.leaves.clone();
        for leaf in &mut leaves[..written] {
            *leaf = leaf.clone().abs();
        }
        self.with_leaves(leaves)
    }

    /// Takes leaf `i`, so that the caller is its only owner.
    pub fn take(&mut self, i: usize) -> Tensor<1> {
        let nothing = Tensor::empty([0], &self.leaves[i].device());
        std::mem::replace(&mut self.leaves[i], nothing)
    }

    /// Returns leaf `i` with shape `[rows, ..]`.
    pub fn rows(&self, i: usize) -> Tensor<2> {
        let leaf = self.leaves[i].clone();
        let width = leaf.dims()[0] / self.shape.rows;
        leaf.reshape([self.shape.rows, width])
    }

    /// Returns leaf `i`.
    pub fn leaf(&self, i: usize) -> Tensor<1> {
        self.leaves[i].clone()
    }
}

/// Returns the rotary angles for heads of `width` features.
fn table(
    width: usize,
    max_positions: usize,
    device: &Device,
    dtype: DType,
) -> Result<RopeTable, Error> {
    let config = RopeConfig {
        width: width / 2 * 2,
        max_positions,
        base: 10_000.0,
        scaling: Scaling::None,
    };
    Ok(RopeTable::new(&config, device, dtype)?)
}

/// Returns the work of one direction. The first `written` leaves are overwritten. `gradient` is the gradient of the
/// output.
pub fn work<'a>(
    form: OperationFn,
    written: usize,
    direction: Direction,
    inputs: &'a Inputs,
    gradient: &'a Tensor<1>,
) -> Work<'a> {
    match direction {
        Direction::Forward => Box::new(move || {
            let mut inputs = inputs.owning(written);
            Box::new(move || drop(form(&mut inputs)))
        }),
        Direction::Backward => Box::new(move || {
            let track = |leaf: &Tensor<1>| Tensor::from_inner(leaf.clone()).require_grad();
            let mut tracked = inputs.with_leaves(inputs.leaves.iter().map(track).collect());
            let seed = Seed(gradient.clone());
            let loss: Tensor<1> = apply(vec![form(&mut tracked).into_dispatch()], seed);
            Box::new(move || drop(loss.backward()))
        }),
    }
}

/// Scalar whose backward returns a given gradient for its input, so that only the operation is timed.
#[derive(Debug)]
pub struct Seed(pub Tensor<1>);

impl Function for Seed {
    fn forward(&self, _inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let options = (&self.0.device(), self.0.dtype());
        (Tensor::<1>::zeros([1], options).into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.0.clone().into_dispatch())]
    }
}

//! A small model that multiplies with FP8 weights and is trained by hand. The weights are quantized by the
//! wrapper or by the test.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, FloatDType, TensorData};
use burn_megatron_kernels::fp8::{
    self, Accumulation, CurrentScale, Format, Fp8Matrix, QuantizerUsage, Scaling, amax,
    current_scale, multiply,
};

use super::*;
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::ReduceOp;
use crate::nn::fp8::{QuantizedWeight, WeightQuantizer};
use crate::nn::hook::Pass;

/// The scaling recipe of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recipe {
    Current,
    Delayed,
    Square,
    Mx,
}

pub const RECIPES: [Recipe; 4] = [Recipe::Current, Recipe::Delayed, Recipe::Square, Recipe::Mx];

impl Recipe {
    pub fn has_one_scale(self) -> bool {
        matches!(self, Self::Current | Self::Delayed)
    }
}

/// Quantizes one weight.
#[derive(Debug)]
pub struct Layer {
    recipe: Recipe,
    tensor: Comm,
    delayed: Mutex<Delayed>,
    pub quantized: AtomicUsize,
}

/// The scale of this step, and the largest magnitude of its values.
#[derive(Debug)]
struct Delayed {
    scale: f32,
    seen: f32,
}

impl Layer {
    pub fn new(recipe: Recipe, groups: &ParallelContext) -> Self {
        let (scale, seen) = (1.0, 0.0);
        Self {
            recipe,
            tensor: groups.tensor().clone(),
            delayed: Mutex::new(Delayed { scale, seen }),
            quantized: AtomicUsize::new(0),
        }
    }

    /// Computes the scale of the next step.
    pub fn end_step(&self) {
        let mut delayed = self.delayed.lock().unwrap();
        if delayed.seen > 0.0 {
            delayed.scale = 448.0 / delayed.seen;
        }
        delayed.seen = 0.0;
    }
}

impl WeightQuantizer for Layer {
    fn format(&self) -> Format {
        Format::E4M3
    }

    fn has_one_scale(&self) -> bool {
        self.recipe.has_one_scale()
    }

    fn scale(&self, amax: Tensor<1>) -> Tensor<1> {
        match self.recipe {
            Recipe::Delayed => {
                let mut delayed = self.delayed.lock().unwrap();
                delayed.seen = delayed.seen.max(amax.clone().into_scalar::<f32>());
                amax.full_like(delayed.scale)
            }
            _ => current_scale(amax, Format::E4M3, CurrentScale::default()),
        }
    }

    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight {
        self.quantized.fetch_add(1, Ordering::Relaxed);
        let scaling = match self.recipe {
            Recipe::Current | Recipe::Delayed => {
                let whole = CollectiveOp::AllReduce(ReduceOp::Max);
                let amax = start(amax(weight.clone()), &whole, &self.tensor).wait();
                Scaling::Tensor(self.scale(amax))
            }
            Recipe::Square => Scaling::Blocks {
                square: true,
                power_of_two: true,
            },
            Recipe::Mx => Scaling::Mx,
        };
        let made = fp8::quantize(weight, Format::E4M3, &scaling, QuantizerUsage::BOTH);
        QuantizedWeight {
            rowwise: made.rowwise.unwrap(),
            columnwise: made.columnwise.unwrap(),
        }
    }
}

/// One size is a multiple of the row alignment, and the others are not.
pub const SIZES: [usize; 4] = [40, 48, 70, 5];

/// Three FP8 weights with a shift between them.
#[derive(Module, Debug)]
pub struct Net {
    pub first: Param<Tensor<2>>,
    pub shift: Param<Tensor<1>>,
    pub second: Param<Tensor<2>>,
    pub third: Param<Tensor<2>>,
}

/// The indices of the weights in the table.
pub const WEIGHTS: [usize; 3] = [0, 2, 3];

const SHIFT: usize = 1;

/// Pseudorandom numbers between -1 and 1.
pub fn noise<const D: usize>(shape: [usize; D], key: usize) -> Tensor<D> {
    let value = |i: usize| {
        let mixed = (i * 2_654_435_761 + key * 40_503 + 12_345) % 1_000_003;
        (mixed * mixed % 1009) as f32 / 504.5 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

pub fn net(key: usize) -> Net {
    let weight = |at: usize| {
        let size = 0.2 * (1 + at) as f32;
        Param::from_tensor(noise([SIZES[at], SIZES[at + 1]], key + at) * size)
    };
    Net {
        first: weight(0),
        shift: Param::from_tensor(noise([SIZES[1]], key + 9)),
        second: weight(1),
        third: weight(2),
    }
}

/// Returns the model with a quantizer per weight. On the tensor axis every parameter is split, so that each
/// rank has its own net with its own size.
pub fn model(recipe: Recipe, groups: &ParallelContext) -> (ParallelModule<Net>, Vec<Arc<Layer>>) {
    let place = groups.place();
    let mut model = ParallelModule::replicated(net(100 * place.index));
    for entry in model.table.entries_mut() {
        entry.shape[0] *= place.size;
        let placement = Placement::split(0, entry.shape[0], place.size);
        entry.placements = (Axis::Tensor, placement).into();
    }
    let layers = WEIGHTS.map(|_| Arc::new(Layer::new(recipe, groups)));
    (model, layers.to_vec())
}

pub fn named(layers: &[Arc<Layer>]) -> Vec<(String, Arc<dyn WeightQuantizer>)> {
    let named = |(path, layer): (&str, &Arc<Layer>)| -> (String, Arc<dyn WeightQuantizer>) {
        (path.into(), layer.clone())
    };
    ["first", "second", "third"]
        .into_iter()
        .zip(layers)
        .map(named)
        .collect()
}

/// A wrapped net.
pub struct Trained {
    pub ddp: DistributedDataParallel<Net>,
    pub layers: Vec<Arc<Layer>>,
    /// The weights of this step, if the wrapper does not hold them.
    cached: Option<Vec<Arc<QuantizedWeight>>>,
}

impl Trained {
    pub fn new(
        recipe: Recipe,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let (model, layers) = model(recipe, groups);
        let weights = named(&layers);
        Ok(Self {
            ddp: DistributedDataParallel::with_weights(model, groups, config, weights)?,
            layers,
            cached: None,
        })
    }

    /// Discards the cached weights after a step.
    pub fn invalidate(&mut self) {
        self.cached = None;
    }

    /// Returns both copies of each weight: from the wrapper, or quantized once from its values.
    pub fn weights(&mut self) -> Vec<Arc<QuantizedWeight>> {
        let sink = self.ddp.sink();
        let kept = WEIGHTS.map(|index| sink.quantized(index, Pass::Forward));
        if let [Some(first), Some(second), Some(third)] = kept {
            return vec![first, second, third];
        }
        let make = || {
            let made = WEIGHTS.into_iter().enumerate().map(|(at, index)| {
                let value = sink.value(index, Pass::Forward).unwrap().flat;
                let weight = value.reshape([SIZES[at], SIZES[at + 1]]);
                Arc::new(self.layers[at].quantize(weight))
            });
            made.collect()
        };
        self.cached.get_or_insert_with(make).clone()
    }

    /// Runs one micro-batch and returns its loss.
    pub fn run(&mut self, key: usize, last: bool) -> f64 {
        let weights = self.weights();
        let sink = self.ddp.sink();
        let nothing = self.ddp.forward(&Device::flex(), |_| {
            (0..4).for_each(|index| sink.expect(index));
            Tensor::<1>::zeros([1], &device()).require_grad()
        });
        let shift = sink.value(SHIFT, Pass::Forward).unwrap().flat;
        let shift = shift.cast(FloatDType::F32).reshape([1, SIZES[1]]);
        let x = noise([3, SIZES[0]], key);
        let h = forward(&x, &weights[0]) + shift;
        let z = forward(&h, &weights[1]);
        let y = forward(&z, &weights[2]);
        let accumulate = |index: usize, gradient: Tensor<2>| {
            let gradient = match index {
                SHIFT => gradient.sum_dim(0),
                _ => gradient,
            };
            let len = gradient.shape().num_elements();
            sink.accumulate(index, gradient.reshape([len]));
        };
        accumulate(3, z.transpose().matmul(y.clone()));
        let dz = backward(&y, &weights[2]);
        accumulate(2, h.transpose().matmul(dz.clone()));
        let dh = backward(&dz, &weights[1]);
        accumulate(SHIFT, dh.clone());
        accumulate(0, x.transpose().matmul(dh));
        if last {
            self.ddp.backward_last(nothing)
        } else {
            self.ddp.backward(nothing)
        };
        (y.clone() * y).sum().into_scalar::<f64>() / 2.0
    }
}

fn forward(x: &Tensor<2>, weight: &QuantizedWeight) -> Tensor<2> {
    multiply(
        &rowwise(x),
        &weight.columnwise,
        None,
        FloatDType::F32,
        Accumulation::Fast,
    )
}

fn backward(dy: &Tensor<2>, weight: &QuantizedWeight) -> Tensor<2> {
    multiply(
        &rowwise(dy),
        &weight.rowwise,
        None,
        FloatDType::F32,
        Accumulation::Exact,
    )
}

fn rowwise(x: &Tensor<2>) -> Fp8Matrix {
    let scale = current_scale(amax(x.clone()), Format::E4M3, CurrentScale::default());
    let scaling = Scaling::Tensor(scale);
    let made = fp8::quantize(x.clone(), Format::E4M3, &scaling, QuantizerUsage::ROWWISE);
    made.rowwise.unwrap()
}

/// Returns the bits of a tensor.
pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    values(tensor.cast(DType::F32))
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// Returns the bits of a matrix: codes and scales.
pub fn bits_of(matrix: &Fp8Matrix) -> [Vec<u32>; 2] {
    let codes: Vec<u32> = matrix.codes.clone().into_data().try_into_vec().unwrap();
    let scales = match &matrix.scales {
        fp8::Scales::Tensor(scale) => bits(scale.clone()),
        fp8::Scales::Blocks { scales, .. } => bits(scales.clone()),
        fp8::Scales::Mx(scales) => scales.clone().into_data().try_into_vec().unwrap(),
    };
    [codes, scales]
}

//! The matmul of rows with the weights of their experts, for experts with FP8 layers.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::activation::ActivationFunction;
use burn_megatron_kernels::gradient::{Destination, FlatGradients, Place};
use burn_megatron_kernels::moe::grouped::GroupedMatmul;
use burn_megatron_kernels::{Function, apply, flat};

use crate::collective::PendingTensor;
use crate::nn::Activation;
use crate::nn::arithmetic::{
    FloatArithmetic, LinearKernels, NeededGradients, SavedInput, WeightSource,
};
use crate::nn::forward_context::is_tracked;
use crate::nn::fp8::{Fp8Arithmetic, Fp8Layer, QuantizedWeight};
use crate::nn::hook::{ParameterHook, WeightGradientFn, fused_value};
use crate::nn::layer_arithmetic::LayerArithmetic;
use crate::nn::recompute::{SavesInput, apply_discarding};
use crate::nn::wide::wide;

/// Multiplies `x` `[rows, in]` by the weight of each row's expert, `[experts, in, out]`. Returns `[rows, out]`.
///
/// An expert with an FP8 layer computes the matmul as an [`Fp8Linear`](crate::nn::fp8::Fp8Linear) does. Other experts
/// compute in the dtype of `x` with `kernels`. If the computation of the scales is collective, this call is collective
/// over the expert-tensor axis.
///
/// # Panics
///
/// If the group sizes do not add up to the number of rows. See also
/// [`grouped_matmul`](burn_megatron_kernels::moe::grouped::grouped_matmul).
pub(super) fn expert_product(
    input: ExpertInput,
    weight: &Param<Tensor<3>>,
    layers: &[Option<Fp8Layer>],
    group_sizes: &[usize],
    kernels: LinearKernels,
) -> Tensor<2> {
    let x = input.anchor();
    let (weights, destination) = fused_value(weight, x);
    let [rows, _] = x.dims();
    if layers.iter().all(Option::is_none) {
        let shape = ([rows, input.width()], x.dtype());
        let product = GroupedMatmul::new(shape, &weights, destination, group_sizes);
        return input.multiplied(product, weights);
    }
    let total = group_sizes.iter().sum::<usize>();
    assert!(
        rows == total,
        "x has {rows} rows, but the rows of all experts sum to {total}: expected equal numbers"
    );
    let trains_weight = destination.is_some() || is_tracked(&weights);
    let is_recorded = is_tracked(x) || trains_weight;
    let saves_codes = trains_weight && matches!(input, ExpertInput::Rows(_));
    // The owner of a hooked weight reports changes of the weight, so FP8 copies may be cached.
    let is_hooked = ParameterHook::of(weight).is_some();
    let values = weights.clone().inner();
    let expert = |(index, (layer, rows)): (usize, (&Option<Fp8Layer>, &usize))| {
        let arithmetic = match layer {
            Some(layer) => {
                LayerArithmetic::Fp8(Fp8Arithmetic::new(layer, is_recorded, saves_codes))
            }
            None => LayerArithmetic::Float(FloatArithmetic {
                kernels,
                transposed: false,
            }),
        };
        let caching = layer.as_ref().filter(|layer| {
            // An expert without rows needs no copies.
            is_hooked && *rows > 0 && layer.caches_weight()
        });
        let value = || matrix(&values, index);
        Expert {
            copies: caching.map(|layer| layer.cached_weight(value, is_recorded)),
            rows: *rows,
            padded_rows: rows.next_multiple_of(layer.as_ref().map_or(1, Fp8Layer::row_multiple)),
            arithmetic,
        }
    };
    let experts = layers.iter().zip(group_sizes).enumerate().map(expert);
    let [_, inputs, outputs] = weights.dims();
    let function = ExpertProduct {
        sizes: [inputs, outputs],
        experts: experts.collect(),
        destination,
    };
    input.multiplied(function, weights)
}

/// The input rows of the matmul of the experts.
pub(super) enum ExpertInput {
    /// The rows: `[rows, in]`.
    Rows(Tensor<2>),
    /// An activation of `x`, multiplied by the weight of each row. It is recomputed in the backward pass.
    Activation {
        /// `[rows, in]`, or `[rows, 2 in]` for a gated activation.
        x: Tensor<2>,
        /// The weight of each row: `[rows]`.
        weights: Tensor<1>,
        activation: Activation,
    },
}

impl ExpertInput {
    /// Returns the tensor to which the weights are anchored.
    fn anchor(&self) -> &Tensor<2> {
        match self {
            Self::Rows(x) | Self::Activation { x, .. } => x,
        }
    }

    /// Returns the number of features that are multiplied.
    fn width(&self) -> usize {
        let [_, width] = self.anchor().dims();
        match self {
            Self::Activation { activation, .. } if activation.is_gated() => width / 2,
            _ => width,
        }
    }

    fn multiplied(self, product: impl SavesInput, weights: Tensor<3>) -> Tensor<2> {
        let others = vec![weights.into_dispatch()];
        match self {
            Self::Rows(x) => apply([vec![x.into_dispatch()], others].concat(), product),
            Self::Activation {
                x,
                weights,
                activation,
            } => {
                let weights = weights.cast(wide(x.dtype()));
                let inputs = vec![x.into_dispatch(), weights.into_dispatch()];
                let activation = ActivationFunction::weighted(activation.kernel())
                    .with_options(activation.options());
                let [y] = apply_discarding(activation, inputs, product, others);
                y
            }
        }
    }
}

impl SavesInput for GroupedMatmul {
    fn reads_input(&self, needed: &[bool]) -> bool {
        needed[0] || self.has_destination()
    }
}

impl SavesInput for ExpertProduct {
    fn saves_input(&self) -> bool {
        self.saves_rows()
    }

    fn reads_input(&self, needed: &[bool]) -> bool {
        needed[0] || self.destination.is_some()
    }
}

/// The matmul of the experts. Inputs: the rows and the weights. It saves the inputs that an expert needs, followed by
/// the tensors that each expert with rows saves.
#[derive(Debug)]
struct ExpertProduct {
    /// The numbers of input and output features.
    sizes: [usize; 2],
    experts: Vec<Expert>,
    /// The destination of the gradient of the weights. With `None` the autodiff graph receives the gradient.
    destination: Option<Destination>,
}

#[derive(Debug)]
struct Expert {
    rows: usize,
    /// The number of rows, including zero rows. FP8 matmuls on a GPU require a multiple of 16 rows.
    padded_rows: usize,
    arithmetic: LayerArithmetic,
    /// The rowwise and columnwise FP8 copies of the weight, if they are cached.
    copies: Option<Arc<QuantizedWeight>>,
}

impl Expert {
    /// Returns the rows of this expert in `x`, from row `first` on, padded with zero rows.
    fn rows_of(&self, x: &Tensor<2>, first: usize) -> Tensor<2> {
        let rows = x.clone().narrow(0, first, self.rows);
        if self.padded_rows == self.rows {
            return rows;
        }
        let zeros = [self.padded_rows - self.rows, x.dims()[1]];
        let zeros = Tensor::zeros(zeros, (&x.device(), x.dtype()));
        Tensor::cat(vec![rows, zeros], 0)
    }

    /// Returns the cached copies of the weight, or else its values.
    fn weight(&self, value: impl FnOnce() -> Tensor<2>) -> WeightSource<'_> {
        match &self.copies {
            Some(copies) => WeightSource::Quantized(copies),
            None => WeightSource::Graph(value()),
        }
    }

    /// Returns `y` without the zero rows.
    fn without_padding(&self, y: Tensor<2>) -> Tensor<2> {
        y.narrow(0, 0, self.rows)
    }
}

impl ExpertProduct {
    /// Returns the experts with rows, each with its number and its first row.
    fn with_rows(&self) -> impl Iterator<Item = (usize, usize, &Expert)> {
        let mut end = 0;
        let experts = self.experts.iter().enumerate().map(move |(index, expert)| {
            end += expert.rows;
            (index, end - expert.rows, expert)
        });
        experts.filter(|(.., expert)| expert.rows > 0)
    }

    fn saves_rows(&self) -> bool {
        self.with_rows()
            .any(|(.., expert)| !expert.arithmetic.saves_codes())
    }

    fn saves_weights(&self) -> bool {
        self.with_rows().any(|(.., expert)| expert.copies.is_none())
    }
}

/// Returns the flattened gradients of the weights, with `length` elements each, in the dtype of the rows or in the
/// buffer. No gradient is computed for experts without rows.
fn weight_gradients(
    computations: Vec<Option<WeightGradientFn>>,
    length: usize,
    rows: (Device, DType),
    target: Option<FlatGradients>,
) -> Tensor<1> {
    let zeros = |(device, dtype): &(Device, DType)| Tensor::zeros([length], (device, *dtype));
    let Some(FlatGradients { mut flat, places }) = target else {
        let gradient = |computation: Option<WeightGradientFn>| match computation {
            Some(compute) => compute(None),
            None => zeros(&rows),
        };
        return Tensor::cat(computations.into_iter().map(gradient).collect(), 0);
    };
    let Place { offset, add } = places[0];
    for (index, computation) in computations.into_iter().enumerate() {
        let offset = offset + index * length;
        match computation {
            Some(compute) => {
                let places = vec![Place { offset, add }];
                flat = compute(Some(FlatGradients { flat, places }));
            }
            None if add => {}
            None => {
                let zeros = zeros(&(flat.device(), flat.dtype()));
                flat = flat::accumulate(flat, offset, zeros, false);
            }
        }
    }
    flat
}

impl Function for ExpertProduct {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<2>::from_dispatch(inputs[0].clone());
        let weights = Tensor::<3>::from_dispatch(inputs[1].clone());
        let kept = [self.saves_rows(), self.saves_weights()];
        let kept = inputs.into_iter().zip(kept);
        let mut saved: Vec<_> = kept
            .filter_map(|(input, is_kept)| is_kept.then_some(input))
            .collect();
        let mut outputs = vec![];
        for (index, first, expert) in self.with_rows() {
            let rows = expert.rows_of(&x, first);
            let weight = expert.weight(|| matrix(&weights, index));
            let (y, tensors) = expert.arithmetic.output(rows, weight, None);
            outputs.push(expert.without_padding(y));
            saved.extend(tensors.input_codes.into_iter().flatten());
            saved.extend(tensors.extra);
        }
        (joined(outputs, &x, self.sizes[1]).into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let needed = NeededGradients {
            input: needed[0],
            weight: needed[1] || self.destination.is_some(),
        };
        let dy = Tensor::<2>::from_dispatch(gradient);
        let mut saved = saved.into_iter();
        let x = self.saves_rows().then(|| next(&mut saved));
        let x = x.map(Tensor::<2>::from_dispatch);
        let weights = self.saves_weights().then(|| next(&mut saved));
        let weights = weights.map(Tensor::<3>::from_dispatch);
        let mut of_x = vec![];
        let mut of_weights: Vec<_> = self.experts.iter().map(|_| None).collect();
        for (index, first, expert) in self.with_rows() {
            let x = match &x {
                Some(x) if !expert.arithmetic.saves_codes() => {
                    let rows = expert.rows_of(x, first).unsqueeze();
                    SavedInput::Floats(PendingTensor::ready(rows))
                }
                _ => SavedInput::Codes([next(&mut saved), next(&mut saved)]),
            };
            let extras = expert.arithmetic.saved_extras(expert.copies.is_some());
            let extra: Vec<_> = saved.by_ref().take(extras).collect();
            let dy = expert
                .arithmetic
                .gradient(expert.rows_of(&dy, first), needed);
            if needed.input {
                let weight = expert.weight(|| match &weights {
                    Some(weights) => matrix(weights, index),
                    None => unreachable!("weights that are read are saved"),
                });
                of_x.push(expert.without_padding(dy.input(weight, &extra)));
            }
            let of_weight = move |target| dy.weight(x, &extra, target);
            of_weights[index] = Some(Box::new(of_weight) as WeightGradientFn);
        }
        let [inputs, outputs] = self.sizes;
        let rows = (dy.device(), dy.dtype());
        let of_weights = move |target| weight_gradients(of_weights, inputs * outputs, rows, target);
        let of_weights = match &self.destination {
            Some(destination) => {
                destination.accumulate_later(of_weights);
                None
            }
            None => needed.weight.then(|| {
                of_weights(None)
                    .reshape([self.experts.len(), inputs, outputs])
                    .into_dispatch()
            }),
        };
        let of_x = needed
            .input
            .then(|| joined(of_x, &dy, inputs).into_dispatch());
        vec![of_x, of_weights]
    }
}

/// Returns the weight of an expert, `[in, out]`.
fn matrix(weights: &Tensor<3>, expert: usize) -> Tensor<2> {
    let [_, inputs, outputs] = weights.dims();
    weights
        .clone()
        .narrow(0, expert, 1)
        .reshape([inputs, outputs])
}

/// Concatenates the rows of all experts to `[rows, width]`, in the dtype of `like`.
fn joined(parts: Vec<Tensor<2>>, like: &Tensor<2>, width: usize) -> Tensor<2> {
    if parts.is_empty() {
        return Tensor::zeros([0, width], (&like.device(), like.dtype()));
    }
    Tensor::cat(parts, 0)
}

fn next(saved: &mut impl Iterator<Item = DispatchTensor>) -> DispatchTensor {
    match saved.next() {
        Some(tensor) => tensor,
        None => unreachable!("the forward has saved what the backward reads"),
    }
}

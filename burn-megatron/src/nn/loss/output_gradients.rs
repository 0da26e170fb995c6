//! The gradients of an output layer, summed over chunks of tokens.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_megatron_kernels::flat;
use burn_megatron_kernels::gradient::{FlatGradients, Place};

use super::linear::Chunk;
use crate::nn::arithmetic::{FloatArithmetic, NeededGradients, flatten};
use crate::nn::hook::WeightGradientFn;
use crate::nn::wide::wide;

/// The flattened gradients of an output layer, as far as they are needed.
pub(super) struct OutputGradients {
    /// The gradient of the hidden states, `[tokens * hidden]`, in the dtype of the hidden states.
    pub input: Option<Tensor<1>>,
    /// The gradient of the weight, `[width * hidden]`, in f32 (in f64 for an f64 model).
    pub weight: Option<Tensor<1>>,
}

impl OutputGradients {
    /// Creates uninitialized gradients for hidden states `[tokens, hidden]` and a weight `[width, hidden]`.
    pub fn new(x: &Tensor<2>, weight: &Tensor<2>, needed: NeededGradients) -> Self {
        let empty = |like: &Tensor<2>, dtype: DType| {
            Tensor::empty([like.shape().num_elements()], (&x.device(), dtype))
        };
        let sum = wide(x.dtype());
        Self {
            input: needed.input.then(|| empty(x, x.dtype())),
            weight: needed.weight.then(|| empty(weight, sum)),
        }
    }

    /// Writes the gradient of the hidden states of a chunk, and adds the chunk's contribution to the weight gradient.
    /// `dy` is the gradient of the logits of the chunk. The first chunk overwrites the weight gradient.
    pub fn add(
        &mut self,
        chunk: Chunk,
        dy: Tensor<2>,
        weight: &Tensor<2>,
        arithmetic: &FloatArithmetic,
    ) {
        let Chunk { first, x, .. } = chunk;
        if let Some(flat) = self.input.take() {
            let offset = first * x.dims()[1];
            let weight = weight.clone().transpose();
            let dx = arithmetic.input_gradient(dy.clone(), weight);
            self.input = Some(flat::accumulate(flat, offset, flatten(dx), false));
        }
        if let Some(flat) = self.weight.take() {
            let places = vec![Place {
                offset: 0,
                add: first > 0,
            }];
            let target = Some(FlatGradients { flat, places });
            self.weight = Some(arithmetic.weight_gradient(x, dy, target));
        }
    }

    /// Multiplies all gradients by `ratio`, `[1]` in f32 (f64 for f64).
    pub fn scaled(self, ratio: Tensor<1>) -> Self {
        let scaled = |x| flat::scale(x, ratio.clone());
        Self {
            input: self.input.map(scaled),
            weight: self.weight.map(scaled),
        }
    }

    pub fn into_saved(self) -> Vec<DispatchTensor> {
        let saved = [self.input, self.weight].into_iter().flatten();
        saved.map(Tensor::into_dispatch).collect()
    }

    pub fn from_saved(saved: Vec<DispatchTensor>, needed: NeededGradients) -> Self {
        let mut saved = saved.into_iter().map(Tensor::from_dispatch);
        Self {
            input: if needed.input { saved.next() } else { None },
            weight: if needed.weight { saved.next() } else { None },
        }
    }
}

/// Wraps a weight gradient that has already been computed, so that it can be accumulated in a buffer.
pub(super) fn computed(gradient: Tensor<1>) -> WeightGradientFn {
    Box::new(move |target| match target {
        Some(FlatGradients { flat, places }) => {
            let Place { offset, add } = places[0];
            let gradient = gradient.cast(flat.dtype());
            flat::accumulate(flat, offset, gradient, add)
        }
        None => gradient,
    })
}

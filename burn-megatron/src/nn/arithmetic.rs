//! What a linear layer computes with: the products, without the way of the tensors to them.

use std::fmt::Debug;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{flat, gemm};

use super::door::{Pass, Place};
use super::linear::{Behind, rows};
use crate::collective::PendingTensor;

/// The three products of a linear layer.
///
/// All tensors are plain; inputs and gradients of outputs are `[rows, width]`, weights `[in, out]`.
pub(super) trait Arithmetic: Clone + Debug + Send + Sync + 'static {
    /// Whether it asks whoever keeps the weight for it itself, and in what form it is there.
    const ASKS: bool;

    /// The gradient of the output, as the other two products read it.
    type Gradient: Clone + Send + 'static;

    /// `x weight + bias`, and what the backward needs of it.
    fn output(
        &self,
        x: Tensor<2>,
        weight: Factor<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, Kept);

    /// Whether something is [kept instead](Kept::instead) of the input.
    fn keeps_instead(&self) -> bool;

    /// Prepares the gradient of the output for what is wanted.
    fn gradient(&self, dy: Tensor<2>, wanted: Wanted) -> Self::Gradient;

    /// `dy weight^T`. `beside` is what the forward kept beside the input.
    fn input_gradient(
        &self,
        dy: &Self::Gradient,
        weight: Factor<'_>,
        beside: &[DispatchTensor],
    ) -> Tensor<2>;

    /// `x^T dy`.
    fn weight_gradient(&self, x: Input, dy: Self::Gradient, beside: &[DispatchTensor])
    -> Tensor<2>;

    /// The same, flat, in a place of a buffer where there is one.
    fn weight_gradient_at(
        &self,
        x: Input,
        dy: Self::Gradient,
        beside: &[DispatchTensor],
        place: Option<Place>,
    ) -> Tensor<1>;
}

/// A weight.
pub(super) enum Factor<'a> {
    /// The graph has it.
    Here(Tensor<2>),
    /// It is to be had behind its door, where it lies as `[out, in]` if the flag says so.
    Behind(&'a Behind, bool),
}

impl Factor<'_> {
    /// The value, as floats.
    pub fn value(self, pass: Pass) -> Tensor<2> {
        match self {
            Self::Here(weight) => weight,
            Self::Behind(behind, false) => behind.value(pass),
            Self::Behind(behind, true) => behind.value(pass).transpose(),
        }
    }
}

/// What a forward keeps.
#[derive(Default)]
pub(super) struct Kept {
    /// Instead of the input.
    pub instead: Option<[DispatchTensor; 2]>,
    /// Beside it.
    pub beside: Vec<DispatchTensor>,
}

/// The input, in the backward.
pub(super) enum Input {
    /// Whole, or on its way.
    Whole(PendingTensor<3>),
    /// What was kept instead.
    Instead([DispatchTensor; 2]),
}

/// Which gradients are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub input: bool,
    pub weight: bool,
}

/// Products in the type of the input.
#[derive(Clone, Debug)]
pub(super) struct Plain {
    /// Whether they go through the kernels' seam.
    pub fused: bool,
    /// Whether the weight gradient goes to its place as `[out, in]`.
    pub transposed: bool,
}

impl Plain {
    fn product(&self, x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        match self.fused {
            true => gemm::linear(x, weight, bias),
            false => gemm::composed::linear(x, weight, bias),
        }
    }
}

impl Arithmetic for Plain {
    const ASKS: bool = false;

    type Gradient = Tensor<2>;

    fn output(
        &self,
        x: Tensor<2>,
        weight: Factor<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, Kept) {
        let y = self.product(x, weight.value(Pass::Forward), bias);
        (y, Kept::default())
    }

    fn keeps_instead(&self) -> bool {
        false
    }

    fn gradient(&self, dy: Tensor<2>, _wanted: Wanted) -> Tensor<2> {
        dy
    }

    fn input_gradient(
        &self,
        dy: &Tensor<2>,
        weight: Factor<'_>,
        _beside: &[DispatchTensor],
    ) -> Tensor<2> {
        let weight = weight.value(Pass::Backward);
        self.product(dy.clone(), weight.transpose(), None)
    }

    fn weight_gradient(&self, x: Input, dy: Tensor<2>, _beside: &[DispatchTensor]) -> Tensor<2> {
        weight_gradient(whole(x), dy)
    }

    fn weight_gradient_at(
        &self,
        x: Input,
        dy: Tensor<2>,
        _beside: &[DispatchTensor],
        place: Option<Place>,
    ) -> Tensor<1> {
        let (left, right) = match self.transposed {
            true => (dy, whole(x)),
            false => (whole(x), dy),
        };
        let Some(Place { flat, offset, add }) = place else {
            return flatten(weight_gradient(left, right));
        };
        // The product adds up in f32, or f64; sums in 16 bits are not its business.
        if self.fused && flat.dtype().size() >= 4 {
            let _span = tracing::trace_span!("weight_gradient").entered();
            return gemm::accumulate_weight_gradient_at(left, right, flat, offset, add);
        }
        flat::accumulate(flat, offset, flatten(weight_gradient(left, right)), add)
    }
}

/// `left^T right`, of `[rows, a]` and `[rows, b]`.
fn weight_gradient(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let _span = tracing::trace_span!("weight_gradient").entered();
    left.transpose().matmul(right)
}

/// An input of which nothing was kept instead.
fn whole(x: Input) -> Tensor<2> {
    match x {
        Input::Whole(x) => rows(x.wait()),
        Input::Instead(_) => unreachable!("this arithmetic keeps the input"),
    }
}

/// `[a, b]` to `[a b]`.
pub(super) fn flatten(x: Tensor<2>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}

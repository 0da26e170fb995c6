//! Blocks that are run again in the backward instead of being remembered.
//!
//! The first run of a block is recorded nowhere: of all that it computes, only its input is kept.
//! The backward runs the block once more, records it, and goes back through it at once (Chen et al.
//! 2016, arXiv:1604.06174). That costs one more forward, and it frees two things:
//!
//! - the activations inside of the block;
//! - under full sharding ([`ZeroStage::Parameters`](crate::data_parallel::ZeroStage::Parameters)) its
//!   gathered parameters. The modules of burn-nn save their weights in the graph, which would keep
//!   every block of a model from the forward to the backward. Run again, a block gets its parameters
//!   through their doors a second time.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

use super::{Position, door};

/// `body(x)`, which is run again in the backward: nothing of it is saved but `x`.
///
/// `body` holds its module, which is cheap to clone:
///
/// ```
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use burn_megatron::nn::recompute;
///
/// fn forward(layers: &[Linear], mut x: Tensor<2>) -> Tensor<2> {
///     for layer in layers {
///         let layer = layer.clone();
///         x = recompute(x, move |x| layer.forward(x));
///     }
///     x
/// }
/// ```
///
/// This is about forwards under a
/// [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel), or under a
/// [`with_anchor`](super::door::with_anchor). Anywhere else, as in an evaluation or in a module that
/// has no wrapper, `body` just runs, and is recorded or not as it would be by itself.
///
/// Both runs must compute the same:
///
/// - Random numbers must be drawn again. [`Dropout`](super::Dropout) does that in a
///   [`recompute_at`]. The dropout of burn-nn does not: the second run draws other masks, so its
///   gradients are not those of the first. Leave it at 0 inside of a block.
/// - State that a forward moves on is moved on twice, such as the running mean of a batch norm.
///
/// Blocks may stand inside of each other. Under full sharding give every element of the model's
/// list of blocks a `body` of its own, and the layers before and after the list theirs: what stands
/// in one `body` is gathered together in the backward.
///
/// # Panics
///
/// If `body` uses a tracked tensor that is not its input, as the gradient of that would be lost.
/// Parameters of the wrapped module are not tracked; an activation from outside must come in as a
/// part of `x`.
pub fn recompute<const D: usize, const E: usize>(
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
) -> Tensor<E> {
    let Some(anchor) = door::anchor() else {
        return body(x);
    };
    let autodiff = x.is_autodiff();
    let inputs = match autodiff && x.is_tracked() {
        true => vec![x.into_dispatch()],
        // As in a first block: its parameters need something that leads to them.
        false => vec![x.into_dispatch(), anchor],
    };
    apply(inputs, Block { body, autodiff })
}

/// [`recompute`] at the [`Position`] of now: the [`Dropout`](super::Dropout)s that share `position`
/// draw the same masks again, wherever the training stands when the backward comes.
///
/// # Panics
///
/// As [`recompute`].
pub fn recompute_at<const D: usize, const E: usize>(
    position: &Position,
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
) -> Tensor<E> {
    let (position, place) = (position.clone(), position.get());
    recompute(x, move |x| position.at(place, || body(x)))
}

/// A block with an input of `D` dims and an output of `E`.
struct Block<const D: usize, const E: usize, F> {
    body: F,
    /// Whether the input came with autodiff, tracked or not: layers take that for training.
    autodiff: bool,
}

impl<const D: usize, const E: usize, F: Fn(Tensor<D>) -> Tensor<E>> Block<D, E, F> {
    /// The input as the body would see it if it were recorded, but on no graph.
    fn input(&self, plain: DispatchTensor) -> Tensor<D> {
        let plain = Tensor::from_dispatch(plain);
        match self.autodiff {
            true => Tensor::from_inner(plain),
            false => plain,
        }
    }
}

impl<const D: usize, const E: usize, F> Function for Block<D, E, F>
where
    F: Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
{
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = inputs.swap_remove(0);
        let y = door::promising(|| (self.body)(self.input(x.clone())));
        assert!(
            !(y.is_autodiff() && y.is_tracked()),
            "a recomputed block uses a tracked tensor that is not its input, whose gradient would be \
             lost; make it a part of the input, or do not recompute this block"
        );
        (y.inner().into_dispatch(), vec![x])
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let _span = tracing::trace_span!("recompute").entered();
        let mut x = self.input(saved.swap_remove(0));
        if needed[0] {
            x = x.require_grad();
        }
        let anchor = Tensor::<1>::zeros([1], &x.device().inner().autodiff()).require_grad();
        let y = door::again(&anchor, || (self.body)(x.clone()));
        let mut leaves = from_gradient(y, gradient, anchor).backward();
        let input = needed[0].then(|| {
            let gradient = x.grad_remove(&mut leaves);
            // A block that ignores its input has none.
            gradient.unwrap_or_else(|| x.inner().zeros_like())
        });
        let mut gradients = vec![None; needed.len()];
        gradients[0] = input.map(Tensor::into_dispatch);
        gradients
    }
}

impl<const D: usize, const E: usize, F> fmt::Debug for Block<D, E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a recomputed block from {D} to {E} dims")
    }
}

/// A scalar whose backward gives `y` this gradient, of its shape. `anchor`, `[1]`, is tracked, so
/// that there is a backward even if `y` depends on nothing.
fn from_gradient<const E: usize>(
    y: Tensor<E>,
    gradient: DispatchTensor,
    anchor: Tensor<1>,
) -> Tensor<1> {
    let inputs = vec![y.into_dispatch(), anchor.into_dispatch()];
    apply(inputs, Seed(gradient))
}

/// The gradient that a backward starts from.
struct Seed(DispatchTensor);

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the gradient of a recomputed block's output")
    }
}

impl Function for Seed {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(1), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.0.clone()), None]
    }
}

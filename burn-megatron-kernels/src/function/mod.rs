//! An operation given by its forward and its backward.
//!
//! [`apply`] runs a [`Function`] on any number of inputs up to [`MAX_INPUTS`]. Both directions see
//! plain tensors (no autodiff), whatever the backend, so a function is written once on
//! `Tensor<D>`. The part that reaches into Burn's backend traits stands in `backend.rs`.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::Tensor;

mod backend;
#[cfg(test)]
mod tests;

use backend::{FunctionOps, TensorList};

/// The largest number of inputs a [`Function`] can have.
pub const MAX_INPUTS: usize = 4;

/// A differentiable operation with one float output.
///
/// Inputs, saved tensors and gradients are rank-erased; turn them into `Tensor<D>` with
/// `Tensor::from_dispatch`. Everything seen here is outside of the autodiff graph.
pub trait Function: Debug + Send + Sync + 'static {
    /// Computes the output, and what the backward will need of this call.
    ///
    /// What it saves is dropped at once where no input is tracked.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>);

    /// Computes one gradient per input from the gradient of the output.
    ///
    /// `needed[i]` is false where input `i` is not tracked: its gradient can be left out, and is
    /// ignored when given. `None` for a tracked input says that the gradient left another way.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>>;

    /// The input whose gradient so far [`backward_onto`](Self::backward_onto) adds its own to.
    ///
    /// Asked when the backward of this function is due. May only be given if that input is an
    /// output of another recorded operation, and a gradient of it has been registered in the same
    /// pass, by a function that shares a state with this one. Otherwise there is nothing to take.
    fn onto(&self) -> Option<usize> {
        None
    }

    /// [`backward`](Self::backward), with the gradient of the input [`onto`](Self::onto) made so
    /// far: what is returned for that input is the sum of both.
    ///
    /// It saves the separate addition that autodiff would do. Only called where `onto` names an
    /// input that is tracked.
    fn backward_onto(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
        so_far: DispatchTensor,
    ) -> Vec<Option<DispatchTensor>> {
        let _ = (saved, gradient, needed, so_far);
        panic!("{self:?} names an input in `onto` and has no `backward_onto`")
    }
}

/// Runs `function` on `inputs` and records it where an input is tracked.
///
/// A plain tensor beside a tracked one counts as a constant.
///
/// # Panics
///
/// With no inputs or more than [`MAX_INPUTS`], and when `O` is not the rank of the output.
///
/// # Example
///
/// ```
/// use burn::backend::DispatchTensor;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::{Function, apply};
///
/// /// `2 x`, with a backward that says so.
/// #[derive(Debug)]
/// struct Double;
///
/// impl Function for Double {
///     fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
///         let x = Tensor::<1>::from_dispatch(inputs.remove(0));
///         ((x * 2.0).into_dispatch(), vec![])
///     }
///     fn backward(
///         &self,
///         _saved: Vec<DispatchTensor>,
///         gradient: DispatchTensor,
///         _needed: &[bool],
///     ) -> Vec<Option<DispatchTensor>> {
///         vec![Some((Tensor::<1>::from_dispatch(gradient) * 2.0).into_dispatch())]
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([1.0, 3.0], &device).require_grad();
/// let y: Tensor<1> = apply(vec![x.clone().into_dispatch()], Double);
/// let gradients = y.sum().backward();
/// assert_eq!(x.grad(&gradients).unwrap().sum().into_scalar::<f32>(), 4.0);
/// ```
pub fn apply<const O: usize>(inputs: Vec<DispatchTensor>, function: impl Function) -> Tensor<O> {
    let shared = SharedFunction(Arc::new(function));
    Tensor::from_dispatch(Dispatch::apply_function(TensorList(inputs), shared))
}

/// A function on its way through the backends.
#[derive(Clone, Debug)]
struct SharedFunction(Arc<dyn Function>);

//! Differentiable operations, defined by their forward and their backward.
//!
//! [`apply`] runs a [`Function`] on up to [`MAX_INPUTS`] inputs. Both directions see plain tensors
//! (no autodiff) on any backend, so a function is written once on `Tensor<D>`. Only `backend.rs`
//! uses the backend traits of Burn.

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
    /// Computes the output, and the tensors to save for the backward.
    ///
    /// Saved tensors are dropped immediately if no input is tracked.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>);

    /// Computes one gradient per input from the gradient of the output.
    ///
    /// `needed[i]` is false if input `i` is not tracked: its gradient may be omitted, and is
    /// ignored otherwise. `None` for a tracked input means that its gradient was delivered another
    /// way.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>>;

    /// The input whose gradient so far [`backward_onto`](Self::backward_onto) adds its own to.
    ///
    /// Called right before the backward of this function. May only return `Some` if that input is
    /// an output of another recorded operation, and a gradient of it has been registered in the
    /// same pass by a function that shares state with this one. Otherwise there is no gradient to
    /// take.
    fn onto(&self) -> Option<usize> {
        None
    }

    /// [`backward`](Self::backward), with the accumulated gradient of the input
    /// [`onto`](Self::onto): the gradient returned for that input is the sum of both.
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
/// An untracked input counts as a constant.
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

/// A function, shared by the backends that a call passes through.
#[derive(Clone, Debug)]
struct SharedFunction(Arc<dyn Function>);

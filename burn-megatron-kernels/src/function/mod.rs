//! Differentiable operations, defined by their forward and their backward.
//!
//! [`apply`] runs a [`Function`] on up to [`MAX_INPUTS`] inputs. Both directions get plain tensors
//! (no autodiff) on any backend, so that a function is written once with `Tensor<D>`. Only
//! `backend.rs` uses the backend traits of Burn.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::Tensor;

mod backend;
mod observe;
#[cfg(test)]
mod tests;

pub(crate) use backend::forward;
use backend::{FunctionOps, TensorList};
pub use observe::{CallObserver, observed};

/// The maximum number of inputs of a [`Function`].
pub const MAX_INPUTS: usize = 7;

/// The inputs of a function, or the tensors saved for its backward.
pub type Tensors = Vec<DispatchTensor>;

/// The gradients of the inputs or outputs of a function.
pub type Gradients = Vec<Option<DispatchTensor>>;

/// A differentiable operation with one float output.
///
/// Inputs, saved tensors and gradients are rank-erased. Convert them to `Tensor<D>` with
/// `Tensor::from_dispatch`. All of them are outside the autodiff graph.
pub trait Function: Debug + Send + Sync + 'static {
    /// Computes the output, and the tensors that the backward needs.
    ///
    /// Saved tensors are dropped immediately if no input is tracked.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>);

    /// Computes one gradient per input from the gradient of the output.
    ///
    /// `needed[i]` is false if input `i` is not tracked. Its gradient may be omitted and is
    /// ignored. `None` for a tracked input means that the gradient was delivered in another way.
    fn backward(&self, saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients;
}

/// A differentiable operation with several float outputs. It otherwise corresponds to [`Function`].
pub trait MultiFunction: Debug + Send + Sync + 'static {
    /// Returns the path of the type.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Computes the outputs, and the tensors that the backward needs.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>);

    /// Computes one gradient per input from the gradients of the outputs. The gradient of an output
    /// is `None` if the loss does not depend on it.
    fn backward(&self, saved: Tensors, gradients: Gradients, needed: &[bool]) -> Gradients;
}

/// Runs `function` on `inputs` and records it if an input is tracked.
///
/// An untracked input counts as a constant.
///
/// # Panics
///
/// Panics without inputs or with more than [`MAX_INPUTS`], and if `O` is not the rank of the
/// output.
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
    let [output] = apply_multi(inputs, SingleOutput(function));
    output
}

/// Computes [`apply`] for `K` outputs of the same rank. All outputs are tracked if any input is
/// tracked.
///
/// # Panics
///
/// Panics in the same cases as [`apply`], and if the function has a different number of outputs.
pub fn apply_multi<const O: usize, const K: usize>(
    inputs: Vec<DispatchTensor>,
    function: impl MultiFunction,
) -> [Tensor<O>; K] {
    let function = SharedFunction(Arc::new(function));
    let TensorList(outputs) = Dispatch::apply_function(TensorList(inputs), function);
    match <[_; K]>::try_from(outputs) {
        Ok(outputs) => outputs.map(Tensor::from_dispatch),
        Err(outputs) => panic!(
            "expected a function with {K} outputs, got {}",
            outputs.len()
        ),
    }
}

/// A [`Function`] as a [`MultiFunction`].
#[derive(Debug)]
struct SingleOutput<F>(F);

impl<F: Function> MultiFunction for SingleOutput<F> {
    fn name(&self) -> &'static str {
        std::any::type_name::<F>()
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let (output, saved) = self.0.forward(inputs);
        (vec![output], saved)
    }

    fn backward(&self, saved: Tensors, mut gradients: Gradients, needed: &[bool]) -> Gradients {
        match gradients.remove(0) {
            Some(gradient) => self.0.backward(saved, gradient, needed),
            None => unreachable!("the backward runs for an output with a gradient"),
        }
    }
}

/// A function shared by the backends that a call passes through.
#[derive(Clone, Debug)]
pub(crate) struct SharedFunction(pub(crate) Arc<dyn MultiFunction>);

impl SharedFunction {
    /// Returns the name of the type without its parameters and modules.
    pub(crate) fn name(&self) -> String {
        let whole = self.0.name();
        let without = whole.split('<').next().unwrap_or(whole);
        without.rsplit("::").next().unwrap_or(without).into()
    }
}

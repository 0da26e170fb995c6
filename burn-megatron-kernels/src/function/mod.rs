//! Differentiable operations that are defined by a forward pass and a backward pass.
//!
//! [`apply`] runs a [`Function`] on up to [`MAX_INPUTS`] inputs. The forward and the backward pass get plain tensors
//! (without autodiff), so that one implementation with `Tensor<D>` supports every backend. Only the file `backend.rs`
//! uses the backend traits of Burn.

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

/// The inputs of a function, or the tensors that the function saves for its backward pass.
pub type Tensors = Vec<DispatchTensor>;

/// The gradients of the inputs or outputs of a function, with `None` for a missing gradient.
pub type Gradients = Vec<Option<DispatchTensor>>;

/// A differentiable operation with one float output, similar to `torch.autograd.Function`.
///
/// Inputs, saved tensors and gradients are `DispatchTensor`s, which do not have a static number of dimensions. Convert
/// them to `Tensor<D>` with `Tensor::from_dispatch`. Autodiff tracks none of these tensors.
pub trait Function: Debug + Send + Sync + 'static {
    /// Computes the output. Also returns the tensors that the backward pass needs.
    ///
    /// The saved tensors are dropped immediately if autodiff tracks none of the inputs.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>);

    /// Computes the gradient of each input from the gradient of the output.
    ///
    /// `needed[i]` is false if autodiff does not track input `i`. In this case the gradient of input `i` is ignored and
    /// may be `None`. For a tracked input, return `None` if this method has already stored the gradient elsewhere, for
    /// example in a flat buffer.
    fn backward(&self, saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients;
}

/// A differentiable operation with several float outputs. See [`Function`] for an operation with one output.
pub trait MultiFunction: Debug + Send + Sync + 'static {
    /// Returns the name of the function. The default is the path of its type.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Computes the outputs. Also returns the tensors that the backward pass needs.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>);

    /// Computes the gradient of each input from the gradients of the outputs. The gradient of an output is `None` if
    /// the loss does not depend on this output.
    fn backward(&self, saved: Tensors, gradients: Gradients, needed: &[bool]) -> Gradients;
}

/// Runs `function` on `inputs`. Autodiff records the call if it tracks at least one input.
///
/// Inputs that autodiff does not track are constants and get no gradient.
///
/// # Panics
///
/// Panics if there are no inputs or more than [`MAX_INPUTS`] inputs, or if the output does not have `O` dimensions.
///
/// # Example
///
/// ```
/// use burn::backend::DispatchTensor;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::{Function, apply};
///
/// /// Computes `2 x`. The backward pass multiplies the gradient by 2.
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

/// Runs a function with `K` outputs on `inputs`, as in [`apply`]. All outputs have `O` dimensions. If autodiff tracks
/// at least one input, it tracks all outputs.
///
/// # Panics
///
/// Panics in the same cases as [`apply`], and if the function does not have `K` outputs.
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

/// Wraps a [`Function`] as a [`MultiFunction`].
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

/// A function that is shared by the backends through which a call passes.
#[derive(Clone, Debug)]
pub(crate) struct SharedFunction(pub(crate) Arc<dyn MultiFunction>);

impl SharedFunction {
    /// Returns the name of the type without its generic parameters and module path.
    pub(crate) fn name(&self) -> String {
        let whole = self.0.name();
        let without = whole.split('<').next().unwrap_or(whole);
        without.rsplit("::").next().unwrap_or(without).into()
    }
}

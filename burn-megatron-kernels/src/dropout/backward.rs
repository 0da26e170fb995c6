//! Dropout as an autodiff function, and the parameters of its forward and backward device operations.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{DropoutMask, NAME, RowSizes, cpu};
use crate::column_sum::bias_gradient;
use crate::cpu::wide;
use crate::function::{Function, Gradients, Tensors};
use crate::gradient::{self, Destination, FlatGradients, Place};
use crate::launch::{SimpleOp, Spec, launch, launch_one};

/// Bias, dropout and residual addition as an autodiff function. The inputs are `x`, then the bias and the residual if
/// present.
#[derive(Debug)]
pub(super) struct BiasDropoutAdd {
    pub sizes: RowSizes,
    pub mask: Option<DropoutMask>,
    /// The type of each input.
    pub input: DType,
    pub bias: Option<DType>,
    pub residual: Option<DType>,
    /// The flat buffer that receives the gradient of the bias. With `None`, autodiff receives the gradient.
    pub destination: Option<Destination>,
}

impl Function for BiasDropoutAdd {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let dtype = self.residual.unwrap_or(self.input);
        let op = SimpleOp {
            name: NAME,
            parameters: DropoutForwardOp {
                sizes: self.sizes,
                mask: self.mask,
                bias: self.bias.is_some(),
                residual: self.residual.is_some(),
            },
            outputs: vec![Spec::new(inputs[0].shape(), dtype)],
            cpu: cpu::forward,
            #[cfg(feature = "cubecl")]
            cube: kernel::forward,
        };
        (launch_one(op, inputs), vec![])
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let bias = self.bias.filter(|_| needed[1]);
        if self.mask.is_none() && gradient.dtype() == self.input {
            return self.handed_on(gradient, bias);
        }
        let mut results = match &self.destination {
            Some(destination) => gradient::accumulate(&[destination], |target| {
                let mut results = self.launch(gradient.clone(), true, target);
                let bias = results.pop().map(Tensor::from_dispatch);
                (results, Vec::from_iter(bias))
            }),
            None if needed[0] || bias.is_some() => {
                self.launch(gradient.clone(), bias.is_some(), None)
            }
            None => vec![],
        }
        .into_iter();
        let mut gradients = vec![results.next()];
        if self.bias.is_some() {
            let narrow = |(sum, dtype)| Tensor::<1>::from_dispatch(sum).cast::<DType>(dtype);
            let sum = results.next().zip(bias).map(narrow);
            gradients.push(sum.map(Tensor::into_dispatch));
        }
        if self.residual.is_some() {
            gradients.push(Some(gradient));
        }
        gradients
    }
}

impl BiasDropoutAdd {
    /// Returns the gradients if nothing is dropped or rounded. In this case the gradient of `x` is the gradient of the
    /// output.
    fn handed_on(&self, gradient: DispatchTensor, bias: Option<DType>) -> Gradients {
        let mut gradients = vec![Some(gradient.clone())];
        if self.bias.is_some() {
            let destination = self.destination.as_ref();
            gradients.push(bias_gradient(gradient.clone(), bias, destination));
        }
        gradients.extend(self.residual.map(|_| Some(gradient)));
        gradients
    }

    /// Returns the gradient of `x` and, if requested, of the bias.
    fn launch(
        &self,
        gradient: DispatchTensor,
        bias: bool,
        target: Option<FlatGradients>,
    ) -> Vec<DispatchTensor> {
        let (flat, places) = gradient::split(NAME, target, self.sizes.width, self.input);
        let mut outputs = vec![Spec::new(gradient.shape(), self.input)];
        if bias {
            let sum = Spec::new([self.sizes.width], wide(self.input));
            outputs.push(flat.as_ref().map_or(sum, Spec::of_any));
        }
        let op = SimpleOp {
            name: NAME,
            parameters: DropoutBackwardOp {
                sizes: self.sizes,
                mask: self.mask,
                input: self.input,
                bias,
                place: places.map(|places| places[0]),
            },
            outputs,
            cpu: cpu::backward,
            #[cfg(feature = "cubecl")]
            cube: kernel::backward,
        };
        let inputs = [Some(gradient), flat].into_iter().flatten();
        launch(op, inputs.collect())
    }
}

/// The forward device operation. The inputs are `x`, then the bias and the residual if present. The output is the
/// result.
#[derive(Debug)]
pub(super) struct DropoutForwardOp {
    pub sizes: RowSizes,
    pub mask: Option<DropoutMask>,
    pub bias: bool,
    pub residual: bool,
}

/// The backward device operation.
///
/// The inputs are the gradient of the output, and the flat buffer if the bias gradient has a place in it. The outputs
/// are the gradient of `x` and, if requested, the gradient of the bias in f32 (f64 for f64). With a place, the flat
/// buffer is returned instead of the bias gradient.
#[derive(Debug)]
pub(super) struct DropoutBackwardOp {
    pub sizes: RowSizes,
    pub mask: Option<DropoutMask>,
    /// The type of `x`.
    pub input: DType,
    pub bias: bool,
    pub place: Option<Place>,
}

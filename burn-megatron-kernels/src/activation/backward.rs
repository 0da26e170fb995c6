//! The activation as a [`Function`], and its forward and backward device operations.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::kind::FusedActivation;
use super::{Activation, ActivationOptions, NAME, check_options, cpu, statistics};
use crate::cpu::for_float;
use crate::error::accept;
use crate::function::{Function, Gradients, Tensors};
use crate::gradient::{self, Destination, Place};
use crate::launch::{DeviceOp, SimpleOp, Spec, launch, launch_one};

/// The gradients that a backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RequestedGradients {
    pub x: bool,
    pub bias: bool,
    pub weight: bool,
}

impl FusedActivation {
    /// Computes the output on Burn's CPU backend.
    pub(crate) fn on_cpu(&self, inputs: Vec<FlexTensor>) -> FlexTensor {
        for_float!(inputs[0].dtype(), E => cpu::forward::<E>(self, inputs))
    }
}

/// The activation of [`activate_with`](super::activate_with) as a [`Function`].
///
/// The inputs are `x`, the bias and the row weight. The function saves these inputs for the backward pass.
#[derive(Debug)]
pub struct ActivationFunction {
    pub(super) fused: FusedActivation,
    /// The flat buffer that receives the gradient of the bias. With `None`, autodiff receives the gradient.
    pub(super) destination: Option<Destination>,
}

impl ActivationFunction {
    /// Creates an activation without a row weight and with default options.
    ///
    /// `bias` is `None` for an activation without a bias. `Some(None)` is a bias whose gradient is returned to
    /// autodiff. `Some(Some(destination))` is a bias whose gradient is written to a flat buffer.
    pub fn new(kind: Activation, bias: Option<Option<Destination>>) -> Self {
        let fused = FusedActivation {
            bias: bias.is_some(),
            ..FusedActivation::plain(kind)
        };
        let destination = bias.flatten();
        Self { fused, destination }
    }

    /// Creates an activation with a row weight, without a bias and with default options.
    ///
    /// The inputs are `x` and the row weight. The row weight is f32 (f64 if `x` is f64).
    pub fn weighted(kind: Activation) -> Self {
        let mut activation = Self::new(kind, None);
        activation.fused.weight = true;
        activation
    }

    /// Sets the options of the activation.
    ///
    /// # Panics
    ///
    /// Panics if the options are not valid for this activation function, in the same cases as
    /// [`activate`](super::activate).
    pub fn with_options(mut self, options: ActivationOptions) -> Self {
        accept(check_options(self.fused.kind, options));
        self.fused.options = options;
        self
    }

    /// Returns the activation function.
    pub fn kind(&self) -> Activation {
        self.fused.kind
    }

    /// Returns whether the gradient of the bias is written to a flat buffer.
    pub fn has_destination(&self) -> bool {
        self.destination.is_some()
    }
}

impl Function for ActivationFunction {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let mut output = Spec::of_any(&inputs[0]);
        if let Some(width) = output.shape.last_mut() {
            *width = self.fused.kind.output_width(*width);
        }
        let op = SimpleOp {
            name: NAME,
            parameters: self.fused,
            outputs: vec![output],
            cpu: |fused, inputs| vec![fused.on_cpu(inputs)],
            #[cfg(feature = "cubecl")]
            cube: |fused, inputs| vec![kernel::forward(fused, inputs)],
        };
        (launch_one(op, inputs.clone()), inputs)
    }

    fn backward(&self, mut saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let (x, bias, weight) = self.fused.split(needed.iter().copied());
        let wanted = RequestedGradients {
            x,
            bias: bias.unwrap_or(false) || self.destination.is_some(),
            weight: weight.unwrap_or(false),
        };
        saved.push(gradient);
        let op = ActivationBackwardOp {
            fused: self.fused,
            wanted,
            place: None,
        };
        let mut gradients = match &self.destination {
            None => launch(op, saved),
            Some(destination) => gradient::accumulate(&[destination], |target| {
                let (width, dtype) = (saved[1].shape().num_elements(), saved[0].dtype());
                let (flat, places) = gradient::split(NAME, target, width, dtype);
                saved.extend(flat);
                let place = places.map(|places| places[0]);
                let mut gradients = launch(ActivationBackwardOp { place, ..op }, saved);
                let bias = gradients.remove(usize::from(wanted.x));
                (gradients, vec![Tensor::from_dispatch(bias)])
            }),
        }
        .into_iter();
        needed
            .iter()
            .map(|needed| needed.then(|| gradients.next()).flatten())
            .collect()
    }
}

/// Computes the requested gradients of `x`, the bias and the row weight.
///
/// The inputs are the inputs of the forward pass, followed by the gradient of the output. If the bias gradient goes to
/// a flat buffer, this buffer is the last input, and it replaces the bias gradient in the outputs.
#[derive(Debug)]
pub(super) struct ActivationBackwardOp {
    pub fused: FusedActivation,
    pub wanted: RequestedGradients,
    pub place: Option<Place>,
}

impl DeviceOp for ActivationBackwardOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let (x, bias, weight) = self.fused.split(inputs);
        let bias = match self.place {
            Some(_) => inputs.last(),
            None => bias,
        };
        let wanted = self.wanted;
        let weight = weight.map(|weight| Spec::new(weight.shape.clone(), statistics(x.dtype)));
        let outputs = [
            wanted.x.then(|| x.clone()),
            bias.filter(|_| wanted.bias).cloned(),
            weight.filter(|_| wanted.weight),
        ];
        outputs.into_iter().flatten().collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        for_float!(inputs[0].dtype(), E => cpu::backward::<E>(self, inputs))
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::backward(self, inputs)
    }
}

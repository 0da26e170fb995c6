//! The router weights as an autodiff function, and the device operations of the router.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{NAME, RouterOptions, cpu};
use crate::cpu::{for_float, wide};
use crate::function::{Function, Gradients, Tensors};
use crate::launch::{DeviceOp, Spec, launch_one};

/// The router weights as a function of the logits. The function saves the logits for the backward pass.
#[derive(Debug)]
pub(super) struct RouterWeights {
    pub options: RouterOptions,
    /// The chosen experts, `[tokens, k]` in I32.
    pub indices: DispatchTensor,
}

impl Function for RouterWeights {
    fn forward(&self, inputs: Tensors) -> (DispatchTensor, Tensors) {
        let all = vec![inputs[0].clone(), self.indices.clone()];
        (launch_one(RouterOp::Weights(self.options), all), inputs)
    }

    fn backward(
        &self,
        mut saved: Tensors,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Gradients {
        saved.extend([self.indices.clone(), gradient]);
        vec![Some(launch_one(RouterOp::Gradient(self.options), saved))]
    }
}

/// A device operation of the router.
#[derive(Debug)]
pub(super) enum RouterOp {
    /// Computes the indices from logits and an optional bias.
    Choose(RouterOptions),
    /// Computes the weights from logits and indices.
    Weights(RouterOptions),
    /// Computes the gradient of the logits from logits, indices and the gradient of the weights.
    Gradient(RouterOptions),
}

impl DeviceOp for RouterOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let logits = &inputs[0];
        vec![match self {
            Self::Choose(options) => Spec::new([logits.shape[0], options.top_k], DType::I32),
            Self::Weights(_) => Spec::new(inputs[1].shape.clone(), wide(logits.dtype)),
            Self::Gradient(_) => logits.clone(),
        }]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![for_float!(inputs[0].dtype(), E => match self {
            Self::Choose(options) => cpu::choose::<E>(options, &inputs),
            Self::Weights(options) => cpu::weights::<E>(options, &inputs),
            Self::Gradient(options) => cpu::gradient::<E>(options, &inputs),
        })]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![match self {
            Self::Choose(options) => kernel::choose(options, inputs),
            Self::Weights(options) => kernel::weights(options, inputs),
            Self::Gradient(options) => kernel::gradient(options, inputs),
        }]
    }
}

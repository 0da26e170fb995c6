//! The weights as a recorded function, and the device operations.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{NAME, RouterOptions, cpu};
use crate::Function;
use crate::cpu::{for_float, wide};
use crate::launch::{DeviceOp, Spec, launch_one};

/// Input: the logits, which it saves.
#[derive(Debug)]
pub(super) struct RouterWeights {
    pub options: RouterOptions,
    /// `[tokens, k]` of I32.
    pub indices: DispatchTensor,
}

impl Function for RouterWeights {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let all = vec![inputs[0].clone(), self.indices.clone()];
        (launch_one(WeightsOp(self.options), all), inputs)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        saved.extend([self.indices.clone(), gradient]);
        vec![Some(launch_one(GradientOp(self.options), saved))]
    }
}

/// Logits, and the bias where there is one, to indices.
#[derive(Debug)]
pub(super) struct ChooseOp(pub RouterOptions);

impl DeviceOp for ChooseOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([inputs[0].shape[0], self.0.top_k], DType::I32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let indices = for_float!(inputs[0].dtype(), E => cpu::choose::<E>(&self.0, &inputs));
        vec![indices]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::choose(&self.0, inputs)]
    }
}

/// Logits and indices to weights.
#[derive(Debug)]
struct WeightsOp(RouterOptions);

impl DeviceOp for WeightsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new(inputs[1].shape.clone(), wide(inputs[0].dtype))]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let weights = for_float!(inputs[0].dtype(), E => cpu::weights::<E>(&self.0, &inputs));
        vec![weights]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::weights(&self.0, inputs)]
    }
}

/// Logits, indices and the gradient of the weights to that of the logits.
#[derive(Debug)]
struct GradientOp(RouterOptions);

impl DeviceOp for GradientOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let gradient = for_float!(inputs[0].dtype(), E => cpu::gradient::<E>(&self.0, &inputs));
        vec![gradient]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::gradient(&self.0, inputs)]
    }
}

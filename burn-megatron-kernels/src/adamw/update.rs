//! The step as a [`DeviceOp`].

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{AdamWStep, Decay, NAME, cpu};
use crate::launch::{DeviceOp, Spec};

/// Inputs: weights, first and second moment, gradient; where blocks have factors, those of the
/// decay, and those of the rate if there are any.
#[derive(Debug)]
pub(super) struct AdamWOp {
    numbers: StepScalars,
    /// The offset of the first element in its block.
    offset_in_block: usize,
    model: Option<DType>,
}

/// The scalars of a step, which computes `w -= size m / (root sqrt(v) + epsilon) + decay w`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepScalars {
    /// The factor of the gradient.
    pub scale: f64,
    /// `beta1` and `1 - beta1`.
    pub first: [f64; 2],
    /// `beta2` and `1 - beta2`.
    pub second: [f64; 2],
    /// `rate / (1 - beta1^t)`.
    pub size: f64,
    /// `1 / sqrt(1 - beta2^t)`.
    pub root: f64,
    /// Added to the root.
    pub epsilon: f64,
    /// `rate * weight_decay`, or 0.
    pub decay: f64,
}

impl StepScalars {
    fn new(step: &AdamWStep, decays: bool) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(step.step as f64);
        Self {
            scale: step.gradient_scale,
            first: [step.beta1, 1.0 - step.beta1],
            second: [step.beta2, 1.0 - step.beta2],
            size: step.rate / correction(step.beta1),
            root: 1.0 / correction(step.beta2).sqrt(),
            epsilon: step.epsilon,
            decay: if decays {
                step.rate * step.weight_decay
            } else {
                0.0
            },
        }
    }
}

impl AdamWOp {
    pub(super) fn new(step: &AdamWStep, decay: &Decay, model: Option<DType>) -> Self {
        Self {
            numbers: StepScalars::new(step, !matches!(decay, Decay::None)),
            offset_in_block: match decay {
                Decay::Blocks(blocks) => blocks.first,
                _ => 0,
            },
            model,
        }
    }
}

impl DeviceOp for AdamWOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let mut outputs = inputs[..3].to_vec();
        outputs.extend(
            self.model
                .map(|dtype| Spec::new(inputs[0].shape.clone(), dtype)),
        );
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::update(inputs, self.offset_in_block, &self.numbers, self.model)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::update(inputs, self.offset_in_block, &self.numbers, self.model)
    }
}

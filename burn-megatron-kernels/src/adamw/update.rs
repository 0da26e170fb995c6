//! The optimizer step as a [`DeviceOp`].

use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::outcome::doubles;
use super::{AdamWStep, Decay, NAME, cpu};
use crate::launch::{DeviceOp, Spec};

/// The optimizer step as a device operation.
///
/// Its inputs are the following tensors. Only the first four are required:
///
/// - weights, first moment, second moment, gradient,
/// - outcome,
/// - weight decay factors and learning rate factors of the blocks,
/// - copy of the weights.
#[derive(Debug)]
pub(super) struct AdamWOp {
    numbers: StepScalars,
    /// Whether an outcome replaces some of the scalars.
    outcome: bool,
    decays: bool,
    /// The position of the first element in its block.
    offset_in_block: usize,
    /// Whether there is a copy of the weights.
    model: bool,
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
    /// The step size, `rate / (1 - beta1^t)`.
    pub size: f64,
    /// The factor of the square root of the second moment, `1 / sqrt(1 - beta2^t)`.
    pub root: f64,
    /// The number added to the square root of the second moment.
    pub epsilon: f64,
    /// The weight decay of the step, `rate * weight_decay`. It is 0 if weight decay applies to no weights.
    pub decay: f64,
}

impl StepScalars {
    pub(super) fn new(step: &AdamWStep, decays: bool) -> Self {
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
    pub(super) fn new(step: &AdamWStep, decay: &Decay, outcome: bool, model: bool) -> Self {
        let decays = !matches!(decay, Decay::None);
        Self {
            numbers: StepScalars::new(step, decays),
            outcome,
            decays,
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
        outputs.extend(inputs.last().filter(|_| self.model).cloned());
        outputs
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let model = self.model.then(|| inputs.pop()).flatten();
        let numbers = if self.outcome {
            let outcome = doubles(&inputs.remove(4));
            self.numbers.with_outcome(&outcome, self.decays)
        } else {
            Some(self.numbers)
        };
        match numbers {
            Some(numbers) => cpu::update(inputs, model, self.offset_in_block, &numbers),
            None => cpu::unchanged(inputs, model.map(|model| model.dtype())),
        }
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let model = self.model.then(|| inputs.pop()).flatten();
        let outcome = self.outcome.then(|| inputs.remove(4));
        let mut numbers = self.numbers;
        if outcome.is_some() {
            // The kernel multiplies this value by the weight decay of the outcome.
            numbers.decay = if self.decays { 1.0 } else { 0.0 };
        }
        super::kernel::update(inputs, outcome, model, self.offset_in_block, &numbers)
    }
}

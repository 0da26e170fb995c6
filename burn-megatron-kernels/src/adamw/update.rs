//! The step as a [`Kernel`].

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{AdamWStep, Decay, NAME, cpu};
use crate::launch::{Kernel, Spec};

/// Inputs: weights, first and second moment, gradient; where blocks have factors, those of the
/// decay, and those of the rate if there are any.
#[derive(Debug)]
pub(super) struct Update {
    numbers: Numbers,
    /// The place of the first element in its block.
    inside: usize,
    model: Option<DType>,
}

/// What a step comes down to:
/// `w -= size m / (root sqrt(v) + epsilon) + decay w`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Numbers {
    /// What the gradient is multiplied with.
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

impl Numbers {
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

impl Update {
    pub(super) fn new(step: &AdamWStep, decay: &Decay, model: Option<DType>) -> Self {
        Self {
            numbers: Numbers::new(step, !matches!(decay, Decay::None)),
            inside: match decay {
                Decay::Blocks(blocks) => blocks.first,
                _ => 0,
            },
            model,
        }
    }
}

impl Kernel for Update {
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
        cpu::update(inputs, self.inside, &self.numbers, self.model)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::update(inputs, self.inside, &self.numbers, self.model)
    }
}

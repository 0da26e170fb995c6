//! The three parts as device operations, with their parameters.

use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{CrossEntropyOptions, NAME, STATISTICS, VocabularyShard, cpu};
use crate::cpu::wide;
use crate::launch::{DeviceOp, InPlace, Spec};

/// The columns of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vocabulary {
    /// The token that column 0 is; 0 where no column is one.
    pub first: u32,
    /// The columns that are tokens: the first ones.
    pub valid: u32,
    /// The tokens of the whole vocabulary.
    pub tokens: u32,
    /// The target that has no loss.
    pub ignore: Option<i64>,
}

impl Vocabulary {
    /// For `width` columns. The sizes have been checked to fit into 31 bits.
    pub(super) fn new(part: &VocabularyShard, width: usize, ignore: Option<i64>) -> Self {
        let valid = part.tokens.saturating_sub(part.first).min(width);
        let first = if valid == 0 { 0 } else { part.first };
        Self {
            first: first as u32,
            valid: valid as u32,
            tokens: part.tokens as u32,
            ignore,
        }
    }
}

/// The weights of the terms of the loss.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossWeights {
    /// `1 - s`, of the target's logit.
    pub keep: f64,
    /// `s / K`, of each logit.
    pub share: f64,
    /// `s`, of their mean.
    pub smoothing: f64,
    /// `z`, of the squared log-sum-exp.
    pub z: f64,
}

impl LossWeights {
    pub(super) fn new(tokens: usize, options: &CrossEntropyOptions) -> Self {
        let count = tokens as f64;
        let smoothing = match tokens {
            1 => 0.0,
            _ => options.label_smoothing * count / (count - 1.0),
        };
        Self {
            keep: 1.0 - smoothing,
            share: smoothing / count,
            smoothing,
            z: options.z_loss,
        }
    }
}

/// Logits `[rows, width]` and targets `[rows]` to `[rows, 4]`.
#[derive(Debug)]
pub(super) struct StatisticsOp {
    pub vocabulary: Vocabulary,
}

impl DeviceOp for StatisticsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let rows = inputs[0].shape[0];
        vec![Spec::new([rows, STATISTICS], wide(inputs[0].dtype))]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::statistics(&inputs[0], &inputs[1], &self.vocabulary)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::statistics(inputs, &self.vocabulary)
    }
}

/// Statistics `[parts, rows, 4]`, or `[rows, 4]` of the only part, and targets `[rows]` to the loss
/// and the log-sum-exp, `[rows]`.
#[derive(Debug)]
pub(super) struct CombineOp {
    pub vocabulary: Vocabulary,
    pub weights: LossWeights,
}

impl DeviceOp for CombineOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let row = Spec::new(inputs[1].shape.clone(), inputs[0].dtype);
        vec![row.clone(), row]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::combine(&inputs[0], &inputs[1], &self.vocabulary, &self.weights)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::combine(inputs, &self.vocabulary, &self.weights)
    }
}

/// Logits `[rows, width]`, targets, log-sum-exp and gradient of the loss, `[rows]` each, to the
/// gradient of the logits.
#[derive(Debug)]
pub(super) struct GradientOp {
    pub vocabulary: Vocabulary,
    pub weights: LossWeights,
}

impl DeviceOp for GradientOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::FIRST)
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::gradient(inputs, &self.vocabulary, &self.weights)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::gradient(inputs, &self.vocabulary, &self.weights)
    }
}

/// Logits `[rows, width]` of the whole vocabulary, targets and gradient of the loss, `[rows]` each, to the loss `[rows]`
/// and the gradient of the logits.
#[derive(Debug)]
pub(super) struct LossAndGradientOp {
    pub vocabulary: Vocabulary,
    pub weights: LossWeights,
}

impl DeviceOp for LossAndGradientOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[2].clone(), inputs[0].clone()]
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace {
            input: 0,
            output: 1,
        })
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let Ok([logits, targets, upstream]) = <[FlexTensor; 3]>::try_from(inputs) else {
            unreachable!("it is launched with three inputs")
        };
        let parts = cpu::statistics(&logits, &targets, &self.vocabulary);
        let mut outputs = cpu::combine(&parts, &targets, &self.vocabulary, &self.weights);
        let lse = outputs.remove(1);
        let inputs = vec![logits, targets, lse, upstream];
        outputs.push(cpu::gradient(inputs, &self.vocabulary, &self.weights));
        outputs
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::loss_and_gradient(inputs, &self.vocabulary, &self.weights)
    }
}

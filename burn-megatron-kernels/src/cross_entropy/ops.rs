//! The steps of the loss as one device operation with parameters.

use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{CrossEntropyOptions, NAME, STATISTICS, VocabularyShard, cpu};
use crate::cpu::wide;
use crate::launch::{DeviceOp, InPlace, Spec, exactly};

/// The columns of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vocabulary {
    /// The token of column 0; 0 if no column is a token.
    pub first: u32,
    /// The number of columns that are tokens. They come first.
    pub valid: u32,
    /// The number of tokens of the complete vocabulary.
    pub tokens: u32,
    /// The target without a loss.
    pub ignore: Option<i64>,
}

impl Vocabulary {
    /// Creates the vocabulary of `width` columns. The sizes must have been checked to fit into 31
    /// bits.
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
    /// `1 - s`, the weight of the target's logit.
    pub keep: f64,
    /// `s / K`, the weight of each logit.
    pub share: f64,
    /// `s`, the weight of the mean of the logits.
    pub smoothing: f64,
    /// `z`, the weight of the squared log-sum-exp.
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

/// A step of the loss. Targets, losses, log-sum-exps and their gradients are `[rows]`.
#[derive(Clone, Copy, Debug)]
pub(super) enum LossPart {
    /// Computes statistics `[rows, 4]` from logits `[rows, width]` and targets.
    Statistics,
    /// Computes the loss and the log-sum-exp from statistics `[parts, rows, 4]` (or `[rows, 4]` for a single part) and
    /// targets.
    Combine,
    /// Computes the gradient of the logits from logits `[rows, width]`, targets, log-sum-exp and the gradient of the
    /// loss.
    Gradient,
    /// Computes the loss and the gradient of the logits from logits `[rows, width]` of the complete vocabulary, targets
    /// and the gradient of the loss.
    LossAndGradient,
}

impl LossPart {
    /// Creates the operation on `width` columns of a part of the vocabulary.
    pub(super) fn op(
        self,
        part: &VocabularyShard,
        width: usize,
        options: &CrossEntropyOptions,
    ) -> LossOp {
        LossOp {
            part: self,
            vocabulary: Vocabulary::new(part, width, options.ignore),
            weights: LossWeights::new(part.tokens, options),
        }
    }
}

/// A step of the loss as a device operation.
#[derive(Debug)]
pub(super) struct LossOp {
    pub part: LossPart,
    pub vocabulary: Vocabulary,
    pub weights: LossWeights,
}

impl DeviceOp for LossOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let first = inputs[0].clone();
        match self.part {
            LossPart::Statistics => {
                vec![Spec::new([first.shape[0], STATISTICS], wide(first.dtype))]
            }
            LossPart::Combine => vec![Spec::new(inputs[1].shape.clone(), first.dtype); 2],
            LossPart::Gradient => vec![first],
            LossPart::LossAndGradient => vec![inputs[2].clone(), first],
        }
    }

    fn in_place(&self) -> Option<InPlace> {
        match self.part {
            LossPart::Statistics | LossPart::Combine => None,
            LossPart::Gradient => Some(InPlace::FIRST),
            LossPart::LossAndGradient => Some(InPlace {
                input: 0,
                output: 1,
            }),
        }
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        match self.part {
            LossPart::Statistics => vec![cpu::statistics(self, &inputs[0], &inputs[1])],
            LossPart::Combine => cpu::combine(self, &inputs[0], &inputs[1]),
            LossPart::Gradient => vec![cpu::gradient(self, exactly(inputs))],
            LossPart::LossAndGradient => {
                let [logits, targets, upstream] = exactly(inputs);
                let parts = cpu::statistics(self, &logits, &targets);
                let [loss, lse] = exactly(cpu::combine(self, &parts, &targets));
                vec![loss, cpu::gradient(self, [logits, targets, lse, upstream])]
            }
        }
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        match self.part {
            LossPart::Statistics => vec![kernel::statistics(self, exactly(inputs))],
            LossPart::Combine => kernel::combine(self, exactly(inputs)).into(),
            LossPart::Gradient => vec![kernel::gradient(self, exactly(inputs))],
            LossPart::LossAndGradient => kernel::loss_and_gradient(self, exactly(inputs)).into(),
        }
    }
}

//! The sums as a recorded function, and the device operations.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{NAME, cpu};
use crate::Function;
use crate::cpu::{for_float, wide};
use crate::launch::{DeviceOp, Spec, launch_one};
use crate::moe::score::ScoreFunction;

/// The quantity that is summed over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SumKind {
    /// The score of each expert.
    Scores(ScoreFunction),
    /// The squared log-sum-exp.
    SquaredLse,
}

impl SumKind {
    /// The score, divided by its sum over all experts.
    pub fn score(self) -> ScoreFunction {
        match self {
            Self::Scores(score) => score,
            Self::SquaredLse => ScoreFunction::Softmax,
        }
    }

    /// The sums of a sequence.
    pub fn width(self, experts: usize) -> usize {
        match self {
            Self::Scores(_) => experts,
            Self::SquaredLse => 1,
        }
    }
}

/// Input: the logits `[tokens, experts]`, which it saves. Output: `[sequences * width]`.
#[derive(Debug)]
pub(super) struct RouterSums {
    pub kind: SumKind,
    pub sequences: usize,
    /// `[tokens]`: 1 for a token that counts, and 0.
    pub valid: Option<DispatchTensor>,
}

impl Function for RouterSums {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let mut all = inputs.clone();
        all.extend(self.valid.clone());
        let op = SumsOp {
            kind: self.kind,
            sequences: self.sequences,
        };
        (launch_one(op, all), inputs)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        saved.push(gradient);
        saved.extend(self.valid.clone());
        let op = GradientOp {
            kind: self.kind,
            sequences: self.sequences,
        };
        vec![Some(launch_one(op, saved))]
    }
}

/// Logits, and what is valid where it is given, to the sums.
#[derive(Debug)]
pub(super) struct SumsOp {
    pub kind: SumKind,
    pub sequences: usize,
}

impl DeviceOp for SumsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let length = self.sequences * self.kind.width(inputs[0].shape[1]);
        vec![Spec::new([length], wide(inputs[0].dtype))]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let sums = for_float!(inputs[0].dtype(), E => cpu::sums::<E>(self, &inputs));
        vec![sums]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::sums(self, inputs)]
    }
}

/// Logits, the gradient of the sums, and what is valid where it is given, to the gradient of the logits.
#[derive(Debug)]
pub(super) struct GradientOp {
    pub kind: SumKind,
    pub sequences: usize,
}

impl DeviceOp for GradientOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let gradient = for_float!(inputs[0].dtype(), E => cpu::gradient::<E>(self, &inputs));
        vec![gradient]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::gradient(self, inputs)]
    }
}

/// Indices to counts.
#[derive(Debug)]
pub(super) struct CountOp {
    pub experts: usize,
    pub sequences: usize,
}

impl DeviceOp for CountOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([self.sequences, self.experts], DType::I32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::count(self, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::count(self, inputs)]
    }
}

//! The sums over tokens as an autodiff function, and the device operations.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{NAME, cpu};
use crate::cpu::{for_float, wide};
use crate::function::{Function, Gradients, Tensors};
use crate::launch::{DeviceOp, Spec, launch_one};
use crate::moe::score::ScoreFunction;

/// The values that are summed over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SumKind {
    /// The score of each expert.
    Scores(ScoreFunction),
    /// The squared log-sum-exp of the logits.
    SquaredLse,
}

impl SumKind {
    /// Returns the score function. The scores are divided by their sum over all experts.
    pub fn score(self) -> ScoreFunction {
        match self {
            Self::Scores(score) => score,
            Self::SquaredLse => ScoreFunction::Softmax,
        }
    }

    /// Returns the number of sums per sequence.
    pub fn width(self, experts: usize) -> usize {
        match self {
            Self::Scores(_) => experts,
            Self::SquaredLse => 1,
        }
    }
}

/// The sums over the tokens of each sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceSums {
    pub kind: SumKind,
    pub sequences: usize,
}

/// The sums over tokens as a function of the logits `[tokens, experts]`. The function saves the logits. Its output is
/// `[sequences * width]`.
#[derive(Debug)]
pub(super) struct RouterSums {
    pub sums: SequenceSums,
    /// A mask `[tokens]` that is 1 for tokens that are included, and 0 for the other tokens.
    pub valid: Option<DispatchTensor>,
}

impl Function for RouterSums {
    fn forward(&self, inputs: Tensors) -> (DispatchTensor, Tensors) {
        let mut all = inputs.clone();
        all.extend(self.valid.clone());
        (launch_one(StatisticsOp::Sums(self.sums), all), inputs)
    }

    fn backward(
        &self,
        mut saved: Tensors,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Gradients {
        saved.push(gradient);
        saved.extend(self.valid.clone());
        vec![Some(launch_one(StatisticsOp::Gradient(self.sums), saved))]
    }
}

/// A device operation of the statistics.
#[derive(Debug)]
pub(super) enum StatisticsOp {
    /// Computes the sums from the logits, and `valid` if it is given.
    Sums(SequenceSums),
    /// Computes the gradient of the logits from the logits, the gradient of the sums, and `valid` if it is given.
    Gradient(SequenceSums),
    /// Computes the counts from the indices.
    Count { experts: usize, sequences: usize },
}

impl DeviceOp for StatisticsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let first = &inputs[0];
        vec![match *self {
            Self::Sums(SequenceSums { kind, sequences }) => {
                let length = sequences * kind.width(first.shape[1]);
                Spec::new([length], wide(first.dtype))
            }
            Self::Gradient(_) => first.clone(),
            Self::Count { experts, sequences } => Spec::new([sequences, experts], DType::I32),
        }]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let dtype = inputs[0].dtype();
        vec![match *self {
            Self::Sums(sums) => for_float!(dtype, E => cpu::sums::<E>(sums, &inputs)),
            Self::Gradient(sums) => for_float!(dtype, E => cpu::gradient::<E>(sums, &inputs)),
            Self::Count { experts, sequences } => cpu::count(&inputs[0], experts, sequences),
        }]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![match *self {
            Self::Sums(sums) => kernel::sums(sums, inputs),
            Self::Gradient(sums) => kernel::gradient(sums, inputs),
            Self::Count { experts, sequences } => {
                kernel::count(inputs.remove(0), experts, sequences)
            }
        }]
    }
}

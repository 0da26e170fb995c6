//! The three tensors that an FP8 layer quantizes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A tensor that an FP8 linear layer quantizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operand {
    /// The input, `[tokens, in]`.
    Input,
    /// The weight, `[in, out]`.
    Weight,
    /// The gradient of the output, `[tokens, out]`.
    Gradient,
}

impl Operand {
    /// All operands, in the order that is used in all lists and reports.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::Gradient];
}

/// Writes the name of the operand in reports, such as `input`.
impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The operands that are split over the tensor ranks of the layer, or over the expert-tensor axis for experts. The
/// weight always counts as split. Ranks that do not split the weight hold the same weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitOperands {
    /// Whether the input is split, along its features (in a row-parallel layer) or along its tokens.
    pub input: bool,
    /// Whether the output gradient is split, along its features (in a column-parallel layer) or along its tokens.
    pub gradient: bool,
}

impl SplitOperands {
    pub fn is_split(self, operand: Operand) -> bool {
        match operand {
            Operand::Input => self.input,
            Operand::Weight => true,
            Operand::Gradient => self.gradient,
        }
    }
}

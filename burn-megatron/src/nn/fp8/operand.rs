//! The three tensors that a layer quantises.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A tensor that a linear layer quantises.
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
    /// All operands, in the order in which they are listed everywhere.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::Gradient];
}

/// Writes its name in reports: `input`.
impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Which operands are split over the layer's tensor ranks, for experts those of the expert-tensor axis. The weight
/// always is, or ranks have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitOperands {
    /// The input: its features, as of a row-parallel layer, or its tokens.
    pub input: bool,
    /// The gradient of the output: its features, as of a column-parallel layer, or its tokens.
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

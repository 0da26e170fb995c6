//! The stages of ZeRO.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What the ranks of a data-parallel group share instead of each holding a copy.
///
/// Written as its number. Each stage shares what the one before it does, and more.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(try_from = "u8", into = "u8")]
pub enum ZeroStage {
    /// Nothing.
    #[default]
    Replicated = 0,
    /// Master weights and moments.
    Optimizer = 1,
    /// The summed gradients too.
    Gradients = 2,
    /// The parameters too: they are gathered block by block.
    Parameters = 3,
}

impl ZeroStage {
    /// Every stage.
    pub const ALL: [Self; 4] = [
        Self::Replicated,
        Self::Optimizer,
        Self::Gradients,
        Self::Parameters,
    ];
}

/// There is no such stage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no ZeRO stage \"{0}\"; the stages are 0 (everything on every rank), 1 (the optimizer \
     state is sharded), 2 (and the gradients) and 3 (and the parameters)"
)]
pub struct UnknownStage(pub String);

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        stage as u8
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = UnknownStage;

    fn try_from(number: u8) -> Result<Self, UnknownStage> {
        let stage = Self::ALL.get(usize::from(number));
        stage.copied().ok_or(UnknownStage(number.to_string()))
    }
}

impl FromStr for ZeroStage {
    type Err = UnknownStage;

    fn from_str(text: &str) -> Result<Self, UnknownStage> {
        let number: Result<u8, _> = text.parse();
        let unknown = |_| UnknownStage(text.into());
        number.map_err(unknown)?.try_into()
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&u8::from(*self), f)
    }
}

//! The requested implementation of attention (fused or unfused), and the requested engine of fused attention.

use std::fmt::{self, Display};
use std::str::FromStr;

use burn_megatron_kernels::attention::EngineKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KernelChoice, KernelChoiceError};

/// The requested implementation of attention: fused or unfused, with an optional engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(into = "String", try_from = "String")]
#[schemars(extend("enum" = ["auto", "fused", "unfused", "mma", "portable"]))]
pub enum AttentionChoice {
    /// Requests the fused or the unfused implementation, as for any other operation. The engine of fused attention is
    /// chosen automatically.
    Form(KernelChoice),
    /// Requests fused attention with this engine. An error is returned if the engine cannot be used.
    Engine(EngineKind),
}

impl AttentionChoice {
    /// Returns the requested implementation. If an engine is requested, the implementation is fused.
    pub fn form(self) -> KernelChoice {
        match self {
            Self::Form(choice) => choice,
            Self::Engine(_) => KernelChoice::Fused,
        }
    }

    /// Returns the requested engine, or `None` if the engine is chosen automatically.
    pub fn engine(self) -> Option<EngineKind> {
        match self {
            Self::Form(_) => None,
            Self::Engine(engine) => Some(engine),
        }
    }
}

impl Default for AttentionChoice {
    fn default() -> Self {
        Self::Form(KernelChoice::Auto)
    }
}

impl Display for AttentionChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Form(choice) => choice.name(),
            Self::Engine(engine) => engine.name(),
        })
    }
}

impl FromStr for AttentionChoice {
    type Err = KernelChoiceError;

    fn from_str(text: &str) -> Result<Self, KernelChoiceError> {
        if let Ok(choice) = text.parse() {
            return Ok(Self::Form(choice));
        }
        let mut engines = EngineKind::ALL.into_iter();
        let engine = engines.find(|engine| engine.name() == text);
        let engine =
            engine.ok_or_else(|| KernelChoiceError::UnknownAttentionChoice(text.into()))?;
        Ok(Self::Engine(engine))
    }
}

impl From<AttentionChoice> for String {
    fn from(choice: AttentionChoice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for AttentionChoice {
    type Error = KernelChoiceError;

    fn try_from(text: String) -> Result<Self, KernelChoiceError> {
        text.parse()
    }
}

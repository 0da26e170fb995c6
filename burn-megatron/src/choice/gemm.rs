//! The requested engine of matrix products on the CPU.

use std::str::FromStr;

use burn_megatron_kernels::gemm::{CpuGemm, UnknownCpuGemm};
use serde::{Deserialize, Serialize};

/// A [`CpuGemm`], by its name in recipes and flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct GemmChoice(pub CpuGemm);

impl FromStr for GemmChoice {
    type Err = UnknownCpuGemm;

    fn from_str(text: &str) -> Result<Self, UnknownCpuGemm> {
        Ok(Self(text.parse()?))
    }
}

impl From<GemmChoice> for String {
    fn from(choice: GemmChoice) -> Self {
        choice.0.to_string()
    }
}

impl TryFrom<String> for GemmChoice {
    type Error = UnknownCpuGemm;

    fn try_from(text: String) -> Result<Self, UnknownCpuGemm> {
        text.parse()
    }
}

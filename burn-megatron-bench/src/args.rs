//! Flags that several benchmarks share.

use std::path::PathBuf;

use burn::tensor::DType;
use burn_megatron_cli::internal::at_least_one;
use clap::{Args, ValueEnum};

/// Flags of benchmarks that repeat steps.
#[derive(Args)]
pub struct StepFlags {
    /// Number of measured steps per case.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Number of warm-up steps before the measured steps.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warm_up: usize,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The dtype of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDtype {
    /// 32-bit floats.
    #[value(aliases = ["fp32", "float32"])]
    F32,
    /// 16-bit IEEE floats (half precision).
    #[value(aliases = ["fp16", "float16"])]
    F16,
    /// bfloat16: 16-bit floats with the exponent range of f32.
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<BenchDtype> for DType {
    fn from(dtype: BenchDtype) -> Self {
        match dtype {
            BenchDtype::F32 => Self::F32,
            BenchDtype::F16 => Self::F16,
            BenchDtype::Bf16 => Self::BF16,
        }
    }
}

/// Parses a finite number above 0.
pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        Ok(_) => Err("expected a finite number above 0".into()),
        Err(error) => Err(format!("{error}")),
    }
}

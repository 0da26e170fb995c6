//! The dtypes of the model and of the optimizer's moments.

use burn::tensor::{DType, Device, FloatDType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::DataParallelConfigError;

/// The precision of the model: the dtype of the parameters in forward and backward. Gradients are summed and master
/// weights are updated in f32, or in f64 if the precision is f64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[derive(strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Precision {
    /// 64-bit floating point, for comparisons of results. Requires a CPU device.
    #[schemars(extend("aliases" = ["fp64", "float64"]))]
    F64,
    /// The dtype in which the module was built, which is usually f32.
    #[default]
    #[schemars(extend("aliases" = ["fp32", "float32"]))]
    F32,
    /// bfloat16: 16-bit floating point with the exponent range of f32.
    #[schemars(extend("aliases" = ["bfloat16"]))]
    Bf16,
    /// IEEE half precision: 16-bit floating point with a small range. Requires loss scaling.
    #[schemars(extend("aliases" = ["fp16", "float16"]))]
    F16,
}

impl Precision {
    /// Returns the dtype in which the model computes with a parameter. `built` is the dtype in which the parameter was
    /// built.
    pub fn of(self, built: DType) -> DType {
        self.float().map_or(built, DType::from)
    }

    /// Returns the dtype in which the parameters must be built. It is the dtype of the master weights.
    pub fn master(self) -> DType {
        match self {
            Self::F64 => DType::F64,
            Self::F32 | Self::Bf16 | Self::F16 => DType::F32,
        }
    }

    /// Checks that a model on `device` can use this precision.
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError::F64Device`] for f64 on a device other than the CPU.
    pub fn check(self, device: &Device) -> Result<(), DataParallelConfigError> {
        let device = device.clone().inner();
        if self == Self::F64 && device != Device::flex() {
            let device = format!("{device:?}");
            return Err(DataParallelConfigError::F64Device { device });
        }
        Ok(())
    }

    /// Returns the dtype of this precision, or `None` if the model uses the dtype in which the module was built.
    pub fn float(self) -> Option<FloatDType> {
        match self {
            Self::F64 => Some(FloatDType::F64),
            Self::F32 => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
        }
    }
}

/// The dtype of the optimizer's moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Moments {
    /// 32-bit floating point: 4 bytes per element.
    #[default]
    F32,
    /// bfloat16: 2 bytes per element.
    Bf16,
}

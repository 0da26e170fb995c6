//! The ends of steps as device operations.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{LOG_COLUMNS, ScaleRules, cpu};
use crate::launch::{DeviceOp, Spec};

/// Inputs: the log, and what was seen.
#[derive(Debug)]
pub(super) struct LogOp {
    pub slot: usize,
    /// Whether the count of values beyond the format was seen too.
    pub counts: bool,
    pub elements: usize,
}

impl DeviceOp for LogOp {
    fn name(&self) -> &'static str {
        "log_magnitude"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let log = inputs.remove(0);
        vec![cpu::log(self, log, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::log(self, inputs)]
    }
}

/// Inputs: the logs, the state and, on CubeCL devices, the table of the rules.
#[derive(Debug)]
pub(super) struct NextScalesOp {
    pub rules: ScaleRules,
}

impl DeviceOp for NextScalesOp {
    fn name(&self) -> &'static str {
        "next_scales"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let slots = self.rules.slots();
        let flat = |count: usize| Spec::new([count], DType::F32);
        vec![
            inputs[1].clone(),
            flat(LOG_COLUMNS * slots),
            flat(2 * slots),
        ]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::next_scales(&self.rules, &inputs[0], &inputs[1])
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::next_scales(&self.rules, inputs)
    }
}

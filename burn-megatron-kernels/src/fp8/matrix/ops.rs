//! Transposed and padded codes as device operations.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{cpu, words};
use crate::cpu::{slice, tensor};
use crate::launch::{DeviceOp, Spec};

/// Input: padded rows of `depth` codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransposeOp {
    pub depth: usize,
}

impl DeviceOp for TransposeOp {
    fn name(&self) -> &'static str {
        "transposed"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let rows = inputs[0].shape[0];
        vec![Spec::new([self.depth, words(rows)], DType::U32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let rows = inputs[0].layout().shape()[0];
        let codes = cpu::transposed_codes(slice(&inputs[0]), [rows, self.depth]);
        vec![tensor(codes, [self.depth, words(rows)])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::transpose(inputs.remove(0), self.depth)]
    }
}

/// Input: codes without padding.
#[derive(Clone, Copy, Debug)]
pub(super) struct PadOp {
    pub rows: usize,
    pub depth: usize,
}

impl DeviceOp for PadOp {
    fn name(&self) -> &'static str {
        "from_flat"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([self.rows, words(self.depth)], DType::U32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let codes = cpu::padded(slice(&inputs[0]), [self.rows, self.depth]);
        vec![tensor(codes, [self.rows, words(self.depth)])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::pad(inputs.remove(0), [self.rows, self.depth])]
    }
}

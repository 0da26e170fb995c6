//! Transposed and padded codes as device operations.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, TensorData};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{cpu, words};
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
        let codes = cpu::transposed_codes(cpu::words_of(&inputs[0]), [rows, self.depth]);
        let codes = TensorData::new(codes, [self.depth, words(rows)]);
        vec![FlexTensor::from_data(codes)]
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
        let sizes = [self.rows, self.depth];
        let codes = cpu::padded(cpu::words_of(&inputs[0]), sizes);
        let codes = TensorData::new(codes, [self.rows, words(self.depth)]);
        vec![FlexTensor::from_data(codes)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::pad(inputs.remove(0), [self.rows, self.depth])]
    }
}

//! The device operations of rotary positions.
//!
//! After the tensors that a launch works on come cosines, sines and, where every token has its own
//! position, the positions.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::check::NAME;
#[cfg(feature = "cubecl")]
use super::kernel;
use super::{MlaDims, RotaryHeads, cpu};
use crate::cpu::for_float;
use crate::launch::{DeviceOp, InPlace, Spec};

/// Rotates `x` forward or back.
#[derive(Debug)]
pub(super) struct RotateOp {
    pub heads: RotaryHeads,
    /// The position of the first token where not every token has its own.
    pub start: usize,
    pub back: bool,
}

impl DeviceOp for RotateOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::FIRST)
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let x = inputs.remove(0);
        for_float!(x.dtype(), E => {
            let angles = cpu::CpuAngles::<E>::new(&inputs, x.shape()[1], self.start, self.back);
            vec![cpu::rotate::<E>(x, &angles, self.heads)]
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let x = inputs.remove(0);
        let angles = kernel::AngleArgs::new(inputs, x.shape()[1], self.start, self.back);
        vec![kernel::rotate(x, angles, self.heads)]
    }
}

/// `q`, `kv` and the shared key to the queries and the keys.
#[derive(Debug)]
pub(super) struct MlaForwardOp {
    pub heads: RotaryHeads,
    pub mla: MlaDims,
    pub start: usize,
}

impl DeviceOp for MlaForwardOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone(); 2]
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::FIRST)
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let angles = inputs.split_off(3);
        let q = inputs.remove(0);
        for_float!(q.dtype(), E => {
            let angles = cpu::CpuAngles::<E>::new(&angles, q.shape()[1], self.start, false);
            let k = cpu::mla_forward::<E>(&inputs[0], &inputs[1], &angles, self.heads, self.mla);
            vec![cpu::rotate::<E>(q, &angles, self.heads), k]
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let angles = inputs.split_off(3);
        let angles = kernel::AngleArgs::new(angles, inputs[0].shape()[1], self.start, false);
        kernel::mla_forward(inputs, angles, self.heads, self.mla)
    }
}

/// The gradient of the keys to those of `kv`, 0 for the values, and of the shared key.
#[derive(Debug)]
pub(super) struct MlaBackwardOp {
    pub heads: RotaryHeads,
    pub mla: MlaDims,
    pub start: usize,
}

impl DeviceOp for MlaBackwardOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [batch, seq] = [inputs[0].shape[0], inputs[0].shape[1]];
        let features = self.mla.nope + self.mla.value;
        let dtype = inputs[0].dtype;
        vec![
            Spec::new([batch, seq, self.heads.heads, features], dtype),
            Spec::new([batch, seq, self.heads.width], dtype),
        ]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let dk = inputs.remove(0);
        for_float!(dk.dtype(), E => {
            let angles = cpu::CpuAngles::<E>::new(&inputs, dk.shape()[1], self.start, true);
            cpu::mla_backward::<E>(&dk, &angles, self.heads, self.mla)
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let dk = inputs.remove(0);
        let angles = kernel::AngleArgs::new(inputs, dk.shape()[1], self.start, true);
        kernel::mla_backward(dk, angles, self.heads, self.mla)
    }
}

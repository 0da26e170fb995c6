//! Rotary position embedding as a device operation.
//!
//! The inputs are the tensors to rotate, the cosines, the sines and, if every token has its own position, the
//! positions.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::check::NAME;
#[cfg(feature = "cubecl")]
use super::kernel;
use super::{MlaDims, RotaryHeads, cpu};
use crate::cpu::for_float;
#[cfg(feature = "cubecl")]
use crate::launch::exactly;
use crate::launch::{DeviceOp, InPlace, Spec};

/// The kind of rotation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rotation {
    /// Rotates `x`. With `back`, rotates by the negative angles.
    Heads { back: bool },
    /// Computes the queries and the keys from `q`, `kv` and the part of the keys that all heads share.
    Mla(MlaDims),
    /// Computes the gradients of `kv` (0 for the values) and of the shared part of the keys from the gradient of the
    /// keys.
    MlaBack(MlaDims),
}

#[derive(Debug)]
pub(super) struct RotateOp {
    pub rotation: Rotation,
    pub heads: RotaryHeads,
    /// The table row of the first token, unless every token has its own position.
    pub start: usize,
}

impl RotateOp {
    /// Returns the number of inputs before the table and the positions.
    fn rotated_inputs(&self) -> usize {
        match self.rotation {
            Rotation::Mla(_) => 3,
            _ => 1,
        }
    }

    /// Returns whether the rotation is by the negative angles.
    pub(super) fn is_back(&self) -> bool {
        match self.rotation {
            Rotation::Heads { back } => back,
            Rotation::Mla(_) => false,
            Rotation::MlaBack(_) => true,
        }
    }
}

impl DeviceOp for RotateOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let x = inputs[0].clone();
        match self.rotation {
            Rotation::Heads { .. } => vec![x],
            Rotation::Mla(_) => vec![x; 2],
            Rotation::MlaBack(mla) => {
                let ([batch, seq], heads) = ([x.shape[0], x.shape[1]], self.heads);
                vec![
                    Spec::new([batch, seq, heads.heads, mla.nope + mla.value], x.dtype),
                    Spec::new([batch, seq, heads.width], x.dtype),
                ]
            }
        }
    }

    fn in_place(&self) -> Option<InPlace> {
        match self.rotation {
            Rotation::MlaBack(_) => None,
            _ => Some(InPlace::FIRST),
        }
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let angles = inputs.split_off(self.rotated_inputs());
        let x = inputs.remove(0);
        for_float!(x.dtype(), E => {
            let angles = cpu::CpuAngles::<E>::new(&angles, x.shape()[1], self);
            match self.rotation {
                Rotation::Heads { .. } => vec![cpu::rotate::<E>(x, &angles, self.heads)],
                Rotation::Mla(mla) => {
                    let k = cpu::mla_forward::<E>(&inputs[0], &inputs[1], &angles, self.heads, mla);
                    vec![cpu::rotate::<E>(x, &angles, self.heads), k]
                }
                Rotation::MlaBack(mla) => cpu::mla_backward::<E>(&x, &angles, self.heads, mla),
            }
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let angles = inputs.split_off(self.rotated_inputs());
        let angles = kernel::AngleArgs::new(angles, inputs[0].shape()[1], self);
        match self.rotation {
            Rotation::Heads { .. } => vec![kernel::rotate(inputs.remove(0), angles, self.heads)],
            Rotation::Mla(mla) => kernel::mla_forward(exactly(inputs), angles, self.heads, mla),
            Rotation::MlaBack(mla) => {
                kernel::mla_backward(inputs.remove(0), angles, self.heads, mla)
            }
        }
    }
}

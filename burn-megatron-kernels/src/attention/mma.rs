//! Attention by `mma.sync`, in the shape of FlashAttention-2.

use burn::tensor::{DType, Device, Tensor};

use super::engine::AttentionEngine;
use super::kernel::mma::{MAX_WIDTH, STEP, missing_support, shapes};
use super::matrix::{MatrixDevice, MatrixKernels, refused};
use super::problem::{AttentionProblem, Projections};
use crate::KernelError;

/// The algorithm of Dao, "FlashAttention-2" (2023), by NVIDIA's `mma.sync` of 16 by 8 by 16 in f16 or
/// bf16 with sums in f32: scores, weights and their gradients stay in registers, `ldmatrix` reads
/// keys and values from shared memory, and `cp.async` copies the next tile there while one is worked
/// on. It takes heads of 16 to 128 features, in steps of 16, a positive scale, and all that
/// [`Portable`](super::Portable) does beside that: groups, masks, documents, sinks, views. Views whose
/// rows do not start at multiples of 16 bytes are copied.
///
/// The backward has no atomic additions: one kernel over blocks of queries and one over blocks of keys
/// compute the scores each, and the gradients of a key over the heads of its group are summed in
/// order. Rounding is that of [`CmmaTiles`](super::CmmaTiles).
///
/// [`select_engine`](super::select_engine) does not prefer it to another engine: it is used where it
/// is named. Its kernels for widths of 64, 96 and 128 were run on an emulated GPU in f16 and bf16 and
/// compared with NumPy. Its tests have not been run there, and it has never run on a GPU.
#[derive(Clone, Debug)]
pub struct MmaTiles(MatrixDevice);

impl MmaTiles {
    /// An engine for tensors on `device`; queries the device for what the kernels need.
    ///
    /// # Errors
    ///
    /// If `device` is not a CubeCL device, or has no `mma.sync`, `ldmatrix` or `cp.async` for f16 or
    /// bf16; the message names what is missing.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Self::query(device).map_err(|reason| refused(device, reason))
    }

    /// [`new`](Self::new), with only what is missing as the error.
    pub(super) fn query(device: &Device) -> Result<Self, String> {
        MatrixDevice::query("mma", MatrixKernels::Mma, device, missing_support).map(Self)
    }

    /// The element types that it takes on its device.
    pub fn types(&self) -> &[DType] {
        self.0.types()
    }
}

impl AttentionEngine for MmaTiles {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        self.0.supports(problem, STEP, MAX_WIDTH)?;
        if problem.scale <= 0.0 {
            return Err(format!(
                "scale {}: expected a positive number",
                problem.scale
            ));
        }
        let there = self.0.shared_memory();
        let shapes = shapes(problem.heads.width, problem.dtype == DType::BF16);
        let needed = shapes.iter().map(|shape| shape.memory()).max();
        match needed.filter(|needed| *needed > there) {
            Some(needed) => Err(format!(
                "heads of width {}: {needed} bytes of shared memory for a block, and the device has \
                 {there}",
                problem.heads.width
            )),
            None => Ok(()),
        }
    }

    fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>) {
        self.0.forward(problem, projections, sink)
    }

    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>) {
        self.0.backward(problem, projections, sink, result, dout)
    }
}

//! Attention by cooperative matrix products.

use burn::tensor::{DType, Device, Tensor};

use super::engine::AttentionEngine;
use super::kernel::matrix::{MAX_WIDTH, TILE, TileMultiplier, missing_support};
use super::matrix::{MatrixDevice, MatrixKernels, refused};
use super::problem::{AttentionProblem, Projections};
use crate::KernelError;

const NAME: &str = "cmma";

/// Tiles that the matrix units of a CubeCL device multiply: 16 by 16 by 16, in f16 or bf16, with
/// sums in f32. It takes heads of 16 to 128 features, in steps of 16, and all that
/// [`Portable`](super::Portable) does beside that: groups, masks, documents, sinks, views.
///
/// [`select_engine`](super::select_engine) prefers it to [`Portable`](super::Portable). It has been
/// compiled for A100, H100 and B200, run on an emulated GPU in f16 and bf16, and on a software device
/// in f16 with loops in place of the matrix instructions. It has never run on a GPU.
///
/// Softmax, its statistics and all sums are in f32. Probabilities, and the gradients of scores, are
/// rounded to the type of the inputs before they are multiplied, as in Dao, "FlashAttention-2"
/// (2023).
#[derive(Clone, Debug)]
pub struct CmmaTiles(MatrixDevice);

impl CmmaTiles {
    /// An engine for tensors on `device`; queries the device for its matrix units.
    ///
    /// # Errors
    ///
    /// If `device` is not a CubeCL device, or does not support these products in f16 or bf16; the
    /// message names what is missing.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Self::query(device).map_err(|reason| refused(device, reason))
    }

    /// [`new`](Self::new), with only what is missing as the error.
    pub(super) fn query(device: &Device) -> Result<Self, String> {
        let kernels = MatrixKernels::Cmma(TileMultiplier::MatrixUnits);
        MatrixDevice::query(NAME, kernels, device, missing_support).map(Self)
    }

    /// The same kernels with loops in place of matrix instructions, for devices without them.
    #[cfg(test)]
    pub(super) fn with_loops(device: &Device) -> Self {
        let mut types = vec![DType::F16, DType::BF16];
        types.retain(|dtype| device.supports_dtype(*dtype));
        let kernels = MatrixKernels::Cmma(TileMultiplier::Loops);
        Self(MatrixDevice::with(NAME, kernels, device, types))
    }

    /// The element types that it takes on its device.
    pub fn types(&self) -> &[DType] {
        self.0.types()
    }
}

impl AttentionEngine for CmmaTiles {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        self.0.supports(problem, TILE, MAX_WIDTH)
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

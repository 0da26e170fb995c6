//! Attention by the matrix units of a CubeCL device.

use burn::backend::DispatchDevice;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::engine::{AttentionEngine, backward_by, forward_by};
use super::kernel::matrix::{self, MAX_WIDTH, TILE, TileMultiplier, missing_support};
use super::ops;
use super::problem::{AttentionProblem, OPERATION, Projections};
use crate::KernelError;
use crate::error::accept;
use crate::launch::{DeviceOp, Spec};

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
pub struct CmmaTiles {
    device: Device,
    types: Vec<DType>,
    products: TileMultiplier,
}

impl CmmaTiles {
    /// An engine for tensors on `device`; queries the device for its matrix units.
    ///
    /// # Errors
    ///
    /// If `device` is not a CubeCL device, or does not support these products in f16 or bf16; the
    /// message names what is missing.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Self::query(device).map_err(|reason| {
            let message = format!("no matrix units on {device:?}: {reason}: use Portable");
            KernelError::shape(OPERATION, message)
        })
    }

    /// [`new`](Self::new), with only what is missing as the error.
    pub(super) fn query(device: &Device) -> Result<Self, String> {
        let Some(cube) = cube_device(device.as_dispatch()) else {
            return Err("it is not a CubeCL device".into());
        };
        let client = cube.client();
        let mut types = vec![DType::F16, DType::BF16];
        let mut missing = Vec::new();
        types.retain(|dtype| match missing_support(&client, *dtype) {
            Some(reason) => {
                missing.push(reason);
                false
            }
            None => true,
        });
        if types.is_empty() {
            return Err(missing.join("; "));
        }
        let products = TileMultiplier::MatrixUnits;
        Ok(Self::with(device, types, products))
    }

    /// The same kernels with loops in place of matrix instructions, for devices without them.
    #[cfg(test)]
    pub(super) fn with_loops(device: &Device) -> Self {
        let mut types = vec![DType::F16, DType::BF16];
        types.retain(|dtype| device.supports_dtype(*dtype));
        Self::with(device, types, TileMultiplier::Loops)
    }

    fn with(device: &Device, types: Vec<DType>, products: TileMultiplier) -> Self {
        Self {
            device: device.clone().inner(),
            types,
            products,
        }
    }

    /// The element types that it takes on its device.
    pub fn types(&self) -> &[DType] {
        &self.types
    }

    fn check_device(&self, projections: &Projections) -> Result<(), KernelError> {
        let given = projections.device().inner();
        if given == self.device {
            Ok(())
        } else {
            let message = format!(
                "tensors are on {given:?}, and the engine {NAME:?} was made for {:?}: expected \
                     the same device",
                self.device
            );
            Err(KernelError::shape(OPERATION, message))
        }
    }
}

const NAME: &str = "cmma";

impl AttentionEngine for CmmaTiles {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        let (width, dtype) = (problem.heads.width, problem.dtype);
        if !width.is_multiple_of(TILE) || width > MAX_WIDTH {
            return Err(format!(
                "heads of width {width}: expected multiples of {TILE} up to {MAX_WIDTH}"
            ));
        }
        if self.types.contains(&dtype) {
            Ok(())
        } else {
            Err(format!(
                "element type {dtype:?}: expected one of {:?}",
                self.types
            ))
        }
    }

    fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>) {
        accept(self.check_device(&projections));
        let kernel = MatrixForwardOp {
            kernel: ops::AttentionForwardOp(problem.clone()),
            products: self.products,
        };
        forward_by(kernel, problem, projections, sink)
    }

    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>) {
        accept(self.check_device(&projections));
        let kernel = MatrixBackwardOp {
            kernel: ops::AttentionBackwardOp(problem.clone()),
            products: self.products,
        };
        backward_by(kernel, problem, projections, sink, result, dout)
    }
}

/// The CubeCL device behind a device of Burn, if there is one.
fn cube_device(device: &DispatchDevice) -> Option<&CubeDevice> {
    match device {
        DispatchDevice::Autodiff(device) => cube_device(device),
        DispatchDevice::Cube(device) => Some(device),
        _ => None,
    }
}

/// [`ops::AttentionForwardOp`] by matrix units.
#[derive(Debug)]
struct MatrixForwardOp {
    kernel: ops::AttentionForwardOp,
    products: TileMultiplier,
}

/// [`ops::AttentionBackwardOp`] by matrix units.
#[derive(Debug)]
struct MatrixBackwardOp {
    kernel: ops::AttentionBackwardOp,
    products: TileMultiplier,
}

impl DeviceOp for MatrixForwardOp {
    fn name(&self) -> &'static str {
        self.kernel.name()
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        self.kernel.outputs(inputs)
    }

    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, _inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        unreachable!("`supports` accepts only tensors on CubeCL devices")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        matrix::forward(&self.kernel.0, self.products, inputs)
    }
}

impl DeviceOp for MatrixBackwardOp {
    fn name(&self) -> &'static str {
        self.kernel.name()
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        self.kernel.outputs(inputs)
    }

    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, _inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        unreachable!("`supports` accepts only tensors on CubeCL devices")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        matrix::backward(&self.kernel.0, self.products, inputs)
    }
}

//! What the engines for the matrix units of a CubeCL device share.

use burn::backend::DispatchDevice;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use super::engine::{backward_by, forward_by};
use super::kernel::matrix::{self, TileMultiplier};
use super::kernel::mma;
use super::ops;
use super::problem::{AttentionProblem, OPERATION, Projections};
use crate::KernelError;
use crate::error::accept;
use crate::launch::{DeviceOp, Spec};

/// Kernels by matrix units.
#[derive(Clone, Copy, Debug)]
pub(super) enum MatrixKernels {
    /// Cooperative products of 16 by 16 by 16.
    Cmma(TileMultiplier),
    /// `mma.sync` of 16 by 8 by 16.
    Mma,
}

/// Kernels, the device that an engine was made for, and the types that it takes there.
#[derive(Clone, Debug)]
pub(super) struct MatrixDevice {
    name: &'static str,
    kernels: MatrixKernels,
    device: Device,
    types: Vec<DType>,
}

impl MatrixDevice {
    /// Queries `device` with a function that returns what it does not support of a type.
    ///
    /// # Errors
    ///
    /// What is missing.
    pub(super) fn query(
        name: &'static str,
        kernels: MatrixKernels,
        device: &Device,
        missing_support: impl Fn(&Client, DType) -> Option<String>,
    ) -> Result<Self, String> {
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
        Ok(Self::with(name, kernels, device, types))
    }

    /// For a device that is known to take these types.
    pub(super) fn with(
        name: &'static str,
        kernels: MatrixKernels,
        device: &Device,
        types: Vec<DType>,
    ) -> Self {
        Self {
            name,
            kernels,
            device: device.clone().inner(),
            types,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn types(&self) -> &[DType] {
        &self.types
    }

    /// The bytes of shared memory that a cube may have.
    pub(super) fn shared_memory(&self) -> usize {
        let device = cube_device(self.device.as_dispatch());
        device.map_or(0, |device| {
            device.client().properties().hardware.max_shared_memory_size
        })
    }

    /// Checks the width of the heads, in steps of `step` up to `most`, and the type.
    pub(super) fn supports(
        &self,
        problem: &AttentionProblem,
        step: usize,
        most: usize,
    ) -> Result<(), String> {
        let (width, dtype) = (problem.heads.width, problem.dtype);
        if !width.is_multiple_of(step) || width > most {
            return Err(format!(
                "heads of width {width}: expected multiples of {step} up to {most}"
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

    /// [`AttentionEngine::forward`](super::AttentionEngine::forward)
    pub(super) fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>) {
        accept(self.check_device(&projections));
        let kernel = MatrixForwardOp {
            kernel: ops::AttentionForwardOp(problem.clone()),
            kernels: self.kernels,
        };
        forward_by(kernel, problem, projections, sink)
    }

    /// [`AttentionEngine::backward`](super::AttentionEngine::backward)
    pub(super) fn backward(
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
            kernels: self.kernels,
        };
        backward_by(kernel, problem, projections, sink, result, dout)
    }

    fn check_device(&self, projections: &Projections) -> Result<(), KernelError> {
        let given = projections.device().inner();
        if given == self.device {
            Ok(())
        } else {
            let message = format!(
                "tensors are on {given:?}, and the engine {:?} was made for {:?}: expected \
                     the same device",
                self.name, self.device
            );
            Err(KernelError::shape(OPERATION, message))
        }
    }
}

/// The error of an engine that `device` does not support.
pub(super) fn refused(device: &Device, reason: String) -> KernelError {
    let message = format!("no matrix units on {device:?}: {reason}: use Portable");
    KernelError::shape(OPERATION, message)
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
    kernels: MatrixKernels,
}

/// [`ops::AttentionBackwardOp`] by matrix units.
#[derive(Debug)]
struct MatrixBackwardOp {
    kernel: ops::AttentionBackwardOp,
    kernels: MatrixKernels,
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
        match self.kernels {
            MatrixKernels::Cmma(products) => matrix::forward(&self.kernel.0, products, inputs),
            MatrixKernels::Mma => mma::forward(&self.kernel.0, inputs),
        }
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
        match self.kernels {
            MatrixKernels::Cmma(products) => matrix::backward(&self.kernel.0, products, inputs),
            MatrixKernels::Mma => mma::backward(&self.kernel.0, inputs),
        }
    }
}

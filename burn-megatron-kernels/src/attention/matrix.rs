//! Attention by the matrix units of a CubeCL device.

use burn::backend::DispatchDevice;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::engine::{AttentionEngine, backward_by, forward_by};
use super::kernel::matrix::{self, MAX_WIDTH, Products, TILE, lacks};
use super::portable;
use super::problem::{OPERATION, Problem, Projections};
use crate::KernelError;
use crate::error::accept;
use crate::launch::{Kernel, Spec};

/// Tiles that the matrix units of a CubeCL device multiply: 16 by 16 by 16, in f16 or bf16, with
/// sums in f32. It takes heads of 16 to 128 features, in steps of 16, and all that
/// [`Portable`](super::Portable) does beside that: groups, masks, documents, sinks, views.
///
/// Nothing chooses it by itself: give it to
/// [`flash_attention_with`](super::flash_attention_with). It has been compiled for A100, H100 and
/// B200, and run on a software device in f16, with loops in place of the matrix instructions. It has
/// never run on a GPU.
///
/// Softmax, its statistics and all sums are in f32. Probabilities, and the gradients of scores, are
/// rounded to the type of the inputs before they are multiplied, as in Dao, "FlashAttention-2"
/// (2023).
#[derive(Clone, Debug)]
pub struct CmmaTiles {
    device: Device,
    types: Vec<DType>,
    products: Products,
}

impl CmmaTiles {
    /// For tensors on `device`, which is asked for its matrix units.
    ///
    /// # Errors
    ///
    /// When `device` is no CubeCL device, or multiplies neither f16 nor bf16 in this way; what it
    /// lacks is in the message.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        let refused = |message: String| {
            let message = format!("no matrix units on {device:?}: {message}; Portable fits");
            KernelError::shape(OPERATION, message)
        };
        let Some(cube) = cube_device(device.as_dispatch()) else {
            return Err(refused("it is no CubeCL device".into()));
        };
        let client = cube.client();
        let mut types = vec![DType::F16, DType::BF16];
        let mut missing = Vec::new();
        types.retain(|dtype| match lacks(&client, *dtype) {
            Some(reason) => {
                missing.push(reason);
                false
            }
            None => true,
        });
        if types.is_empty() {
            return Err(refused(missing.join("; ")));
        }
        let products = Products::Units;
        Ok(Self::with(device, types, products))
    }

    /// The same kernels on a device that need not have matrix units: loops multiply the tiles.
    #[cfg(test)]
    pub(super) fn by_loops(device: &Device) -> Self {
        let mut types = vec![DType::F16, DType::BF16];
        types.retain(|dtype| device.supports_dtype(*dtype));
        Self::with(device, types, Products::Loops)
    }

    fn with(device: &Device, types: Vec<DType>, products: Products) -> Self {
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
        match given == self.device {
            true => Ok(()),
            false => {
                let message = format!(
                    "tensors are on {given:?}, and the engine {NAME:?} was made for {:?}; one \
                     device fits",
                    self.device
                );
                Err(KernelError::shape(OPERATION, message))
            }
        }
    }
}

const NAME: &str = "cmma";

impl AttentionEngine for CmmaTiles {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        let (width, dtype) = (problem.heads.width, problem.dtype);
        if !width.is_multiple_of(TILE) || width > MAX_WIDTH {
            return Err(format!(
                "heads of width {width}; multiples of {TILE} up to {MAX_WIDTH} fit"
            ));
        }
        match self.types.contains(&dtype) {
            true => Ok(()),
            false => Err(format!("{dtype:?}; {:?} fit", self.types)),
        }
    }

    fn forward(
        &self,
        problem: &Problem,
        projections: Projections,
        sink: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>) {
        accept(self.check_device(&projections));
        let kernel = Forward {
            kernel: portable::Forward(problem.clone()),
            products: self.products,
        };
        forward_by(kernel, problem, projections, sink)
    }

    fn backward(
        &self,
        problem: &Problem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>) {
        accept(self.check_device(&projections));
        let kernel = Backward {
            kernel: portable::Backward(problem.clone()),
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

/// [`portable::Forward`] by matrix units.
#[derive(Debug)]
struct Forward {
    kernel: portable::Forward,
    products: Products,
}

/// [`portable::Backward`] by matrix units.
#[derive(Debug)]
struct Backward {
    kernel: portable::Backward,
    products: Products,
}

impl Kernel for Forward {
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
        unreachable!("the engine is made for a CubeCL device, and asks where tensors are")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        matrix::forward(&self.kernel.0, self.products, inputs)
    }
}

impl Kernel for Backward {
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
        unreachable!("the engine is made for a CubeCL device, and asks where tensors are")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        matrix::backward(&self.kernel.0, self.products, inputs)
    }
}

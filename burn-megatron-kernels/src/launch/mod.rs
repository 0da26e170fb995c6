//! Device operations. A device operation has one implementation per backend, and runs on the backend of its inputs.
//!
//! [`launch`] does not use autodiff. A [`Function`](crate::Function) calls it in its forward and backward passes.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Shape, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::error::{accept, check_size};

mod backend;
#[cfg(test)]
mod tests;

pub(crate) use backend::{check_float, memory_id};

/// The shape and the type of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    /// The dimensions.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
}

impl Spec {
    /// Creates the description of a tensor with these dimensions and this type.
    pub(crate) fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
        }
    }

    /// Returns the shape and the type of a tensor without a static number of dimensions.
    pub(crate) fn of_any(tensor: &DispatchTensor) -> Self {
        Self::new(tensor.shape(), tensor.dtype())
    }

    /// Returns the shape and the type of `tensor`.
    pub(crate) fn of<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Self {
        Self::new(tensor.shape(), tensor.dtype())
    }
}

/// The index of an input and the index of the output that is written to the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InPlace {
    pub input: usize,
    pub output: usize,
}

impl InPlace {
    /// The first input and the first output.
    pub(crate) const FIRST: Self = Self {
        input: 0,
        output: 0,
    };
}

/// An operation on plain tensors, with an implementation for each kind of backend.
///
/// [`outputs`](Self::outputs) is called before the implementation. The public function that launches the operation
/// checks the shapes. Inputs are contiguous unless [`strided`](Self::strided) returns true. An implementation may
/// overwrite an input whose memory no other tensor shares, and return it as an output.
pub(crate) trait DeviceOp: Debug + Send + Sync + 'static {
    /// Returns the name of the operation for error messages.
    fn name(&self) -> &'static str;

    /// Returns the shapes and types of the outputs.
    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec>;

    /// Returns the input and the output that share memory, for an input that is contiguous and whose memory no other
    /// tensor shares. The memory planner uses this information. It is not needed for gradient buffers.
    fn in_place(&self) -> Option<InPlace> {
        None
    }

    /// Returns whether the implementations support inputs that are not contiguous.
    fn strided(&self) -> bool {
        false
    }

    /// Runs the operation on Burn's CPU backend.
    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor>;

    /// Runs the operation on a CubeCL device, such as CUDA or WebGPU.
    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor>;
}

/// A [`DeviceOp`] that is built from one function per kind of backend. The shapes of its outputs are known in advance.
#[derive(Debug)]
pub(crate) struct SimpleOp<P> {
    pub name: &'static str,
    /// The argument of both functions, in addition to the tensors.
    pub parameters: P,
    pub outputs: Vec<Spec>,
    pub cpu: fn(&P, Vec<FlexTensor>) -> Vec<FlexTensor>,
    #[cfg(feature = "cubecl")]
    pub cube: fn(&P, Vec<CubeTensor>) -> Vec<CubeTensor>,
}

impl<P: Debug + Send + Sync + 'static> DeviceOp for SimpleOp<P> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        self.outputs.clone()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        (self.cpu)(&self.parameters, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        (self.cube)(&self.parameters, inputs)
    }
}

/// Runs a device operation on plain tensors of one device.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the device does not support an element
/// type, a tensor has too many elements, or the backend has no implementation.
pub(crate) fn launch(kernel: impl DeviceOp, inputs: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
    let specs: Vec<_> = inputs.iter().map(Spec::of_any).collect();
    let outputs = kernel.outputs(&specs);
    for spec in specs.iter().chain(&outputs) {
        let shape: Vec<usize> = spec.shape.iter().copied().collect();
        accept(check_size(kernel.name(), &shape));
    }
    accept(backend::check_types(kernel.name(), &inputs, &outputs));
    backend::run(Arc::new(kernel), inputs, outputs)
}

/// Converts a list of tensors to an array of known length.
pub(crate) fn exactly<T, const N: usize>(tensors: Vec<T>) -> [T; N] {
    match <[T; N]>::try_from(tensors) {
        Ok(tensors) => tensors,
        Err(tensors) => unreachable!("{} tensors of a kernel that has {N}", tensors.len()),
    }
}

/// Runs [`launch`] for an operation with one output.
pub(crate) fn launch_one(kernel: impl DeviceOp, inputs: Vec<DispatchTensor>) -> DispatchTensor {
    launch(kernel, inputs).remove(0)
}

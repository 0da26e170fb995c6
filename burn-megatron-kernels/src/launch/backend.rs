//! The only module of a launch that uses internals of Burn: the backend of a tensor, and its primitive.
//!
//! With the feature `fusion`, a kernel is queued as an opaque operation and runs when the stream is flushed. Operations
//! before and after the kernel are still fused with each other.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice, DispatchTensor,
    DispatchTensorKind, Flex, TensorMetadata,
};
use burn::tensor::DType;

use super::{DeviceOp, Spec};
use crate::KernelError;
use crate::record::launch_on_shapes;

/// Returns an error for element types that the device of the inputs does not support.
pub(super) fn check_types(
    operation: &'static str,
    inputs: &[DispatchTensor],
    outputs: &[Spec],
) -> Result<(), KernelError> {
    let device = inputs[0].device();
    let dtypes = inputs.iter().map(|tensor| tensor.dtype());
    let mut floats = dtypes
        .chain(outputs.iter().map(|spec| spec.dtype))
        .filter(DType::is_float);
    floats.try_for_each(|dtype| check_float(operation, dtype, &device))
}

/// Returns an error for a float type that a device does not support.
pub(crate) fn check_float(
    operation: &'static str,
    dtype: DType,
    device: &DispatchDevice,
) -> Result<(), KernelError> {
    // No CubeCL kernel here computes in f64, because Burn's CUDA tensors do not support f64.
    let has = |dtype: &DType| {
        (*dtype != DType::F64 || has_f64(device)) && Dispatch::supports_dtype(device, *dtype)
    };
    if has(&dtype) {
        return Ok(());
    }
    let all = [DType::F64, DType::F32, DType::F16, DType::BF16];
    let fits = all.into_iter().filter(has);
    Err(KernelError::element_type(operation, dtype, device, fits))
}

fn has_f64(device: &DispatchDevice) -> bool {
    match device {
        DispatchDevice::Autodiff(device) => has_f64(device),
        DispatchDevice::Flex(_) | DispatchDevice::Capture(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Runs the implementation of an operation for the backend of its inputs.
pub(super) fn run(
    kernel: Arc<dyn DeviceOp>,
    inputs: Vec<DispatchTensor>,
    outputs: Vec<Spec>,
) -> Vec<DispatchTensor> {
    match &inputs[0].kind {
        DispatchTensorKind::Flex(_) => {
            let inputs = inputs.into_iter().map(|tensor| match tensor.kind {
                DispatchTensorKind::Flex(tensor) => flex(tensor),
                other => mixed(kernel.name(), "flex", &other),
            });
            let inputs = if kernel.strided() {
                inputs.collect()
            } else {
                inputs.map(|tensor| tensor.to_contiguous()).collect()
            };
            let results = kernel.cpu(inputs);
            check_results(kernel.name(), &results, &outputs);
            results.into_iter().map(wrap_flex).collect()
        }
        #[cfg(feature = "cubecl")]
        DispatchTensorKind::Cube(_) => cube::run(kernel, inputs, outputs),
        DispatchTensorKind::Capture(_) => launch_on_shapes(&*kernel, inputs, outputs),
        other => panic!("{} has no form for {other:?}", kernel.name()),
    }
}

/// Returns an identifier of the memory of a tensor. It is valid as long as the memory is referenced, and no other
/// memory of the process ever has the same identifier. Returns `None` if tensors have no identifier, as on the CPU and
/// with `fusion`.
pub(crate) fn memory_id(tensor: &DispatchTensor) -> Option<usize> {
    match &tensor.kind {
        #[cfg(all(feature = "cubecl", not(feature = "fusion")))]
        DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Some(tensor.handle.memory.descriptor().id.value),
        _ => None,
    }
}

fn mixed(operation: &str, device: &str, other: &DispatchTensorKind) -> ! {
    panic!("{operation}: one tensor is on {device}, another is {other:?}: expected one device")
}

/// Checks that the outputs have the declared shapes and types. The check is skipped if it would be expensive compared
/// to the work.
fn check_results<T: TensorMetadata>(operation: &str, results: &[T], outputs: &[Spec]) {
    let given = results
        .iter()
        .map(|tensor| Spec::new(tensor.shape(), tensor.dtype()));
    debug_assert!(
        given.clone().eq(outputs.iter().cloned()),
        "{operation} promised {outputs:?} and gave {:?}",
        given.collect::<Vec<_>>()
    );
}

/// Returns the primitive tensor. Floats, integers and booleans have the same primitive type on this backend.
fn flex(tensor: BackendTensor<Flex>) -> FlexTensor {
    match tensor {
        BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor) => {
            tensor
        }
        other => panic!("a {} tensor is not an input of a kernel", other.name()),
    }
}

fn wrap_flex(tensor: FlexTensor) -> DispatchTensor {
    let dtype = tensor.dtype();
    plain(DispatchTensorKind::Flex(by_type::<Flex>(dtype, tensor)))
}

fn by_type<B>(dtype: DType, tensor: B::FloatTensorPrimitive) -> BackendTensor<B>
where
    B: Backend<
            IntTensorPrimitive = <B as burn::backend::BackendTypes>::FloatTensorPrimitive,
            BoolTensorPrimitive = <B as burn::backend::BackendTypes>::FloatTensorPrimitive,
        >,
{
    match dtype {
        DType::Bool(_) => BackendTensor::Bool(tensor),
        dtype if dtype.is_float() => BackendTensor::Float(tensor),
        _ => BackendTensor::Int(tensor),
    }
}

fn plain(kind: DispatchTensorKind) -> DispatchTensor {
    DispatchTensor {
        kind,
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

#[cfg(feature = "cubecl")]
mod cube {
    use burn::backend::Cube;
    use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};

    use super::*;

    type Primitive = <Cube as burn::backend::BackendTypes>::FloatTensorPrimitive;

    pub(super) fn run(
        kernel: Arc<dyn DeviceOp>,
        inputs: Vec<DispatchTensor>,
        outputs: Vec<Spec>,
    ) -> Vec<DispatchTensor> {
        let inputs = inputs.into_iter().map(|tensor| match tensor.kind {
            DispatchTensorKind::Cube(tensor) => unwrap(tensor),
            other => mixed(kernel.name(), "a CubeCL device", &other),
        });
        let results = queue(kernel.clone(), inputs.collect(), outputs);
        let wrap = |tensor: Primitive| {
            let dtype = tensor.dtype();
            plain(DispatchTensorKind::Cube(by_type::<Cube>(dtype, tensor)))
        };
        results.into_iter().map(wrap).collect()
    }

    fn unwrap(tensor: BackendTensor<Cube>) -> Primitive {
        match tensor {
            BackendTensor::Float(tensor)
            | BackendTensor::Int(tensor)
            | BackendTensor::Bool(tensor) => tensor,
            other => panic!("a {} tensor is not an input of a kernel", other.name()),
        }
    }

    fn execute(
        kernel: &dyn DeviceOp,
        inputs: Vec<CubeTensor>,
        outputs: &[Spec],
    ) -> Vec<CubeTensor> {
        let inputs = if kernel.strided() {
            inputs
        } else {
            inputs.into_iter().map(into_contiguous).collect()
        };
        let results = kernel.cube(inputs);
        check_results(kernel.name(), &results, outputs);
        results
    }

    #[cfg(not(feature = "fusion"))]
    fn queue(
        kernel: Arc<dyn DeviceOp>,
        inputs: Vec<CubeTensor>,
        outputs: Vec<Spec>,
    ) -> Vec<CubeTensor> {
        execute(&*kernel, inputs, &outputs)
    }

    #[cfg(feature = "fusion")]
    fn queue(
        kernel: Arc<dyn DeviceOp>,
        inputs: Vec<Primitive>,
        outputs: Vec<Spec>,
    ) -> Vec<Primitive> {
        use burn::backend::fusion::custom::{
            CustomOpIr, OperationFn, OperationIr, StreamId, TensorIr,
        };
        use burn_cubecl::CubeBackend;

        let client = inputs[0].client.clone();
        let inputs: Vec<TensorIr> = inputs.into_iter().map(|tensor| tensor.into_ir()).collect();
        let results: Vec<TensorIr> = outputs
            .iter()
            .map(|spec| {
                TensorIr::uninit(client.create_empty_handle(), spec.shape.clone(), spec.dtype)
            })
            .collect();
        let description = CustomOpIr {
            id: kernel.name().into(),
            inputs: inputs.clone(),
            outputs: results.clone(),
            scalars: vec![],
        };
        // Every primitive of this backend is a `CubeTensor`, so one function can access all types.
        let operation = OperationFn(
            move |handles: &mut burn::backend::fusion::custom::HandleContainer<_>| {
                let inputs = inputs
                    .iter()
                    .map(|tensor| handles.get_float_tensor::<CubeBackend>(tensor))
                    .collect();
                let tensors = execute(&*kernel, inputs, &outputs);
                for (result, tensor) in results.iter().zip(tensors) {
                    handles.register_float_tensor::<CubeBackend>(&result.id, tensor);
                }
                Ok(())
            },
        );
        client.register(
            StreamId::current(),
            OperationIr::Custom(description),
            operation,
        )
    }
}

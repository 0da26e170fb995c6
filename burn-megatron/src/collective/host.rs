//! Conversion between tensors and host buffers.

use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use half::{bf16, f16};

use crate::comm::{Buffer, CommError, DType as WireDType, raise};

/// Returns the elements of a plain tensor in row-major order. The elements are not copied if no other tensor shares
/// their memory.
///
/// Panics (see [`raise`]) if the device cannot be read, or if the communicator does not support the dtype.
pub fn to_buffer<const D: usize>(tensor: Tensor<D>) -> Buffer {
    let data = host_data(tensor);
    match data.dtype() {
        DType::F64 => elements::<f64>(data).into(),
        DType::F32 | DType::Flex32 => elements::<f32>(data).into(),
        DType::BF16 => elements::<bf16>(data).into(),
        DType::F16 => elements::<f16>(data).into(),
        other => invalid(format!("a tensor of {other:?} cannot be sent")),
    }
}

/// Returns the buffer type of a float tensor, or `None` for a type that cannot be sent.
pub(crate) fn buffer_dtype(dtype: DType) -> Option<WireDType> {
    match dtype {
        DType::F64 => Some(WireDType::F64),
        DType::F32 | DType::Flex32 => Some(WireDType::F32),
        DType::BF16 => Some(WireDType::BF16),
        DType::F16 => Some(WireDType::F16),
        _ => None,
    }
}

/// Returns the element type with which the elements of a float tensor of this dtype are sent.
///
/// Panics (see [`raise`]) if tensors of this dtype cannot be sent.
pub fn wire_dtype(dtype: DType) -> WireDType {
    buffer_dtype(dtype).unwrap_or_else(|| invalid(format!("a tensor of {dtype:?} cannot be sent")))
}

/// Waits for the device and returns the elements of a plain tensor as `f64`.
///
/// Panics (see [`raise`]) if the device cannot be read.
pub fn to_f64(tensor: Tensor<1>) -> Vec<f64> {
    elements(host_data(tensor).convert_dtype(DType::F64))
}

/// Waits for the device and returns the elements of a plain tensor.
///
/// Panics (see [`raise`]) if the device cannot be read.
fn host_data<const D: usize>(tensor: Tensor<D>) -> TensorData {
    match tensor.try_into_data() {
        Ok(data) => data,
        Err(error) => invalid(format!("a tensor cannot be read from its device: {error}")),
    }
}

/// Creates a tensor of `shape` on `device` from its elements in row-major order.
pub fn from_buffer<const D: usize>(
    buffer: Buffer,
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    let data = match buffer {
        Buffer::F64(values) => TensorData::new(values, shape),
        Buffer::F32(values) => TensorData::new(values, shape),
        Buffer::BF16(values) => TensorData::new(values, shape),
        Buffer::F16(values) => TensorData::new(values, shape),
        other => invalid(format!("{} is not a type of float tensors", other.dtype())),
    };
    Tensor::from_data(data, (device, dtype))
}

/// Waits for the device and copies a tensor to host memory. A CPU tensor is not copied.
///
/// Panics (see [`raise`]) if the device cannot be read.
pub fn to_host(x: Tensor<1>) -> Tensor<1> {
    if x.device() == Device::flex() {
        return x;
    }
    let dtype = x.dtype();
    Tensor::from_data(host_data(x), (&Device::flex(), dtype))
}

/// Copies a host tensor to a device through staging memory that the device can read directly. If `device` is the CPU,
/// the tensor is not copied.
pub fn to_device(x: Tensor<1>, device: &Device) -> Tensor<1> {
    if *device == Device::flex() {
        return x;
    }
    let dtype = x.dtype();
    let mut data = host_data(x);
    device.staging(std::iter::once(&mut data));
    Tensor::from_data(data, (device, dtype))
}

/// Returns the value of `result`. Panics (see [`raise`]) if `result` is an error.
pub fn or_raise<T>(result: Result<T, CommError>) -> T {
    result.unwrap_or_else(|error| raise(error))
}

/// Panics (see [`raise`]) with the error for an invalid call of a collective.
pub fn invalid(message: String) -> ! {
    raise(CommError::Engine {
        engine: "collective".into(),
        message,
    })
}

fn elements<E: Element>(data: TensorData) -> Vec<E> {
    match data.try_into_vec::<E>() {
        Ok(values) => values,
        Err(error) => invalid(format!("a tensor's elements cannot be read: {error}")),
    }
}

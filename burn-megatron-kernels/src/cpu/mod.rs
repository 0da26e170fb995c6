//! Shared code of the CPU implementations: element types, vectorized math functions, and parallel loops over rows.
//!
//! A CPU implementation is generic over [`Element`] and computes in [`Element::Wide`], which is f32 for 16-bit types.
//! Its inner loops are plain Rust inside [`vectorized`], which compiles them once for each supported SIMD width.

mod element;
mod lines;
mod math;
mod rows;
mod tasks;

pub(crate) use element::{Element, Real};
pub(crate) use lines::{add, narrow, widen};
pub(crate) use rows::{ROW_GRAIN, for_row_tasks, for_rows, rows_per_task, unfused, vectorized};
pub(crate) use tasks::{for_each_task, map_tasks};

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use bytemuck::Pod;

/// Returns the elements of a contiguous tensor.
pub(crate) fn slice<T: burn::tensor::Element + Pod>(tensor: &FlexTensor) -> &[T] {
    match tensor.as_slice() {
        Some(slice) => slice,
        None => unreachable!(
            "a {:?} tensor was read as {:?}, or was not contiguous",
            tensor.dtype(),
            T::dtype()
        ),
    }
}

/// Returns the elements of a contiguous tensor for writing. Copies the elements first if another tensor shares the
/// memory.
pub(crate) fn slice_mut<E: Element>(tensor: &mut FlexTensor) -> &mut [E] {
    match tensor.layout().contiguous_offsets() {
        Some((start, end)) => &mut tensor.storage_mut::<E>()[start..end],
        None => unreachable!("a tensor that was not contiguous was written to"),
    }
}

/// Returns the tensor itself if it is contiguous and no other tensor shares its memory, otherwise a contiguous copy.
pub(crate) fn own<E: Element>(flex: FlexTensor) -> FlexTensor {
    if flex.is_unique() && flex.is_contiguous() {
        flex
    } else {
        let shape = flex.layout().shape().clone();
        tensor::<E>(slice::<E>(&flex.to_contiguous()).to_vec(), shape)
    }
}

/// Returns a contiguous tensor of these values.
pub(crate) fn tensor<T: burn::tensor::Element>(
    values: Vec<T>,
    shape: impl Into<Shape>,
) -> FlexTensor {
    FlexTensor::from_data(burn::tensor::TensorData::new(values, shape.into()))
}

/// Returns a one-dimensional tensor of these values.
pub(crate) fn vector<T: burn::tensor::Element>(values: Vec<T>) -> FlexTensor {
    let length = values.len();
    tensor(values, [length])
}

/// Calls `$body` with the type `$element` that belongs to the [`DType`] `$dtype`.
///
/// Types other than floats are unreachable, because `launch` rejects them.
macro_rules! for_float {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $element = f64;
                $body
            }
            burn::tensor::DType::F32 | burn::tensor::DType::Flex32 => {
                type $element = f32;
                $body
            }
            burn::tensor::DType::F16 => {
                type $element = burn::tensor::f16;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $element = burn::tensor::bf16;
                $body
            }
            other => unreachable!("{other:?} is not a float"),
        }
    };
}
pub(crate) use for_float;

/// Returns the type in which values of `dtype` are summed and statistics are computed.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

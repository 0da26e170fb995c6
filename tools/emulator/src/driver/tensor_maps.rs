//! Tensor maps for asynchronous copies. They have the emulator's own format, which only its instructions can read.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::CUresult;

use super::Answer;
use super::errors::say;
use super::state::on_device;
use crate::tensor_map::{Invalid, SIZE, Tensor, encode_im2col, encode_tiled};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Returns `count` values of the caller.
///
/// # Safety
///
/// `values` must be null or valid for reading `count` values.
unsafe fn given<'a, T>(values: *const T, count: usize) -> Answer<&'a [T]> {
    match (values.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(INVALID),
        // SAFETY: guaranteed by the caller.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(values, count) }),
    }
}

/// Writes an encoded tensor map.
///
/// # Safety
///
/// `map` must be null or valid for writing.
unsafe fn write(map: *mut c_void, encoded: Result<[u8; SIZE], Invalid>) -> Answer {
    let bytes = encoded.map_err(|error| {
        say(&error.to_string());
        INVALID
    })?;
    // A tensor map must be aligned to 64 bytes.
    if map.is_null() || !(map as usize).is_multiple_of(64) {
        return Err(INVALID);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { map.cast::<[u8; SIZE]>().write(bytes) };
    Ok(())
}

/// Encodes a tiled tensor map. L2 promotion does not change results.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut c_void,
    data_type: c_uint,
    rank: c_uint,
    address: *mut c_void,
    sizes: *const u64,
    strides: *const u64,
    box_sizes: *const c_uint,
    steps: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _promotion: c_uint,
    fill: c_uint,
) -> CUresult {
    on_device(0, |_| {
        let count = (1..=5).contains(&rank).then_some(rank as usize);
        let count = count.ok_or(INVALID)?;
        // SAFETY: the manual defines the number of values by the rank, with one stride less.
        unsafe {
            let tensor = Tensor {
                data_type,
                address: address as u64,
                sizes: given(sizes, count)?,
                strides: given(strides, count - 1)?,
                steps: given(steps, count)?,
                interleave,
                swizzle,
                fill,
            };
            write(map, encode_tiled(&tensor, given(box_sizes, count)?))
        }
    })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cuTensorMapEncodeIm2col(
    map: *mut c_void,
    data_type: c_uint,
    rank: c_uint,
    address: *mut c_void,
    sizes: *const u64,
    strides: *const u64,
    lower: *const c_int,
    upper: *const c_int,
    channels: c_uint,
    pixels: c_uint,
    steps: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _promotion: c_uint,
    fill: c_uint,
) -> CUresult {
    on_device(0, |_| {
        let count = (3..=5).contains(&rank).then_some(rank as usize);
        let count = count.ok_or(INVALID)?;
        // SAFETY: the same as for the tiled map. The corners have no channels and no batch.
        unsafe {
            let tensor = Tensor {
                data_type,
                address: address as u64,
                sizes: given(sizes, count)?,
                strides: given(strides, count - 1)?,
                steps: given(steps, count)?,
                interleave,
                swizzle,
                fill,
            };
            let (lower, upper) = (given(lower, count - 2)?, given(upper, count - 2)?);
            write(map, encode_im2col(&tensor, lower, upper, channels, pixels))
        }
    })
}

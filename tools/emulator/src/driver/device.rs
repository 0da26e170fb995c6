//! The device: the properties of an H200 that programs query.

use std::ffi::{CStr, c_char, c_int, c_uint};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute_enum as Attribute, CUresult, CUuuid};

use super::state::{anywhere, on_device};
use super::{Answer, OutPointer};

/// CUDA 12.9: the version of the compiler whose PTX the emulator reads.
const VERSION: c_int = 12090;

const NAME: &CStr = c"NVIDIA H200 (emulated)";

/// A bus id without a device, so that programs that ask the system about it find nothing.
const BUS: &CStr = c"0000:00:1f.7";

/// The shared memory of a multiprocessor, in bytes.
pub(super) const SHARED_OF_MULTIPROCESSOR: usize = 228 << 10;
/// The shared memory that each block occupies in addition to its own, in bytes.
pub(super) const SHARED_RESERVED: usize = 1 << 10;
/// The maximum shared memory of a block that requests it.
pub(super) const SHARED_OPT_IN: usize = 227 << 10;
/// The maximum shared memory of any other block.
pub(super) const SHARED: usize = 48 << 10;
/// The maximum number of threads of a block.
pub(super) const THREADS: u32 = 1024;
/// The maximum size of a block by dimension.
pub(super) const BLOCK: [u32; 3] = [1024, 1024, 64];
/// The maximum size of a grid by dimension.
pub(super) const GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
pub(crate) const MULTIPROCESSORS: usize = 132;
/// The maximum numbers of threads and blocks that are resident on a multiprocessor.
pub(super) const RESIDENT: (usize, usize) = (2048, 32);

/// The attributes of the device. All other attributes are 0, which means a missing feature.
///
/// An H200 supports managed memory and cooperative launches. The emulator supports neither.
const ATTRIBUTES: &[(Attribute, usize)] = {
    use Attribute::*;
    &[
        (CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, THREADS as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, BLOCK[0] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, BLOCK[1] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, BLOCK[2] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, GRID[0] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, GRID[1] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, GRID[2] as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, SHARED),
        (CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 64 << 10),
        (CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (CU_DEVICE_ATTRIBUTE_MAX_PITCH, i32::MAX as usize),
        (CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 64 << 10),
        (CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_980_000),
        (CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512),
        (CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
        (CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, MULTIPROCESSORS),
        (CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
        (CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1),
        (CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0x1f),
        (CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3_201_000),
        (CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144),
        (CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 60 << 20),
        (
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            RESIDENT.0,
        ),
        (CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
        (CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
        (CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
        (CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1),
        (CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1),
        (
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            SHARED_OF_MULTIPROCESSOR,
        ),
        (
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            64 << 10,
        ),
        (
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            SHARED_OPT_IN,
        ),
        (
            CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
            RESIDENT.1,
        ),
        (
            CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
            SHARED_RESERVED,
        ),
        (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
        (CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 1),
    ]
};

fn attribute(number: c_uint) -> Answer<c_int> {
    let known = ATTRIBUTES
        .iter()
        .find(|(known, _)| *known as c_uint == number);
    match (known, number) {
        (Some((_, value)), _) => Ok(*value as c_int),
        (None, 1..1000) => Ok(0),
        (None, _) => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> CUresult {
    anywhere(|world| match flags {
        0 => {
            world.ready = true;
            Ok(())
        }
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: OutPointer<c_int>) -> CUresult {
    anywhere(|_| version.set(VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: OutPointer<c_int>) -> CUresult {
    on_device(0, |_| count.set(1))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: OutPointer<CUdevice>, ordinal: c_int) -> CUresult {
    on_device(ordinal, |_| device.set(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: OutPointer<c_int>,
    number: c_uint,
    device: CUdevice,
) -> CUresult {
    on_device(device, |_| value.set(attribute(number)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: OutPointer<usize>, device: CUdevice) -> CUresult {
    on_device(device, |world| bytes.set(world.options.memory as usize))
}

/// Writes a null-terminated string into `length` bytes. The string is truncated if it does not fit.
///
/// # Safety
///
/// `to` must be null or valid for writing `length` bytes.
unsafe fn write_text(string: &CStr, to: *mut c_char, length: c_int) -> Answer {
    if to.is_null() || length < 1 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = string.to_bytes();
    let count = bytes.len().min(length as usize - 1);
    // SAFETY: guaranteed by the caller. `count + 1` does not exceed `length`.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(bytes.as_ptr(), count);
        to.add(count).write(0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    length: c_int,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller passes the length of the buffer.
    on_device(device, |_| unsafe { write_text(NAME, name, length) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(
    name: *mut c_char,
    length: c_int,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the same as for the name.
    on_device(device, |_| unsafe { write_text(BUS, name, length) })
}

fn uuid() -> CUuuid {
    CUuuid {
        bytes: (*b"burn-megatron-em").map(|byte| byte as c_char),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(out: OutPointer<CUuuid>, device: CUdevice) -> CUresult {
    on_device(device, |_| out.set(uuid()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(out: OutPointer<CUuuid>, device: CUdevice) -> CUresult {
    on_device(device, |_| out.set(uuid()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(
    can: OutPointer<c_int>,
    device: CUdevice,
    peer: CUdevice,
) -> CUresult {
    on_device(device, |_| match peer {
        0 => can.set(0),
        _ => Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
    })
}

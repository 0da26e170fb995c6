//! Device memory, and pinned host memory.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUpointer_attribute, CUresult, CUstream};

use super::errors::say;
use super::state::{DriverGuard, in_context};
use super::work::StreamWork;
use super::{Answer, OutPointer};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl DriverGuard {
    /// Allocates device memory. If the memory is exhausted, pending frees are executed first.
    pub fn allocate(&mut self, bytes: usize) -> Answer<u64> {
        if bytes == 0 {
            return Err(INVALID);
        }
        let limit = self.options.memory;
        if let Some(address) = self.memory.allocate(bytes, limit) {
            return Ok(address);
        }
        self.finish_all()?;
        let address = self.memory.allocate(bytes, limit);
        address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn allocate_pinned(&mut self, bytes: usize) -> Answer<*mut c_void> {
        self.not_captured()?;
        if bytes == 0 {
            return Err(INVALID);
        }
        let address = self.pinned.allocate(bytes, u64::MAX);
        let address = address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(address as *mut c_void)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: OutPointer<usize>, total: OutPointer<usize>) -> CUresult {
    in_context(|world| {
        let all = world.options.memory;
        free.offer(all.saturating_sub(world.memory.bytes()) as usize);
        total.offer(all as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(
    start: OutPointer<CUdeviceptr>,
    bytes: OutPointer<usize>,
    address: CUdeviceptr,
) -> CUresult {
    in_context(|world| {
        let found = world.memory.allocation(address);
        let found = found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        start.offer(found.start);
        bytes.offer(found.bytes);
        Ok(())
    })
}

/// Returns an attribute of a pointer. The emulator supports only the buffer id.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(
    value: OutPointer<u64>,
    attribute: c_uint,
    address: CUdeviceptr,
) -> CUresult {
    in_context(|world| {
        if attribute != CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as c_uint {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        value.set(world.memory.allocation(address).ok_or(INVALID)?.number)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: OutPointer<CUdeviceptr>, bytes: usize) -> CUresult {
    in_context(|world| {
        world.not_captured()?;
        address.set(world.allocate(bytes)?)
    })
}

/// Waits for all work, as the driver does, and frees device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> CUresult {
    in_context(|world| {
        world.not_captured()?;
        world.waits("cuMemFree_v2");
        world.finish_all()?;
        if world.memory.free(address) {
            Ok(())
        } else {
            say(&format!("cuMemFree: nothing begins at {address:#x}"));
            Err(INVALID)
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(
    address: OutPointer<CUdeviceptr>,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    in_context(|world| {
        let stream = super::streams::named(stream)?;
        world.streams.get(stream)?;
        let allocated = world.allocate(bytes)?;
        address.set(allocated)?;
        world.put(stream, StreamWork::Allocate)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    in_context(|world| {
        if !world.memory.snapshot().holds(address, 1) {
            say(&format!(
                "cuMemFreeAsync: nothing is allocated at {address:#x}"
            ));
            return Err(INVALID);
        }
        world.put(super::streams::named(stream)?, StreamWork::Free(address))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(address: OutPointer<*mut c_void>, bytes: usize) -> CUresult {
    in_context(|world| address.set(world.allocate_pinned(bytes)?))
}

/// Allocates pinned memory. The flags have no effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(
    address: OutPointer<*mut c_void>,
    bytes: usize,
    _flags: c_uint,
) -> CUresult {
    in_context(|world| address.set(world.allocate_pinned(bytes)?))
}

/// Waits for all work, which may still copy to the memory, and frees pinned memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: *mut c_void) -> CUresult {
    in_context(|world| {
        world.not_captured()?;
        world.waits("cuMemFreeHost");
        world.finish_all()?;
        if world.pinned.free(address as u64) {
            Ok(())
        } else {
            Err(INVALID)
        }
    })
}

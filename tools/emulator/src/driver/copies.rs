//! Copies and fills.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdeviceptr, CUmemorytype, CUresult, CUstream,
};

use super::Answer;
use super::errors::say;
use super::queue::LEGACY;
use super::state::{DriverGuard, in_context};
use super::streams::named;
use super::transfers::{Copy, CopyEndpoint, FillPattern};
use super::work::StreamWork;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn checked(checked: Result<(), String>) -> Answer {
    checked.map_err(|reason| {
        say(&reason);
        INVALID
    })
}

impl DriverGuard {
    /// Puts a copy on a stream. Pageable host memory behaves as in the driver: it is read at the call, and written
    /// before the call returns. Returns whether the call must wait.
    fn put_copy(&mut self, mut copy: Copy, stream: usize) -> Answer<bool> {
        if copy.width == 0 || copy.height == 0 {
            return Ok(false);
        }
        checked(copy.check(&self.memory.snapshot()))?;
        let recorded = self.streams.get(stream)?.capture.is_some();
        let pinned = self.pinned.snapshot();
        let ordinary = |address| !recorded && !pinned.holds(address as u64, 1);
        match copy.from {
            // Without lazy streams, the copy runs immediately and reads the memory itself.
            CopyEndpoint::Host(address) if self.options.lazy && ordinary(address) => {
                copy.stage(address)
            }
            _ => {}
        }
        let wait = matches!(copy.to, CopyEndpoint::Host(address) if ordinary(address));
        self.put(stream, StreamWork::Copy(copy))?;
        Ok(wait)
    }

    /// Copies, for a `call` that does not have to wait.
    fn copy(&mut self, call: &str, copy: Copy, stream: usize) -> Answer {
        if self.put_copy(copy, stream)? {
            self.waits(call);
            self.finish_stream(stream)
        } else {
            Ok(())
        }
    }

    /// Copies, for a `call` that waits until the copy is done.
    fn copy_now(&mut self, call: &str, copy: Copy) -> Answer {
        self.put_copy(copy, LEGACY)?;
        self.waits(call);
        self.finish_stream(LEGACY)
    }

    fn fill(&mut self, address: u64, pattern: &[u8], count: usize, stream: usize) -> Answer {
        if count == 0 {
            return Ok(());
        }
        let pattern = pattern.to_vec();
        let fill = FillPattern {
            address,
            pattern,
            count,
        };
        if !address.is_multiple_of(fill.pattern.len() as u64) {
            return Err(INVALID);
        }
        checked(fill.check(&self.memory.snapshot()))?;
        self.put(stream, StreamWork::FillPattern(fill))
    }

    /// Returns the endpoint of an address. An address is a device address if it is in allocated device memory.
    fn end(&self, address: u64) -> CopyEndpoint {
        if self.memory.snapshot().holds(address, 1) {
            CopyEndpoint::Device(address)
        } else {
            CopyEndpoint::Host(address as usize)
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
) -> CUresult {
    let copy = Copy::row(
        CopyEndpoint::Device(to),
        CopyEndpoint::Host(from as usize),
        bytes,
    );
    in_context(|world| world.copy_now("cuMemcpyHtoD_v2", copy))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let copy = Copy::row(
        CopyEndpoint::Device(to),
        CopyEndpoint::Host(from as usize),
        bytes,
    );
    in_context(|world| world.copy("cuMemcpyHtoDAsync_v2", copy, named(stream)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let copy = Copy::row(
        CopyEndpoint::Host(to as usize),
        CopyEndpoint::Device(from),
        bytes,
    );
    in_context(|world| world.copy_now("cuMemcpyDtoH_v2", copy))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let copy = Copy::row(
        CopyEndpoint::Host(to as usize),
        CopyEndpoint::Device(from),
        bytes,
    );
    in_context(|world| world.copy("cuMemcpyDtoHAsync_v2", copy, named(stream)?))
}

/// Copies without waiting, as the driver does.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> CUresult {
    let copy = Copy::row(CopyEndpoint::Device(to), CopyEndpoint::Device(from), bytes);
    in_context(|world| world.copy("cuMemcpyDtoD_v2", copy, LEGACY))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let copy = Copy::row(CopyEndpoint::Device(to), CopyEndpoint::Device(from), bytes);
    in_context(|world| world.copy("cuMemcpyDtoDAsync_v2", copy, named(stream)?))
}

/// Copies within the only context.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: CUdeviceptr,
    _to_context: CUcontext,
    from: CUdeviceptr,
    _from_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    cuMemcpyDtoDAsync_v2(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> CUresult {
    in_context(|world| {
        let copy = Copy::row(world.end(to), world.end(from), bytes);
        world.copy_now("cuMemcpy", copy)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    in_context(|world| {
        let copy = Copy::row(world.end(to), world.end(from), bytes);
        world.copy("cuMemcpyAsync", copy, named(stream)?)
    })
}

/// Returns the copy of rows that a caller describes. Arrays are not supported, since only textures use them.
fn rows(world: &DriverGuard, asked: &CUDA_MEMCPY2D) -> Answer<Copy> {
    let end = |kind, host: usize, device: u64| match kind {
        CUmemorytype::CU_MEMORYTYPE_HOST => Ok(CopyEndpoint::Host(host)),
        CUmemorytype::CU_MEMORYTYPE_DEVICE => Ok(CopyEndpoint::Device(device)),
        CUmemorytype::CU_MEMORYTYPE_UNIFIED => Ok(world.end(device)),
        CUmemorytype::CU_MEMORYTYPE_ARRAY => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    };
    let pitch = |pitch: usize| {
        if pitch == 0 {
            asked.WidthInBytes
        } else {
            pitch
        }
    };
    let (to_pitch, from_pitch) = (pitch(asked.dstPitch), pitch(asked.srcPitch));
    let moved = |end, x: usize, y: usize, pitch: usize| {
        let by = y.wrapping_mul(pitch).wrapping_add(x);
        match end {
            CopyEndpoint::Device(address) => CopyEndpoint::Device(address.wrapping_add(by as u64)),
            CopyEndpoint::Host(address) => CopyEndpoint::Host(address.wrapping_add(by)),
            staged => staged,
        }
    };
    let to = end(asked.dstMemoryType, asked.dstHost as usize, asked.dstDevice)?;
    let from = end(asked.srcMemoryType, asked.srcHost as usize, asked.srcDevice)?;
    Ok(Copy {
        to: moved(to, asked.dstXInBytes, asked.dstY, to_pitch),
        from: moved(from, asked.srcXInBytes, asked.srcY, from_pitch),
        width: asked.WidthInBytes,
        height: asked.Height,
        to_pitch,
        from_pitch,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2D_v2(asked: *const CUDA_MEMCPY2D) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let asked = unsafe { asked.as_ref() };
    in_context(|world| {
        let copy = rows(world, asked.ok_or(INVALID)?)?;
        world.copy_now("cuMemcpy2D_v2", copy)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(
    asked: *const CUDA_MEMCPY2D,
    stream: CUstream,
) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let asked = unsafe { asked.as_ref() };
    in_context(|world| {
        let copy = rows(world, asked.ok_or(INVALID)?)?;
        world.copy("cuMemcpy2DAsync_v2", copy, named(stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(address: CUdeviceptr, value: c_uchar, count: usize) -> CUresult {
    in_context(|world| world.fill(address, &[value], count, LEGACY))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(
    address: CUdeviceptr,
    value: c_uchar,
    count: usize,
    stream: CUstream,
) -> CUresult {
    in_context(|world| world.fill(address, &[value], count, named(stream)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(
    address: CUdeviceptr,
    value: c_ushort,
    count: usize,
    stream: CUstream,
) -> CUresult {
    in_context(|world| world.fill(address, &value.to_le_bytes(), count, named(stream)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(
    address: CUdeviceptr,
    value: c_uint,
    count: usize,
    stream: CUstream,
) -> CUresult {
    in_context(|world| world.fill(address, &value.to_le_bytes(), count, named(stream)?))
}

//! Pools of stream-ordered memory. There is one pool, which keeps no freed memory.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemPool_attribute_enum as Attribute, CUmemoryPool, CUresult, CUstream,
};

use super::memory::cuMemAllocAsync;
use super::state::{DriverState, in_context, on_device};
use super::{Answer, OutPointer};

/// The handle of the only pool.
const POOL: usize = 0xb0010;

fn named(pool: CUmemoryPool) -> Answer {
    match pool as usize {
        POOL => Ok(()),
        _ => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
    }
}

fn attribute(world: &DriverState, number: c_uint) -> Answer<u64> {
    use Attribute::*;
    let is = |attribute: Attribute| attribute as c_uint == number;
    if is(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) || is(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) {
        return Ok(world.memory.bytes());
    }
    if is(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        Ok(0)
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(
    pool: OutPointer<CUmemoryPool>,
    device: CUdevice,
) -> CUresult {
    on_device(device, |_| pool.set(POOL as CUmemoryPool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(pool: OutPointer<CUmemoryPool>, device: CUdevice) -> CUresult {
    on_device(device, |_| pool.set(POOL as CUmemoryPool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) -> CUresult {
    on_device(device, |_| named(pool))
}

/// Accepts every limit of a pool, since the pool keeps no memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    _number: c_uint,
    _value: *mut c_void,
) -> CUresult {
    on_device(0, |_| named(pool))
}

/// Returns an attribute of the pool. Only attributes that are sizes in bytes are supported.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    number: c_uint,
    value: OutPointer<u64>,
) -> CUresult {
    on_device(0, |world| {
        named(pool)?;
        value.set(attribute(world, number)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: CUmemoryPool, _keep: usize) -> CUresult {
    on_device(0, |_| named(pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync(
    address: OutPointer<CUdeviceptr>,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    match in_context(|_| named(pool)) {
        CUresult::CUDA_SUCCESS => cuMemAllocAsync(address, bytes, stream),
        error => error,
    }
}

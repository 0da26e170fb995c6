//! The context, and the threads on which it is current.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{CUcontext, CUdevice, CUresult};

use super::state::{CONTEXT, CURRENT, DriverState, in_context, on_device};
use super::{Answer, OutPointer};

fn handle() -> CUcontext {
    CONTEXT as CUcontext
}

/// Returns the context that a caller passed. Fails if it is not a context.
fn named(world: &DriverState, context: CUcontext) -> Answer<usize> {
    match (context as usize, world.retained) {
        (CONTEXT, 1..) => Ok(CONTEXT),
        (CONTEXT, 0) => Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        _ => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(
    context: OutPointer<CUcontext>,
    device: CUdevice,
) -> CUresult {
    on_device(device, |world| {
        context.set(handle())?;
        world.retained += 1;
        Ok(())
    })
}

/// Releases the context. Memory, streams and modules outlive the last release: the next call that retains the context
/// finds them again.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    on_device(device, |world| {
        let left = world.retained.checked_sub(1);
        world.retained = left.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        Ok(())
    })
}

/// Accepts every way in which the host waits, since the device does not depend on it.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, _flags: c_uint) -> CUresult {
    on_device(device, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: OutPointer<c_uint>,
    active: OutPointer<c_int>,
) -> CUresult {
    on_device(device, |world| {
        flags.set(0)?;
        active.set(c_int::from(world.retained > 0))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: OutPointer<CUcontext>) -> CUresult {
    on_device(0, |_| {
        let current = CURRENT.with_borrow(|contexts| contexts.last().copied());
        context.set(current.unwrap_or(0) as CUcontext)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    on_device(0, |world| {
        let context = if context.is_null() {
            None
        } else {
            Some(named(world, context)?)
        };
        CURRENT.with_borrow_mut(|contexts| {
            contexts.pop();
            contexts.extend(context);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    on_device(0, |world| {
        let context = named(world, context)?;
        CURRENT.with_borrow_mut(|contexts| contexts.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: OutPointer<CUcontext>) -> CUresult {
    on_device(0, |_| {
        let popped = CURRENT.with_borrow_mut(Vec::pop);
        let popped = popped.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        context.offer(popped as CUcontext);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: OutPointer<CUdevice>) -> CUresult {
    in_context(|_| device.set(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> CUresult {
    in_context(|world| {
        world.not_captured()?;
        world.waits("cuCtxSynchronize");
        world.finish_all()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(
    least: OutPointer<c_int>,
    greatest: OutPointer<c_int>,
) -> CUresult {
    in_context(|_| {
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    })
}

/// Fails always: there is one device, and a device is not its own peer.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(_peer: CUcontext, _flags: c_uint) -> CUresult {
    in_context(|_| Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDisablePeerAccess(_peer: CUcontext) -> CUresult {
    in_context(|_| Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED))
}

//! The functions for registered memory.

use std::ffi::c_int;

use super::{give, report};
use crate::driver::jobs;
use crate::nccl::state::{HostContribution, ring, state};
use crate::nccl::{Code, Failure, SUCCESS, UNHANDLED_CUDA_ERROR, argument, group};

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclMemAlloc(place: *mut u64, bytes: usize) -> Code {
    let allocate = || {
        let address = jobs::allocate(bytes).ok_or_else(|| Failure {
            code: UNHANDLED_CUDA_ERROR,
            reason: format!("the device has no {bytes} bytes left"),
        })?;
        state().pieces.add(address, bytes);
        // SAFETY: guaranteed by the caller.
        unsafe { give(place, address) }
    };
    report("ncclMemAlloc", allocate())
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemFree(address: u64) -> Code {
    let removed = state().pieces.remove(address);
    let freed = removed.map(|()| {
        jobs::free(address);
        SUCCESS
    });
    report("ncclMemFree", freed)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommRegister(
    comm: usize,
    address: u64,
    bytes: usize,
    place: *mut usize,
) -> Code {
    let register = || {
        if !jobs::holds(address, bytes) {
            return Err(argument(format!(
                "{bytes} bytes at {address:#x} are not memory of the device"
            )));
        }
        let mut state = state();
        state.usable(comm)?;
        // SAFETY: guaranteed by the caller.
        unsafe { give(place, state.register(comm, address, bytes)?) }
    };
    report("ncclCommRegister", register())
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDeregister(comm: usize, handle: usize) -> Code {
    let deregistered = state().deregister(comm, handle);
    report("ncclCommDeregister", deregistered.map(|()| SUCCESS))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommWindowRegister(
    comm: usize,
    address: u64,
    bytes: usize,
    place: *mut usize,
    _flags: c_int,
) -> Code {
    let register = || {
        let mut state = state();
        if place.is_null() {
            return Err(argument("the place for a window is null"));
        }
        if !state.pieces.holds(address, bytes) {
            return Err(argument(format!(
                "{bytes} bytes at {address:#x} are not of ncclMemAlloc"
            )));
        }
        let place = place as usize;
        let brought = HostContribution::Window {
            comm,
            address,
            bytes,
            place,
        };
        state.meet(comm, brought)?;
        drop(state);
        ring();
        jobs::wake();
        group::begun(comm)
    };
    report("ncclCommWindowRegister", register())
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommWindowDeregister(comm: usize, window: usize) -> Code {
    ncclCommDeregister(comm, window)
}

//! Memory that can be registered.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;

use super::{FakeComm, INVALID_ARGUMENT, INVALID_USAGE};
use crate::engines::nccl::api::{IN_PROGRESS, RawComm, SUCCESS};

/// Memory with the number of its registrations.
type Allocation = (Vec<u8>, usize);

/// Memory of `mem_alloc` by address.
static MEMORY: LazyLock<Mutex<HashMap<u64, Allocation>>> = LazyLock::new(Mutex::default);

/// A stream may still use the memory, so it is not freed.
pub fn forget() {
    std::mem::forget(std::mem::take(&mut *MEMORY.lock().unwrap()));
}

/// The number of allocations that are not freed.
pub fn live_allocations() -> usize {
    MEMORY.lock().unwrap().len()
}

pub extern "C" fn mem_alloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    let mut memory = vec![0u8; bytes];
    let start = memory.as_mut_ptr();
    MEMORY.lock().unwrap().insert(start as u64, (memory, 0));
    // SAFETY: the caller's pointer to an address.
    unsafe { *address = start.cast() };
    SUCCESS
}

pub extern "C" fn mem_free(address: *mut c_void) -> c_int {
    let mut memory = MEMORY.lock().unwrap();
    match memory.get(&(address as u64)) {
        Some((_, 0)) => {
            memory.remove(&(address as u64));
            SUCCESS
        }
        _ => INVALID_USAGE,
    }
}

fn note(comm: RawComm, address: u64, add: bool) -> c_int {
    let comm = FakeComm::of(comm);
    let mut memory = MEMORY.lock().unwrap();
    let Some((_, registrations)) = memory.get_mut(&address) else {
        return INVALID_ARGUMENT;
    };
    match (add, *registrations) {
        (true, _) => *registrations += 1,
        (false, 0) => return INVALID_USAGE,
        (false, _) => *registrations -= 1,
    }
    if add {
        comm.registered.fetch_add(1, Ordering::SeqCst)
    } else {
        comm.registered.fetch_sub(1, Ordering::SeqCst)
    };
    SUCCESS
}

/// The handle is the address.
pub extern "C" fn comm_register(
    comm: RawComm,
    address: *mut c_void,
    _bytes: usize,
    handle: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's pointer to a handle.
    unsafe { *handle = address };
    note(comm, address as u64, true)
}

pub extern "C" fn deregister(comm: RawComm, handle: *mut c_void) -> c_int {
    note(comm, handle as u64, false)
}

/// Registers a window of one length on all ranks.
pub extern "C" fn window_register(
    comm: RawComm,
    address: *mut c_void,
    len: usize,
    place: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    let (raw, comm) = (comm as usize, FakeComm::of(comm));
    if !comm.usable() || flags != 1 {
        return INVALID_USAGE;
    }
    comm.busy.fetch_add(1, Ordering::SeqCst);
    let number = comm.next.fetch_add(1, Ordering::SeqCst);
    let (address, place) = (address as u64, place as usize);
    thread::spawn(move || {
        let own = len.to_le_bytes().to_vec();
        if let Some(all) = comm.world.all_exchange(number, comm.rank, own.clone()) {
            assert!(all.iter().all(|len| **len == own), "windows differ");
            note(raw as RawComm, address, true);
            // SAFETY: the pointer is valid until this communicator is not busy any more.
            let place = unsafe { AtomicPtr::from_ptr(place as *mut *mut c_void) };
            place.store(address as *mut c_void, Ordering::SeqCst);
            comm.busy.fetch_sub(1, Ordering::SeqCst);
        }
    });
    IN_PROGRESS
}

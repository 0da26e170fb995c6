//! The memory of the fake NCCL that can be registered.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;

use super::{FakeComm, INVALID_ARGUMENT, INVALID_USAGE};
use crate::engines::nccl::api::{IN_PROGRESS, RawComm, SUCCESS};

/// The memory that `mem_alloc` has allocated, keyed by address.
static MEMORY: LazyLock<Mutex<HashMap<u64, Vec<u8>>>> = LazyLock::new(Mutex::default);

/// The number of registered bytes, keyed by communicator and address.
static REGISTERED: Mutex<BTreeMap<(usize, u64), usize>> = Mutex::new(BTreeMap::new());

/// Clears the state of earlier tests. The memory is leaked, because a stream may still use it.
pub fn forget() {
    std::mem::forget(std::mem::take(&mut *MEMORY.lock().unwrap()));
    REGISTERED.lock().unwrap().clear();
}

/// Returns the number of allocations that have not been freed.
pub fn live_allocations() -> usize {
    MEMORY.lock().unwrap().len()
}

/// Returns the number of registrations, including windows.
pub fn live_registrations() -> usize {
    REGISTERED.lock().unwrap().len()
}

pub extern "C" fn mem_alloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    let mut memory = vec![0u8; bytes];
    let start = memory.as_mut_ptr();
    MEMORY.lock().unwrap().insert(start as u64, memory);
    // SAFETY: the caller passes a pointer to an address.
    unsafe { *address = start.cast() };
    SUCCESS
}

pub extern "C" fn mem_free(address: *mut c_void) -> c_int {
    let address = address as u64;
    let registered = REGISTERED.lock().unwrap();
    if registered.keys().any(|(_, other)| *other == address) {
        return INVALID_USAGE;
    }
    match MEMORY.lock().unwrap().remove(&address) {
        Some(_) => SUCCESS,
        None => INVALID_USAGE,
    }
}

/// Records a registration. Rejects memory that overlaps another registration of the communicator, because the real
/// library would use the older registration.
fn register(comm: RawComm, address: u64, bytes: usize) -> c_int {
    let mut registered = REGISTERED.lock().unwrap();
    let overlaps = |((other, start), len): (&(usize, u64), &usize)| {
        *other == comm as usize && address < start + *len as u64 && *start < address + bytes as u64
    };
    if registered.iter().any(overlaps) {
        return INVALID_ARGUMENT;
    }
    registered.insert((comm as usize, address), bytes);
    FakeComm::of(comm).registered.fetch_add(1, Ordering::SeqCst);
    SUCCESS
}

/// Registers memory. The handle is the address of the memory.
pub extern "C" fn comm_register(
    comm: RawComm,
    address: *mut c_void,
    bytes: usize,
    handle: *mut *mut c_void,
) -> c_int {
    if !FakeComm::of(comm).usable() {
        return INVALID_USAGE;
    }
    // SAFETY: the caller passes a pointer to a handle.
    unsafe { *handle = address };
    register(comm, address as u64, bytes)
}

pub extern "C" fn comm_deregister(comm: RawComm, handle: *mut c_void) -> c_int {
    let mut registered = REGISTERED.lock().unwrap();
    match registered.remove(&(comm as usize, handle as u64)) {
        Some(_) => {
            FakeComm::of(comm).registered.fetch_sub(1, Ordering::SeqCst);
            SUCCESS
        }
        None => INVALID_USAGE,
    }
}

pub extern "C" fn window_deregister(comm: RawComm, window: *mut c_void) -> c_int {
    comm_deregister(comm, window)
}

/// Registers a window in memory that `mem_alloc` has allocated. The window must have the same length on all ranks.
pub extern "C" fn window_register(
    comm: RawComm,
    address: *mut c_void,
    len: usize,
    place: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    let (raw, comm) = (comm as usize, FakeComm::of(comm));
    let is_own = MEMORY.lock().unwrap().contains_key(&(address as u64));
    if !comm.usable() || flags != 1 || !is_own {
        return INVALID_USAGE;
    }
    comm.busy.fetch_add(1, Ordering::SeqCst);
    let number = comm.next.fetch_add(1, Ordering::SeqCst);
    let (address, place) = (address as u64, place as usize);
    thread::spawn(move || {
        let own = len.to_le_bytes().to_vec();
        if let Some(all) = comm.world.all_exchange(number, comm.rank, own.clone()) {
            assert!(all.iter().all(|len| **len == own), "windows differ");
            assert_eq!(register(raw as RawComm, address, len), SUCCESS);
            // SAFETY: the pointer is valid until this communicator is no longer busy.
            let place = unsafe { AtomicPtr::from_ptr(place as *mut *mut c_void) };
            place.store(address as *mut c_void, Ordering::SeqCst);
            comm.busy.fetch_sub(1, Ordering::SeqCst);
        }
    });
    IN_PROGRESS
}

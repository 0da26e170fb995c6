//! The functions of the library, under their C names and with the types of `nccl.h`.
//!
//! Handles are numbers, and enumerators are plain integers, since a caller may use a newer version of the library.

// The names are NVIDIA's.
#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{process, thread};

use super::state::{HostContribution, Id, NcclState, Settings, ring, state};
use super::{
    Code, Failure, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS,
    UNHANDLED_CUDA_ERROR, VERSION, argument, group,
};
use crate::driver::jobs;

mod collectives;
mod memory;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(Id);

/// The first fields of `ncclConfig_t`. Only these fields are read. The last two fields are read only if the config
/// has them.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
/// The value of a config attribute that is not set.
const UNDEFINED: c_int = c_int::MIN;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Prints the reason why a call failed, and returns its code.
fn report(function: &str, answer: Result<Code, Failure>) -> Code {
    answer.unwrap_or_else(|Failure { code, reason }| {
        eprintln!("NCCL emulator: {function}: {reason}");
        LAST.set(CString::new(reason).unwrap_or_default());
        code
    })
}

/// Writes a result to an address of the caller.
///
/// # Safety
/// `place` must be null or valid for writing a `T`.
unsafe fn give<T>(place: *mut T, value: T) -> Result<Code, Failure> {
    if place.is_null() {
        Err(argument("the place for a result is null"))
    } else {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { place.write(value) };
        Ok(SUCCESS)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    // SAFETY: guaranteed by the caller, as in all of these functions.
    report("ncclGetVersion", unsafe { give(version, VERSION) })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"the device failed",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"another rank failed",
        IN_PROGRESS => c"in progress",
        _ => c"unknown code",
    };
    text.as_ptr()
}

/// Returns the reason of this thread's last failure, or of the communicator's last failure.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(comm: usize) -> *const c_char {
    let state = state();
    let found = state.comms.get(&comm);
    let world = found.and_then(|comm| state.worlds.get(&comm.world));
    if let Some(error) = world.and_then(|world| world.error.as_ref()) {
        LAST.set(CString::new(error.reason.clone()).unwrap_or_default());
    }
    LAST.with_borrow(|last| last.as_ptr())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(place: *mut UniqueId) -> Code {
    // SAFETY: guaranteed by the caller.
    report("ncclGetUniqueId", unsafe { give(place, unique_id()) })
}

fn unique_id() -> UniqueId {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let mut id = [0; 128];
    id[..8].copy_from_slice(b"emulated");
    id[8..12].copy_from_slice(&process::id().to_le_bytes());
    id[12..20].copy_from_slice(&IDS.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    UniqueId(id)
}

fn from_here(id: &UniqueId) -> Result<(), Failure> {
    let UniqueId(id) = id;
    let (mark, of) = (&id[..8], &id[8..12]);
    if mark == b"emulated" && of == process::id().to_le_bytes() {
        Ok(())
    } else {
        Err(argument(
            "the id is of another process, and ranks are threads of one here",
        ))
    }
}

/// Returns the settings of a config. Settings that are not set, or a missing config, use `usual`.
///
/// # Safety
/// `config` must be null or point to a config.
unsafe fn settings(config: *const Config, usual: Settings) -> Result<Settings, Failure> {
    if config.is_null() {
        return Ok(usual);
    }
    // SAFETY: guaranteed by the caller of this function. A config of an older caller is shorter than this struct.
    let (size, magic, blocking) = unsafe { ((*config).size, (*config).magic, (*config).blocking) };
    let blocking = match (magic, blocking) {
        (MAGIC, UNDEFINED) => usual.blocking,
        (MAGIC, 0) => false,
        (MAGIC, 1) => true,
        (MAGIC, other) => return Err(argument(format!("blocking is {other}"))),
        _ => return Err(argument("the config was not initialised")),
    };
    if size < size_of::<Config>() {
        return Ok(Settings { blocking, ..usual });
    }
    // SAFETY: guaranteed by the caller of this function, and the config has this length.
    let (min, max) = unsafe { ((*config).min_ctas, (*config).max_ctas) };
    // Checked before defaults are filled in, as in NCCL.
    let wrong = |ctas| ctas != UNDEFINED && ctas <= 0;
    if wrong(min) || wrong(max) || min > max {
        return Err(argument(format!("minCTAs is {min}, and maxCTAs is {max}")));
    }
    let ctas = usize::try_from(max).unwrap_or(usual.ctas);
    Ok(Settings { blocking, ctas })
}

/// Creates a communicator and writes its handle.
///
/// # Safety
/// `place` must be null or valid for writing a handle. `config` must be null or point to a config.
unsafe fn init(
    place: *mut usize,
    size: c_int,
    id: &UniqueId,
    rank: c_int,
    config: *const Config,
) -> Result<Code, Failure> {
    from_here(id)?;
    if place.is_null() {
        return Err(argument("the place for a communicator is null"));
    }
    let (Ok(rank), Ok(size)) = (usize::try_from(rank), usize::try_from(size)) else {
        return Err(argument(format!(
            "invalid rank {rank}: expected below {size}"
        )));
    };
    // SAFETY: guaranteed by the caller of this function.
    let settings = unsafe { settings(config, Settings::default())? };
    let comm = state().join(&id.0, rank, size, settings)?;
    // SAFETY: guaranteed by the caller of this function.
    unsafe { give(place, comm)? };
    ring();
    group::begun(comm)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRank(
    place: *mut usize,
    size: c_int,
    id: UniqueId,
    rank: c_int,
) -> Code {
    // SAFETY: guaranteed by the caller.
    report("ncclCommInitRank", unsafe {
        init(place, size, &id, rank, std::ptr::null())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    place: *mut usize,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> Code {
    // SAFETY: guaranteed by the caller.
    report("ncclCommInitRankConfig", unsafe {
        init(place, size, &id, rank, config)
    })
}

/// Creates a communicator for each of `count` devices, which are all device 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(
    places: *mut usize,
    count: c_int,
    _devices: *const c_int,
) -> Code {
    let id = unique_id();
    group::start();
    let each = |rank: c_int| {
        let place = if places.is_null() {
            places
        } else {
            // SAFETY: guaranteed by the caller.
            unsafe { places.add(rank as usize) }
        };
        unsafe { init(place, count, &id, rank, std::ptr::null()) }
    };
    let begun = (0..count).try_for_each(|rank| each(rank).map(drop));
    let ended = group::end();
    report("ncclCommInitAll", begun.and(ended))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommSplit(
    comm: usize,
    colour: c_int,
    key: c_int,
    place: *mut usize,
    config: *const Config,
) -> Code {
    let split = || {
        if place.is_null() {
            return Err(argument("the place for a communicator is null"));
        }
        if colour < -1 {
            return Err(argument(format!("the colour is {colour}")));
        }
        let mut state = state();
        let usual = state.comm(comm)?.settings;
        let brought = HostContribution::Split {
            colour,
            key,
            // SAFETY: guaranteed by the caller.
            settings: unsafe { settings(config, usual)? },
            thread: thread::current().id(),
            place: place as usize,
        };
        state.meet(comm, brought)?;
        drop(state);
        ring();
        // Streams of mismatched ranks continue.
        jobs::wake();
        group::begun(comm)
    };
    report("ncclCommSplit", split())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(comm: usize, place: *mut Code) -> Code {
    // An event that a stream waits for may have happened.
    jobs::wake();
    let progress = state().progress(comm);
    // SAFETY: guaranteed by the caller.
    let give = |progress| unsafe { give(place, progress) };
    report("ncclCommGetAsyncError", progress.and_then(give))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: usize) -> Code {
    let finalized = state().finalize(comm);
    ring();
    report(
        "ncclCommFinalize",
        finalized.and_then(|()| group::begun(comm)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: usize) -> Code {
    let destroyed = state().remove(comm, false);
    ring();
    report("ncclCommDestroy", destroyed.map(|()| SUCCESS))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: usize) -> Code {
    let aborted = state().remove(comm, true);
    jobs::wake();
    report("ncclCommAbort", aborted.map(|()| SUCCESS))
}

/// Writes a number of a communicator.
///
/// # Safety
/// The same as for [`give`].
unsafe fn ask(
    comm: usize,
    place: *mut c_int,
    what: impl FnOnce(&NcclState, usize) -> usize,
) -> Result<Code, Failure> {
    let state = state();
    state.comm(comm)?;
    // SAFETY: guaranteed by the caller of this function.
    unsafe { give(place, what(&state, comm) as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCount(comm: usize, place: *mut c_int) -> Code {
    let size = |state: &NcclState, comm| {
        let world = state.comms.get(&comm).map(|comm| comm.world);
        let world = world.and_then(|world| state.worlds.get(&world));
        world.map_or(0, |world| world.size)
    };
    // SAFETY: guaranteed by the caller.
    report("ncclCommCount", unsafe { ask(comm, place, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCuDevice(comm: usize, place: *mut c_int) -> Code {
    // SAFETY: guaranteed by the caller.
    report("ncclCommCuDevice", unsafe { ask(comm, place, |_, _| 0) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommUserRank(comm: usize, place: *mut c_int) -> Code {
    let rank = |state: &NcclState, comm| state.comms.get(&comm).map_or(0, |comm| comm.rank);
    // SAFETY: guaranteed by the caller.
    report("ncclCommUserRank", unsafe { ask(comm, place, rank) })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Code {
    group::start();
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Code {
    report("ncclGroupEnd", group::end())
}

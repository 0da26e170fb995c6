//! Tests of ranks that call the library by its C names.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS};
use crate::driver::jobs::testing::{attach, enter, stream};
use crate::driver::jobs::{self, is_idle};

mod collectives;
mod refused;
mod residency;
mod worlds;

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    rest: [c_int; 12],
}

unsafe extern "C" {
    safe fn ncclGroupStart() -> c_int;
    safe fn ncclGroupEnd() -> c_int;
    fn ncclGetVersion(place: *mut c_int) -> c_int;
    fn ncclGetErrorString(code: c_int) -> *const c_char;
    fn ncclGetLastError(comm: usize) -> *const c_char;
    fn ncclGetUniqueId(place: *mut Id) -> c_int;
    fn ncclCommInitRank(place: *mut usize, size: c_int, id: Id, rank: c_int) -> c_int;
    fn ncclCommInitRankConfig(
        place: *mut usize,
        size: c_int,
        id: Id,
        rank: c_int,
        config: *const Config,
    ) -> c_int;
    fn ncclCommInitAll(places: *mut usize, count: c_int, devices: *const c_int) -> c_int;
    fn ncclCommSplit(
        comm: usize,
        colour: c_int,
        key: c_int,
        place: *mut usize,
        config: *const Config,
    ) -> c_int;
    fn ncclCommGetAsyncError(comm: usize, place: *mut c_int) -> c_int;
    safe fn ncclCommFinalize(comm: usize) -> c_int;
    safe fn ncclCommDestroy(comm: usize) -> c_int;
    safe fn ncclCommAbort(comm: usize) -> c_int;
    fn ncclCommCount(comm: usize, place: *mut c_int) -> c_int;
    fn ncclCommCuDevice(comm: usize, place: *mut c_int) -> c_int;
    fn ncclCommUserRank(comm: usize, place: *mut c_int) -> c_int;
    fn ncclAllReduce(
        from: u64,
        to: u64,
        count: usize,
        of: c_int,
        op: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclReduceScatter(
        from: u64,
        to: u64,
        count: usize,
        of: c_int,
        op: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclAllGather(
        from: u64,
        to: u64,
        count: usize,
        of: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclBroadcast(
        from: u64,
        to: u64,
        count: usize,
        of: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclBcast(
        place: u64,
        count: usize,
        of: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclReduce(
        from: u64,
        to: u64,
        count: usize,
        of: c_int,
        op: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    fn ncclSend(from: u64, n: usize, of: c_int, peer: c_int, comm: usize, s: usize) -> c_int;
    fn ncclRecv(to: u64, n: usize, of: c_int, peer: c_int, comm: usize, s: usize) -> c_int;
    fn ncclMemAlloc(place: *mut u64, bytes: usize) -> c_int;
    safe fn ncclMemFree(address: u64) -> c_int;
    fn ncclCommRegister(comm: usize, address: u64, bytes: usize, place: *mut usize) -> c_int;
    safe fn ncclCommDeregister(comm: usize, handle: usize) -> c_int;
    fn ncclCommWindowRegister(
        comm: usize,
        address: u64,
        bytes: usize,
        place: *mut usize,
        flags: c_int,
    ) -> c_int;
    safe fn ncclCommWindowDeregister(comm: usize, window: usize) -> c_int;
}

const F32: c_int = 7;
const SUM: c_int = 0;

fn id() -> Id {
    let mut id = Id([0; 128]);
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { ncclGetUniqueId(&mut id) }, SUCCESS);
    id
}

fn config(blocking: c_int) -> Config {
    Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 21_700,
        blocking,
        cluster_size: c_int::MIN,
        min_ctas: c_int::MIN,
        max_ctas: c_int::MIN,
        rest: [c_int::MIN; 12],
    }
}

/// Creates the communicators of all ranks on one thread.
fn all(count: usize) -> Vec<usize> {
    let mut comms = vec![0; count];
    // SAFETY: `comms` has `count` places.
    let code = unsafe { ncclCommInitAll(comms.as_mut_ptr(), count as c_int, std::ptr::null()) };
    assert_eq!(code, SUCCESS);
    comms
}

/// Creates non-blocking communicators of all ranks.
fn all_non_blocking(count: usize) -> Vec<usize> {
    all_with(count, &config(0))
}

/// Creates communicators of all ranks with a config.
fn all_with(count: usize, config: &Config) -> Vec<usize> {
    let id = id();
    let begin = |rank| {
        let mut comm = 0;
        // SAFETY: the pointer and the config are valid.
        let code = unsafe { ncclCommInitRankConfig(&mut comm, count as c_int, id, rank, config) };
        assert_eq!(code, IN_PROGRESS);
        comm
    };
    (0..count as c_int).map(begin).collect()
}

fn progress(comm: usize) -> c_int {
    let mut state = -1;
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { ncclCommGetAsyncError(comm, &mut state) }, SUCCESS);
    state
}

fn device(numbers: &[f32]) -> u64 {
    let address = jobs::allocate(size_of_val(numbers)).expect("there is memory");
    // SAFETY: the memory was just allocated with this length.
    unsafe { (address as *mut f32).copy_from(numbers.as_ptr(), numbers.len()) };
    address
}

fn read(address: u64, count: usize) -> Vec<f32> {
    // SAFETY: the tests read memory that they have allocated.
    unsafe { std::slice::from_raw_parts(address as *const f32, count) }.to_vec()
}

fn last_error(comm: usize) -> String {
    // SAFETY: the text lives until the next call of this thread.
    let text = unsafe { CStr::from_ptr(ncclGetLastError(comm)) };
    text.to_string_lossy().into_owned()
}

/// Waits until a stream has executed its work.
fn settle(stream: usize) {
    let start = Instant::now();
    while !is_idle(stream) {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "the stream stands"
        );
        thread::sleep(Duration::from_micros(100));
        jobs::wake();
    }
}

/// Puts a mark on a stream. It shows whether all work before it is done.
fn mark(stream: usize) -> Arc<AtomicUsize> {
    let mark = Arc::new(AtomicUsize::new(0));
    let set = mark.clone();
    let job = move |_: &_| {
        set.fetch_add(1, Ordering::SeqCst);
        Ok(())
    };
    jobs::enqueue(
        stream as *mut c_void as _,
        Arc::new(job),
        serde_json::Value::Null,
    );
    mark
}

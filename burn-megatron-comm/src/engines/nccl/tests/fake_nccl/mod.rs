//! A fake NCCL library for ranks that are threads of a process. It uses the streams of the fake device.
//!
//! It is as strict as the real library in cases in which the engine could be wrong:
//!
//! - A collective blocks its stream until all ranks have called it. A send blocks its stream until it is received.
//! - A communicator with a call in progress rejects every other call.
//! - The work of a call is on its stream only after the communicator has reported success.
//! - The launch of the first message between two ranks waits until the other rank launches it.
//! - In older versions, one thread can have only one NCCL group in progress.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;

use super::super::api::{Api, Config, IN_PROGRESS, RawComm, SUCCESS, UniqueId};
use super::fake_device::delay_at_random;
use calls::*;
use memory::*;

mod calls;
mod memory;
mod world;

pub use calls::{CONCURRENT_GROUPS, launches};
pub use memory::{live_allocations, live_registrations};
pub use world::FakeWorld;

const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

struct FakeComm {
    world: Arc<FakeWorld>,
    rank: usize,
    /// The number of launches and splits in progress on the communicator.
    busy: AtomicUsize,
    /// The number of the next collective.
    next: AtomicUsize,
    finalized: AtomicBool,
    dead: AtomicBool,
    registered: AtomicUsize,
    /// The number of the test that has created the communicator.
    test: usize,
}

static WORLDS: LazyLock<Mutex<HashMap<[u8; 128], Arc<FakeWorld>>>> = LazyLock::new(Mutex::default);
static IDS: AtomicUsize = AtomicUsize::new(1);
/// The number of communicators that are alive (neither destroyed nor aborted), and the number of aborted communicators.
pub static ALIVE: AtomicI32 = AtomicI32::new(0);
pub static ABORTED: AtomicI32 = AtomicI32::new(0);
/// The size and the CTA limits of every communicator that this test has created.
pub static OPENED: Mutex<Vec<(usize, [c_int; 2])>> = Mutex::new(vec![]);
/// The number of communicators of this test that were created in a group.
pub static IN_GROUPS: AtomicUsize = AtomicUsize::new(0);
/// The number of the current test. Communicators of earlier tests are not counted. Transports of earlier tests may
/// still close them in the background.
static TEST: AtomicUsize = AtomicUsize::new(0);

/// Clears the state of earlier tests.
pub fn reset() {
    TEST.fetch_add(1, Ordering::SeqCst);
    ALIVE.store(0, Ordering::SeqCst);
    ABORTED.store(0, Ordering::SeqCst);
    IN_GROUPS.store(0, Ordering::SeqCst);
    OPENED.lock().unwrap().clear();
    memory::forget();
    calls::forget();
    delay_at_random(None);
}

/// Returns the world of an id that a rank has used.
pub fn world(id: &[u8]) -> Arc<FakeWorld> {
    WORLDS.lock().unwrap()[id].clone()
}

impl FakeComm {
    fn new(world: Arc<FakeWorld>, rank: usize, ctas: [c_int; 2]) -> &'static Self {
        ALIVE.fetch_add(1, Ordering::SeqCst);
        OPENED.lock().unwrap().push((world.size, ctas));
        Box::leak(Box::new(Self {
            world,
            rank,
            busy: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            finalized: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            registered: AtomicUsize::new(0),
            test: TEST.load(Ordering::SeqCst),
        }))
    }

    fn of(raw: RawComm) -> &'static Self {
        // SAFETY: created by `new` and never freed.
        unsafe { &*(raw as *const Self) }
    }

    fn is_of_current_test(&self) -> bool {
        self.test == TEST.load(Ordering::SeqCst)
    }

    fn raw(&'static self) -> RawComm {
        self as *const Self as RawComm
    }

    fn state(&self) -> c_int {
        let state = self.world.state.lock().unwrap();
        let size = self.world.size;
        match self.world.error.load(Ordering::SeqCst) {
            SUCCESS => {}
            error => return error,
        }
        let unready = state.joined < size
            || self.busy.load(Ordering::SeqCst) > 0
            || (self.finalized.load(Ordering::SeqCst) && state.finalized < size);
        if unready { IN_PROGRESS } else { SUCCESS }
    }

    fn usable(&self) -> bool {
        !self.dead.load(Ordering::SeqCst) && self.state() == SUCCESS
    }
}

extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    let mut new = [0; 128];
    new[..8].copy_from_slice(&IDS.fetch_add(1, Ordering::SeqCst).to_le_bytes());
    // SAFETY: the caller passes a pointer to an id.
    unsafe { *id = UniqueId(new) };
    SUCCESS
}

extern "C" fn comm_init(
    comm: *mut RawComm,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    IN_GROUPS.fetch_add(calls::in_group().into(), Ordering::SeqCst);
    let mut worlds = WORLDS.lock().unwrap();
    let world = worlds.entry(id.0);
    let world = world
        .or_insert_with(|| FakeWorld::new(size as usize))
        .clone();
    if world.size != size as usize || rank >= size {
        return INVALID_ARGUMENT;
    }
    world.state.lock().unwrap().joined += 1;
    // SAFETY: the caller passes a pointer to a communicator.
    let place = unsafe { AtomicPtr::from_ptr(comm) };
    let comm = FakeComm::new(world, rank as usize, ctas(config));
    place.store(comm.raw(), Ordering::SeqCst);
    IN_PROGRESS
}

extern "C" fn comm_split(
    comm: RawComm,
    colour: c_int,
    key: c_int,
    place: *mut RawComm,
    config: *mut Config,
) -> c_int {
    let (comm, ctas) = (FakeComm::of(comm), ctas(config));
    if !comm.usable() {
        return INVALID_USAGE;
    }
    comm.busy.fetch_add(1, Ordering::SeqCst);
    let number = comm.next.fetch_add(1, Ordering::SeqCst);
    let place = place as usize;
    thread::spawn(move || {
        let own = [colour.to_le_bytes(), key.to_le_bytes()].concat();
        let Some(all) = comm.world.all_exchange(number, comm.rank, own) else {
            return;
        };
        let number_at = |bytes: &[u8]| c_int::from_le_bytes(bytes.try_into().unwrap());
        let mut part: Vec<(c_int, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, bytes)| number_at(&bytes[..4]) == colour)
            .map(|(rank, bytes)| (number_at(&bytes[4..]), rank))
            .collect();
        part.sort();
        if colour >= 0 {
            let index = part
                .iter()
                .position(|(_, rank)| *rank == comm.rank)
                .unwrap();
            let mut state = comm.world.state.lock().unwrap();
            let world = state.parts.entry((number, colour));
            let world = world.or_insert_with(|| FakeWorld::new(part.len())).clone();
            drop(state);
            world.state.lock().unwrap().joined += 1;
            // SAFETY: the pointer is valid until this communicator is no longer busy.
            let place = unsafe { AtomicPtr::from_ptr(place as *mut RawComm) };
            place.store(FakeComm::new(world, index, ctas).raw(), Ordering::SeqCst);
        }
        comm.busy.fetch_sub(1, Ordering::SeqCst);
    });
    IN_PROGRESS
}

extern "C" fn comm_async_error(comm: RawComm, state: *mut c_int) -> c_int {
    let comm = FakeComm::of(comm);
    if comm.dead.load(Ordering::SeqCst) {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller passes a pointer to a state.
    unsafe { *state = comm.state() };
    SUCCESS
}

extern "C" fn comm_user_rank(comm: RawComm, rank: *mut c_int) -> c_int {
    let comm = FakeComm::of(comm);
    if !comm.usable() {
        return INVALID_USAGE;
    }
    // SAFETY: the caller passes a pointer to a rank.
    unsafe { *rank = comm.rank as c_int };
    SUCCESS
}

/// Returns the minimum and the maximum number of CTAs of a config.
fn ctas(config: *mut Config) -> [c_int; 2] {
    // SAFETY: the caller passes a pointer to a config.
    let config = unsafe { &*config };
    [config.min_ctas, config.max_ctas]
}

extern "C" fn comm_finalize(comm: RawComm) -> c_int {
    let comm = FakeComm::of(comm);
    if !comm.usable() || comm.registered.load(Ordering::SeqCst) > 0 {
        return INVALID_USAGE;
    }
    comm.finalized.store(true, Ordering::SeqCst);
    comm.world.state.lock().unwrap().finalized += 1;
    IN_PROGRESS
}

extern "C" fn comm_destroy(comm: RawComm) -> c_int {
    let comm = FakeComm::of(comm);
    let fit = comm.finalized.load(Ordering::SeqCst) && comm.usable();
    if !fit || comm.dead.swap(true, Ordering::SeqCst) {
        return INVALID_USAGE;
    }
    if comm.is_of_current_test() {
        ALIVE.fetch_sub(1, Ordering::SeqCst);
    }
    SUCCESS
}

extern "C" fn comm_abort(comm: RawComm) -> c_int {
    let comm = FakeComm::of(comm);
    if comm.dead.swap(true, Ordering::SeqCst) {
        return INVALID_ARGUMENT;
    }
    comm.world.aborted.store(true, Ordering::SeqCst);
    let _state = comm.world.state.lock().unwrap();
    comm.world.condvar.notify_all();
    if comm.is_of_current_test() {
        ALIVE.fetch_sub(1, Ordering::SeqCst);
        ABORTED.fetch_add(1, Ordering::SeqCst);
    }
    SUCCESS
}

extern "C" fn get_error_string(code: c_int) -> *const c_char {
    let text = match code {
        2 => c"system error",
        6 => c"remote error",
        _ => c"invalid usage",
    };
    text.as_ptr()
}

extern "C" fn get_last_error(_comm: RawComm) -> *const c_char {
    c"something that NCCL knows".as_ptr()
}

macro_rules! version {
    ($name:ident, $code:literal) => {
        pub extern "C" fn $name(version: *mut c_int) -> c_int {
            // SAFETY: the caller passes a pointer to a version.
            unsafe { *version = $code };
            SUCCESS
        }
    };
}
version!(v2_13, 21304);
version!(v2_16, 21602);
version!(v2_17, 21701);
version!(v2_20, 22003);
version!(v2_27, 22703);

/// Returns the functions of an NCCL version. The version `v2_17` has no splits, and the version `v2_20` has no windows.
pub fn api(get_version: extern "C" fn(*mut c_int) -> c_int) -> Api {
    let mut code = 0;
    get_version(&mut code);
    let since = |least: c_int| code >= least;
    Api {
        get_version,
        get_error_string,
        get_last_error,
        get_unique_id,
        comm_init,
        comm_async_error,
        comm_user_rank,
        comm_finalize,
        comm_destroy,
        comm_abort,
        group_start,
        group_end,
        all_reduce,
        all_gather,
        reduce_scatter,
        broadcast,
        send,
        receive,
        comm_split: since(21800).then_some(comm_split as _),
        mem_alloc: since(21900).then_some(mem_alloc as _),
        mem_free: since(21900).then_some(mem_free as _),
        comm_register: since(21900).then_some(comm_register as _),
        comm_deregister: since(21900).then_some(comm_deregister as _),
        window_register: since(22700).then_some(window_register as _),
        window_deregister: since(22700).then_some(window_deregister as _),
    }
}

//! All that the driver knows, in one place.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUgraphNodeType, CUresult};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Answer;
use super::events::Event;
use super::functions::Function;
use super::graphs::{Capture, Graph};
use super::modules::Module;
use super::options::Options;
use super::queue::{StreamPoint, Streams};
use super::table::Table;
use super::work::StreamWork;
use crate::memory::Memory;

/// The handle of the one context.
pub(super) const CONTEXT: usize = 0xc0de0;

/// The state of the driver.
pub(super) struct DriverState {
    /// The requested options.
    pub options: Options,
    /// Whether `cuInit` was called.
    pub ready: bool,
    /// The number of holders of the primary context.
    pub retained: u32,
    /// The fault of a kernel: from then on every call returns this, as on a GPU.
    pub fault: Option<CUresult>,
    /// The fault of a kernel that a GPU lets pass: the next call that learns of it returns this, once.
    pub finding: Option<CUresult>,
    /// The device's memory.
    pub memory: Memory,
    /// The host's memory that copies read and write when they run, not when they are called.
    pub pinned: Memory,
    /// Work that is to be done, by stream.
    pub streams: Streams<StreamWork>,
    /// The points for which streams wait that are opened later.
    pub awaited: Vec<StreamPoint>,
    /// The number of works done since the beginning.
    pub performed: u64,
    pub events: Table<Event>,
    pub modules: Table<Module>,
    pub functions: Table<Function>,
    pub captures: Table<Capture>,
    pub graphs: Table<Graph>,
    pub nodes: Table<CUgraphNodeType>,
    /// Graphs that can be launched.
    pub executables: Table<Vec<StreamWork>>,
}

impl DriverState {
    /// As it is before `cuInit`.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            ready: false,
            retained: 0,
            fault: None,
            finding: None,
            memory: Memory::default(),
            pinned: Memory::default(),
            streams: Streams::default(),
            awaited: Vec::new(),
            performed: 0,
            events: Table::default(),
            modules: Table::default(),
            functions: Table::default(),
            captures: Table::default(),
            graphs: Table::default(),
            nodes: Table::default(),
            executables: Table::default(),
        }
    }
}

static WORLD: OnceLock<Mutex<DriverState>> = OnceLock::new();

/// Told after each call: work that others wait for may be done.
static CHANGED: Condvar = Condvar::new();

/// The state, while a call has it to itself.
pub(super) struct DriverGuard(MutexGuard<'static, DriverState>);

impl Deref for DriverGuard {
    type Target = DriverState;

    fn deref(&self) -> &DriverState {
        &self.0
    }
}

impl DerefMut for DriverGuard {
    fn deref_mut(&mut self) -> &mut DriverState {
        &mut self.0
    }
}

impl DriverGuard {
    fn now() -> Self {
        let world = WORLD.get_or_init(|| Mutex::new(DriverState::new(Options::from_environment())));
        Self(world.lock())
    }

    /// Lets other calls in until one of them has ended.
    pub fn wait(&mut self) {
        CHANGED.wait(&mut self.0);
    }
}

thread_local! {
    /// The contexts that are current, the last one on top.
    pub(super) static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Whether the driver runs a function of the host on this thread.
    pub(super) static CALLED_BACK: Cell<bool> = const { Cell::new(false) };
}

/// Answers a call that needs nothing but the driver.
pub(super) fn anywhere(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    if CALLED_BACK.get() {
        // As the manual says; here the lock is held, too.
        return CUresult::CUDA_ERROR_NOT_PERMITTED;
    }
    let answer = answer(&mut DriverGuard::now());
    CHANGED.notify_all();
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Answers a call about the device, which `cuInit` must come before.
pub(super) fn on_device(device: i32, answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    anywhere(|world| match (world.ready, device) {
        (false, _) => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
        (true, 0) => answer(world),
        (true, _) => Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
    })
}

/// Answers a call that needs a current context in which nothing went wrong.
pub(super) fn in_context(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    by_handle(|world| {
        if CURRENT.with_borrow(Vec::is_empty) {
            Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
        } else {
            answer(world)
        }
    })
}

/// Answers a call about an event or a stream, which knows its context: none need be current.
pub(super) fn by_handle(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    on_device(0, |world| match (world.retained, world.fault) {
        (0, _) => Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        (_, Some(fault)) => Err(fault),
        (_, None) => answer(world),
    })
}

/// A fresh driver in a context of this thread, for one test at a time.
#[cfg(test)]
pub(super) fn fresh(options: Options) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock();
    anywhere(|world| {
        **world = DriverState::new(options);
        world.ready = true;
        world.retained = 1;
        Ok(())
    });
    CURRENT.set(vec![CONTEXT]);
    turn
}

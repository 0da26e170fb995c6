//! The complete state of the driver.

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

/// The handle of the only context.
pub(super) const CONTEXT: usize = 0xc0de0;

/// The state of the driver.
pub(super) struct DriverState {
    /// The requested options.
    pub options: Options,
    /// Whether `cuInit` was called.
    pub ready: bool,
    /// The number of holders of the primary context.
    pub retained: u32,
    /// The fault of a kernel. From then on every call returns this fault, as on a GPU.
    pub fault: Option<CUresult>,
    /// The fault of a kernel after which a GPU would continue. The next call that checks for faults returns it once.
    pub finding: Option<CUresult>,
    /// The device's memory.
    pub memory: Memory,
    /// The pinned host memory. Copies access it when they run, not when they are called.
    pub pinned: Memory,
    /// Pending work by stream.
    pub streams: Streams<StreamWork>,
    /// Points that all future streams wait for.
    pub awaited: Vec<StreamPoint>,
    /// The number of tasks that have been executed.
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
    /// Returns the state before `cuInit`.
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

/// Notified after each call, since work that other threads wait for may be done.
static CHANGED: Condvar = Condvar::new();

/// Exclusive access to the state during a call.
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

    /// Releases the lock until another call has ended.
    pub fn wait(&mut self) {
        CHANGED.wait(&mut self.0);
    }
}

thread_local! {
    /// The stack of current contexts. The last context is on top.
    pub(super) static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Whether the driver is running a host function on this thread.
    pub(super) static CALLED_BACK: Cell<bool> = const { Cell::new(false) };
}

/// Executes a call that needs only the driver.
pub(super) fn anywhere(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    if CALLED_BACK.get() {
        // The manual specifies this error. The lock is held as well.
        return CUresult::CUDA_ERROR_NOT_PERMITTED;
    }
    let answer = answer(&mut DriverGuard::now());
    CHANGED.notify_all();
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Executes a call about the device. Fails before `cuInit`.
pub(super) fn on_device(device: i32, answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    anywhere(|world| match (world.ready, device) {
        (false, _) => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
        (true, 0) => answer(world),
        (true, _) => Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
    })
}

/// Executes a call that needs a current context without a fault.
pub(super) fn in_context(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    by_handle(|world| {
        if CURRENT.with_borrow(Vec::is_empty) {
            Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
        } else {
            answer(world)
        }
    })
}

/// Executes a call about an event or a stream. These belong to a context, so no context has to be current.
pub(super) fn by_handle(answer: impl FnOnce(&mut DriverGuard) -> Answer) -> CUresult {
    on_device(0, |world| match (world.retained, world.fault) {
        (0, _) => Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        (_, Some(fault)) => Err(fault),
        (_, None) => answer(world),
    })
}

/// Creates a new driver with a current context on this thread. Only one test at a time can use it.
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

//! Memory that NCCL knows beforehand, so that others reach it without a copy of NCCL's own.
//!
//! CubeCL gives out memory of its own pools alone and takes in none: its storage keeps the addresses that
//! it has allocated itself, in a map that nobody else can fill. So tensors cannot lie in memory of
//! `ncclMemAlloc`. A collective on a large tensor is staged instead: a copy on the device into registered
//! memory, the collective in place there, a copy back, all on the stream of the collectives. Whether the
//! two copies are won back was not measured.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::library::{Addresses, Comm, Library, Progress};
use super::plan::{Plan, Step};

/// Smaller calls are not staged.
pub(super) const LEAST_BYTES: usize = 1 << 20;

/// Memory is registered in multiples of so many bytes, the granularity of NVIDIA's memory.
const GRAIN: usize = 2 << 20;

/// What a registration is: a window that lies alike on all ranks, or one of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Window,
    Plain,
}

/// What is asked for and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// Nobody asked.
    Off,
    /// It is used as soon as there is something to register.
    On(Kind),
    /// It cannot be had, for this reason.
    Refused(String),
}

impl Registration {
    pub fn of(asked: bool, library: &Library) -> Self {
        match (asked, library.registration()) {
            (false, _) => Self::Off,
            (true, (true, _)) => Self::On(Kind::Window),
            (true, (false, true)) => Self::On(Kind::Plain),
            (true, (false, false)) => Self::Refused(format!(
                "NCCL {} has none; {} is the first that has",
                library.version(),
                super::version::Version::REGISTER
            )),
        }
    }

    /// One line for the header of a run.
    pub fn line(&self) -> String {
        match self {
            Self::Off => "registered buffers off".into(),
            Self::On(Kind::Window) => "registered buffers on (symmetric windows, staged)".into(),
            Self::On(Kind::Plain) => "registered buffers on (staged)".into(),
            Self::Refused(reason) => {
                format!("registered buffers asked for, but not used: {reason}")
            }
        }
    }
}

/// One piece of registered memory.
#[derive(Debug)]
pub(super) struct Staging {
    address: u64,
    bytes: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// NCCL fills in the window, when the other ranks have come.
    Opening(Box<AtomicPtr<c_void>>),
    Window(usize),
    Plain(usize),
}

impl Staging {
    /// The bytes that a call needs, if it is one of those that are staged: they are the same on every rank.
    pub fn bytes_for(plan: &Plan) -> Option<usize> {
        let staged = |step: &Step| {
            matches!(
                step,
                Step::AllReduce(_) | Step::AllGather | Step::ReduceScatter(_)
            )
        };
        let bytes = plan.bytes().into_iter().max().unwrap_or(0);
        (bytes >= LEAST_BYTES && plan.steps.iter().all(staged))
            .then(|| bytes.next_multiple_of(GRAIN))
    }

    /// Memory of `bytes`, registered with `comm` or about to be.
    pub fn begin(bytes: usize, kind: Kind, comm: Comm, library: &Library) -> Result<Self, String> {
        let address = library.allocate(bytes)?;
        let state = match kind {
            Kind::Window => {
                let place = Box::new(AtomicPtr::new(ptr::null_mut()));
                let opening = library.window(comm, address, bytes, &place);
                opening.map(|()| State::Opening(place))
            }
            Kind::Plain => library.register(comm, address, bytes).map(State::Plain),
        };
        match state {
            Ok(state) => Ok(Self {
                address,
                bytes,
                state,
            }),
            Err(reason) => {
                // SAFETY: nothing was registered. A failure leaks the memory.
                let _ = unsafe { library.free(address) };
                Err(reason)
            }
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it may be used.
    ///
    /// # Errors
    /// Why it never may.
    pub fn ready(&mut self, comm: Comm, library: &Library) -> Result<bool, String> {
        let State::Opening(place) = &self.state else {
            return Ok(true);
        };
        if library.poll(comm)? == Progress::Running {
            return Ok(false);
        }
        let window = place.load(Ordering::Acquire);
        // No window where the ranks reach no memory of each other: it is registered for this rank alone.
        self.state = match window.is_null() {
            true => State::Plain(library.register(comm, self.address, self.bytes)?),
            false => State::Window(window as usize),
        };
        Ok(true)
    }

    /// Where the call works in place.
    pub fn addresses(&self, plan: &Plan, index: usize) -> Addresses {
        let [input, output] = plan.bytes().map(|bytes| (bytes * index) as u64);
        let start = self.address;
        match plan.steps.first() {
            Some(Step::AllGather) => [start + input, start],
            Some(Step::ReduceScatter(_)) => [start, start + output],
            _ => [start, start],
        }
    }

    /// Gives it back: first what NCCL knows of it, then the memory. While the communicator lives.
    pub fn release(self, comm: Comm, library: &Library) -> Result<(), String> {
        match self.state {
            State::Window(window) => library.close_window(comm, window)?,
            // A handle of nothing: the library had no use for it.
            State::Plain(0) => {}
            State::Plain(handle) => library.deregister(comm, handle)?,
            State::Opening(place) => {
                // The library may still write there.
                Box::leak(place);
                return Ok(());
            }
        }
        // SAFETY: it was deregistered above, and every call has passed.
        unsafe { library.free(self.address) }
    }
}

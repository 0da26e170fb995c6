//! Registered memory, which peers access without a copy through NCCL's own buffers.
//!
//! CubeCL allocates from its own pools alone: its storage keeps the addresses that it has allocated itself in a
//! private map. So tensors cannot lie in memory of `ncclMemAlloc`. A collective on a large tensor is staged
//! instead: a copy on the device into registered memory, the collective in slot there, a copy back, all on the
//! stream of the collectives. Whether this pays for the two copies was not measured.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::library::{Addresses, Comm, Library, Progress};
use super::plan::{NcclOp, NcclPlan};

/// Smaller calls are not staged.
pub(super) const MIN_REGISTERED_BYTES: usize = 1 << 20;

/// Memory is registered in multiples of this, the granularity of NVIDIA's memory.
const REGISTRATION_GRANULARITY: usize = 2 << 20;

/// A symmetric window over all ranks, or a registration of this rank alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegistrationKind {
    Window,
    Plain,
}

/// Whether registration is requested and available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// Not requested.
    Off,
    /// Used for calls that are large enough.
    On(RegistrationKind),
    /// Not available, for this reason.
    Unavailable(String),
}

impl Registration {
    pub fn of(asked: bool, library: &Library) -> Self {
        match (asked, library.registration()) {
            (false, _) => Self::Off,
            (true, (true, _)) => Self::On(RegistrationKind::Window),
            (true, (false, true)) => Self::On(RegistrationKind::Plain),
            (true, (false, false)) => Self::Unavailable(format!(
                "NCCL {} has none; expected at least {}",
                library.version(),
                super::version::Version::REGISTER
            )),
        }
    }

    /// One line for the header of a run.
    pub fn description(&self) -> String {
        match self {
            Self::Off => "registered buffers off".into(),
            Self::On(RegistrationKind::Window) => {
                "registered buffers on (symmetric windows, staged)".into()
            }
            Self::On(RegistrationKind::Plain) => "registered buffers on (staged)".into(),
            Self::Unavailable(reason) => {
                format!("registered buffers requested, but not available: {reason}")
            }
        }
    }
}

/// One registered buffer.
#[derive(Debug)]
pub(super) struct RegisteredBuffer {
    address: u64,
    bytes: usize,
    state: RegistrationState,
}

#[derive(Debug)]
enum RegistrationState {
    /// NCCL writes the window when all ranks have registered.
    Opening(Box<AtomicPtr<c_void>>),
    Window(usize),
    Plain(usize),
}

impl RegisteredBuffer {
    /// The bytes that a call needs, if it is staged: the same on every rank.
    pub fn bytes_for(plan: &NcclPlan) -> Option<usize> {
        let staged = |step: &NcclOp| {
            matches!(
                step,
                NcclOp::AllReduce(_) | NcclOp::AllGather | NcclOp::ReduceScatter(_)
            )
        };
        let bytes = plan.bytes().into_iter().max().unwrap_or(0);
        (bytes >= MIN_REGISTERED_BYTES && plan.steps.iter().all(staged))
            .then(|| bytes.next_multiple_of(REGISTRATION_GRANULARITY))
    }

    /// Memory of `bytes`, registered with `comm` or being registered.
    pub fn begin(
        bytes: usize,
        kind: RegistrationKind,
        comm: Comm,
        library: &Library,
    ) -> Result<Self, String> {
        let address = library.allocate(bytes)?;
        let state = match kind {
            RegistrationKind::Window => {
                let slot = Box::new(AtomicPtr::new(ptr::null_mut()));
                let opening = library.window(comm, address, bytes, &slot);
                opening.map(|()| RegistrationState::Opening(slot))
            }
            RegistrationKind::Plain => library
                .register(comm, address, bytes)
                .map(RegistrationState::Plain),
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

    /// Whether it can be used.
    ///
    /// # Errors
    /// Why it never can.
    pub fn ready(&mut self, comm: Comm, library: &Library) -> Result<bool, String> {
        let RegistrationState::Opening(slot) = &self.state else {
            return Ok(true);
        };
        if library.poll(comm)? == Progress::Running {
            return Ok(false);
        }
        let window = slot.load(Ordering::Acquire);
        // No window where the ranks have no access to each other's memory: register it for this rank alone.
        self.state = if window.is_null() {
            RegistrationState::Plain(library.register(comm, self.address, self.bytes)?)
        } else {
            RegistrationState::Window(window as usize)
        };
        Ok(true)
    }

    /// The addresses for an in-slot call.
    pub fn addresses(&self, plan: &NcclPlan, index: usize) -> Addresses {
        let [input, output] = plan.bytes().map(|bytes| (bytes * index) as u64);
        let start = self.address;
        match plan.steps.first() {
            Some(NcclOp::AllGather) => [start + input, start],
            Some(NcclOp::ReduceScatter(_)) => [start, start + output],
            _ => [start, start],
        }
    }

    /// Deregisters and frees the memory, while the communicator is alive.
    pub fn release(self, comm: Comm, library: &Library) -> Result<(), String> {
        match self.state {
            RegistrationState::Window(window) => library.close_window(comm, window)?,
            // A null handle: the library did not register it.
            RegistrationState::Plain(0) => {}
            RegistrationState::Plain(handle) => library.deregister(comm, handle)?,
            RegistrationState::Opening(slot) => {
                // The library may still write there.
                Box::leak(slot);
                return Ok(());
            }
        }
        // SAFETY: it was deregistered above, and every call is complete.
        unsafe { library.free(self.address) }
    }
}

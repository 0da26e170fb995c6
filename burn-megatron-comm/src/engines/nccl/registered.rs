//! Registered memory, which other ranks access directly instead of through NCCL's internal buffers.
//!
//! CubeCL allocates memory only from its own pools, and its storage keeps the addresses of its allocations in a private
//! map. Therefore, tensors cannot be placed in memory of `ncclMemAlloc`, which windows require. Instead, a large tensor
//! is copied on the device into a window before a collective, and the result is copied back afterwards. The collective
//! runs in place in the window. The copies and the collective run on the same stream.
//!
//! The allocations of CubeCL can be registered without a copy. The performance of both modes was not measured.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use super::driver::{Allocation, DeviceDriver};
use super::library::{Addresses, Comm, Library, Progress};
use super::plan::{NcclOp, NcclPlan};
use super::version::Version;
use crate::nccl_config::RegisteredBuffers;

/// The minimum size in bytes of an input or output whose memory is registered.
pub(super) const MIN_REGISTERED_BYTES: usize = 1 << 20;

/// The allocation granularity of NVIDIA GPUs. The size of a window is a multiple of this size.
const REGISTRATION_GRANULARITY: usize = 2 << 20;

/// Whether the registration of memory is requested and available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// Registration is not requested.
    Off,
    /// Registration is used for large calls.
    On(RegisteredBuffers),
    /// Registration is requested but not available, for this reason.
    Unavailable(String),
}

impl Registration {
    pub fn of(request: Option<RegisteredBuffers>, library: &Library) -> Self {
        let (windows, plain) = library.registration();
        let (is_available, since) = match request {
            None => return Self::Off,
            Some(RegisteredBuffers::Allocations) => (plain, Version::REGISTER),
            Some(RegisteredBuffers::Windows) => (windows, Version::WINDOWS),
        };
        match request {
            Some(kind) if is_available => Self::On(kind),
            _ => Self::Unavailable(format!(
                "NCCL {} does not support them; expected at least {since}",
                library.version(),
            )),
        }
    }

    /// Returns a line of text for the header of a run, including the number of copies so far.
    pub fn description(&self, copied: &CopyCount) -> String {
        match self {
            Self::Off => "registered buffers off".into(),
            Self::On(RegisteredBuffers::Allocations) => {
                "registered buffers on (allocations; 0 copies)".into()
            }
            Self::On(RegisteredBuffers::Windows) => {
                let (copies, bytes) = copied.get();
                format!(
                    "registered buffers on (symmetric windows; 2 copies on the device for each collective on a tensor of \
                     at least {} MiB: {copies} so far, of {:.1} MiB)",
                    MIN_REGISTERED_BYTES >> 20,
                    bytes as f64 / 2f64.powi(20)
                )
            }
            Self::Unavailable(reason) => {
                format!("registered buffers requested, but not available: {reason}")
            }
        }
    }
}

/// Returns whether the memory of a call is registered. The result is the same on all ranks.
pub(super) fn is_registered(plan: &NcclPlan) -> bool {
    let is_collective = |step: &NcclOp| {
        matches!(
            step,
            NcclOp::AllReduce(_) | NcclOp::AllGather | NcclOp::ReduceScatter(_)
        )
    };
    let bytes = plan.bytes().into_iter().max().unwrap_or(0);
    bytes >= MIN_REGISTERED_BYTES && plan.steps.iter().all(is_collective)
}

/// Returns the size in bytes of the window of a call, or `None` if the call uses no window. The result is the same on
/// all ranks.
pub(super) fn window_bytes(plan: &NcclPlan) -> Option<usize> {
    let bytes = plan.bytes().into_iter().max().unwrap_or(0);
    is_registered(plan).then(|| bytes.next_multiple_of(REGISTRATION_GRANULARITY))
}

/// A counter of the copies between tensors and windows.
#[derive(Debug, Default)]
pub(super) struct CopyCount {
    copies: AtomicU64,
    bytes: AtomicU64,
}

impl CopyCount {
    pub fn add(&self, bytes: usize) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the number of copies and the number of copied bytes.
    pub fn get(&self) -> (u64, u64) {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        (get(&self.copies), get(&self.bytes))
    }
}

/// The allocations that are registered with a communicator, sorted by address.
///
/// CubeCL does not report when it frees an allocation. The registration of a freed allocation is removed when another
/// allocation at an overlapping address is registered, or when the communicator is closed.
#[derive(Debug, Default)]
pub(super) struct RegisteredAllocations(BTreeMap<u64, (Allocation, usize)>);

impl RegisteredAllocations {
    /// Registers the allocation that contains an address, unless it is already registered.
    pub fn register(
        &mut self,
        address: u64,
        comm: Comm,
        library: &Library,
        driver: &dyn DeviceDriver,
    ) -> Result<(), String> {
        let allocation = driver.allocation(address)?;
        let known = self.0.get(&allocation.address);
        if known.is_some_and(|(known, _)| *known == allocation) {
            return Ok(());
        }
        let (start, end) = (
            allocation.address,
            allocation.address + allocation.bytes as u64,
        );
        let overlaps = |(other, _): &(Allocation, usize)| {
            other.address < end && other.address + other.bytes as u64 > start
        };
        let freed = self.0.values().filter(|entry| overlaps(entry));
        for (freed, handle) in freed.copied().collect::<Vec<_>>() {
            self.0.remove(&freed.address);
            deregister(handle, comm, library)?;
        }
        let handle = library.register(comm, start, allocation.bytes)?;
        self.0.insert(start, (allocation, handle));
        Ok(())
    }

    /// Deregisters all allocations. The communicator must be alive.
    pub fn release(&mut self, comm: Comm, library: &Library) -> Result<(), String> {
        for (_, handle) in std::mem::take(&mut self.0).into_values() {
            deregister(handle, comm, library)?;
        }
        Ok(())
    }
}

fn deregister(handle: usize, comm: Comm, library: &Library) -> Result<(), String> {
    match handle {
        // The library did not register the allocation.
        0 => Ok(()),
        handle => library.deregister(comm, handle),
    }
}

/// A memory window that a call uses.
#[derive(Debug)]
pub(super) struct RegisteredWindow {
    address: u64,
    bytes: usize,
    state: WindowState,
}

#[derive(Debug)]
enum WindowState {
    /// NCCL is registering the window. It writes the window to the slot when all ranks have registered theirs.
    Opening(Box<AtomicPtr<c_void>>),
    Window(usize),
    Plain(usize),
}

impl RegisteredWindow {
    /// Allocates `bytes` bytes and starts to register them with `comm`.
    pub fn begin(bytes: usize, comm: Comm, library: &Library) -> Result<Self, String> {
        let address = library.allocate(bytes)?;
        let slot = Box::new(AtomicPtr::new(ptr::null_mut()));
        match library.window(comm, address, bytes, &slot) {
            Ok(()) => Ok(Self {
                address,
                bytes,
                state: WindowState::Opening(slot),
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

    /// Returns whether the window is ready to use.
    ///
    /// # Errors
    /// The reason why the window cannot become ready.
    pub fn ready(&mut self, comm: Comm, library: &Library) -> Result<bool, String> {
        let WindowState::Opening(slot) = &self.state else {
            return Ok(true);
        };
        if library.poll(comm)? == Progress::Running {
            return Ok(false);
        }
        let window = slot.load(Ordering::Acquire);
        // If the ranks cannot access each other's memory, there is no window. The memory is then registered for this
        // rank alone.
        self.state = if window.is_null() {
            WindowState::Plain(library.register(comm, self.address, self.bytes)?)
        } else {
            WindowState::Window(window as usize)
        };
        Ok(true)
    }

    /// Returns the addresses of the input and output of a call that runs in place in the window.
    pub fn addresses(&self, plan: &NcclPlan, index: usize) -> Addresses {
        let [input, output] = plan.bytes().map(|bytes| (bytes * index) as u64);
        let start = self.address;
        match plan.steps.first() {
            Some(NcclOp::AllGather) => [start + input, start],
            Some(NcclOp::ReduceScatter(_)) => [start, start + output],
            _ => [start, start],
        }
    }

    /// Deregisters the window and frees its memory. The communicator must be alive.
    pub fn release(self, comm: Comm, library: &Library) -> Result<(), String> {
        match self.state {
            WindowState::Window(window) => library.close_window(comm, window)?,
            WindowState::Plain(handle) => deregister(handle, comm, library)?,
            WindowState::Opening(slot) => {
                // The library may still write to the slot.
                Box::leak(slot);
                return Ok(());
            }
        }
        // SAFETY: the memory was deregistered above, and every call is complete.
        unsafe { library.free(self.address) }
    }
}

//! The device memory of the input and output of a call. It is the memory of a tensor, or staging memory for a host
//! buffer.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::driver::{DeviceDriver, RecordedEvent, Stream};
use super::library::Addresses;
use super::plan::NcclPlan;
use crate::buffer::{Buffer, DType};
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::ResultSlot;
use crate::with_elements;

/// The device memory of a call on a tensor, from the start of the call until the device has executed it.
pub(super) struct DeviceBuffers {
    resolved: Mutex<Option<Result<ResolvedBuffers, String>>>,
    /// The event that is recorded after the call. Readers of the result wait for this event.
    done: OnceLock<Arc<RecordedEvent>>,
    /// Whether the result may be taken only after the device has executed the call.
    wait_for_device: bool,
    pub launched: Arc<ResultSlot>,
    pub passed: Arc<ResultSlot>,
}

/// Device memory with known addresses. It may be used after the event `ready`.
pub(super) struct ResolvedBuffers {
    pub addresses: Addresses,
    /// The event that is recorded after the input was written and after the last use of the output memory.
    pub ready: Option<Arc<RecordedEvent>>,
    /// A value that keeps the memory alive.
    pub hold: Box<dyn Any + Send>,
}

/// The addresses, with the event [`ResolvedBuffers::ready`].
pub(super) type ReadyAddresses = (Addresses, Option<Arc<RecordedEvent>>);

impl DeviceBuffers {
    pub fn new(wait_for_device: bool, passed: Arc<ResultSlot>) -> Arc<Self> {
        Arc::new(Self {
            resolved: Mutex::default(),
            done: OnceLock::new(),
            wait_for_device,
            launched: Arc::default(),
            passed,
        })
    }

    /// Sets the memory, or the reason why the memory is not available.
    pub fn resolve(&self, resolved: Result<ResolvedBuffers, String>) {
        *self.resolved.lock() = Some(resolved);
    }

    /// Returns the addresses and the event to wait for. Returns `None` if they are not known yet.
    pub fn addresses(&self) -> Option<Result<ReadyAddresses, String>> {
        let resolved = self.resolved.lock();
        let known = |resolved: &ResolvedBuffers| (resolved.addresses, resolved.ready.clone());
        resolved
            .as_ref()
            .map(|resolved| resolved.as_ref().map(known).map_err(String::clone))
    }

    /// Records that the call has been put on its stream, before the event `done`.
    pub fn mark_launched(&self, done: &Arc<RecordedEvent>) {
        let _ = self.done.set(done.clone());
        if !self.wait_for_device {
            self.launched.fulfil(Ok(empty_result()));
        }
    }

    /// Returns the event that is recorded after the call, or `None` if the call has not been launched.
    pub fn done(&self) -> Option<&Arc<RecordedEvent>> {
        self.done.get()
    }

    /// Completes the call and releases the memory.
    pub fn complete(&self, ended: Result<(), CommError>) {
        if ended.is_ok() {
            self.release();
        }
        self.launched.fulfil(ended.clone().map(|()| empty_result()));
        self.passed.fulfil(ended.map(|()| empty_result()));
    }

    pub fn release(&self) {
        self.resolved.lock().take();
    }

    /// Leaks the memory, because the device may still write to it.
    pub fn leak(&self) {
        std::mem::forget(self.resolved.lock().take());
    }
}

impl fmt::Debug for DeviceBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceBuffers")
    }
}

pub(super) fn empty_result() -> Buffer {
    Buffer::empty(DType::U8)
}

/// Device memory for a call on a host buffer.
///
/// Copies use a separate stream. A copy from pageable host memory blocks this thread until the stream reaches the copy.
/// Therefore it must not be queued behind a collective that waits for another rank. Pinned memory would not help: it
/// would require one more copy on the host, because the driver already stages pageable memory in its own pinned memory.
#[derive(Debug)]
pub(super) struct StagingBuffers {
    pub addresses: Addresses,
    /// The event that is recorded after the copy of the input.
    pub ready: Arc<RecordedEvent>,
}

/// The maximum number of bytes of an input or an output that is staged in a shared block.
const HALF_BLOCK: usize = 32 << 10;

/// The maximum number of unused blocks that are kept for later calls.
const MAX_KEPT_BLOCKS: usize = 8;

/// An allocator of device memory for host buffers. It also copies data to and from this memory.
///
/// The input and the output of a small call share a block, which is kept for later calls. A small collective takes less
/// time than two stream-ordered allocations, whose memory is returned to the operating system when the stream is
/// synchronized.
#[derive(Debug)]
pub(super) struct Staging {
    driver: Arc<dyn DeviceDriver>,
    copies: Stream,
    kept: Vec<u64>,
}

impl Staging {
    /// Creates a staging allocator whose copies run on the stream `copies`.
    pub fn new(driver: Arc<dyn DeviceDriver>, copies: Stream) -> Self {
        Self {
            driver,
            copies,
            kept: vec![],
        }
    }

    /// Copies the input of a call to the device, and allocates device memory for the output.
    pub fn stage(&mut self, input: &Buffer, plan: &NcclPlan) -> Result<StagingBuffers, String> {
        let addresses = self.allocate(plan)?;
        match self.fill(input, addresses[0]) {
            Ok(ready) => Ok(StagingBuffers { addresses, ready }),
            Err(reason) => {
                self.free(addresses, plan);
                Err(reason)
            }
        }
    }

    fn allocate(&mut self, plan: &NcclPlan) -> Result<Addresses, String> {
        if is_small(plan) {
            let kept = self.kept.pop().map(Ok);
            let new = || self.driver.allocate(2 * HALF_BLOCK, self.copies);
            let block = kept.unwrap_or_else(new)?;
            return Ok([block, block + HALF_BLOCK as u64]);
        }
        let mut addresses = [0; 2];
        for (at, bytes) in plan.bytes().into_iter().enumerate() {
            if bytes > 0 {
                let allocated = self.driver.allocate(bytes, self.copies);
                addresses[at] = allocated.inspect_err(|_| self.free(addresses, plan))?;
            }
        }
        Ok(addresses)
    }

    fn fill(&self, input: &Buffer, address: u64) -> Result<Arc<RecordedEvent>, String> {
        match bytes(input) {
            [] => {}
            // SAFETY: the plan has the length of the input, and no other call uses the memory.
            bytes => unsafe { self.driver.copy_to_device(address, bytes, self.copies) }?,
        }
        RecordedEvent::record(self.copies, &self.driver)
    }

    /// Copies the result of a completed call to the host. The result is the first part of the output.
    pub fn fetch(
        &self,
        staged: &StagingBuffers,
        plan: &NcclPlan,
        pool: &BufferPool,
    ) -> Result<Buffer, String> {
        if plan.result == 0 {
            return Ok(Buffer::empty(plan.dtype));
        }
        let mut result = pool.take(plan.dtype, plan.result);
        let (to, from) = (bytes_mut(&mut result), staged.addresses[1]);
        // SAFETY: the output has at least as many elements as the result, and the call is complete.
        unsafe { self.driver.copy_to_host(to, from, self.copies) }?;
        Ok(result)
    }

    /// Releases the device memory of a completed call.
    pub fn release(&mut self, staged: &StagingBuffers, plan: &NcclPlan) {
        if is_small(plan) && self.kept.len() < MAX_KEPT_BLOCKS {
            self.kept.push(staged.addresses[0]);
        } else {
            self.free(staged.addresses, plan);
        }
    }

    fn free(&self, addresses: Addresses, plan: &NcclPlan) {
        let allocations = if is_small(plan) { 1 } else { 2 };
        for address in addresses.into_iter().take(allocations) {
            if address != 0 {
                self.driver.free(address, self.copies);
            }
        }
    }

    /// Frees all kept blocks.
    pub fn clear(&mut self) {
        for block in self.kept.drain(..) {
            self.driver.free(block, self.copies);
        }
    }
}

/// Returns whether the input and the output of a call fit into a block.
fn is_small(plan: &NcclPlan) -> bool {
    plan.bytes().into_iter().all(|bytes| bytes <= HALF_BLOCK)
}

pub(super) fn bytes(buffer: &Buffer) -> &[u8] {
    // SAFETY: numbers have no padding, so they can be viewed as bytes.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(&values[..]))
    })
}

pub(super) fn bytes_mut(buffer: &mut Buffer) -> &mut [u8] {
    // SAFETY: numbers have no padding, and every bit pattern is a valid number.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(&values[..]))
    })
}

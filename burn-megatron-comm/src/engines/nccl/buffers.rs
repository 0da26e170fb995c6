//! The device memory of a call's input and output: that of a tensor, or staged for a host buffer.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::driver::{DeviceDriver, RecordedEvent, Stream};
use super::library::Addresses;
use super::plan::NcclPlan;
use crate::buffer::{Buffer, DType, with_elements};
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::ResultSlot;

/// The memory of a tensor's call, from its start until the device has executed it.
pub(super) struct DeviceBuffers {
    resolved: Mutex<Option<Result<ResolvedBuffers, String>>>,
    /// Recorded after the call; readers of the result wait for it.
    done: OnceLock<Arc<RecordedEvent>>,
    /// Whether the result may be taken only when the device has executed the call.
    wait_for_device: bool,
    pub launched: Arc<ResultSlot>,
    pub passed: Arc<ResultSlot>,
}

/// Memory with known addresses, usable once `ready` is complete.
pub(super) struct ResolvedBuffers {
    pub addresses: Addresses,
    /// Recorded after the writes of the input and the last use of the output's memory.
    pub ready: Option<Arc<RecordedEvent>>,
    /// Keeps the memory alive.
    pub hold: Box<dyn Any + Send>,
}

/// The addresses, and the event of [`ResolvedBuffers::ready`].
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

    /// Sets the memory, or why there is none.
    pub fn resolve(&self, resolved: Result<ResolvedBuffers, String>) {
        *self.resolved.lock() = Some(resolved);
    }

    /// The addresses and the event to wait for, once they are known.
    pub fn addresses(&self) -> Option<Result<ReadyAddresses, String>> {
        let resolved = self.resolved.lock();
        let known = |resolved: &ResolvedBuffers| (resolved.addresses, resolved.ready.clone());
        resolved
            .as_ref()
            .map(|resolved| resolved.as_ref().map(known).map_err(String::clone))
    }

    /// Notes that the call is on its stream, before `done`.
    pub fn mark_launched(&self, done: &Arc<RecordedEvent>) {
        let _ = self.done.set(done.clone());
        if !self.wait_for_device {
            self.launched.fulfil(Ok(empty_result()));
        }
    }

    /// The event after the call, once it is launched.
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

    /// Leaks the memory, as the device may still write it.
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

/// Device memory for the call of a host buffer.
///
/// Copies have a stream of their own. A copy from pageable host memory blocks this thread until its stream reaches
/// it, so it must not be queued behind a collective that waits for another rank. Pinned memory would not help:
/// it would be one more copy on the host, as the driver stages pageable memory in pinned memory of its own.
#[derive(Debug)]
pub(super) struct StagingBuffers {
    pub addresses: Addresses,
    /// Recorded after the copy of the input.
    pub ready: Arc<RecordedEvent>,
}

impl StagingBuffers {
    pub fn new(
        input: &Buffer,
        plan: &NcclPlan,
        copies: Stream,
        driver: &Arc<dyn DeviceDriver>,
    ) -> Result<Self, String> {
        let mut addresses = [0; 2];
        let staged = stage(input, plan, copies, driver, &mut addresses);
        let staged = staged.and_then(|()| RecordedEvent::record(copies, driver));
        match staged {
            Ok(ready) => Ok(Self { addresses, ready }),
            Err(reason) => {
                free(addresses, copies, driver);
                Err(reason)
            }
        }
    }

    /// Copies the result, the first elements of the output, to the host.
    pub fn fetch(
        &self,
        plan: &NcclPlan,
        copies: Stream,
        driver: &Arc<dyn DeviceDriver>,
        pool: &BufferPool,
    ) -> Result<Buffer, String> {
        if plan.result == 0 {
            return Ok(Buffer::empty(plan.dtype));
        }
        let mut result = pool.take(plan.dtype, plan.result);
        // SAFETY: the output has at least the elements of the result, and the call is complete.
        unsafe { driver.copy_to_host(bytes_mut(&mut result), self.addresses[1], copies) }?;
        Ok(result)
    }

    /// Releases the memory once the call is complete.
    pub fn free(&self, copies: Stream, driver: &Arc<dyn DeviceDriver>) {
        free(self.addresses, copies, driver);
    }
}

fn stage(
    input: &Buffer,
    plan: &NcclPlan,
    copies: Stream,
    driver: &Arc<dyn DeviceDriver>,
    addresses: &mut Addresses,
) -> Result<(), String> {
    for (address, bytes) in addresses.iter_mut().zip(plan.bytes()) {
        if bytes > 0 {
            *address = driver.allocate(bytes, copies)?;
        }
    }
    match bytes(input) {
        [] => Ok(()),
        // SAFETY: the plan has the length of the input, and the memory is new.
        bytes => unsafe { driver.copy_to_device(addresses[0], bytes, copies) },
    }
}

fn free(addresses: Addresses, copies: Stream, driver: &Arc<dyn DeviceDriver>) {
    for address in addresses {
        if address != 0 {
            driver.free(address, copies);
        }
    }
}

pub(super) fn bytes(buffer: &Buffer) -> &[u8] {
    // SAFETY: numbers without padding, viewed as bytes.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(&values[..]))
    })
}

pub(super) fn bytes_mut(buffer: &mut Buffer) -> &mut [u8] {
    // SAFETY: numbers without padding, of which every bit pattern is valid.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(&values[..]))
    })
}

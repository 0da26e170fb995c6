//! Where the input and the output of a call lie: lent by a tensor, or staged for a buffer.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::driver::{Driver, Mark, Stream};
use super::library::Addresses;
use super::plan::Plan;
use crate::buffer::{Buffer, DType, with_elements};
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::Slot;

/// The memory of tensors, from the moment in which their call is started until the device has passed it.
pub(super) struct Loan {
    lent: Mutex<Option<Result<Lent, String>>>,
    /// Behind the call; to be waited for by what reads the result.
    done: OnceLock<Arc<Mark>>,
    /// Whether the result may be asked for only when the device has passed.
    late: bool,
    pub launched: Arc<Slot>,
    pub passed: Arc<Slot>,
}

/// Memory that is ready, or will be at its mark.
pub(super) struct Lent {
    pub addresses: Addresses,
    /// Behind what writes the input, and what still uses the memory of the output.
    pub ready: Option<Arc<Mark>>,
    /// Keeps the memory where it is.
    pub hold: Box<dyn Any + Send>,
}

/// The addresses, and the mark of [`Lent::ready`].
pub(super) type Known = (Addresses, Option<Arc<Mark>>);

impl Loan {
    pub fn new(late: bool, passed: Arc<Slot>) -> Arc<Self> {
        Arc::new(Self {
            lent: Mutex::default(),
            done: OnceLock::new(),
            late,
            launched: Arc::default(),
            passed,
        })
    }

    /// Hands the memory over, or says why there is none.
    pub fn fill(&self, lent: Result<Lent, String>) {
        *self.lock() = Some(lent);
    }

    /// The addresses and the mark to wait for, once they are known.
    pub fn known(&self) -> Option<Result<Known, String>> {
        let lent = self.lock();
        let known = |lent: &Lent| (lent.addresses, lent.ready.clone());
        lent.as_ref()
            .map(|lent| lent.as_ref().map(known).map_err(String::clone))
    }

    /// Notes that the call is on its stream, up to `done`.
    pub fn launch(&self, done: &Arc<Mark>) {
        let _ = self.done.set(done.clone());
        if !self.late {
            self.launched.fulfil(Ok(nothing()));
        }
    }

    /// What is behind the call, once it is launched.
    pub fn done(&self) -> Option<&Arc<Mark>> {
        self.done.get()
    }

    /// Notes how the call ended, and gives the memory back.
    pub fn end(&self, ended: Result<(), CommError>) {
        if ended.is_ok() {
            self.give_back();
        }
        self.launched.fulfil(ended.clone().map(|()| nothing()));
        self.passed.fulfil(ended.map(|()| nothing()));
    }

    pub fn give_back(&self) {
        self.lock().take();
    }

    /// Keeps the memory for ever: the device may still write there.
    pub fn leak(&self) {
        std::mem::forget(self.lock().take());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Lent, String>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Loan")
    }
}

pub(super) fn nothing() -> Buffer {
    Buffer::empty(DType::U8)
}

/// Memory of the device for the call of a host buffer.
///
/// Copies have a stream of their own. One from ordinary host memory holds up this thread until its stream
/// comes there, so it must not stand behind a collective that waits for another rank. Pinned memory
/// would not help: it would be one more copy on the host, as the driver has pinned memory of its own that
/// it passes ordinary memory through.
#[derive(Debug)]
pub(super) struct Staged {
    pub addresses: Addresses,
    /// Behind the copy of the input.
    pub ready: Arc<Mark>,
}

impl Staged {
    pub fn new(
        input: &Buffer,
        plan: &Plan,
        copies: Stream,
        driver: &Arc<dyn Driver>,
    ) -> Result<Self, String> {
        let mut addresses = [0; 2];
        let staged = stage(input, plan, copies, driver, &mut addresses);
        let staged = staged.and_then(|()| Mark::behind(copies, driver));
        match staged {
            Ok(ready) => Ok(Self { addresses, ready }),
            Err(reason) => {
                free(addresses, copies, driver);
                Err(reason)
            }
        }
    }

    /// The first elements of the output, as many as the result has.
    pub fn fetch(
        &self,
        plan: &Plan,
        copies: Stream,
        driver: &Arc<dyn Driver>,
        pool: &BufferPool,
    ) -> Result<Buffer, String> {
        if plan.result == 0 {
            return Ok(Buffer::empty(plan.dtype));
        }
        let mut result = pool.take(plan.dtype, plan.result);
        // SAFETY: the output has at least the elements of the result, and the call has passed.
        unsafe { driver.to_host(bytes_mut(&mut result), self.addresses[1], copies) }?;
        Ok(result)
    }

    /// Gives the memory back once the call has passed.
    pub fn free(&self, copies: Stream, driver: &Arc<dyn Driver>) {
        free(self.addresses, copies, driver);
    }
}

fn stage(
    input: &Buffer,
    plan: &Plan,
    copies: Stream,
    driver: &Arc<dyn Driver>,
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
        bytes => unsafe { driver.to_device(addresses[0], bytes, copies) },
    }
}

fn free(addresses: Addresses, copies: Stream, driver: &Arc<dyn Driver>) {
    for address in addresses {
        if address != 0 {
            driver.free(address, copies);
        }
    }
}

pub(super) fn bytes(buffer: &Buffer) -> &[u8] {
    // SAFETY: numbers without padding, seen as their bytes.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(&values[..]))
    })
}

pub(super) fn bytes_mut(buffer: &mut Buffer) -> &mut [u8] {
    // SAFETY: numbers without padding, of which all bits are a value.
    with_elements!(buffer, values => unsafe {
        std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(&values[..]))
    })
}

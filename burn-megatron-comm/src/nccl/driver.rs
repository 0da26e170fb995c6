//! What the engine needs of a device: streams, events and memory.

use std::fmt;
use std::sync::Arc;

/// A stream: what is put on it happens in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stream(pub usize);

/// An event: a place in a stream, once it is recorded there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Event(pub usize);

/// A device. Addresses are of its memory; every error is what it says, in words.
pub(super) trait Driver: fmt::Debug + Send + Sync {
    /// Which one, for people: `"cuda:0"`.
    fn name(&self) -> String;

    /// Makes this thread work on the device.
    fn enter(&self) -> Result<(), String>;

    /// A stream that runs beside all others.
    fn stream(&self) -> Result<Stream, String>;

    /// Gives a stream back, once nothing is put on it any more.
    fn close(&self, stream: Stream);

    fn event(&self) -> Result<Event, String>;

    fn destroy(&self, event: Event);

    fn record(&self, event: Event, stream: Stream) -> Result<(), String>;

    /// What is put on `stream` from now on waits for the event, as it was recorded last.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), String>;

    /// Whether everything before the event has happened.
    fn passed(&self, event: Event) -> Result<bool, String>;

    /// Memory that may be used by what is put on `stream` from now on.
    fn allocate(&self, bytes: usize, stream: Stream) -> Result<u64, String>;

    /// Frees memory once the stream comes there.
    fn free(&self, address: u64, stream: Stream);

    /// # Safety
    /// The memory lives, and nobody else writes there, until the stream has passed; `from` until this
    /// returns.
    unsafe fn to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String>;

    /// Copies now: returns when the bytes are there.
    ///
    /// # Safety
    /// The memory lives and has so many bytes.
    unsafe fn to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String>;

    /// # Safety
    /// Both live until the stream has passed, and have so many bytes.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<(), String>;
}

/// A place in a stream that others wait for.
#[derive(Debug)]
pub(super) struct Mark {
    driver: Arc<dyn Driver>,
    event: Event,
}

impl Mark {
    /// A mark that nothing has been recorded in: nobody waits for it.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self, String> {
        let event = driver.event()?;
        Ok(Self {
            driver: driver.clone(),
            event,
        })
    }

    /// A mark behind all that was put on `stream`.
    pub fn behind(stream: Stream, driver: &Arc<dyn Driver>) -> Result<Arc<Self>, String> {
        let mark = Self::new(driver)?;
        driver.record(mark.event, stream)?;
        Ok(Arc::new(mark))
    }

    pub fn event(&self) -> Event {
        self.event
    }

    /// Makes what is put on `stream` from now on wait for it.
    pub fn hold(&self, stream: Stream) -> Result<(), String> {
        self.driver.wait(stream, self.event)
    }

    pub fn passed(&self) -> Result<bool, String> {
        self.driver.passed(self.event)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.driver.destroy(self.event);
    }
}

//! The interface to the streams, events and memory of a device.

use std::fmt;
use std::sync::Arc;

/// The handle of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stream(pub usize);

/// The handle of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Event(pub usize);

/// The priority of a stream. When a multiprocessor becomes free, the device starts high-priority work first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Priority {
    Normal,
    High,
}

/// A memory allocation on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    pub address: u64,
    pub bytes: usize,
    /// The id of the allocation. It is different for every allocation of the process, including allocations that were
    /// freed.
    pub id: u64,
}

/// The interface to a device. Addresses are device addresses. Errors are the error messages of the driver.
pub(super) trait DeviceDriver: fmt::Debug + Send + Sync {
    /// Returns the name of the device, for example `"cuda:0"`.
    fn name(&self) -> String;

    /// Makes the device current on this thread.
    fn make_current(&self) -> Result<(), String>;

    /// Allows this thread to poll, allocate and synchronize while another thread captures a CUDA graph. Without this
    /// call, these operations would invalidate the capture, although they are not part of the graph.
    fn ignore_captures(&self) -> Result<(), String>;

    /// Returns the number of multiprocessors.
    fn multiprocessors(&self) -> Result<usize, String>;

    /// Creates a stream that runs concurrently with all other streams.
    fn create_stream(&self, priority: Priority) -> Result<Stream, String>;

    /// Destroys a stream that is no longer used.
    fn destroy_stream(&self, stream: Stream);

    fn create_event(&self) -> Result<Event, String>;

    fn destroy_event(&self, event: Event);

    fn record(&self, event: Event, stream: Stream) -> Result<(), String>;

    /// Makes later work on `stream` wait until the event, as last recorded, has completed.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<(), String>;

    /// Returns whether all work before the event is complete.
    fn query_event(&self, event: Event) -> Result<bool, String>;

    /// Allocates memory in stream order. Later work on `stream` may use it.
    fn allocate(&self, bytes: usize, stream: Stream) -> Result<u64, String>;

    /// Returns the allocation that contains the address `address`.
    fn allocation(&self, address: u64) -> Result<Allocation, String>;

    /// Frees memory in stream order.
    fn free(&self, address: u64, stream: Stream);

    /// Copies `from` to the device.
    ///
    /// # Safety
    /// `to` must be valid, and nothing else may access it until the stream has executed the copy. `from` must be valid
    /// until this method returns.
    unsafe fn copy_to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String>;

    /// Copies memory from the device to the host and waits for the copy.
    ///
    /// # Safety
    /// `from` must be valid and have the length of `to`.
    unsafe fn copy_to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String>;

    /// Copies memory between two addresses of the device.
    ///
    /// # Safety
    /// Both addresses must be valid for `bytes` bytes until the stream has executed the copy.
    unsafe fn copy_on_device(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), String>;
}

/// An event that is destroyed when this value is dropped.
#[derive(Debug)]
pub(super) struct RecordedEvent {
    driver: Arc<dyn DeviceDriver>,
    event: Event,
}

impl RecordedEvent {
    /// Creates an event that has not been recorded. A wait for this event returns immediately.
    pub fn new(driver: &Arc<dyn DeviceDriver>) -> Result<Self, String> {
        let event = driver.create_event()?;
        Ok(Self {
            driver: driver.clone(),
            event,
        })
    }

    /// Records an event after all work that has been submitted to `stream`.
    pub fn record(stream: Stream, driver: &Arc<dyn DeviceDriver>) -> Result<Arc<Self>, String> {
        let mark = Self::new(driver)?;
        driver.record(mark.event, stream)?;
        Ok(Arc::new(mark))
    }

    pub fn event(&self) -> Event {
        self.event
    }

    /// Makes later work on `stream` wait for the event.
    pub fn block(&self, stream: Stream) -> Result<(), String> {
        self.driver.stream_wait_event(stream, self.event)
    }

    pub fn is_complete(&self) -> Result<bool, String> {
        self.driver.query_event(self.event)
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        self.driver.destroy_event(self.event);
    }
}

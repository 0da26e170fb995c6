//! Events of a whole CUDA context, which drivers have supported since CUDA 12.5.

use std::ffi::{c_int, c_void};

use super::super::driver::Event;

type ContextEventFn = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// The functions `cuCtxRecordEvent` and `cuCtxWaitEvent`. They are looked up by name, because the bindings contain them
/// only if they were built on a machine with a new CUDA version.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextEvents {
    record: ContextEventFn,
    wait: ContextEventFn,
    context: usize,
}

impl ContextEvents {
    /// Loads the functions for events of the CUDA context `context`.
    ///
    /// # Errors
    /// A message if the driver does not have these functions.
    pub fn of(context: *mut c_void) -> Result<Self, String> {
        let name = if cfg!(windows) {
            "nvcuda.dll"
        } else {
            "libcuda.so.1"
        };
        let missing =
            |error| format!("context events require a driver of CUDA 12.5 or newer ({error})");
        // SAFETY: the driver is already loaded, and both functions take a context and an event.
        unsafe {
            let driver = libloading::Library::new(name).map_err(missing)?;
            let record = *driver.get(b"cuCtxRecordEvent").map_err(missing)?;
            let wait = *driver.get(b"cuCtxWaitEvent").map_err(missing)?;
            // The library stays loaded.
            std::mem::forget(driver);
            Ok(Self {
                record,
                wait,
                context: context as usize,
            })
        }
    }

    /// Records the event after all work that has been submitted to the device so far.
    pub fn record(&self, event: Event) -> Result<(), String> {
        self.call("cuCtxRecordEvent", self.record, event)
    }

    /// Makes all work that is submitted later wait for the event.
    pub fn wait(&self, event: Event) -> Result<(), String> {
        self.call("cuCtxWaitEvent", self.wait, event)
    }

    fn call(&self, name: &str, function: ContextEventFn, event: Event) -> Result<(), String> {
        // SAFETY: the context and the event are alive.
        match unsafe { function(self.context as *mut c_void, event.0 as *mut c_void) } {
            0 => Ok(()),
            code => Err(format!("{name}: the CUDA driver reports error {code}")),
        }
    }
}

//! Events of a whole context, which drivers have since CUDA 12.5.

use std::ffi::{c_int, c_void};

use super::super::driver::Event;

type OnContext = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// `cuCtxRecordEvent` and `cuCtxWaitEvent`. They are looked for by name, as the bindings have them only if
/// the machine that built them had a new CUDA.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextEvents {
    record: OnContext,
    wait: OnContext,
    context: usize,
}

impl ContextEvents {
    /// Those of `context`.
    ///
    /// # Errors
    /// That the driver has none.
    pub fn of(context: *mut c_void) -> Result<Self, String> {
        let name = match cfg!(windows) {
            true => "nvcuda.dll",
            false => "libcuda.so.1",
        };
        let missing = |error| format!("the CUDA driver has none, CUDA 12.5 does ({error})");
        // SAFETY: the driver is open already, and both functions take a context and an event.
        unsafe {
            let driver = libloading::Library::new(name).map_err(missing)?;
            let record = *driver.get(b"cuCtxRecordEvent").map_err(missing)?;
            let wait = *driver.get(b"cuCtxWaitEvent").map_err(missing)?;
            // It stays as long as the process.
            std::mem::forget(driver);
            Ok(Self {
                record,
                wait,
                context: context as usize,
            })
        }
    }

    /// Records all that the device has been told to do so far.
    pub fn record(&self, event: Event) -> Result<(), String> {
        self.call("cuCtxRecordEvent", self.record, event)
    }

    /// Makes all that the device will be told to do wait.
    pub fn wait(&self, event: Event) -> Result<(), String> {
        self.call("cuCtxWaitEvent", self.wait, event)
    }

    fn call(&self, name: &str, function: OnContext, event: Event) -> Result<(), String> {
        // SAFETY: the context and the event are alive.
        match unsafe { function(self.context as *mut c_void, event.0 as *mut c_void) } {
            0 => Ok(()),
            code => Err(format!("{name}: the CUDA driver reports error {code}")),
        }
    }
}

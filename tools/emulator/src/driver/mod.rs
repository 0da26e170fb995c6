//! The functions of the CUDA driver, under their C names.
//!
//! NVIDIA's manual of the driver API says what each does; what is said here is only where this
//! driver is more, or less, than that. A function that is not here is missing from the library too: a
//! program that wants it says so by name.
//!
//! There is one device, and one context on it: its primary one. All state stands in one [`DriverState`](state::DriverState)
//! behind one lock, which is held while work runs: one kernel at a time, whatever the streams.
//!
//! Work of a stream is done at the call that puts it there, if nothing stands before it, or, where
//! that was asked for, only when somebody waits for it. Either way it is done on the thread of a
//! caller.
//!
//! Faults are reported in a line on standard error, in addition to the code that the driver returns. What ruins the
//! context of a GPU ruins it here: every later call returns it. Undefined behaviour that a GPU would not report is
//! returned once, by the launch, or where work waits by the next call that waits for it.

// The names are NVIDIA's.
#![allow(non_snake_case)]

mod context;
mod copies;
mod counts;
mod device;
mod errors;
mod events;
mod functions;
mod graphs;
pub(crate) mod jobs;
mod launch;
mod memory;
mod modules;
mod options;
mod pools;
mod queue;
mod state;
mod streams;
mod symbols;
mod table;
mod tensor_maps;
#[cfg(test)]
mod tests;
mod transfers;
mod work;

use cudarc::driver::sys::CUresult;
pub(crate) use device::MULTIPROCESSORS;

/// The result of a function of the driver.
type Answer<T = ()> = Result<T, CUresult>;

/// Where a caller wants a result.
///
/// A C function can be given any address: that it can be written is the caller's promise, and one
/// that is null is refused.
#[repr(transparent)]
pub(crate) struct OutPointer<T>(*mut T);

impl<T> OutPointer<T> {
    /// Hands the result over.
    fn set(&self, value: T) -> Answer {
        if self.0.is_null() {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        } else {
            // SAFETY: the caller's promise; what was there means nothing yet and is not dropped.
            unsafe { self.0.write(value) };
            Ok(())
        }
    }

    /// As [`set`](Self::set) for a result that the caller need not want.
    fn offer(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as above.
            unsafe { self.0.write(value) };
        }
    }
}

/// A string that a caller gives; `None` if there is none or it is not text.
///
/// # Safety
///
/// It is null or ends with a null character.
unsafe fn text<'a>(string: *const std::ffi::c_char) -> Option<&'a str> {
    // SAFETY: the caller's promise.
    let string = (!string.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(string) });
    string?.to_str().ok()
}

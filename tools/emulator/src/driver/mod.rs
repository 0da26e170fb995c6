//! The functions of the CUDA driver, under their C names.
//!
//! NVIDIA's manual of the driver API describes each function. The comments here describe only differences from the
//! manual. A function that is not implemented is missing from the library, so a program that needs it fails with the
//! name of the function.
//!
//! There is one device with one context, its primary context. All state is in one [`DriverState`](state::DriverState)
//! behind one lock. The lock is held while work runs, so one kernel runs at a time on all streams.
//!
//! By default, work runs in the call that puts it on a stream, unless it must wait for other work. With lazy streams,
//! work runs only when a call waits for it. In both cases the work runs on the thread of a caller.
//!
//! A fault prints a line to standard error, in addition to the error code. A fault that destroys the context of a GPU
//! also destroys it here: every later call returns the fault. Undefined behaviour that a GPU would not report is
//! returned once, by the launch. With lazy streams it is returned by the next call that waits for the work.

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

/// The result of a driver function.
type Answer<T = ()> = Result<T, CUresult>;

/// An address at which the caller expects a result.
///
/// A C function can receive any address. The caller guarantees that the address can be written. A null address is
/// refused.
#[repr(transparent)]
pub(crate) struct OutPointer<T>(*mut T);

impl<T> OutPointer<T> {
    /// Writes the result.
    fn set(&self, value: T) -> Answer {
        if self.0.is_null() {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        } else {
            // SAFETY: guaranteed by the caller. The old value is uninitialised and is not dropped.
            unsafe { self.0.write(value) };
            Ok(())
        }
    }

    /// Writes the result like [`set`](Self::set), but ignores a null address.
    fn offer(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the same as above.
            unsafe { self.0.write(value) };
        }
    }
}

/// Returns a string of the caller, or `None` if it is null or not UTF-8.
///
/// # Safety
///
/// `string` must be null or end with a null character.
unsafe fn text<'a>(string: *const std::ffi::c_char) -> Option<&'a str> {
    // SAFETY: guaranteed by the caller.
    let string = (!string.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(string) });
    string?.to_str().ok()
}

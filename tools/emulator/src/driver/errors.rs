//! The error codes of the driver, and their texts.

use std::ffi::{CStr, c_char, c_uint};

use cudarc::driver::sys::CUresult;

use super::OutPointer;
use crate::machine::Fault;

macro_rules! errors {
    ($($name:ident: $text:literal,)*) => {
        /// Each code that this driver returns, with its name and its meaning.
        const ERRORS: &[(CUresult, &str, &str)] = &[$((
            CUresult::$name,
            concat!(stringify!($name), "\0"),
            concat!($text, "\0"),
        ),)*];
    };
}

errors! {
    CUDA_SUCCESS: "no error",
    CUDA_ERROR_INVALID_VALUE: "an argument is invalid",
    CUDA_ERROR_OUT_OF_MEMORY: "out of memory",
    CUDA_ERROR_NOT_INITIALIZED: "cuInit was not called",
    CUDA_ERROR_NO_DEVICE: "there is no CUDA device",
    CUDA_ERROR_INVALID_DEVICE: "invalid device",
    CUDA_ERROR_INVALID_IMAGE: "the module is not PTX",
    CUDA_ERROR_INVALID_CONTEXT: "no context is current",
    CUDA_ERROR_NO_BINARY_FOR_GPU: "the module is for another GPU",
    CUDA_ERROR_INVALID_PTX: "the PTX is malformed",
    CUDA_ERROR_INVALID_HANDLE: "a handle is invalid",
    CUDA_ERROR_NOT_FOUND: "name not found",
    CUDA_ERROR_NOT_READY: "not completed yet",
    CUDA_ERROR_ILLEGAL_ADDRESS: "a kernel or a copy touched memory that is not allocated",
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: "there is no other device",
    CUDA_ERROR_CONTEXT_IS_DESTROYED: "the context was released",
    CUDA_ERROR_MISALIGNED_ADDRESS: "a kernel touched an address that is not aligned",
    CUDA_ERROR_LAUNCH_FAILED: "a kernel failed",
    CUDA_ERROR_LAUNCH_TIMEOUT: "a kernel does not end",
    CUDA_ERROR_NOT_PERMITTED: "not permitted here",
    CUDA_ERROR_NOT_SUPPORTED: "not supported by this driver",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: "not permitted while a stream is captured",
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: "the capture was invalidated",
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: "this stream did not begin the capture",
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: "the legacy stream would wait for a captured one",
    CUDA_ERROR_UNKNOWN: "a kernel has undefined behaviour that a GPU would not report",
    CUDA_ERROR_CAPTURED_EVENT: "the event was recorded in a captured stream",
}

/// Prints a message, in addition to the error code.
pub(super) fn say(line: &str) {
    eprintln!("CUDA emulator: {line}");
}

/// Returns whether a GPU would continue after this fault.
pub(super) fn passes(fault: &Fault) -> bool {
    matches!(fault, Fault::Race(_) | Fault::Unwritten { .. })
}

/// Returns the code that the driver would return for this fault of a kernel.
pub(super) fn code(fault: &Fault) -> CUresult {
    match fault {
        fault if passes(fault) => CUresult::CUDA_ERROR_UNKNOWN,
        Fault::Address { .. } => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        Fault::Misaligned { .. } => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        Fault::Endless(_) => CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
        _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
    }
}

fn look_up(
    error: c_uint,
    out: &OutPointer<*const c_char>,
    which: fn(&(CUresult, &'static str, &'static str)) -> &'static str,
) -> CUresult {
    let found = ERRORS
        .iter()
        .find(|(code, ..)| *code as c_uint == error)
        .and_then(|entry| CStr::from_bytes_with_nul(which(entry).as_bytes()).ok());
    let known = match found {
        Some(_) => CUresult::CUDA_SUCCESS,
        None => CUresult::CUDA_ERROR_INVALID_VALUE,
    };
    let set = out.set(found.map_or(std::ptr::null(), CStr::as_ptr));
    set.err().unwrap_or(known)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: c_uint, out: OutPointer<*const c_char>) -> CUresult {
    look_up(error, &out, |(_, name, _)| name)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_uint, out: OutPointer<*const c_char>) -> CUresult {
    look_up(error, &out, |(.., text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_name() {
        for (code, name, text) in ERRORS {
            assert_eq!(format!("{code:?}\0"), *name);
            let mut said = std::ptr::null();
            let result = cuGetErrorString(*code as c_uint, OutPointer(&mut said));
            assert_eq!(result, CUresult::CUDA_SUCCESS);
            // SAFETY: the call set the pointer to a string of the table.
            let said = unsafe { CStr::from_ptr(said) };
            assert_eq!(said.to_bytes_with_nul(), text.as_bytes());
        }
        let mut said = c"before".as_ptr();
        let unknown = cuGetErrorName(123_456, OutPointer(&mut said));
        assert_eq!(unknown, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert!(said.is_null());
    }
}

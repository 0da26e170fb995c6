//! Looks up functions of the driver by name.

use std::ffi::{CString, c_char, c_int, c_void};

use cudarc::driver::sys::CUresult;

use super::state::anywhere;
use super::{Answer, OutPointer, text};

/// Suffixes of function names, newest version first.
const FORMS: [&str; 4] = ["_v4", "_v3", "_v2", ""];

/// Returns the address of a symbol in the file that this library was loaded from.
fn look_up(name: &str) -> Option<*mut c_void> {
    let mut here = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let this = look_up as fn(&str) -> Option<*mut c_void> as *const c_void;
    // SAFETY: the call fills the struct if it succeeds. Otherwise the struct is zero and has no file.
    let file = unsafe {
        libc::dladdr(this, here.as_mut_ptr());
        here.assume_init().dli_fname
    };
    if file.is_null() {
        return None;
    }
    // SAFETY: the name is a string of the loader. The file is already loaded.
    let library = unsafe { libc::dlopen(file, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    let found = FORMS.iter().find_map(|form| {
        let name = CString::new(format!("{name}{form}")).ok()?;
        // SAFETY: the library is open, and the name is a string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    });
    // SAFETY: the library was opened above. It stays loaded, since this code is part of it.
    unsafe { libc::dlclose(library) };
    found
}

fn find(name: Option<&str>) -> Answer<*mut c_void> {
    let name = name.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let own = name.starts_with("cu").then(|| look_up(name)).flatten();
    own.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
}

/// Returns the address of a function. The requested version is ignored, since each function has one version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: OutPointer<*mut c_void>,
    _version: c_int,
    _flags: u64,
    status: OutPointer<c_int>,
) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { text(name) };
    anywhere(|_| {
        let found = find(name);
        // CU_GET_PROC_ADDRESS_SUCCESS and CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
        status.offer(c_int::from(found.is_err()));
        out.set(*found.as_ref().unwrap_or(&std::ptr::null_mut()))?;
        found.map(drop)
    })
}

/// Fails always: undocumented functions of the driver, which NVRTC looks for, do not exist here.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetExportTable(
    _table: OutPointer<*const c_void>,
    _id: *const c_void,
) -> CUresult {
    CUresult::CUDA_ERROR_NOT_FOUND
}

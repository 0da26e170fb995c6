//! NVRTC, the compiler from CUDA C++ to PTX, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

type Program = *mut c_void;
type Code = c_int;

/// The functions that are used, with the signatures of `nvrtc.h`.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
    message: unsafe extern "C" fn(Code) -> *const c_char,
    /// Keeps the functions valid.
    _library: Library,
}

impl Nvrtc {
    /// Loads the library. The error names the file, and the function if a function is missing.
    pub fn load(path: &Path) -> Result<Self, String> {
        let failed = |error: libloading::Error| format!("{}: {error}", path.display());
        // SAFETY: the file is NVIDIA's compiler, whose initializers have no requirements. The signatures match its
        // header. The functions are not kept longer than the library.
        unsafe {
            let library = Library::new(path).map_err(failed)?;
            macro_rules! function {
                ($name:literal) => {
                    *library.get($name).map_err(failed)?
                };
            }
            Ok(Self {
                create: function!(b"nvrtcCreateProgram\0"),
                compile: function!(b"nvrtcCompileProgram\0"),
                log_size: function!(b"nvrtcGetProgramLogSize\0"),
                log: function!(b"nvrtcGetProgramLog\0"),
                ptx_size: function!(b"nvrtcGetPTXSize\0"),
                ptx: function!(b"nvrtcGetPTX\0"),
                destroy: function!(b"nvrtcDestroyProgram\0"),
                message: function!(b"nvrtcGetErrorString\0"),
                _library: library,
            })
        }
    }

    /// Compiles CUDA C++ to PTX with the given options. The error is the output of the compiler.
    pub fn compile(&self, source: &str, options: &[String]) -> Result<String, String> {
        let source = CString::new(source).map_err(|e| format!("the source: {e}"))?;
        let options = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| format!("an option: {e}"))?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: `source` and `options` outlive the calls. The texts are read into memory of the size that the
        // library reported.
        unsafe {
            let code = (self.create)(
                &mut handle,
                source.as_ptr(),
                ptr::null(),
                0,
                ptr::null(),
                ptr::null(),
            );
            self.check(code)?;
            let compiled = (self.compile)(handle, options.len() as c_int, options.as_ptr());
            let result = match self.check(compiled) {
                Ok(()) => self.text(handle, self.ptx_size, self.ptx),
                Err(reason) => {
                    let log = self.text(handle, self.log_size, self.log);
                    Err(log.map_or_else(|e| e, |log| format!("{reason}\n{log}")))
                }
            };
            (self.destroy)(&mut handle);
            result
        }
    }

    /// Reads a text of the program: requests first the size and then the text.
    ///
    /// # Safety
    ///
    /// `handle` must be a live program, and the functions must be a pair of this library.
    unsafe fn text(
        &self,
        handle: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<String, String> {
        let mut bytes = 0;
        // SAFETY: the caller guarantees the handle and the functions. The buffer has the size that the library
        // reported.
        let text = unsafe {
            self.check(size(handle, &mut bytes))?;
            let mut text = vec![0u8; bytes];
            self.check(read(handle, text.as_mut_ptr().cast()))?;
            text
        };
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(bytes);
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    fn check(&self, code: Code) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static text for every number, which is never freed.
        let message = unsafe { CStr::from_ptr((self.message)(code)) };
        Err(message.to_string_lossy().into_owned())
    }
}

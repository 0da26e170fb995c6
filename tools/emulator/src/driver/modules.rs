//! Loads modules of PTX.

use std::collections::HashMap;
use std::ffi::{c_char, c_uint, c_void};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmodule, CUresult};

use super::errors::say;
use super::functions::Function;
use super::state::{DriverGuard, in_context};
use super::{Answer, OutPointer, text};
use crate::lower::lower;
use crate::ptx::{self, Space, Variable, parse};

/// The first bytes of machine code from `ptxas` and from `nvcc`.
const MACHINE_CODE: [&[u8; 4]; 2] = [b"\x7fELF", b"\x50\xed\x55\xba"];

/// A loaded module.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// The function handle of each kernel.
    functions: HashMap<String, usize>,
    /// The address and the size in bytes of each variable.
    globals: HashMap<String, (u64, usize)>,
}

/// Returns whether PTX for this target runs on the device. The targets are all versions up to 9.0 without a suffix,
/// and 9.0 with a suffix.
fn runs(target: &str) -> bool {
    let number = target.strip_prefix("sm_");
    match number.map(|number| (number, number.parse::<u32>())) {
        Some(("90a", _)) => true,
        Some((_, Ok(number))) => number <= 90,
        _ => false,
    }
}

/// Writes the text of a module to a file named after its first kernel. Messages refer to lines of this file.
fn keep(source: &str, parsed: &ptx::Module, folder: &Path) {
    let kernel = parsed.kernels.first().map_or("empty", |first| &first.name);
    let file = folder.join(format!("{kernel}.ptx"));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&file, source));
    if let Err(error) = written {
        say(&format!("{}: {error}", file.display()));
    }
}

impl DriverGuard {
    fn load(&mut self, source: &str) -> Answer<usize> {
        let parsed = parse(source).map_err(|error| {
            say(&error.to_string());
            CUresult::CUDA_ERROR_INVALID_PTX
        })?;
        if let Some(folder) = &self.options.ptx {
            keep(source, &parsed, folder);
        }
        if !runs(&parsed.target) {
            say(&format!("PTX for {} does not run on sm_90", parsed.target));
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        let mut module = Module::default();
        match self.furnish(&parsed, &mut module) {
            Ok(()) => Ok(self.modules.add(module)),
            Err(error) => {
                self.unload(&module);
                Err(error)
            }
        }
    }

    /// Adds the variables and functions to a module.
    fn furnish(&mut self, parsed: &ptx::Module, module: &mut Module) -> Answer {
        let lasting = [Space::Global, Space::Constant];
        let all = parsed.variables.iter();
        for variable in all.filter(|variable| lasting.contains(&variable.space)) {
            let address = self.variable(variable)?;
            let place = (address, variable.size);
            module.globals.insert(variable.name.clone(), place);
        }
        let address = |(name, place): (&String, &(u64, usize))| (name.clone(), place.0);
        let addresses = module.globals.iter().map(address).collect();
        for kernel in &parsed.kernels {
            let program = lower(parsed, kernel, &addresses).map_err(|unsupported| {
                say(&unsupported.to_string());
                CUresult::CUDA_ERROR_NOT_SUPPORTED
            })?;
            let function = self.functions.add(Function::new(Arc::new(program)));
            module.functions.insert(kernel.name.clone(), function);
        }
        Ok(())
    }

    /// Allocates a variable. It is zero if it has no initial value.
    fn variable(&mut self, variable: &Variable) -> Answer<u64> {
        let bytes = variable.size.max(1);
        let address = self.allocate(bytes)?;
        let initial = &variable.initial[..variable.initial.len().min(bytes)];
        // SAFETY: the memory was just allocated with this size.
        unsafe {
            let to = address as *mut u8;
            to.write_bytes(0, bytes);
            to.copy_from_nonoverlapping(initial.as_ptr(), initial.len());
        }
        Ok(address)
    }

    fn unload(&mut self, module: &Module) {
        for function in module.functions.values() {
            // The function exists, since only this module removes it.
            let _ = self.functions.remove(*function);
        }
        for (address, _) in module.globals.values() {
            self.memory.free(*address);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(
    out: OutPointer<CUmodule>,
    image: *const c_void,
) -> CUresult {
    in_context(|world| {
        if image.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: an image is machine code, which is longer, or a null-terminated text, as the manual states. A
        // shorter image ends at its null character.
        let source = unsafe { text(image.cast()) };
        let begins = |code: &[u8; 4]| {
            // SAFETY: the bytes are read in order up to the first byte that differs.
            (0..4).all(|index| unsafe { *image.cast::<u8>().add(index) } == code[index])
        };
        if MACHINE_CODE.into_iter().any(begins) {
            say("a module of machine code, where PTX is needed");
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        let source = source.ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        out.set(world.load(source)? as CUmodule)
    })
}

/// Loads a module. The options are ignored, since they are for a compiler that is not emulated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    out: OutPointer<CUmodule>,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the same guarantees.
    unsafe { cuModuleLoadData(out, image) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    in_context(|world| {
        world.not_captured()?;
        world.modules.get(module as usize)?;
        // Kernels of the module may still be waiting.
        world.finish_all()?;
        let module = world.modules.remove(module as usize)?;
        world.unload(&module);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    out: OutPointer<CUfunction>,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { text(name) };
    in_context(|world| {
        let name = name.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let found = world.modules.get(module as usize)?.functions.get(name);
        out.set(*found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)? as CUfunction)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetGlobal_v2(
    address: OutPointer<CUdeviceptr>,
    bytes: OutPointer<usize>,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { text(name) };
    in_context(|world| {
        let name = name.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let found = world.modules.get(module as usize)?.globals.get(name);
        let (start, size) = *found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        address.offer(start);
        bytes.offer(size);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_other_devices_are_refused() {
        for good in ["sm_90a", "sm_90", "sm_75"] {
            assert!(runs(good), "{good}");
        }
        for bad in ["sm_100", "sm_100a", "sm_80a", "compute_90", ""] {
            assert!(!runs(bad), "{bad}");
        }
    }
}

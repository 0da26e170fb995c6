//! Launches of kernels.

use std::ffi::{c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUlaunchAttributeID_enum as Attribute, CUlaunchConfig, CUresult, CUstream,
};

use super::Answer;
use super::device::{BLOCK, GRID, THREADS};
use super::errors::say;
use super::functions::Function;
use super::state::in_context;
use super::streams::named;
use super::work::StreamWork;
use crate::machine::{Parameter, Program};

/// A kernel with all values of a launch.
pub(super) struct KernelLaunch {
    pub program: Arc<Program>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// The arguments in the layout of the kernel parameters.
    pub parameters: Vec<u8>,
    pub dynamic_shared: usize,
}

impl fmt::Debug for KernelLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (grid, block) = (self.grid, self.block);
        write!(f, "{} of {grid:?} blocks of {block:?}", self.program.name)
    }
}

/// The grid, the block, the dynamic shared memory and the stream of a launch.
struct Form {
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: usize,
    stream: CUstream,
}

/// Returns a message about the part of a launch that the device does not support.
fn refused(form: &Form, function: &Function) -> Option<String> {
    let outside = |sizes: [u32; 3], most: [u32; 3]| {
        let mut pairs = sizes.into_iter().zip(most);
        pairs.any(|(size, most)| size == 0 || size > most)
    };
    let threads: u64 = form.block.iter().map(|size| u64::from(*size)).product();
    if outside(form.grid, GRID) {
        return Some(format!("{:?} blocks", form.grid));
    }
    if outside(form.block, BLOCK) || threads > u64::from(THREADS) {
        return Some(format!("{:?} threads", form.block));
    }
    let (asked, allowed) = (form.dynamic_shared, function.dynamic_shared);
    (asked > allowed).then(|| {
        let own = function.program.shared;
        format!("{asked} bytes of shared memory beyond its own {own}, where {allowed} are allowed")
    })
}

/// Reads the arguments.
///
/// # Safety
///
/// `addresses` must contain an address for each parameter. Each address must be valid for reading the parameter.
unsafe fn arguments(parameters: &[Parameter], addresses: *const *mut c_void) -> Answer<Vec<u8>> {
    let end = |parameter: &Parameter| parameter.offset + parameter.size;
    let mut bytes = vec![0; parameters.iter().map(end).max().unwrap_or(0)];
    for (index, parameter) in parameters.iter().enumerate() {
        // SAFETY: guaranteed by the caller, except for null addresses, which are checked.
        let from = if addresses.is_null() {
            std::ptr::null()
        } else {
            unsafe { *addresses.add(index) }.cast_const()
        };
        if from.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let to = &mut bytes[parameter.offset..end(parameter)];
        // SAFETY: guaranteed by the caller.
        unsafe {
            to.as_mut_ptr()
                .copy_from_nonoverlapping(from.cast(), to.len())
        };
    }
    Ok(bytes)
}

/// Launches a kernel.
///
/// # Safety
///
/// The same as for [`arguments`].
unsafe fn launch(form: &Form, function: CUfunction, addresses: *const *mut c_void) -> CUresult {
    in_context(|world| {
        let stream = named(form.stream)?;
        world.streams.get(stream)?;
        let function = world.functions.get(function as usize)?;
        if let Some(what) = refused(form, function) {
            say(&format!(
                "{} is launched with {what}",
                function.program.name
            ));
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let program = function.program.clone();
        // SAFETY: guaranteed by the caller.
        let parameters = unsafe { arguments(&program.parameters, addresses)? };
        let launched = KernelLaunch {
            program,
            grid: form.grid,
            block: form.block,
            parameters,
            dynamic_shared: form.dynamic_shared,
        };
        world.put(stream, StreamWork::Launch(Arc::new(launched)))
    })
}

/// Launches a kernel. Arguments as one buffer (`extra`) are not supported.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    dynamic_shared: c_uint,
    stream: CUstream,
    addresses: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    if !extra.is_null() {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    let form = Form {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        dynamic_shared: dynamic_shared as usize,
        stream,
    };
    // SAFETY: guaranteed by the caller.
    unsafe { launch(&form, function, addresses) }
}

/// Launches a kernel. Attributes that change the result of a kernel, such as a cluster of blocks, are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    function: CUfunction,
    addresses: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    // SAFETY: guaranteed by the caller.
    let Some(config) = (unsafe { config.as_ref() }) else {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    };
    if !extra.is_null() {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    for index in 0..config.numAttrs as usize {
        // SAFETY: guaranteed by the caller: `attrs` has this number of attributes.
        let attribute = unsafe { (*config.attrs.add(index)).id };
        let harmless = [
            Attribute::CU_LAUNCH_ATTRIBUTE_IGNORE,
            Attribute::CU_LAUNCH_ATTRIBUTE_PRIORITY,
        ];
        if !harmless.contains(&attribute) {
            say(&format!("a launch with {attribute:?}"));
            return CUresult::CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    let form = Form {
        grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
        block: [config.blockDimX, config.blockDimY, config.blockDimZ],
        dynamic_shared: config.sharedMemBytes as usize,
        stream: config.hStream,
    };
    // SAFETY: guaranteed by the caller.
    unsafe { launch(&form, function, addresses) }
}

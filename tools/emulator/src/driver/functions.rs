//! Kernels of modules: their attributes and their occupancy.

use std::ffi::{CString, c_char, c_int, c_uint};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUoccupancyB2DSize, CUresult,
};

use super::device::{
    MULTIPROCESSORS, RESIDENT, SHARED, SHARED_OF_MULTIPROCESSOR, SHARED_OPT_IN, SHARED_RESERVED,
    THREADS,
};
use super::state::in_context;
use super::{Answer, OutPointer};
use crate::machine::Program;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A kernel that can be launched.
pub(super) struct Function {
    pub program: Arc<Program>,
    name: CString,
    /// The maximum dynamic shared memory that a launch may request.
    pub dynamic_shared: usize,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.name)
    }
}

impl Function {
    pub fn new(program: Arc<Program>) -> Self {
        Self {
            // The name is a word of PTX, which has no null character.
            name: CString::new(program.name.as_str()).unwrap_or_default(),
            dynamic_shared: SHARED.saturating_sub(program.shared),
            program,
        }
    }

    fn attribute(&self, number: c_uint) -> Answer<usize> {
        use Attribute::*;
        let known = [
            (CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, THREADS as usize),
            (CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.program.shared),
            (CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, 0),
            (CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self.program.local),
            (CU_FUNC_ATTRIBUTE_PTX_VERSION, 90),
            (CU_FUNC_ATTRIBUTE_BINARY_VERSION, 90),
            (CU_FUNC_ATTRIBUTE_CACHE_MODE_CA, 0),
            (
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.dynamic_shared,
            ),
        ];
        let found = known.iter().find(|(known, _)| *known as c_uint == number);
        // Other attributes, mainly the number of registers, depend on a compiler that the emulator does not have.
        let found = found.ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        Ok(found.1)
    }

    /// Allows launches to request this amount of dynamic shared memory.
    fn allow(&mut self, bytes: c_int) -> Answer {
        let bytes = usize::try_from(bytes).map_err(|_| INVALID)?;
        if self.program.shared + bytes > SHARED_OPT_IN {
            return Err(INVALID);
        }
        self.dynamic_shared = bytes;
        Ok(())
    }

    /// Returns the number of blocks that a multiprocessor holds. Registers are not considered, since only the
    /// compiler determines them.
    fn resident(&self, threads: c_int, dynamic_shared: usize) -> Answer<usize> {
        let threads = usize::try_from(threads).map_err(|_| INVALID)?;
        if threads == 0 {
            return Err(INVALID);
        }
        if threads > THREADS as usize {
            return Ok(0);
        }
        let shared = self.program.shared + dynamic_shared;
        if shared > SHARED_OPT_IN {
            return Ok(0);
        }
        let by_shared = SHARED_OF_MULTIPROCESSOR / (shared + SHARED_RESERVED);
        let by_threads = RESIDENT.0 / threads.next_multiple_of(32);
        Ok(by_shared.min(by_threads).min(RESIDENT.1))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(
    value: OutPointer<c_int>,
    number: c_uint,
    function: CUfunction,
) -> CUresult {
    in_context(|world| {
        let function = world.functions.get(function as usize)?;
        value.set(function.attribute(number)? as c_int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(
    function: CUfunction,
    number: c_uint,
    value: c_int,
) -> CUresult {
    use Attribute::*;
    in_context(|world| {
        let function = world.functions.get_mut(function as usize)?;
        let is = |attribute: Attribute| attribute as c_uint == number;
        if is(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
            return function.allow(value);
        }
        // The split between cache and shared memory does not change results.
        if is(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
        }
    })
}

/// Ignores the cache configuration, which does not change results.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(function: CUfunction, _config: c_uint) -> CUresult {
    in_context(|world| world.functions.get(function as usize).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetName(out: OutPointer<*const c_char>, function: CUfunction) -> CUresult {
    in_context(|world| out.set(world.functions.get(function as usize)?.name.as_ptr()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: OutPointer<c_int>,
    function: CUfunction,
    threads: c_int,
    dynamic_shared: usize,
) -> CUresult {
    in_context(|world| {
        let function = world.functions.get(function as usize)?;
        blocks.set(function.resident(threads, dynamic_shared)? as c_int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: OutPointer<c_int>,
    function: CUfunction,
    threads: c_int,
    dynamic_shared: usize,
    _flags: c_uint,
) -> CUresult {
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, dynamic_shared)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxPotentialBlockSize(
    grid: OutPointer<c_int>,
    block: OutPointer<c_int>,
    function: CUfunction,
    dynamic: CUoccupancyB2DSize,
    dynamic_shared: usize,
    limit: c_int,
) -> CUresult {
    in_context(|world| {
        let function = world.functions.get(function as usize)?;
        let largest = match limit {
            1..1024 => limit,
            _ => THREADS as c_int,
        };
        let mut best = (0, 0);
        // Searches the largest block among the blocks that fill a multiprocessor best.
        for threads in (32..=largest).rev().filter(|threads| threads % 32 == 0) {
            let shared = match dynamic {
                // SAFETY: the caller's function may be called with any block size.
                Some(dynamic) => unsafe { dynamic(threads) },
                None => dynamic_shared,
            };
            let blocks = function.resident(threads, shared)? as c_int;
            if blocks * threads > best.0 * best.1 {
                best = (blocks, threads);
            }
        }
        grid.set(best.0 * MULTIPROCESSORS as c_int)?;
        block.set(best.1)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    grid: OutPointer<c_int>,
    block: OutPointer<c_int>,
    function: CUfunction,
    dynamic: CUoccupancyB2DSize,
    dynamic_shared: usize,
    limit: c_int,
    _flags: c_uint,
) -> CUresult {
    // SAFETY: the same guarantees.
    unsafe {
        cuOccupancyMaxPotentialBlockSize(grid, block, function, dynamic, dynamic_shared, limit)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyAvailableDynamicSMemPerBlock(
    bytes: OutPointer<usize>,
    function: CUfunction,
    blocks: c_int,
    threads: c_int,
) -> CUresult {
    in_context(|world| {
        let function = world.functions.get(function as usize)?;
        let blocks = usize::try_from(blocks).map_err(|_| INVALID)?;
        if blocks == 0 || blocks > function.resident(threads, 0)? {
            return Err(INVALID);
        }
        let each = SHARED_OF_MULTIPROCESSOR / blocks - SHARED_RESERVED;
        bytes.set(
            each.min(SHARED_OPT_IN)
                .saturating_sub(function.program.shared),
        )
    })
}

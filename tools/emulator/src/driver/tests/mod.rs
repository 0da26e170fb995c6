//! Tests of the driver through its C functions.

mod copies;
mod counts;
mod device;
mod graphs;
mod launches;
mod streams;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUdevice_attribute_enum as Attribute, CUevent, CUfunction, CUgraphNodeType,
    CUmemorytype, CUmodule, CUresult, CUresult::*, CUstream,
};

use super::OutPointer;
use crate::driver::context::*;
use crate::driver::copies::*;
use crate::driver::device::*;
use crate::driver::events::*;
use crate::driver::functions::*;
use crate::driver::graphs::*;
use crate::driver::jobs;
use crate::driver::launch::*;
use crate::driver::memory::*;
use crate::driver::modules::*;
use crate::driver::options::Options;
use crate::driver::pools::*;
use crate::driver::state::fresh;
use crate::driver::streams::*;
use crate::driver::tensor_maps::*;
use crate::memory::Memory;

const SM: &str = ".version 8.8\n.target sm_90a\n.address_size 64\n";
const NON_BLOCKING: c_uint = 1;

fn lazy() -> Options {
    Options {
        lazy: true,
        ..Options::default()
    }
}

#[track_caller]
fn good(result: CUresult) {
    assert_eq!(result, CUDA_SUCCESS);
}

#[track_caller]
fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    good(cuMemAlloc_v2(OutPointer(&mut address), bytes));
    address
}

fn pinned(bytes: usize) -> *mut u8 {
    let mut address = null_mut();
    good(cuMemAllocHost_v2(OutPointer(&mut address), bytes));
    address.cast()
}

fn stream(flags: c_uint) -> CUstream {
    let mut stream = null_mut();
    good(cuStreamCreate(OutPointer(&mut stream), flags));
    stream
}

fn event() -> CUevent {
    let mut event = null_mut();
    good(cuEventCreate(OutPointer(&mut event), 0));
    event
}

fn to_device(to: u64, bytes: &[u8]) -> CUresult {
    // SAFETY: a slice is valid memory of its length.
    unsafe { cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) }
}

#[track_caller]
fn to_host(from: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    // SAFETY: the same as above.
    good(unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, count) });
    bytes
}

fn load(body: &str) -> (CUresult, CUmodule) {
    let text = format!("{SM}{body}\0");
    let mut module = null_mut();
    // SAFETY: the string is null-terminated.
    let result = unsafe { cuModuleLoadData(OutPointer(&mut module), text.as_ptr().cast()) };
    (result, module)
}

/// Loads a module and returns its kernel `k`.
fn kernel(body: &str) -> CUfunction {
    let (result, module) = load(body);
    good(result);
    let mut function = null_mut();
    // SAFETY: the string is null-terminated.
    good(unsafe { cuModuleGetFunction(OutPointer(&mut function), module, c"k".as_ptr()) });
    function
}

fn launch(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: CUstream,
) -> CUresult {
    let ([x, y, z], [a, b, c]) = (grid, block);
    // SAFETY: the kernel has no parameters.
    unsafe {
        cuLaunchKernel(
            function,
            x,
            y,
            z,
            a,
            b,
            c,
            shared,
            stream,
            null_mut(),
            null_mut(),
        )
    }
}

//! Calls the functions as a program does: by their names in the library.

use std::ffi::{c_int, c_void};

use super::*;
use crate::cublaslt::{INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS};
use crate::driver::jobs;

type Set = unsafe extern "C" fn(usize, u32, *const c_void, usize) -> u32;
type Get = unsafe extern "C" fn(usize, u32, *mut c_void, usize, *mut usize) -> u32;

unsafe extern "C" {
    fn cublasLtCreate(handle: *mut usize) -> u32;
    fn cublasLtDestroy(handle: usize) -> u32;
    fn cublasLtGetVersion() -> usize;
    fn cublasLtGetCudartVersion() -> usize;
    fn cublasLtGetProperty(property: c_int, value: *mut c_int) -> u32;
    fn cublasLtMatmulDescCreate(place: *mut usize, compute: u32, scale: u32) -> u32;
    fn cublasLtMatmulDescDestroy(handle: usize) -> u32;
    fn cublasLtMatmulDescSetAttribute(h: usize, a: u32, v: *const c_void, n: usize) -> u32;
    fn cublasLtMatmulDescGetAttribute(
        h: usize,
        a: u32,
        v: *mut c_void,
        n: usize,
        written: *mut usize,
    ) -> u32;
    fn cublasLtMatrixLayoutCreate(place: *mut usize, t: u32, rows: u64, cols: u64, ld: i64) -> u32;
    fn cublasLtMatrixLayoutDestroy(handle: usize) -> u32;
    fn cublasLtMatmulPreferenceCreate(place: *mut usize) -> u32;
    fn cublasLtMatmulPreferenceSetAttribute(h: usize, a: u32, v: *const c_void, n: usize) -> u32;
    fn cublasLtMatmulAlgoGetHeuristic(
        library: usize,
        description: usize,
        a: usize,
        b: usize,
        c: usize,
        d: usize,
        preference: usize,
        wanted: c_int,
        results: *mut [u64; 12],
        found: *mut c_int,
    ) -> u32;
    fn cublasLtMatmulAlgoCheck(
        library: usize,
        description: usize,
        a: usize,
        b: usize,
        c: usize,
        d: usize,
        algorithm: *const [u64; 12],
        result: *mut [u64; 12],
    ) -> u32;
    fn cublasLtMatmul(
        library: usize,
        description: usize,
        alpha: *const f32,
        a: u64,
        of_a: usize,
        b: u64,
        of_b: usize,
        beta: *const f32,
        c: u64,
        of_c: usize,
        d: u64,
        of_d: usize,
        algorithm: *const [u64; 12],
        workspace: u64,
        workspace_bytes: usize,
        stream: usize,
    ) -> u32;
}

fn made(create: impl FnOnce(*mut usize) -> u32) -> usize {
    let mut handle = 0;
    assert_eq!(create(&mut handle), SUCCESS);
    handle
}

#[test]
fn versions_agree() {
    // SAFETY: these functions only return numbers.
    unsafe {
        assert_eq!(
            (cublasLtGetVersion(), cublasLtGetCudartVersion()),
            (120_901, 12_090)
        );
        let mut parts = [0; 3];
        for (number, part) in parts.iter_mut().enumerate() {
            assert_eq!(cublasLtGetProperty(number as c_int, part), SUCCESS);
        }
        assert_eq!(parts, [12, 9, 1]);
        assert_eq!(cublasLtGetProperty(3, &mut parts[0]), INVALID_VALUE);
    }
}

#[test]
fn attributes_come_back_in_their_sizes() {
    let (set, get): (Set, Get) = (
        cublasLtMatmulDescSetAttribute,
        cublasLtMatmulDescGetAttribute,
    );
    // SAFETY: all places have the given lengths.
    unsafe {
        let handle = made(|place| cublasLtMatmulDescCreate(place, 68, 0));
        let (mut value, mut written) = (0i32, 0usize);
        let place = (&raw mut value).cast();
        assert_eq!(get(handle, 0, place, 4, &mut written), SUCCESS);
        assert_eq!((value, written), (68, 4));
        assert_eq!(get(handle, 26, place, 4, std::ptr::null_mut()), SUCCESS);
        assert_eq!(value, -1);
        let five = 5i32;
        let from = (&raw const five).cast();
        assert_eq!(set(handle, 31, from, 4), SUCCESS);
        assert_eq!(get(handle, 31, place, 4, &mut written), SUCCESS);
        assert_eq!(value, 5);
        // Requests of lengths only.
        assert_eq!(
            get(handle, 8, std::ptr::null_mut(), 0, &mut written),
            SUCCESS
        );
        assert_eq!(written, 8);
        assert_eq!(set(handle, 31, from, 8), INVALID_VALUE);
        assert_eq!(set(handle, 25, from, 4), INVALID_VALUE);
        assert_eq!(set(handle, 99, from, 4), INVALID_VALUE);
        assert_eq!(get(handle, 8, place, 4, &mut written), INVALID_VALUE);
        assert_eq!(set(handle, 3, std::ptr::null(), 4), INVALID_VALUE);
        assert_eq!(cublasLtMatrixLayoutDestroy(handle), INVALID_VALUE);
        assert_eq!(cublasLtMatmulDescDestroy(handle), SUCCESS);
        assert_eq!(cublasLtMatmulDescDestroy(handle), INVALID_VALUE);
        assert_eq!(set(handle, 31, from, 4), INVALID_VALUE);
    }
}

#[test]
fn a_product_from_first_to_last() {
    let _turn = jobs::testing::enter();
    let stream = jobs::testing::stream();
    // SAFETY: handles are valid where they are used, unless the test checks invalid handles.
    unsafe {
        let library = made(|place| cublasLtCreate(place));
        let description = made(|place| cublasLtMatmulDescCreate(place, 68, 0));
        let turn = 1i32;
        let set = cublasLtMatmulDescSetAttribute;
        assert_eq!(
            set(description, of::TRANSA, (&raw const turn).cast(), 4),
            SUCCESS
        );
        let a = made(|place| cublasLtMatrixLayoutCreate(place, 0, 3, 2, 3));
        let b = made(|place| cublasLtMatrixLayoutCreate(place, 0, 3, 2, 3));
        let d = made(|place| cublasLtMatrixLayoutCreate(place, 0, 2, 2, 2));
        let preference = made(|place| cublasLtMatmulPreferenceCreate(place));
        let allowed = 1u64 << 25;
        let set = cublasLtMatmulPreferenceSetAttribute;
        assert_eq!(set(preference, 1, (&raw const allowed).cast(), 8), SUCCESS);
        let (mut advice, mut found) = ([0u64; 12], 0);
        let mut advise = |library, c| {
            let place = &raw mut advice;
            cublasLtMatmulAlgoGetHeuristic(
                library,
                description,
                a,
                b,
                c,
                d,
                preference,
                1,
                place,
                &mut found,
            )
        };
        assert_eq!(advise(library + 16, d), NOT_INITIALIZED);
        assert_eq!(advise(library, a), INVALID_VALUE);
        assert_eq!(advise(library, d), SUCCESS);
        assert_eq!(found, 1);
        // A saved algorithm is valid only for the same product.
        let check = |algorithm: *const _, c, place: *mut _| {
            cublasLtMatmulAlgoCheck(library, description, a, b, c, d, algorithm, place)
        };
        let mut checked = [0u64; 12];
        assert_eq!(check(&advice, d, &mut checked), SUCCESS);
        assert_eq!(checked, advice);
        assert_eq!(check(&[0; 12], d, &mut checked), INVALID_VALUE);
        assert_eq!(check(std::ptr::null(), d, &mut checked), INVALID_VALUE);
        let workspace_bytes = advice[8] as usize;
        let new = |bytes| jobs::allocate(bytes).unwrap();
        let (on_a, on_b, on_d) = (new(24), new(24), new(16));
        (on_a as *mut [f32; 6]).write([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        (on_b as *mut [f32; 6]).write([1.0, 0.0, 2.0, 0.0, 1.0, -1.0]);
        let workspace = new(workspace_bytes);
        let (one, zero) = (1.0f32, 0.0f32);
        let multiply = |library: usize, workspace_bytes: usize| {
            cublasLtMatmul(
                library,
                description,
                &one,
                on_a,
                a,
                on_b,
                b,
                &zero,
                on_d,
                d,
                on_d,
                d,
                &advice,
                workspace,
                workspace_bytes,
                stream,
            )
        };
        assert_eq!(multiply(library, workspace_bytes - 1), INVALID_VALUE);
        assert_eq!(multiply(library, workspace_bytes), SUCCESS);
        // The columns of `D`: the columns of `A` times the first column of `B`, then times the second column.
        assert_eq!(*(on_d as *const [f32; 4]), [7.0, 16.0, -1.0, -1.0]);
        let fast = 77i32;
        let set = cublasLtMatmulDescSetAttribute;
        assert_eq!(
            set(description, of::COMPUTE_TYPE, (&raw const fast).cast(), 4),
            SUCCESS
        );
        assert_eq!(multiply(library, workspace_bytes), NOT_SUPPORTED);
        assert_eq!(cublasLtDestroy(library), SUCCESS);
        assert_eq!(multiply(library, workspace_bytes), NOT_INITIALIZED);
        for address in [on_a, on_b, on_d, workspace] {
            assert!(jobs::free(address));
        }
    }
}

//! The functions of the library, under their C names and with the types of `cublasLt.h`.
//!
//! Handles are numbers, and enumerators are plain integers, since a caller may use a newer version of the library.

// The names are NVIDIA's.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_void};
use std::slice;
use std::sync::Arc;

use cudarc::driver::sys::{CUresult, CUstream};

use super::algorithm::{Algorithm, Opaque};
use super::attributes::{Attributes, description as of, layout, preference};
use super::call::{Call, Scalar};
use super::objects::{Kind, objects};
use super::rules::{self, Product};
use super::{
    CHIP, EXECUTION_FAILED, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, Refusal, SUCCESS,
    Status, VERSION, invalid, unsupported,
};
use crate::driver::jobs;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Opaque,
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// Prints the rule that a call broke, and returns the status.
fn report(function: &str, answer: Result<(), Refusal>) -> Status {
    match answer {
        Ok(()) => SUCCESS,
        Err(Refusal { status, rule }) => {
            eprintln!("cuBLASLt emulator: {function}: {rule}");
            status
        }
    }
}

/// Writes a result to an address of the caller.
///
/// # Safety
/// `place` must be null or valid for writing a `T`.
unsafe fn give<T>(place: *mut T, value: T) -> Result<(), Refusal> {
    if place.is_null() {
        Err(invalid("the place for a result is null"))
    } else {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { place.write(value) };
        Ok(())
    }
}

/// Creates an object and writes its handle.
///
/// # Safety
/// The same as for [`give`].
unsafe fn create(place: *mut usize, kind: Kind, attributes: Attributes) -> Result<(), Refusal> {
    if place.is_null() {
        return Err(invalid("the place for a handle is null"));
    }
    let handle = objects().create(kind, attributes);
    // SAFETY: guaranteed by the caller of this function.
    unsafe { give(place, handle) }
}

/// Sets an attribute.
///
/// # Safety
/// `value` must be null or valid for reading `bytes` bytes.
unsafe fn set(
    kind: Kind,
    handle: usize,
    number: u32,
    value: *const c_void,
    bytes: usize,
) -> Result<(), Refusal> {
    if value.is_null() {
        return Err(invalid("the value of an attribute is null"));
    }
    // SAFETY: guaranteed by the caller of this function.
    let value = unsafe { slice::from_raw_parts(value.cast(), bytes) };
    objects().get_mut(kind, handle)?.set(number, value)
}

/// Reads an attribute.
///
/// # Safety
/// `value` must be null or valid for writing `bytes` bytes. `written` must be null or valid for writing a length.
unsafe fn get(
    kind: Kind,
    handle: usize,
    number: u32,
    value: *mut c_void,
    bytes: usize,
    written: *mut usize,
) -> Result<(), Refusal> {
    let found = objects().get(kind, handle)?.bytes(number)?;
    if !written.is_null() {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { written.write(found.len()) };
    }
    match (bytes, value.is_null()) {
        // The caller requests only the length.
        (0, _) if !written.is_null() => Ok(()),
        (bytes, false) if bytes == found.len() => {
            // SAFETY: guaranteed by the caller of this function.
            unsafe { value.cast::<u8>().copy_from(found.as_ptr(), bytes) };
            Ok(())
        }
        _ => Err(invalid(format!(
            "attribute {number} has {} bytes, not {bytes}",
            found.len()
        ))),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtCreate(handle: *mut usize) -> Status {
    // SAFETY: guaranteed by the caller, as in all of these functions.
    report("cublasLtCreate", unsafe {
        create(handle, Kind::Library, Attributes::new(&[]))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtDestroy(handle: usize) -> Status {
    let destroyed = objects().destroy(Kind::Library, handle);
    report("cublasLtDestroy", destroyed)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetCudartVersion() -> usize {
    VERSION / 100 * 10
}

/// `MAJOR_VERSION`, `MINOR_VERSION` and `PATCH_LEVEL`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtGetProperty(property: c_int, value: *mut c_int) -> Status {
    let number = match property {
        0 => Ok(VERSION / 10_000),
        1 => Ok(VERSION / 100 % 100),
        2 => Ok(VERSION % 100),
        other => Err(invalid(format!("unknown property {other}"))),
    };
    // SAFETY: guaranteed by the caller.
    let give = |number| unsafe { give(value, number as c_int) };
    report("cublasLtGetProperty", number.and_then(give))
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetStatusName(status: Status) -> *const c_char {
    let name = match status {
        SUCCESS => c"CUBLAS_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUBLAS_STATUS_NOT_INITIALIZED",
        INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetStatusString(status: Status) -> *const c_char {
    let text = match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"the library was not initialized",
        INVALID_VALUE => c"a parameter is invalid",
        EXECUTION_FAILED => c"the device failed",
        NOT_SUPPORTED => c"this is not supported",
        _ => c"an unknown status",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(
    place: *mut usize,
    compute: u32,
    scale: u32,
) -> Status {
    let attributes = Attributes::new(of::TABLE)
        .with(of::COMPUTE_TYPE, compute.into())
        .with(of::SCALE_TYPE, scale.into());
    // SAFETY: guaranteed by the caller.
    report("cublasLtMatmulDescCreate", unsafe {
        create(place, Kind::Description, attributes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    place: *mut usize,
    element: u32,
    rows: u64,
    columns: u64,
    leading: i64,
) -> Status {
    let attributes = Attributes::new(layout::TABLE)
        .with(layout::TYPE, element.into())
        .with(layout::ROWS, rows)
        .with(layout::COLS, columns)
        .with(layout::LD, leading as u64);
    // SAFETY: guaranteed by the caller.
    report("cublasLtMatrixLayoutCreate", unsafe {
        create(place, Kind::Layout, attributes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceCreate(place: *mut usize) -> Status {
    let attributes = Attributes::new(preference::TABLE);
    // SAFETY: guaranteed by the caller.
    report("cublasLtMatmulPreferenceCreate", unsafe {
        create(place, Kind::Preference, attributes)
    })
}

macro_rules! attributes {
    ($($kind:ident: $destroy:ident, $set:ident, $get:ident;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $destroy(handle: usize) -> Status {
            let destroyed = objects().destroy(Kind::$kind, handle);
            report(stringify!($destroy), destroyed)
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $set(
            handle: usize,
            attribute: u32,
            value: *const c_void,
            bytes: usize,
        ) -> Status {
            // SAFETY: guaranteed by the caller.
            report(stringify!($set), unsafe {
                set(Kind::$kind, handle, attribute, value, bytes)
            })
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $get(
            handle: usize,
            attribute: u32,
            value: *mut c_void,
            bytes: usize,
            written: *mut usize,
        ) -> Status {
            // SAFETY: guaranteed by the caller.
            report(stringify!($get), unsafe {
                get(Kind::$kind, handle, attribute, value, bytes, written)
            })
        }
    )*};
}

attributes! {
    Description: cublasLtMatmulDescDestroy, cublasLtMatmulDescSetAttribute,
        cublasLtMatmulDescGetAttribute;
    Layout: cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutSetAttribute,
        cublasLtMatrixLayoutGetAttribute;
    Preference: cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreferenceSetAttribute,
        cublasLtMatmulPreferenceGetAttribute;
}

/// Returns the product that these handles describe, with its description. Fails if the product is not allowed.
fn product(
    library: usize,
    description: usize,
    layouts: [usize; 4],
) -> Result<(Product, Attributes), Refusal> {
    let objects = objects();
    objects.get(Kind::Library, library)?;
    let description = objects.get(Kind::Description, description)?;
    let [a, b, c, d] = layouts.map(|layout| objects.get(Kind::Layout, layout));
    let product = rules::check(description, [a?, b?, c?, d?], CHIP)?;
    Ok((product, description.clone()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    library: usize,
    description: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    preference: usize,
    wanted: c_int,
    results: *mut HeuristicResult,
    found: *mut c_int,
) -> Status {
    let advise = || {
        let (product, _) = product(library, description, [a, b, c, d])?;
        if wanted < 1 || results.is_null() || found.is_null() {
            return Err(invalid("no place for an algorithm"));
        }
        let advised = Algorithm::advise(&product, objects().get(Kind::Preference, preference)?)?;
        let count = advised.len().min(wanted as usize);
        // SAFETY: the caller provides space for the requested number of results.
        unsafe {
            for (place, algorithm) in advised[..count].iter().enumerate() {
                give(results.add(place), advice(algorithm))?;
            }
            give(found, count as c_int)
        }
    };
    report("cublasLtMatmulAlgoGetHeuristic", advise())
}

fn advice(algorithm: &Algorithm) -> HeuristicResult {
    HeuristicResult {
        algorithm: algorithm.opaque(),
        workspace: algorithm.workspace,
        status: SUCCESS,
        waves: 1.0,
        reserved: [0; 4],
    }
}

/// Checks that an algorithm belongs to this product. The algorithm may come from a file.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    library: usize,
    description: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    algorithm: *const Opaque,
    result: *mut HeuristicResult,
) -> Status {
    let check = || {
        let (product, _) = product(library, description, [a, b, c, d])?;
        if algorithm.is_null() {
            return Err(invalid("no algorithm"));
        }
        // SAFETY: guaranteed by the caller.
        let algorithm = Algorithm::of(unsafe { &*algorithm }, &product)?;
        // SAFETY: guaranteed by the caller.
        unsafe { give(result, advice(&algorithm)) }
    };
    report("cublasLtMatmulAlgoCheck", check())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmul(
    library: usize,
    description: usize,
    alpha: *const c_void,
    a: u64,
    of_a: usize,
    b: u64,
    of_b: usize,
    beta: *const c_void,
    c: u64,
    of_c: usize,
    d: u64,
    of_d: usize,
    algorithm: *const Opaque,
    workspace: u64,
    workspace_bytes: usize,
    stream: CUstream,
) -> Status {
    let launch = || {
        // If `C` has no layout, it uses the layout of `D`.
        let of_c = if of_c == 0 { of_d } else { of_c };
        let (product, description) = product(library, description, [of_a, of_b, of_c, of_d])?;
        let algorithm = if algorithm.is_null() {
            Algorithm::implicit(&product)
        } else {
            // SAFETY: guaranteed by the caller.
            Algorithm::of(unsafe { &*algorithm }, &product)?
        };
        let pointer = |attribute| description.get(attribute);
        let call = Call {
            product,
            // SAFETY: guaranteed by the caller.
            alpha: unsafe { scalar("alpha", alpha, &product)? },
            beta: unsafe { scalar("beta", beta, &product)? },
            a,
            b,
            c,
            d,
            bias: pointer(of::BIAS_POINTER),
            auxiliary: pointer(of::EPILOGUE_AUX_POINTER),
            scales: [
                of::A_SCALE_POINTER,
                of::B_SCALE_POINTER,
                of::C_SCALE_POINTER,
                of::D_SCALE_POINTER,
            ]
            .map(pointer),
            workspace,
            workspace_bytes,
        };
        call.check(&algorithm)?;
        let mut line = call.line();
        line["algorithm"] = algorithm.number.into();
        let job: jobs::Job = if jobs::fills_products() {
            Arc::new(move |memory| call.fill(memory))
        } else {
            Arc::new(move |memory| call.run(memory))
        };
        match jobs::enqueue(stream, job, line) {
            CUresult::CUDA_SUCCESS => Ok(()),
            other => Err(Refusal {
                status: EXECUTION_FAILED,
                rule: format!("the stream does not take it: {other:?}"),
            }),
        }
    };
    report("cublasLtMatmul", launch())
}

/// Reads `alpha` or `beta`.
///
/// # Safety
/// `place` must be null or point to a scalar in the memory that the description names.
unsafe fn scalar(name: &str, place: *const c_void, product: &Product) -> Result<Scalar, Refusal> {
    let address = place as u64;
    if place.is_null() {
        return Err(invalid(format!("{name} is null")));
    }
    if product.on_device {
        let fits = address.is_multiple_of(product.scalars.bytes() as u64);
        return if fits {
            Ok(Scalar::At(address))
        } else {
            Err(unsupported(format!("{name} is not aligned")))
        };
    }
    // SAFETY: guaranteed by the caller of this function.
    Ok(Scalar::Value(unsafe { product.scalars.load(address) }))
}

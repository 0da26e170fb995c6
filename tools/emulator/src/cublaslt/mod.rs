//! cuBLASLt for the emulated device. Programs open this library as `libcublasLt.so.12`.
//!
//! Products follow NVIDIA's documentation (cuBLAS 12.9). A call that the documentation does not allow returns the
//! documented status, and prints one line with the broken rule to standard error. A call that is allowed but not
//! needed in this repository is refused as not emulated. Arguments are checked at the call, and addresses are checked
//! when the stream executes the product.
//!
//! A product is summed in f64 in the order of `k`, with scales applied, and rounded to the compute type. This is
//! closer to the exact value than any GPU. Fast accumulation has no effect. After `alpha`, `beta`, the bias and GELU,
//! the value is rounded once to the type of the result. If products are only [counted](crate), a call is still
//! checked, and its result is filled with a constant.

mod algorithm;
mod api;
mod attributes;
mod call;
mod epilogue;
mod objects;
mod product;
mod rules;
mod scales;
#[cfg(test)]
mod tests;

/// `cublasStatus_t`, as a plain number, since callers may use values that this library does not define.
type Status = u32;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

/// The result of `cublasLtGetVersion`: 12.9.1.
const VERSION: usize = 120_901;

/// A GPU and a version of cuBLASLt, which determine the supported features.
#[derive(Clone, Copy, Debug)]
struct Chip {
    capability: (u32, u32),
    version: usize,
}

/// The emulated GPU.
const CHIP: Chip = Chip {
    capability: (9, 0),
    version: VERSION,
};

/// The error of a call that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refusal {
    status: Status,
    rule: String,
}

/// Returns the error of a call that is wrong on every device.
fn invalid(rule: impl Into<String>) -> Refusal {
    let (status, rule) = (INVALID_VALUE, rule.into());
    Refusal { status, rule }
}

/// Returns the error of a call that this device, or the library, does not support.
fn unsupported(rule: impl Into<String>) -> Refusal {
    let (status, rule) = (NOT_SUPPORTED, rule.into());
    Refusal { status, rule }
}

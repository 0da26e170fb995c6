//! cuBLASLt for the emulated device: programs open this library as `libcublasLt.so.12` too.
//!
//! Products have the meaning that NVIDIA's documentation gives them (cuBLAS 12.9). What it does not
//! allow is refused with the status that it names, and with one line on the standard error
//! that says the rule; what it allows and nobody here needs is refused as not emulated. A call is
//! checked when it is made, and its addresses when the stream comes to it.
//!
//! A product is summed in f64 in the order of `k`, scales included, and rounded to the type that is
//! computed in, nearer to the exact value than on any GPU: fast accumulation changes nothing. With
//! `alpha`, `beta`, the bias and GELU it is rounded once to the type of the result. Where products are only
//! [counted](crate), a call is checked all the same, and its result filled with a constant.

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

/// `cublasStatus_t`: a plain number, as callers may know more or fewer of them.
type Status = u32;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

/// As `cublasLtGetVersion` gives it: 12.9.1.
const VERSION: usize = 120_901;

/// A GPU and a version of cuBLASLt, which decide on what there is.
#[derive(Clone, Copy, Debug)]
struct Chip {
    capability: (u32, u32),
    version: usize,
}

/// The GPU that is emulated.
const CHIP: Chip = Chip {
    capability: (9, 0),
    version: VERSION,
};

/// The answer to a call that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refusal {
    status: Status,
    rule: String,
}

/// Returns the refusal of a call that is wrong on every device.
fn invalid(rule: impl Into<String>) -> Refusal {
    let (status, rule) = (INVALID_VALUE, rule.into());
    Refusal { status, rule }
}

/// Returns the refusal of a call that this device, or the library, does not support.
fn unsupported(rule: impl Into<String>) -> Refusal {
    let (status, rule) = (NOT_SUPPORTED, rule.into());
    Refusal { status, rule }
}

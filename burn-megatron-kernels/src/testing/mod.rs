//! What the tests of the operations share: devices, types, and the comparison with f64.
//!
//! A test gives an operation and its unfused composition as functions on flat leaves; [`compare`]
//! runs the first on every device, in every type that the device has and with both forms of
//! reduction, and the second in f64 on the CPU.

mod harness;

pub(crate) use harness::{Input, assert_gradients, compare, compare_within, devices, evaluate};
#[cfg(feature = "cubecl")]
pub(crate) use harness::{assert_close, tolerance};

//! Shared code of the tests of operations: devices, element types, and the comparison with f64.
//!
//! A test passes an operation and its unfused composition as functions of flat inputs. [`compare`] runs the operation
//! on every device, in every supported type and with both kinds of reduction. It compares the results with the
//! composition in f64 on the CPU.

mod harness;

pub(crate) use harness::{
    Evaluation, Input, assert_close, assert_gradients, compare, compare_within, devices, evaluate,
    tolerance,
};

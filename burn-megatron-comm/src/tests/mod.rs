//! Tests of the `threads` engine: faults, matching, logs and memory. Operations and random programs are tested by the
//! conformance suite, which every engine must pass.

mod context;
mod faults;
mod log;
mod matching;
mod operations;
mod pool;
mod together;
mod world;

use half::{bf16, f16};

use crate::*;
use burn_megatron_test_support::{TIMEOUT, wait_until};

/// Converts small integers into a buffer. All types represent them exactly.
fn buffer(dtype: DType, values: &[i64]) -> Buffer {
    let values = values.iter().copied();
    match dtype {
        DType::F64 => values.map(|v| v as f64).collect::<Vec<_>>().into(),
        DType::F32 => values.map(|v| v as f32).collect::<Vec<_>>().into(),
        DType::BF16 => values
            .map(|v| bf16::from_f32(v as f32))
            .collect::<Vec<_>>()
            .into(),
        DType::F16 => values
            .map(|v| f16::from_f32(v as f32))
            .collect::<Vec<_>>()
            .into(),
        DType::I64 => values.collect::<Vec<_>>().into(),
        DType::I32 => values.map(|v| v as i32).collect::<Vec<_>>().into(),
        DType::U8 => values.map(|v| v as u8).collect::<Vec<_>>().into(),
    }
}

/// Returns the rank that failed first and its communication error.
fn comm_failure(error: WorldError) -> (usize, CommError) {
    match error {
        WorldError::RankFailed { rank, source, .. } => (
            rank,
            *source.downcast::<CommError>().expect("an error of a call"),
        ),
        other => panic!("no rank failed: {other}"),
    }
}

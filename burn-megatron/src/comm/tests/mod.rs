//! Tests of the room: every operation against a plain reference, faults, and random programs.

mod faults;
mod log;
mod matching;
mod operations;
mod pool;
mod stress;
mod together;
mod world;

use half::{bf16, f16};

use super::*;

const DTYPES: [DType; 7] = [
    DType::F64,
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::I64,
    DType::I32,
    DType::U8,
];

/// Small integers as a buffer; all types hold them exactly.
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

/// What one member gets from a collective, computed the plain way.
fn expected(call: &Call, index: usize, inputs: &[Vec<i64>]) -> Vec<i64> {
    let size = inputs.len();
    let reduced = |op: ReduceOp| -> Vec<i64> {
        (0..inputs[0].len())
            .map(|i| {
                let column = inputs.iter().map(|input| input[i]);
                match op {
                    ReduceOp::Sum => column.sum(),
                    ReduceOp::Average => column.sum::<i64>() / size as i64,
                    ReduceOp::Max => column.max().unwrap(),
                    ReduceOp::Min => column.min().unwrap(),
                }
            })
            .collect()
    };
    match call {
        Call::AllReduce(op) => reduced(*op),
        Call::AllGather => inputs.concat(),
        Call::ReduceScatter(op) => {
            let chunk = inputs[0].len() / size;
            reduced(*op)[index * chunk..(index + 1) * chunk].to_vec()
        }
        Call::Broadcast { root } => inputs[*root].clone(),
        Call::Barrier => Vec::new(),
        Call::AllToAll { .. } | Call::Send { .. } | Call::Receive { .. } => {
            unreachable!("these have tests of their own")
        }
    }
}

/// The rank that failed first, with its error of calls.
fn comm_failure(error: WorldError) -> (usize, CommError) {
    match error {
        WorldError::RankFailed { rank, source, .. } => (
            rank,
            *source.downcast::<CommError>().expect("an error of a call"),
        ),
        other => panic!("no rank failed: {other}"),
    }
}

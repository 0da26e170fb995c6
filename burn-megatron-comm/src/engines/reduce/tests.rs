//! Tests that compare the order of reductions with a reference model.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::DType;

/// Returns numbers of many magnitudes, whose sum depends on the order of the additions.
fn wild(rank: usize, i: usize) -> f64 {
    let hash = (rank as u64 * 7919 + i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let (sign, exponent) = ((hash >> 63) as f64 * 2.0 - 1.0, (hash >> 40) % 12);
    sign * (1.0 + (hash >> 44) as f64 / (1u64 << 20) as f64) * (exponent as f64 - 6.0).exp2()
}

fn contribution(dtype: DType, rank: usize, len: usize) -> Buffer {
    let values = (0..len).map(|i| wild(rank, i));
    match dtype {
        DType::F64 => values.collect::<Vec<f64>>().into(),
        DType::F32 => values.map(|x| x as f32).collect::<Vec<_>>().into(),
        DType::BF16 => values.map(bf16::from_f64).collect::<Vec<_>>().into(),
        DType::F16 => values.map(f16::from_f64).collect::<Vec<_>>().into(),
        DType::I32 => values.map(|x| (x * 1e9) as i32).collect::<Vec<_>>().into(),
        other => unreachable!("{other} is not tested here"),
    }
}

/// Reduces the values of one element position level by level.
fn model<T: Copy>(mut column: Vec<T>, combine: &dyn Fn(T, T) -> T) -> T {
    while column.len() > 1 {
        let up = |pair: &[T]| match pair {
            [a, b] => combine(*a, *b),
            _ => pair[0],
        };
        column = column.chunks(2).map(up).collect();
    }
    column[0]
}

/// Defines the model for floating-point values that are combined in `f32` or `f64`.
macro_rules! model_float {
    ($name:ident, $type:ty) => {
        fn $name(column: Vec<$type>, op: ReduceOp) -> $type {
            let ranks = column.len() as $type;
            match op {
                ReduceOp::Sum => model(column, &|a, b| a + b),
                ReduceOp::Average => model(column, &|a, b| a + b) / ranks,
                ReduceOp::Max => model(column, &<$type>::max),
                ReduceOp::Min => model(column, &<$type>::min),
            }
        }
    };
}
model_float!(model_f64, f64);
model_float!(model_f32, f32);

fn model_buffer(inputs: &[Buffer], op: ReduceOp) -> Buffer {
    /// Applies `reduce` to each element position.
    fn columns<T: Element>(inputs: &[Buffer], reduce: impl Fn(Vec<T>) -> T) -> Vec<T> {
        let views: Vec<&[T]> = inputs.iter().map(|b| b.as_slice().unwrap()).collect();
        let column = |i: usize| views.iter().map(|view| view[i]).collect();
        (0..views[0].len()).map(|i| reduce(column(i))).collect()
    }
    match inputs[0].dtype() {
        DType::F64 => columns(inputs, |column| model_f64(column, op)).into(),
        DType::F32 => columns(inputs, |column| model_f32(column, op)).into(),
        DType::BF16 => columns(inputs, |column: Vec<bf16>| {
            let wide = column.into_iter().map(bf16::to_f32).collect();
            bf16::from_f32(model_f32(wide, op))
        })
        .into(),
        DType::F16 => columns(inputs, |column: Vec<f16>| {
            let wide = column.into_iter().map(f16::to_f32).collect();
            f16::from_f32(model_f32(wide, op))
        })
        .into(),
        _ => columns(inputs, |column: Vec<i32>| match op {
            ReduceOp::Max => model(column, &Ord::max),
            ReduceOp::Min => model(column, &Ord::min),
            _ => model(column, &i32::wrapping_add),
        })
        .into(),
    }
}

fn reduced(inputs: &[Buffer], op: ReduceOp) -> Buffer {
    let mut first = inputs[0].clone();
    reduce_into(&mut first, &inputs[1..].iter().collect::<Vec<_>>(), op);
    first
}

#[test]
fn the_tree_is_that_of_the_model() {
    // Longer than a chunk, and not a multiple of a chunk.
    let len = 2 * CHUNK + 37;
    for ranks in 1..=9 {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I32] {
            let inputs: Vec<_> = (0..ranks).map(|r| contribution(dtype, r, len)).collect();
            for op in ReduceOp::ALL {
                if op == ReduceOp::Average && !dtype.is_float() {
                    continue;
                }
                let expected = model_buffer(&inputs, op);
                assert!(reduced(&inputs, op) == expected, "{op} of {ranks} {dtype}");
                let range = 5..CHUNK + 90;
                let mut part = Buffer::zeros(dtype, range.len());
                let all: Vec<&Buffer> = inputs.iter().collect();
                reduce_range(&all, range.clone(), op, &mut part);
                let expected = expected.slice(range);
                assert!(part == expected, "range, {op} of {ranks} {dtype}");
            }
        }
    }
}

#[test]
fn the_order_shows_in_the_bits() {
    let inputs: Vec<_> = (0..4).map(|r| contribution(DType::F32, r, 999)).collect();
    let views: Vec<&[f32]> = inputs.iter().map(|b| b.as_slice().unwrap()).collect();
    let from_left = |i: usize| views.iter().map(|v| v[i]).reduce(|a, b| a + b).unwrap();
    let from_left: Vec<f32> = (0..999).map(from_left).collect();
    assert_ne!(reduced(&inputs, ReduceOp::Sum), from_left.into());
}

#[test]
fn inner_groups_first_give_the_same_bits() {
    for (ranks, inner) in [(4, 2), (8, 2), (8, 4), (6, 2), (12, 4)] {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let inputs: Vec<_> = (0..ranks)
                .map(|r| contribution(DType::F32, r, 3000))
                .collect();
            let parts: Vec<_> = inputs.chunks(inner).map(|part| reduced(part, op)).collect();
            assert!(
                reduced(&parts, op) == reduced(&inputs, op),
                "{ranks} by {inner}"
            );
        }
    }
}

#[test]
fn sums_in_f32_are_those_of_the_widened_parts() {
    for (dtype, ranks, len) in [
        (DType::BF16, 7, 2500),
        (DType::F16, 4, 1024),
        (DType::F16, 1, 3),
        (DType::BF16, 3, 0),
    ] {
        let inputs: Vec<_> = (0..ranks).map(|r| contribution(dtype, r, len)).collect();
        let wide = |buffer: &Buffer| -> Buffer {
            match buffer {
                Buffer::BF16(values) => values.to_f32_vec().into(),
                Buffer::F16(values) => values.to_f32_vec().into(),
                other => unreachable!("{}", other.dtype()),
            }
        };
        let expected = reduced(&inputs.iter().map(wide).collect::<Vec<_>>(), ReduceOp::Sum);
        let mut sums = vec![f32::NAN; len];
        sum_parts_in_f32(&Buffer::concat(&inputs).unwrap(), ranks, &mut sums);
        assert_eq!(Buffer::from(sums), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_nan_wins_at_every_place(ranks in 1usize..20, bad in 0usize..20, max: bool) {
        let bad = bad % ranks;
        let value = |rank| if rank == bad { f32::NAN } else { rank as f32 };
        let inputs: Vec<Buffer> = (0..ranks).map(|r| vec![value(r), r as f32].into()).collect();
        let op = if max { ReduceOp::Max } else { ReduceOp::Min };
        let result = Vec::<f32>::try_from(reduced(&inputs, op)).unwrap();
        prop_assert!(result[0].is_nan());
        prop_assert_eq!(result[1], if max { ranks as f32 - 1.0 } else { 0.0 });
    }
}

//! Tests of 16-bit gradients that are summed in f32.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, Tensor};
use half::{bf16, f16};

use super::super::*;
use super::over;
use crate::comm::{Buffer, CommError, ReduceOp, World};

const LEN: usize = 100_000;

/// Values of magnitude 1/8 to 1, evenly spread, as a rank's tensor of a 16-bit type.
fn values(rank: usize) -> Vec<f32> {
    let mut state = rank as u64 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let unit = (state >> 40) as f32 / (1u64 << 24) as f32;
        let sign = if state >> 39 & 1 == 0 { 1.0 } else { -1.0 };
        sign * (0.125 + 0.875 * unit)
    };
    (0..LEN).map(|_| next()).collect()
}

fn narrow(dtype: DType, values: &[f32]) -> Buffer {
    let values = values.iter().copied();
    match dtype {
        DType::BF16 => values.map(bf16::from_f32).collect::<Vec<_>>().into(),
        _ => values.map(f16::from_f32).collect::<Vec<_>>().into(),
    }
}

/// Rounds to the nearest value of a 16-bit type.
fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    }
}

fn plain(dtype: DType, values: &[f32]) -> Tensor<1> {
    let buffer = narrow(dtype, values);
    from_buffer(buffer, [values.len()], &Device::flex(), dtype)
}

fn floats(x: Tensor<1>) -> Vec<f32> {
    assert_eq!(x.dtype(), DType::F32);
    x.into_data().try_into_vec().unwrap()
}

fn share(differ: impl Iterator<Item = bool>) -> f64 {
    let differ: Vec<bool> = differ.collect();
    differ.iter().filter(|d| **d).count() as f64 / differ.len() as f64
}

/// Returns the result of a ring that adds in 16 bits: the part of a rank starts at the next rank, and each rank
/// on the way adds its own part and rounds.
fn ring(dtype: DType, ranks: usize) -> Vec<f32> {
    let inputs: Vec<Vec<f32>> = (0..ranks).map(values).collect();
    let sum = |i: usize| {
        let last = i / (LEN / ranks);
        let way = (1..=ranks).map(|step| round(dtype, inputs[(last + step) % ranks][i]));
        way.reduce(|a, b| round(dtype, a + b)).unwrap()
    };
    (0..LEN).map(sum).collect()
}

#[test]
fn sums_are_those_of_the_widened_tensors() {
    for dtype in [DType::BF16, DType::F16] {
        for ranks in [1, 2, 4, 8] {
            let parts = over(ranks, |comm| {
                let x = plain(dtype, &values(comm.rank()));
                let widened = x.clone().cast(DType::F32);
                let wide = floats(start_reduce_scatter_in_f32(x, &comm).wait());
                let expected = floats(start_reduce_scatter(widened, 0, &comm).wait());
                assert_eq!(wide.len(), LEN / ranks);
                assert!(wide == expected, "{dtype:?} over {ranks}");
                wide
            });
            if ranks == 1 {
                continue;
            }
            let (wide, ring) = (parts.concat(), ring(dtype, ranks));
            let raw = share(wide.iter().zip(&ring).map(|(a, b)| a != b));
            assert!(raw > 0.3, "{raw} of {dtype:?} over {ranks}");
            // Compares with the sum rounded once at the end. For two ranks this is the only rounding.
            let rounded = wide.iter().map(|x| round(dtype, *x));
            let rounded = share(rounded.zip(&ring).map(|(a, b)| a != *b));
            match ranks {
                2 => assert_eq!(rounded, 0.0),
                _ => assert!(rounded > 0.1, "{rounded} of {dtype:?} over {ranks}"),
            }
        }
    }
}

#[test]
fn a_scale_of_a_power_of_two_is_exact() {
    for dtype in [DType::BF16, DType::F16] {
        over(4, |comm| {
            let values = values(comm.rank());
            let scaled: Vec<f32> = values.iter().map(|x| x / 8.0).collect();
            let sum =
                |x: &[f32]| floats(start_reduce_scatter_in_f32(plain(dtype, x), &comm).wait());
            let back: Vec<f32> = sum(&scaled).iter().map(|x| x * 8.0).collect();
            assert!(back == sum(&values), "{dtype:?}");
        });
    }
}

/// The memory of the all-to-all is reused.
#[test]
fn nothing_is_allocated_after_the_second_call() {
    over(2, |comm| {
        let pool = comm.pool().unwrap().clone();
        let mut allocated = 0;
        for round in 0..10 {
            let x = plain(DType::BF16, &values(comm.rank()));
            let _ = start_reduce_scatter_in_f32(x, &comm).wait();
            comm.barrier().unwrap();
            match round {
                0 | 1 => allocated = pool.allocated(),
                _ => assert_eq!(pool.allocated(), allocated),
            }
        }
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_sent() {
    let run = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator();
        let refused = |x: Tensor<1>| {
            let start = AssertUnwindSafe(|| drop(start_reduce_scatter_in_f32(x, &comm)));
            let payload = catch_unwind(start).unwrap_err();
            payload.downcast::<CommError>().unwrap().to_string()
        };
        let message = refused(Tensor::ones([4], (&Device::flex(), DType::F32)));
        for part in ["bf16 or f16", "[4]", "world [0, 1]", "F32"] {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
        let message = refused(plain(DType::BF16, &[1.0, 2.0, 3.0]));
        for part in ["dim 0", "[3]", "2 ranks", "world [0, 1]"] {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
        assert!(rank.recent_calls().is_empty());
        let sum = comm.all_reduce(vec![1f32].into(), ReduceOp::Sum)?;
        assert_eq!(sum, vec![2f32].into());
        Ok::<_, CommError>(())
    });
    run.unwrap();
}

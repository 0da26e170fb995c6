//! Tests of reductions with rounding, NaN and overflow.

use super::suite::{CaseContext, CheckResult};
use super::values::{largest, repeated, with_nan};
use burn_megatron_comm::{Buffer, Call, DType, ReduceOp};

/// The number of elements per input in tests that work with any length.
const LEN: usize = 96;

/// Returns `LEN`, rounded up to a multiple of the number of ranks.
fn whole_len(suite: &CaseContext<'_>) -> usize {
    LEN.next_multiple_of(suite.world.size())
}

/// Runs an all-reduce and a reduce-scatter on the same inputs.
fn both(
    suite: &mut CaseContext<'_>,
    op: ReduceOp,
    input: impl Fn(usize) -> Buffer + Copy,
) -> CheckResult {
    let world = suite.world;
    suite.collective(&**world, &Call::AllReduce(op), input)?;
    suite.collective(&**world, &Call::ReduceScatter(op), input)
}

/// Computes averages of every floating-point type and length. If 16-bit floats are accumulated in `f32`, also tests a
/// sum whose intermediate value exceeds the range of the 16-bit type.
pub(super) fn averages(suite: &mut CaseContext<'_>) -> CheckResult {
    let options = suite.options;
    let size = suite.world.size();
    for dtype in suite.floats() {
        for len in &options.sizes {
            let (data, len) = (suite.data(), len.next_multiple_of(size));
            both(suite, ReduceOp::Average, |rank| {
                data.whole(dtype, rank, len)
            })?;
        }
        if dtype == DType::F16 && options.fixed_order {
            let len = whole_len(suite);
            both(suite, ReduceOp::Average, |_| repeated(dtype, 60_000, len))?;
        }
    }
    Ok(())
}

/// Sums one large number and many small numbers. If the sum were rounded to 16 bits at each step, each small number
/// would be lost.
pub(super) fn halves(suite: &mut CaseContext<'_>) -> CheckResult {
    let len = whole_len(suite);
    let first = suite.world.group().ranks()[0];
    for (dtype, large) in [(DType::BF16, 256), (DType::F16, 2048)] {
        if !suite.options.dtypes.contains(&dtype) {
            continue;
        }
        let input = |rank| repeated(dtype, if rank == first { large } else { 1 }, len);
        both(suite, ReduceOp::Sum, input)?;
        both(suite, ReduceOp::Average, input)?;
        let data = suite.data();
        both(suite, ReduceOp::Sum, |rank| data.real(dtype, rank, len))?;
    }
    Ok(())
}

/// Sums fractions of many magnitudes, so that the result depends on the order of the additions. Tests a group in rank
/// order and a group in reverse order.
pub(super) fn order(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    let backwards: Vec<usize> = world.group().ranks().iter().rev().copied().collect();
    let backwards = suite.split(&**world, "backwards", &[backwards])?;
    for dtype in suite.floats() {
        for len in suite.options.sizes.iter().chain([&LEN]) {
            let len = len.next_multiple_of(world.size());
            for comm in [world, &backwards] {
                for call in [
                    Call::AllReduce(ReduceOp::Sum),
                    Call::ReduceScatter(ReduceOp::Sum),
                ] {
                    let data = suite.data();
                    suite.collective(&**comm, &call, |rank| data.real(dtype, rank, len))?;
                }
            }
        }
    }
    Ok(())
}

/// Reduces inputs that contain one NaN: on each rank in turn, at a different position.
pub(super) fn nan(suite: &mut CaseContext<'_>) -> CheckResult {
    if !suite.options.nan_wins {
        return Ok(());
    }
    let (world, len) = (suite.world, whole_len(suite));
    for dtype in suite.floats() {
        for bad in world.group().ranks() {
            for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
                let data = suite.data();
                both(suite, op, |rank| match data.whole(dtype, rank, len) {
                    input if rank == *bad => with_nan(input, rank % len),
                    input => input,
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn integers_wrap(suite: &mut CaseContext<'_>) -> CheckResult {
    let len = whole_len(suite);
    let integers = suite.options.dtypes.iter();
    for dtype in integers.filter(|dtype| !dtype.is_float()) {
        both(suite, ReduceOp::Sum, |_| largest(*dtype, len))?;
    }
    Ok(())
}

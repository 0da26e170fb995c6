//! Parallel loops over rows, whose bodies use SIMD instructions.

use pulp::Simd;

use super::for_each_task;

/// The minimum number of elements for which a parallel task is worth its overhead. Processing them takes tens of
/// microseconds, which is about the time to wake a thread.
pub(crate) const ROW_GRAIN: usize = 128 * 1024;

/// Returns the number of rows of `width` elements per parallel task.
///
/// The number depends only on the width, so that sums by task have the same order for any number of
/// threads.
pub(crate) fn rows_per_task(width: usize) -> usize {
    (ROW_GRAIN / width.max(1)).max(1)
}

/// Runs `work`, compiled for the widest SIMD instructions of the processor.
///
/// Functions that `work` calls are compiled for these instructions only if they are `#[inline(always)]`. The same holds
/// for a closure of more than a few lines: `vectorized(#[inline(always)] || ..)`.
#[inline(always)]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Calls `work` for each task with the index of its first row and with its elements. The output has rows of `width`
/// elements. `cost` is the cost of computing an output element relative to copying it.
pub(crate) fn for_row_tasks<T: Send>(
    output: &mut [T],
    width: usize,
    cost: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let rows = rows_per_task(width * cost);
    let tasks = output.chunks_mut((rows * width).max(1)).enumerate();
    for_each_task(tasks, |(task, output)| work(task * rows, output));
}

/// Calls `work` with the index and the values of each row of `width` elements, in parallel.
///
/// `work` must be `#[inline(always)]`, as for [`vectorized`].
pub(crate) fn for_rows<E: Send>(
    values: &mut [E],
    width: usize,
    work: impl Fn(usize, &mut [E]) + Sync + Send,
) {
    for_row_tasks(values, width, 1, |first, values| {
        vectorized(
            #[inline(always)]
            || {
                for (i, row) in values.chunks_exact_mut(width).enumerate() {
                    work(first + i, row);
                }
            },
        )
    });
}

/// Returns whether the processor has no fused multiply-add instruction.
#[inline(always)]
pub(crate) fn unfused<S: Simd>() -> bool {
    cfg!(target_arch = "x86_64") && S::IS_SCALAR
}

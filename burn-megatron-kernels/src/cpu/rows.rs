//! Rows in parallel, with SIMD inside.

/// Elements that make a parallel task worth its start: some tens of microseconds of work, as many as
/// it takes to wake another thread.
pub(crate) const ROW_GRAIN: usize = 128 * 1024;

/// How many rows of `width` make one parallel task.
///
/// It depends on nothing but the width, so sums that go task by task have the same order on any
/// number of threads.
pub(crate) fn rows_per_task(width: usize) -> usize {
    (ROW_GRAIN / width.max(1)).max(1)
}

/// Runs `work` compiled for the widest SIMD instructions that the processor has.
///
/// What it calls is only part of that code if it is `#[inline(always)]`, and so is a closure of more
/// than a few lines itself: `vectorized(#[inline(always)] || ..)`.
#[inline(always)]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

//! Gradients of lookups that are added to their rows after the backward.
//!
//! The order of the lookups is the host's, and differs from micro-batch to micro-batch, so a CUDA graph of a backward ends with the
//! gradient of the rows that were looked up; after each replay they are added to the rows of its own tokens.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::embedding::SortedLookups;

use super::hook::HookHandle;
use super::lookup::rows_gradient;

/// The gradient of a lookup.
#[derive(Clone, Debug)]
pub struct DeferredLookup {
    pub(super) handle: HookHandle,
    /// `[ids, width]`
    pub(super) gradient: Tensor<2>,
    /// The ids whose rows the weight has.
    pub(super) rows: Range<usize>,
}

impl DeferredLookup {
    /// Adds the gradient to the rows of these lookups.
    pub fn accumulate(&self, sorted: &Arc<SortedLookups>) {
        let HookHandle { index, sink } = &self.handle;
        sink.accumulate_into(&[*index], &mut |target| {
            let gradient = self.gradient.clone();
            vec![rows_gradient(gradient, sorted, self.rows.clone(), target)]
        });
    }
}

thread_local! {
    /// The lookups that are deferred, and those that have been.
    static DEFERRED: RefCell<Option<(Arc<SortedLookups>, Vec<DeferredLookup>)>> = const { RefCell::new(None) };
}

/// Runs `backward` without adding the gradients of the lookups `of`, and returns them, in order.
pub fn defer<T>(of: &Arc<SortedLookups>, backward: impl FnOnce() -> T) -> (T, Vec<DeferredLookup>) {
    /// Ends the deferring, also of a backward that panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            DEFERRED.take();
        }
    }
    DEFERRED.replace(Some((of.clone(), vec![])));
    let end = End;
    let result = backward();
    let deferred = DEFERRED.take().map_or(vec![], |(_, lookups)| lookups);
    drop(end);
    (result, deferred)
}

/// Defers a lookup, or returns it where it is not to be.
pub(super) fn deferred(
    sorted: &Arc<SortedLookups>,
    lookup: DeferredLookup,
) -> Option<DeferredLookup> {
    DEFERRED.with_borrow_mut(|deferred| match deferred {
        Some((of, lookups)) if Arc::ptr_eq(of, sorted) => {
            lookups.push(lookup);
            None
        }
        _ => Some(lookup),
    })
}

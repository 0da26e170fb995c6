//! Embedding gradients that are added to the gradient of the embedding weight after the backward pass.
//!
//! The host sorts the lookups, and their order differs between micro-batches. The CUDA graph of a backward pass
//! therefore ends with the gradient of the embedding output. After each replay of the CUDA graph, the gradient of each
//! token is added to the row of the token in the weight gradient.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::embedding::{SortedLookups, accumulate_rows};
use burn_megatron_kernels::gradient::{FlatGradients, Place};
use parking_lot::Mutex;

use super::forward_context;
use super::hook::HookHandle;
use super::wide::wide;

/// The gradient of an embedding lookup that has not been added to the gradient of the embedding weight yet.
#[derive(Clone, Debug)]
pub struct DeferredLookup {
    pub(super) handle: HookHandle,
    /// `[ids, width]`
    pub(super) gradient: Tensor<2>,
    /// The range of ids whose rows the weight holds.
    pub(super) rows: Range<usize>,
}

impl DeferredLookup {
    /// Adds the gradient of each token to the row of the token in the weight gradient. `sorted` are the lookups of the
    /// micro-batch.
    pub fn accumulate(&self, sorted: &Arc<SortedLookups>) {
        let HookHandle { index, sink } = &self.handle;
        sink.accumulate_into(&[*index], &mut |target| {
            let gradient = self.gradient.clone();
            vec![rows_gradient(gradient, sorted, self.rows.clone(), target)]
        });
    }
}

/// The lookups whose gradients a backward pass defers, and the gradients deferred so far.
#[derive(Clone)]
pub(super) struct DeferredLookups {
    of: Arc<SortedLookups>,
    so_far: Arc<Mutex<Vec<DeferredLookup>>>,
}

/// Runs `backward` without adding the gradients of the lookups `of` to the gradient of the embedding weight. Returns
/// the result of `backward`, and the deferred gradients in the order in which `backward` computed them.
pub fn defer<T>(of: &Arc<SortedLookups>, backward: impl FnOnce() -> T) -> (T, Vec<DeferredLookup>) {
    let lookups = DeferredLookups {
        of: of.clone(),
        so_far: Arc::default(),
    };
    let result = forward_context::deferring_lookups(lookups.clone(), backward);
    let deferred = std::mem::take(&mut *lookups.so_far.lock());
    (result, deferred)
}

/// Defers a lookup, or returns it if it must not be deferred.
pub(super) fn deferred(
    sorted: &Arc<SortedLookups>,
    lookup: DeferredLookup,
) -> Option<DeferredLookup> {
    match forward_context::deferred_lookups() {
        Some(lookups) if Arc::ptr_eq(&lookups.of, sorted) => {
            lookups.so_far.lock().push(lookup);
            None
        }
        _ => Some(lookup),
    }
}

/// Returns the flat gradient of the ids in `rows`, in `target` or in a new buffer.
fn rows_gradient(
    gradient: Tensor<2>,
    sorted: &Arc<SortedLookups>,
    rows: Range<usize>,
    target: Option<FlatGradients>,
) -> Tensor<1> {
    let target = target.unwrap_or_else(|| {
        let options = (&gradient.device(), wide(gradient.dtype()));
        FlatGradients {
            flat: Tensor::zeros([rows.len() * gradient.dims()[1]], options),
            places: vec![Place {
                offset: 0,
                add: true,
            }],
        }
    });
    accumulate_rows(gradient, sorted, rows, target)
}

//! Embedding lookup with a gradient that is accumulated in f32.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_megatron_kernels::embedding::SortedLookups;

use super::deferred_lookups::{self, DeferredLookup};
use super::forward_context;
use super::hook::{HookHandle, ParameterHook, forward_only_value};
use super::unsaved::unsaved;
use super::wide::wide;

/// The ids of a lookup.
#[derive(Debug)]
pub(super) struct LookupIds {
    /// The rows of the weight to look up: `[ids]`.
    pub rows: Tensor<1, Int>,
    /// The sorted lookups of the ids, and the index of the first row of the weight. `None` if the ids are only on the
    /// device. The lookups may refer to a larger table. The weight then holds the rows of the table that start at this
    /// index, and ids of other rows have no gradient.
    pub sorted: Option<(Arc<SortedLookups>, usize)>,
}

/// Looks up the rows `ids` of a weight `[rows, width]`. Returns `[ids, width]`.
///
/// The gradient of a row is the sum over all its lookups. A 16-bit sum would stop growing when it is a few hundred
/// times larger than a single gradient. With a [`ParameterHook`] the gradient is therefore accumulated in f32. With
/// sorted lookups, only the rows of the ids are updated, in lookup order.
pub(super) fn lookup(param: &Param<Tensor<2>>, ids: LookupIds) -> Tensor<2> {
    let hook = ParameterHook::of(param);
    let (Some(hook), Some(anchor)) = (hook, forward_context::anchor()) else {
        return forward_only_value(param).select(0, ids.rows);
    };
    let (handle, base) = (hook.handle().clone(), param.base());
    handle.expect();
    let rows = base.dims()[0];
    let weight = handle.value(base).0;
    let LookupIds { rows: ids, sorted } = ids;
    let ids = ids.inner();
    let ids_again = ids.clone();
    unsaved(
        "LookupFunction",
        vec![weight.into_dispatch(), anchor],
        move |mut inputs| {
            let weight = Tensor::<2>::from_dispatch(inputs.swap_remove(0));
            weight.select(0, ids.clone()).into_dispatch()
        },
        move |gradient| {
            let gradient = Tensor::from_dispatch(gradient);
            pass_gradient(&handle, gradient, (&ids_again, sorted.as_ref()), rows);
            vec![None, None]
        },
    )
}

/// Passes the gradient of the ids to the sink, for a weight with `rows` rows.
fn pass_gradient(
    handle: &HookHandle,
    gradient: Tensor<2>,
    (ids, sorted): (&Tensor<1, Int>, Option<&(Arc<SortedLookups>, usize)>),
    rows: usize,
) {
    let Some((sorted, first)) = sorted else {
        let gradient = whole_gradient(gradient, ids.clone(), rows);
        return handle.sink.accumulate(handle.index, gradient);
    };
    let lookup = DeferredLookup {
        handle: handle.clone(),
        gradient,
        rows: *first..first + rows,
    };
    if let Some(lookup) = deferred_lookups::deferred(sorted, lookup) {
        lookup.accumulate(sorted);
    }
}

/// Returns the flat gradient of all rows. Used if the ids are only on the device.
fn whole_gradient(gradient: Tensor<2>, ids: Tensor<1, Int>, rows: usize) -> Tensor<1> {
    let dtype = wide(gradient.dtype());
    let gradient = gradient.cast(dtype);
    let [_, width] = gradient.dims();
    let zeros = Tensor::zeros([rows, width], (&gradient.device(), gradient.dtype()));
    let sum: Tensor<2> = zeros.select_assign(0, ids, gradient, IndexingUpdateOp::Add);
    sum.reshape([rows * width])
}

//! Embedding lookup, with a gradient that is accumulated in f32.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_megatron_kernels::embedding::SortedLookups;
use burn_megatron_kernels::{Function, apply};

use super::deferred_lookups::{self, DeferredLookup};
use super::forward_context;
use super::hook::{HookHandle, ParameterHook, forward_only_value};
use super::wide::wide;

/// The ids that a lookup reads.
#[derive(Debug)]
pub(super) struct LookupIds {
    /// Rows of the weight, `[ids]`.
    pub rows: Tensor<1, Int>,
    /// The lookups of the ids, sorted, where the host has them. They may be of a larger table, of which the
    /// weight has the rows from this one on; ids of other rows have no gradient then.
    pub sorted: Option<(Arc<SortedLookups>, usize)>,
}

/// The rows `ids` of `[rows, width]`: `[ids, width]`.
///
/// The gradient of a row is the sum over all its lookups; in 16 bits the sum would stop growing at a few
/// hundred times a single gradient. With a [`ParameterHook`] it is accumulated in f32; with sorted lookups
/// in the rows of the ids alone, in the order of the lookups.
pub(super) fn lookup(param: &Param<Tensor<2>>, ids: LookupIds) -> Tensor<2> {
    let hook = ParameterHook::of(param);
    let (Some(hook), Some(anchor)) = (hook, forward_context::anchor()) else {
        return forward_only_value(param).select(0, ids.rows);
    };
    let (handle, base) = (hook.handle().clone(), param.base());
    handle.expect();
    let rows = base.dims()[0];
    let weight = handle.value(base).0;
    let function = LookupFunction { handle, ids, rows };
    apply(vec![weight.into_dispatch(), anchor], function)
}

#[derive(Debug)]
struct LookupFunction {
    handle: HookHandle,
    ids: LookupIds,
    rows: usize,
}

impl Function for LookupFunction {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let weight = Tensor::<2>::from_dispatch(inputs.swap_remove(0));
        let ids = self.ids.rows.clone().inner();
        (weight.select(0, ids).into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = Tensor::<2>::from_dispatch(gradient);
        match &self.ids.sorted {
            None => {
                let HookHandle { index, sink } = &self.handle;
                sink.accumulate(*index, self.whole_gradient(gradient));
            }
            Some((sorted, first)) => {
                let lookup = DeferredLookup {
                    handle: self.handle.clone(),
                    gradient,
                    rows: *first..first + self.rows,
                };
                if let Some(lookup) = deferred_lookups::deferred(sorted, lookup) {
                    lookup.accumulate(sorted);
                }
            }
        }
        vec![None, None]
    }
}

impl LookupFunction {
    /// The gradient of all rows, flat, where the host does not have the ids.
    fn whole_gradient(&self, gradient: Tensor<2>) -> Tensor<1> {
        let dtype = wide(gradient.dtype());
        let gradient = gradient.cast(dtype);
        let ids = self.ids.rows.clone().inner();
        let [_, width] = gradient.dims();
        let zeros = Tensor::zeros([self.rows, width], (&gradient.device(), gradient.dtype()));
        let sum: Tensor<2> = zeros.select_assign(0, ids, gradient, IndexingUpdateOp::Add);
        sum.reshape([self.rows * width])
    }
}

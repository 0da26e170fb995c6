//! Embedding lookup, with a gradient that is accumulated in f32.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor};
use burn_megatron_kernels::{Function, apply};

use super::forward_context;
use super::hook::{HookHandle, ParameterHook, forward_only_value};

/// The rows `ids` of `[rows, width]`: `[ids, width]`.
///
/// The gradient of a row is the sum over all its lookups; in 16 bits the sum would stop growing at a few
/// hundred times a single gradient. With a [`ParameterHook`] it is accumulated in f32.
pub(super) fn lookup(param: &Param<Tensor<2>>, ids: Tensor<1, Int>) -> Tensor<2> {
    let hook = param.reparameterization::<ParameterHook>();
    let (Some(hook), Some(anchor)) = (hook, forward_context::anchor()) else {
        return forward_only_value(param).select(0, ids);
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
    ids: Tensor<1, Int>,
    rows: usize,
}

impl Function for LookupFunction {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let weight = Tensor::<2>::from_dispatch(inputs.swap_remove(0));
        let ids = plain(&self.ids, &weight);
        (weight.select(0, ids).into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let accumulation = match gradient.dtype() {
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let gradient = gradient.cast(accumulation);
        let ids = plain(&self.ids, &gradient);
        let [_, width] = gradient.dims();
        let zeros = Tensor::zeros([self.rows, width], (&gradient.device(), gradient.dtype()));
        let sum: Tensor<2> = zeros.select_assign(0, ids, gradient, IndexingUpdateOp::Add);
        let HookHandle { index, sink } = &self.handle;
        sink.accumulate(*index, sum.reshape([self.rows * width]));
        vec![None, None]
    }
}

/// The ids without autodiff, if `like` has none.
fn plain(ids: &Tensor<1, Int>, like: &Tensor<2>) -> Tensor<1, Int> {
    if ids.is_autodiff() && !like.is_autodiff() {
        ids.clone().inner()
    } else {
        ids.clone()
    }
}

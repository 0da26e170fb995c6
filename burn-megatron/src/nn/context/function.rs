//! Attention over the ranks of a context group, as one differentiable operation.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;

use super::exchange::KeyValueExchange;
use super::partial::{PartialAttention, sink_gradient, with_sink};

/// Context-parallel attention. Inputs: a joint projection `[tokens, heads + 2 groups, width]`, and optionally the sinks
/// `[heads]` in the dtype of the softmax statistics. Output: `[tokens, heads, width]`. Keys and values of other ranks
/// are not kept for the backward pass.
#[derive(Clone, Debug)]
pub(super) struct ExchangedAttention {
    pub of: PartialAttention,
    pub exchange: Arc<dyn KeyValueExchange>,
}

impl ExchangedAttention {
    /// Splits a projection into the queries `[1, tokens, heads, width]` and the block of keys and values.
    fn parts(&self, qkv: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
        let heads = self.of.heads;
        let q = qkv.clone().narrow(1, 0, heads.heads).unsqueeze();
        (q, qkv.narrow(1, heads.heads, 2 * heads.groups))
    }
}

impl Function for ExchangedAttention {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let mut inputs = inputs.into_iter();
        let qkv = Tensor::<3>::from_dispatch(next(&mut inputs));
        let sink = inputs.next().map(Tensor::<1>::from_dispatch);
        let dtype = qkv.dtype();
        let (q, own) = self.parts(qkv.clone());
        let result = self.exchange.forward(&self.of, q, own);
        let (out, lse) = match &sink {
            Some(sink) => with_sink(result, sink.clone()),
            None => result,
        };
        let out = out.cast(dtype).squeeze_dim::<3>(0);
        let mut saved = vec![
            qkv.into_dispatch(),
            out.clone().into_dispatch(),
            lse.into_dispatch(),
        ];
        saved.extend(sink.map(Tensor::into_dispatch));
        (out.into_dispatch(), saved)
    }

    /// The gradients for each block of keys do not depend on the sink, because the log-sum-exp includes it.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let mut saved = saved.into_iter();
        let qkv = Tensor::<3>::from_dispatch(next(&mut saved));
        let out = Tensor::<3>::from_dispatch(next(&mut saved)).unsqueeze();
        let lse = Tensor::<3>::from_dispatch(next(&mut saved));
        let sink = saved.next().map(Tensor::<1>::from_dispatch);
        let dtype = qkv.dtype();
        let (q, own) = self.parts(qkv);
        let dout = Tensor::<3>::from_dispatch(gradient).unsqueeze();
        let result = (out, lse);
        let dsink = sink.map(|sink| sink_gradient(sink, &result, &dout).into_dispatch());
        let (dq, block) = self.exchange.backward(&self.of, q, own, result, dout);
        let gradient = Tensor::cat(vec![dq.squeeze_dim::<3>(0), block], 1);
        let gradient = gradient.cast(dtype).into_dispatch();
        std::iter::once(Some(gradient))
            .chain(dsink.map(Some))
            .collect()
    }
}

fn next(tensors: &mut impl Iterator<Item = DispatchTensor>) -> DispatchTensor {
    match tensors.next() {
        Some(tensor) => tensor,
        None => {
            unreachable!("the function is applied to a projection, and saves three of its tensors")
        }
    }
}

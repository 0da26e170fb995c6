//! Attention over the ranks of a context group as one differentiable operation.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;

use super::exchange::KeyValueExchange;
use super::partial::PartialAttention;

/// From a joint projection `[tokens, heads + 2 groups, width]` to `[tokens, heads, width]`. Of the other ranks'
/// keys and values nothing is kept for the backward.
#[derive(Clone, Debug)]
pub(super) struct ExchangedAttention {
    pub of: PartialAttention,
    pub exchange: Arc<dyn KeyValueExchange>,
}

impl ExchangedAttention {
    /// The queries `[1, tokens, heads, width]` and the block of a projection.
    fn parts(&self, qkv: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
        let heads = self.of.heads;
        let q = qkv.clone().narrow(1, 0, heads.heads).unsqueeze();
        (q, qkv.narrow(1, heads.heads, 2 * heads.groups))
    }
}

impl Function for ExchangedAttention {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let qkv = Tensor::<3>::from_dispatch(inputs.swap_remove(0));
        let dtype = qkv.dtype();
        let (q, own) = self.parts(qkv.clone());
        let (out, lse) = self.exchange.forward(&self.of, q, own);
        let out = out.cast(dtype).squeeze_dim::<3>(0);
        let saved = vec![
            qkv.into_dispatch(),
            out.clone().into_dispatch(),
            lse.into_dispatch(),
        ];
        (out.into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let [qkv, out, lse] = match <[DispatchTensor; 3]>::try_from(saved) {
            Ok(saved) => saved,
            Err(_) => unreachable!("the forward saves three tensors"),
        };
        let qkv = Tensor::<3>::from_dispatch(qkv);
        let dtype = qkv.dtype();
        let (q, own) = self.parts(qkv);
        let out = Tensor::<3>::from_dispatch(out).unsqueeze();
        let result = (out, Tensor::from_dispatch(lse));
        let dout = Tensor::<3>::from_dispatch(gradient).unsqueeze();
        let (dq, block) = self.exchange.backward(&self.of, q, own, result, dout);
        let gradient = Tensor::cat(vec![dq.squeeze_dim::<3>(0), block], 1);
        vec![Some(gradient.cast(dtype).into_dispatch())]
    }
}

//! Attention that holds its scores, `[batch, heads, seq, seq]`: of a product, a softmax, dropout and
//! another product.

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::Heads;
use burn_megatron_kernels::softmax::{self, Mask, Sink};

/// Attention of `[batch, seq, (heads + 2 groups) * width]`, giving
/// `[batch, seq, heads * width]`; `mask` says what is seen, `dropout` acts on the
/// probabilities.
///
/// Queries are multiplied as `[batch, groups, heads per group * seq, width]`, so that one product
/// serves all heads of a group.
pub(super) fn attend(
    qkv: Tensor<3>,
    heads: Heads,
    mask: &Mask,
    fused_softmax: bool,
    dropout: impl FnOnce(Tensor<4>) -> Tensor<4>,
) -> Tensor<3> {
    let [batch, seq, _] = qkv.dims();
    let (count, groups, width) = (heads.heads, heads.groups, heads.width);
    let part = |first: usize, heads: usize| {
        let part = qkv.clone().narrow(2, first * width, heads * width);
        part.reshape([batch, seq, heads, width]).swap_dims(1, 2)
    };
    let (k, v) = (part(count, groups), part(count + groups, groups));
    let grouped = [batch, groups, count / groups * seq];
    let q = part(0, count).reshape([grouped[0], grouped[1], grouped[2], width]);
    let scores = q.matmul(k.swap_dims(2, 3));
    let scores = scores.reshape([batch, count, seq, seq]);
    let scale = 1.0 / (width as f64).sqrt();
    let probabilities = match fused_softmax {
        true => softmax::masked_softmax(scores, scale, mask, Sink::None),
        false => softmax::composed::masked_softmax(scores, scale, mask, Sink::None),
    };
    let weights = dropout(probabilities).reshape([grouped[0], grouped[1], grouped[2], seq]);
    let out = weights.matmul(v).reshape([batch, count, seq, width]);
    out.swap_dims(1, 2).reshape([batch, seq, count * width])
}

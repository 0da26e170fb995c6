//! The reference cross entropy loss, composed of Burn's own operations and differentiated by Burn's autodiff.

use burn::tensor::{Int, Tensor};

use super::{CrossEntropyOptions, VocabularyShard, check, ignored, ops::LossWeights, widened};
use crate::cpu::wide;
use crate::error::accept;

/// Returns the cross entropy loss of each row. See [`cross_entropy`](super::cross_entropy).
///
/// The log-softmax is saved for the backward pass. If the logits of an ignored row are not finite, the gradient of the
/// row is NaN. With the fused loss, it is 0.
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> Tensor<1> {
    let [rows, tokens] = logits.dims();
    let whole = VocabularyShard { first: 0, tokens };
    accept(check(&logits, &targets, &whole, options));
    let weights = LossWeights::new(tokens, options);
    let targets = widened(targets);
    let dtype = wide(logits.dtype());
    let logits = logits.cast(dtype);

    let max = logits.clone().detach().max_dim(1);
    let shifted = logits - max.clone();
    let log_sum = shifted.clone().exp().sum_dim(1).log();
    let index = targets.clone().clamp(0, tokens as i64 - 1);
    let target = shifted.clone().gather(1, index.reshape([rows, 1]));
    let mut loss = log_sum.clone() - target * weights.keep;
    if weights.smoothing != 0.0 {
        loss = loss - shifted.mean_dim(1) * weights.smoothing;
    }
    if weights.z != 0.0 {
        loss = loss + (log_sum + max).powi_scalar(2) * weights.z;
    }
    let loss = loss.reshape([rows]);

    let kept = match ignored(options.ignore, targets.dtype()) {
        Some(ignore) => targets.clone().not_equal_scalar(ignore),
        None => targets.clone().equal(targets.clone()),
    };
    let no_token = targets.clone().lower_scalar(0);
    let fault = no_token
        .bool_or(targets.greater_equal_scalar(tokens as i64))
        .bool_and(kept.clone());
    // The loss is multiplied by NaN instead of being replaced, so that the gradient of an invalid row is NaN too.
    let mark = Tensor::<1>::ones([rows], (&loss.device(), dtype)).mask_fill(fault, f64::NAN);
    (loss * mark).mask_fill(kept.bool_not(), 0.0)
}

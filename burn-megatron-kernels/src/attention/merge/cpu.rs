//! The CPU implementation of the merge. It makes one pass over the rows.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;

use super::UNSEEN;
use crate::cpu::{Real, for_rows, own, slice, slice_mut, tensor};

/// Merges two results. See [`merge`](super::merge). All inputs must be contiguous and must not be empty.
pub(super) fn merge<E: Real>(mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let [_, queries, heads, width] = inputs[0].shape().dims();
    let mut out = own::<E>(inputs.remove(0));
    let (lse, other_lse) = (slice::<E>(&inputs[0]), slice::<E>(&inputs[2]));
    let other = slice::<E>(&inputs[1]);
    let merged: Vec<Merged<E>> = lse
        .iter()
        .zip(other_lse)
        .map(|(one, two)| Merged::new(*one, *two))
        .collect();
    for_rows(
        slice_mut::<E>(&mut out),
        width,
        #[inline(always)]
        |row, out| {
            let (head, query, batch) = (row % heads, row / heads % queries, row / heads / queries);
            let merged = &merged[(batch * heads + head) * queries + query];
            for (out, other) in out.iter_mut().zip(&other[row * width..]) {
                *out = *out * merged.share + *other * merged.other_share;
            }
        },
    );
    let lse: Vec<E> = merged.iter().map(|merged| merged.lse).collect();
    let shape = inputs[0].shape();
    vec![out, tensor(lse, shape)]
}

/// The weights of both results in a row of the merged result, and its log-sum-exp.
struct Merged<E> {
    share: E,
    other_share: E,
    lse: E,
}

impl<E: Real> Merged<E> {
    fn new(lse: E, other_lse: E) -> Self {
        let (one, two) = (lse.double(), other_lse.double());
        let largest = one.max(two);
        if largest <= UNSEEN {
            return Self {
                share: E::ZERO,
                other_share: E::ZERO,
                lse: E::NEG_INFINITY,
            };
        }
        let sum = (one - largest).exp() + (two - largest).exp();
        Self {
            share: E::of((one - largest).exp() / sum),
            other_share: E::of((two - largest).exp() / sum),
            lse: E::of(sum.ln() + largest),
        }
    }
}

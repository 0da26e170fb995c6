//! The CPU implementation. It sorts the pairs of each expert by weight.

use burn::backend::flex::FlexTensor;

use crate::cpu::{Element, Real, for_float, slice, tensor};

pub(super) fn keep(experts: usize, capacity: usize, inputs: &[FlexTensor]) -> FlexTensor {
    let mut kept = slice::<i32>(&inputs[0]).to_vec();
    let [row_to_pair, offsets] = [2, 3].map(|input| slice::<i32>(&inputs[input]));
    let weights = inputs.get(4);
    for expert in 0..experts {
        let rows = offsets[expert] as usize..offsets[expert + 1] as usize;
        let mut pairs: Vec<usize> = row_to_pair[rows]
            .iter()
            .map(|pair| *pair as usize)
            .collect();
        if pairs.len() <= capacity {
            continue;
        }
        if let Some(weights) = weights {
            for_float!(weights.dtype(), E => sort(&mut pairs, slice::<E>(weights)));
        }
        for pair in &pairs[capacity..] {
            kept[*pair] = -1;
        }
    }
    tensor(kept, inputs[0].layout().shape().clone())
}

/// Sorts pairs by weight, largest first. The sort is stable, so that pairs with equal weights keep the order of the
/// tokens.
fn sort<E: Element>(pairs: &mut [usize], weights: &[E]) {
    let weight = |pair: &usize| weights[*pair].wide().double();
    pairs.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
}

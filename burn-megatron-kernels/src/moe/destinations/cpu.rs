//! The CPU implementation. It processes one token after the other.

use burn::backend::flex::FlexTensor;

use super::ExpertPlacement;
use crate::cpu::{slice, tensor};

pub(super) fn destinations(ranks: &ExpertPlacement, indices: &FlexTensor) -> FlexTensor {
    let shape = indices.layout().shape();
    let [tokens, top_k] = [shape[0], shape[1]];
    let mut found = Vec::with_capacity(tokens * top_k * ranks.parts);
    for choices in slice::<i32>(indices).chunks(top_k) {
        let first = found.len();
        for choice in choices {
            for part in 0..ranks.parts {
                let own = destination(ranks, *choice, part);
                let is_new = !found[first..].contains(&own);
                found.push(if is_new { own } else { -1 });
            }
        }
    }
    tensor(found, [tokens, top_k * ranks.parts])
}

/// Returns the destination of a part of an expert, or -1 if it has no destination.
fn destination(ranks: &ExpertPlacement, choice: i32, part: usize) -> i32 {
    let expert = usize::try_from(choice)
        .ok()
        .filter(|it| *it < ranks.experts);
    let rank = expert
        .map(|expert| expert / ranks.experts_per_rank * ranks.stride + part * ranks.part_stride);
    let found = rank.and_then(|rank| Some(rank.checked_sub(ranks.first)? / ranks.size));
    found
        .filter(|found| *found < ranks.count)
        .map_or(-1, |found| found as i32)
}

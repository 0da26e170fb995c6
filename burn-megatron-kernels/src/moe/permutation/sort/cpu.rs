//! The CPU implementation. A first pass counts the pairs, and a second pass places them.

use burn::backend::flex::FlexTensor;

use super::super::layout::LayoutSizes;
use super::{CHUNK, expert};
use crate::cpu::{slice, tensor, vector};

pub(super) fn count(experts: usize, sizes: &LayoutSizes, pairs: &FlexTensor) -> Vec<FlexTensor> {
    let mut totals = vec![0i32; experts];
    let mut before = vec![];
    for chunk in slice::<i32>(pairs).chunks(CHUNK) {
        before.extend_from_slice(&totals);
        for expert in chunk.iter().filter_map(|index| expert(*index, experts)) {
            totals[expert] += 1;
        }
    }
    let (mut offsets, mut end) = (vec![0i32], 0);
    for total in &mut totals {
        let start = end;
        end = (start + sizes.group(*total as usize)).min(sizes.limit);
        *total = (*total).min((end - start) as i32);
        offsets.push(end as i32);
    }
    let chunks = before.len() / experts;
    vec![
        tensor(before, [chunks, experts]),
        vector(totals),
        vector(offsets),
    ]
}

pub(super) fn place(rows: usize, inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let offsets = slice::<i32>(&inputs[2]);
    let experts = offsets.len() - 1;
    let mut next = offsets.to_vec();
    let mut row_to_pair = vec![-1i32; rows];
    let row = |(pair, index): (usize, &i32)| {
        let expert = expert(*index, experts)?;
        let row = next[expert];
        if row == offsets[expert + 1] {
            return None;
        }
        next[expert] += 1;
        row_to_pair[row as usize] = pair as i32;
        Some(row)
    };
    let pairs = slice(&inputs[0]).iter().enumerate();
    let rows: Vec<i32> = pairs.map(row).map(|row| row.unwrap_or(-1)).collect();
    let shape = inputs[0].layout().shape().clone();
    vec![vector(row_to_pair), tensor(rows, shape)]
}

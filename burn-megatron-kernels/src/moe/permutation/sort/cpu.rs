//! On Burn's CPU backend: one pass to count, one to place.

use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;

use super::{CHUNK, CountOp, PlaceOp, expert};

fn ints(values: Vec<i32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

fn indices(tensor: &FlexTensor) -> &[i32] {
    tensor.as_slice().unwrap_or_default()
}

pub(super) fn count(op: &CountOp, pairs: &FlexTensor) -> Vec<FlexTensor> {
    let experts = op.experts;
    let mut totals = vec![0i32; experts];
    let mut before = vec![];
    for chunk in indices(pairs).chunks(CHUNK) {
        before.extend_from_slice(&totals);
        for expert in chunk.iter().filter_map(|index| expert(*index, experts)) {
            totals[expert] += 1;
        }
    }
    let (mut offsets, mut end) = (vec![0i32], 0);
    for total in &mut totals {
        let start = end;
        end = (start + op.sizes.group(*total as usize)).min(op.sizes.limit);
        *total = (*total).min((end - start) as i32);
        offsets.push(end as i32);
    }
    let chunks = before.len() / experts;
    vec![
        ints(before, &[chunks, experts]),
        ints(totals, &[experts]),
        ints(offsets, &[experts + 1]),
    ]
}

pub(super) fn place(op: &PlaceOp, inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let offsets = indices(&inputs[2]);
    let experts = offsets.len() - 1;
    let mut next = offsets.to_vec();
    let mut row_to_pair = vec![-1i32; op.rows];
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
    let pairs = indices(&inputs[0]).iter().enumerate();
    let rows: Vec<i32> = pairs.map(row).map(|row| row.unwrap_or(-1)).collect();
    let shape = inputs[0].layout().shape().clone();
    let rows = FlexTensor::from_data(TensorData::new(rows, shape));
    vec![ints(row_to_pair, &[op.rows]), rows]
}

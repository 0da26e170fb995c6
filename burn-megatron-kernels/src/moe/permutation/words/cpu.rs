//! The CPU implementation. It processes rows in parallel.

use burn::backend::flex::FlexTensor;

use super::WordSizes;
use crate::cpu::{for_row_tasks, slice, tensor};

pub(super) fn permute_words(sizes: &WordSizes, inputs: &[FlexTensor]) -> FlexTensor {
    let [left, right] = [0, 1].map(|part| slice::<u32>(&inputs[part]));
    let index = slice::<i32>(&inputs[2]);
    let [a, b] = sizes.widths;
    let mut output = vec![0u32; sizes.rows * (a + b)];
    let task = |first: usize, output: &mut [u32]| {
        for (row, pair) in output.chunks_exact_mut(a + b).zip(&index[first..]) {
            let Ok(pair) = usize::try_from(*pair) else {
                continue;
            };
            let token = pair / sizes.top_k;
            row[..a].copy_from_slice(&left[token * a..(token + 1) * a]);
            row[a..].copy_from_slice(&right[token * b..(token + 1) * b]);
        }
    };
    for_row_tasks(&mut output, a + b, 1, task);
    tensor(output, [sizes.rows, a + b])
}

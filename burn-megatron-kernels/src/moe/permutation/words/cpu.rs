//! On Burn's CPU backend: rows in parallel.

use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;
use rayon::prelude::*;

use super::PermuteWordsOp;
use crate::cpu::{ROW_GRAIN, rows_per_task};

pub(super) fn permute_words(op: &PermuteWordsOp, inputs: &[FlexTensor]) -> FlexTensor {
    let [left, right] = [0, 1].map(|part| inputs[part].as_slice::<u32>().unwrap_or_default());
    let index = inputs[2].as_slice::<i32>().unwrap_or_default();
    let [a, b] = op.widths;
    let mut output = vec![0u32; op.rows * (a + b)];
    let task = |first: usize, output: &mut [u32]| {
        for (row, pair) in output.chunks_exact_mut(a + b).zip(&index[first..]) {
            let Ok(pair) = usize::try_from(*pair) else {
                continue;
            };
            let token = pair / op.top_k;
            row[..a].copy_from_slice(&left[token * a..(token + 1) * a]);
            row[a..].copy_from_slice(&right[token * b..(token + 1) * b]);
        }
    };
    if output.len() <= ROW_GRAIN {
        task(0, &mut output);
    } else {
        let rows = rows_per_task(a + b);
        let tasks = output.par_chunks_mut(rows * (a + b)).enumerate();
        tasks.for_each(|(i, output)| task(i * rows, output));
    }
    FlexTensor::from_data(TensorData::new(output, [op.rows, a + b]))
}

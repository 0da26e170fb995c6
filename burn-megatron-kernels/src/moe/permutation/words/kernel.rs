//! The CubeCL kernel. A unit copies one u32 word of a row.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::WordSizes;
use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch};
use crate::launch::exactly;

/// The number of units per cube.
const UNITS: u32 = 256;

#[cube(launch_unchecked)]
fn permute_words_kernel(
    left: &Tensor<u32>,
    right: &Tensor<u32>,
    index: &Tensor<i32>,
    output: &mut Tensor<u32>,
    words: u32,
    left_width: u32,
    right_width: u32,
    top_k: u32,
) {
    let at = ABSOLUTE_POS;
    if at < words as usize {
        let width = left_width + right_width;
        let (row, column) = (at as u32 / width, at as u32 % width);
        let pair = index[row as usize];
        let mut word = 0u32;
        if pair >= 0i32 {
            let token = pair as u32 / top_k;
            if column < left_width {
                word = left[(token * left_width + column) as usize];
            } else {
                word = right[(token * right_width + column - left_width) as usize];
            }
        }
        output[at] = word;
    }
}

/// Permutes the words. See [`super::permute_words`].
pub(super) fn permute_words(sizes: &WordSizes, inputs: Vec<CubeTensor>) -> CubeTensor {
    let [left, right, index] = exactly(inputs);
    let client = left.client.clone();
    let output = empty(&left, [sizes.rows, sizes.width()], DType::U32);
    let words = sizes.rows * sizes.width();
    // SAFETY: units past the words access no memory, and indices come from a map.
    unsafe {
        launch!(
            permute_words_kernel,
            [client, words.div_ceil(UNITS as usize), UNITS],
            [],
            [left, right, index, &output],
            (words as u32),
            (sizes.widths[0] as u32, sizes.widths[1] as u32),
            (sizes.top_k as u32)
        );
    }
    output
}

/// Adds one AOT instance for all widths.
pub(crate) fn aot_instances(list: &mut AotList) {
    // The rows are gathered, so the kernel reads their indices one by one.
    instance!(
        list.other("moe/permute_words"), UNITS,
        permute_words_kernel::PermuteWordsKernel [_ _ _ _ _ _ _ _] ()
    );
}

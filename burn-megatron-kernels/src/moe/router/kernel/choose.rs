//! The kernel that chooses experts. It computes the rank of each expert, which is the number of experts with a better
//! score.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{AOT_CUBE, TokenCube, scores};
use crate::cube::instance::{AotList, given, instance, types};
use crate::cube::{empty, launch, matrix_sizes};
use crate::moe::router::{LOWEST, RouterOptions};
use crate::moe::score::ScoreFunction;
use crate::moe::score::kernel::numerator;
use crate::moe::score::row::row_denominator;

/// The compile-time parameters of the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ChooseVariant {
    score: ScoreFunction,
    /// Whether the choice is limited to groups of experts.
    grouped: bool,
    /// The number of values in shared memory. It is at least the number of experts.
    size: usize,
    cube: TokenCube,
}

/// Returns whether the score `other` with index `i` is ranked before the score `score` with index `at`.
#[cube]
fn before(other: f32, i: u32, score: f32, at: u32) -> bool {
    other > score || (other == score && i < at)
}

/// Returns the rank of the value at index `at` among the `count` values of `list` that start at `first`.
#[cube]
fn place(list: &Shared<[f32]>, first: u32, count: u32, at: u32) -> u32 {
    let score = list[at as usize];
    let mut place = 0u32;
    for i in first..first + count {
        place += select(before(list[i as usize], i, score, at), 1u32, 0u32);
    }
    place
}

/// Returns the sum of the `terms` largest values among the `count` values of `list` that start at `first`. The largest
/// value is added first.
#[cube]
fn sum_of_best(list: &Shared<[f32]>, first: u32, count: u32, terms: u32) -> f32 {
    let mut sum = 0.0f32;
    for rank in 0..terms {
        for i in first..first + count {
            if place(list, first, count, i) == rank {
                sum += list[i as usize];
            }
        }
    }
    sum
}

#[cube(launch_unchecked)]
fn choose_kernel<F: Float>(
    logits: &Tensor<F>,
    bias: &ComptimeOption<OwnedTensor<f32>>,
    indices: &mut Tensor<i32>,
    tokens: u32,
    experts: u32,
    top_k: u32,
    groups: u32,
    chosen_groups: u32,
    terms: u32,
    #[comptime] variant: ChooseVariant,
    #[define(F)] _dtype: ElemType,
) {
    let units = comptime!(variant.cube.units);
    let mut list = Shared::<[f32]>::new_slice(comptime!(variant.size));
    let mut of_groups =
        Shared::<[f32]>::new_slice(comptime!(if variant.grouped { variant.size } else { 1 }));
    let mut open =
        Shared::<[u32]>::new_slice(comptime!(if variant.grouped { variant.size } else { 1 }));
    let token = CUBE_POS;
    if token < tokens as usize {
        let start = token * experts as usize;
        let mut largest = 0.0f32;
        let mut total = 1.0f32;
        if comptime!(variant.score == ScoreFunction::PreSoftmax) {
            let planes = comptime!(variant.cube.planes);
            let of_row = row_denominator::<F>(logits, start, experts, variant.score, units, planes);
            largest = of_row.largest;
            total = of_row.total;
        }
        let mut expert = UNIT_POS;
        while expert < experts {
            let mut score = f32::cast_from(logits[start + expert as usize]);
            if comptime!(variant.score != ScoreFunction::Softmax) {
                score = numerator(score, largest, variant.score) / total;
            }
            #[comptime]
            match bias {
                ComptimeOption::Some(bias) => {
                    score += bias.as_slice()[expert as usize];
                }
                ComptimeOption::None => {}
            }
            let lowest = f32::new(comptime!(LOWEST));
            list[expert as usize] = select(score > lowest, score, lowest);
            expert += units;
        }
        sync_cube();
        if comptime!(variant.grouped) {
            let size = experts / groups;
            let mut group = UNIT_POS;
            while group < groups {
                of_groups[group as usize] = sum_of_best(&list, group * size, size, terms);
                group += units;
            }
            sync_cube();
            let mut group = UNIT_POS;
            while group < groups {
                let is_open = place(&of_groups, 0u32, groups, group) < chosen_groups;
                open[group as usize] = select(is_open, 1u32, 0u32);
                group += units;
            }
            sync_cube();
        }
        let mut expert = UNIT_POS;
        while expert < experts {
            let mut place_of = 0u32;
            if comptime!(variant.grouped) {
                let size = experts / groups;
                let score = list[expert as usize];
                place_of += select(open[(expert / size) as usize] == 0u32, experts, 0u32);
                for group in 0..groups {
                    if open[group as usize] == 1u32 {
                        for i in group * size..group * size + size {
                            let is_before = before(list[i as usize], i, score, expert);
                            place_of += select(is_before, 1u32, 0u32);
                        }
                    }
                }
            } else {
                place_of += place(&list, 0u32, experts, expert);
            }
            if place_of < top_k {
                indices[token * top_k as usize + place_of as usize] = expert as i32;
            }
            expert += units;
        }
    }
}

/// Chooses experts. See [`RouterOp`](super::super::backward::RouterOp).
pub(in crate::moe::router) fn choose(
    options: &RouterOptions,
    mut inputs: Vec<CubeTensor>,
) -> CubeTensor {
    let logits = inputs.remove(0);
    let client = logits.client.clone();
    let [tokens, experts] = matrix_sizes(&logits);
    let indices = empty(&logits, [tokens, options.top_k], DType::I32);
    if tokens == 0 {
        return indices;
    }
    let groups = options.groups;
    let variant = ChooseVariant {
        score: options.score,
        grouped: groups.is_some(),
        size: experts.next_power_of_two(),
        cube: TokenCube::new(&client, &logits),
    };
    let (all, chosen, terms) = match groups {
        Some(groups) => (groups.groups, groups.chosen, groups.score.terms()),
        None => (1, 1, 1),
    };
    let dtype = dtype_to_storage_type(logits.dtype);
    // SAFETY: experts past the last one access no memory, and only the first `top_k` experts in the ranking write a
    // result.
    unsafe {
        launch!(
            choose_kernel,
            [client, tokens, variant.cube.units],
            [],
            [logits, inputs.pop(), &indices],
            (tokens as u32, experts as u32, options.top_k as u32),
            (all as u32, chosen as u32, terms as u32),
            (variant, dtype)
        );
    }
    indices
}

/// Adds AOT instances with 256 experts for each score function, and for the group-limited choice of DeepSeek-V3.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, dtype, _) in types() {
        for (of, score) in scores() {
            for (form, grouped) in [("plain", false), ("grouped", true)] {
                let variant = ChooseVariant {
                    score,
                    grouped,
                    size: 256,
                    cube: AOT_CUBE,
                };
                instance!(
                    list.other("moe/choose/{name}/{of}/{form}"), AOT_CUBE.units,
                    choose_kernel::ChooseKernel
                    [_ (given(grouped)) _ _ _ _ _ _ _] (variant, dtype)
                );
            }
        }
    }
}

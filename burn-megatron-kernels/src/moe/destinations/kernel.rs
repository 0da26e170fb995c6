//! The CubeCL kernel. A unit computes the destination of one slot, and compares it with the destinations of the earlier
//! slots.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::ExpertPlacement;
use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch, matrix_sizes};

/// The number of units per cube.
const UNITS: u32 = 256;

/// Returns the destination of a part of an expert, or -1 if it has no destination.
#[cube]
fn destination(choice: i32, part: u32, #[comptime] ranks: ExpertPlacement) -> i32 {
    let experts = comptime!(ranks.experts as i32);
    let first = comptime!(ranks.first as u32);
    let per_rank = comptime!(ranks.experts_per_rank as u32);
    let (stride, part_stride) = (
        comptime!(ranks.stride as u32),
        comptime!(ranks.part_stride as u32),
    );
    let size = comptime!(ranks.size as u32);
    let count = comptime!(ranks.count as u32);
    // The result is the destination plus 1, or 0 without a destination.
    let mut result = 0i32;
    if choice >= 0i32 && choice < experts {
        let rank = choice as u32 / per_rank * stride + part * part_stride;
        if rank >= first {
            let found = (rank - first) / size;
            if found < count {
                result = found as i32 + 1i32;
            }
        }
    }
    result - 1i32
}

#[cube(launch_unchecked)]
fn destinations_kernel(
    indices: &Tensor<i32>,
    found: &mut Tensor<i32>,
    slots: u32,
    top_k: u32,
    #[comptime] ranks: ExpertPlacement,
) {
    let at = ABSOLUTE_POS;
    if at < slots as usize {
        let parts = comptime!(ranks.parts as u32);
        let width = top_k * parts;
        let (token, slot) = (at as u32 / width, at as u32 % width);
        let start = token * top_k;
        let choice = indices[(start + slot / parts) as usize];
        let own = destination(choice, slot % parts, ranks);
        let mut result = own;
        for before in 0..slot {
            let choice = indices[(start + before / parts) as usize];
            if destination(choice, before % parts, ranks) == own {
                result = -1i32;
            }
        }
        found[at] = result;
    }
}

/// Computes the destinations. See [`super::destinations`].
pub(super) fn destinations(ranks: &ExpertPlacement, indices: CubeTensor) -> CubeTensor {
    let client = indices.client.clone();
    let [tokens, top_k] = matrix_sizes(&indices);
    let slots = tokens * top_k * ranks.parts;
    let found = empty(&indices, [tokens, top_k * ranks.parts], DType::I32);
    // SAFETY: units past the slots access no memory.
    unsafe {
        launch!(
            destinations_kernel,
            [client, slots.div_ceil(UNITS as usize), UNITS],
            [],
            [indices, &found],
            (slots as u32, top_k as u32),
            (*ranks)
        );
    }
    found
}

/// Adds one AOT instance, for 64 experts on 8 ranks.
pub(crate) fn aot_instances(list: &mut AotList) {
    let ranks = ExpertPlacement {
        experts: 64,
        experts_per_rank: 8,
        stride: 1,
        parts: 1,
        part_stride: 0,
        first: 0,
        size: 1,
        count: 8,
    };
    instance!(
        list.other("moe/destinations"), UNITS,
        destinations_kernel::DestinationsKernel [_ _ _ _] (ranks)
    );
}

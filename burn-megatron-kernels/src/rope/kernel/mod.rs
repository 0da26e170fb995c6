//! The CubeCL implementation of rotary position embedding.
//!
//! One unit rotates one vector (or pair of vectors) of a few heads of a token, with the cosines and sines in registers.
//! If the rotation is not in place, other units copy the parts that are not rotated.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use super::check::NAME;
use super::ops::RotateOp;
use super::{Pairing, RotaryHeads};
use crate::error::{accept, check_size};

mod aot_instances;
mod launch;
mod mla;
mod rotate;

pub(crate) use aot_instances::aot_instances;
pub(super) use launch::rotate;
pub(super) use mla::{mla_backward, mla_forward};
use rotate::TokenAnglesLaunch;

/// The number of units per cube if the split has not been measured.
const UNITS: u32 = 256;

/// The maximum number of heads per unit if the split has not been measured. The loads of these heads are in flight
/// together. More heads would need registers that reduce occupancy.
const MAX_HEADS_PER_UNIT: usize = 2;

/// The assignment of the heads of a tensor to units. Features are counted in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RopePlan {
    /// The number of elements per vector.
    vector: usize,
    /// The number of elements per vector of the table.
    lanes: usize,
    /// The number of vectors of the table per item.
    loads: usize,
    heads: usize,
    rotated: usize,
    /// The number of heads per unit, a divisor of `rotated`.
    group: usize,
    features: usize,
    first: usize,
    /// The number of rotated vectors per head.
    width: usize,
    /// The number of items per head. A unit rotates one item: one vector of adjacent features, or
    /// two vectors.
    items: usize,
    /// The distance between the first vectors of consecutive items.
    stride: usize,
    /// The distance between the two vectors of an item. It is 0 if pairs lie within one vector.
    distance: usize,
}

impl RopePlan {
    /// Creates a plan with the longest vectors that the device and all widths allow. `others` are additional widths
    /// that vectors must divide.
    fn new(client: &Client, dtype: DType, heads: RotaryHeads, others: &[usize]) -> Self {
        let rotated_units = match heads.pairing {
            Pairing::Halves => heads.width / 2,
            Pairing::Interleaved => heads.width,
        };
        let widths = [heads.features, heads.first, rotated_units];
        let fits = |size: &usize| widths.iter().chain(others).all(|w| w.is_multiple_of(*size));
        let vector = client.io_optimized_vector_sizes(dtype.size()).find(fits);
        Self::with_vector(heads, vector.unwrap_or(1))
    }

    fn with_vector(heads: RotaryHeads, vector: usize) -> Self {
        let half = heads.width / 2;
        let (pairs, items, stride, distance) = match heads.pairing {
            Pairing::Halves => (vector, half / vector, 1, half / vector),
            Pairing::Interleaved if vector == 1 => (1, half, 2, 1),
            Pairing::Interleaved => (vector / 2, heads.width / vector, 1, 0),
        };
        let lanes = pairs.min(4);
        Self {
            vector,
            lanes,
            loads: pairs / lanes,
            heads: heads.heads,
            rotated: heads.rotated,
            group: 1,
            features: heads.features / vector,
            first: heads.first / vector,
            width: heads.width / vector,
            items,
            stride,
            distance,
        }
        .grouped(MAX_HEADS_PER_UNIT)
    }

    /// Returns the plan with the largest number of heads per unit that divides the number of rotated heads and is at
    /// most `most`.
    fn grouped(self, most: usize) -> Self {
        let divides = |group: &usize| self.rotated.is_multiple_of(*group);
        let group = (1..=most).rev().find(divides).unwrap_or(1);
        Self { group, ..self }
    }

    /// Returns the number of units that rotate one token.
    fn rotated_units(&self) -> usize {
        self.rotated / self.group * self.items
    }

    /// Returns the number of vectors of one token that are not rotated.
    fn unrotated_vectors(&self) -> usize {
        self.heads * self.features - self.rotated * self.width
    }
}

/// The table and the positions of a launch as kernel arguments.
#[derive(Clone)]
pub(super) struct AngleArgs {
    cosine: CubeTensor,
    sine: CubeTensor,
    each: Option<CubeTensor>,
    seq: usize,
    start: usize,
    direction: f32,
}

impl AngleArgs {
    /// Creates the arguments from the last inputs of a launch.
    pub(super) fn new(inputs: Vec<CubeTensor>, seq: usize, op: &RotateOp) -> Self {
        let mut inputs = inputs.into_iter();
        let (Some(cosine), Some(sine)) = (inputs.next(), inputs.next()) else {
            unreachable!("every launch of this operation has cosines and sines")
        };
        Self {
            cosine,
            sine,
            each: inputs.next(),
            seq,
            start: op.start,
            direction: if op.is_back() { -1.0 } else { 1.0 },
        }
    }

    fn launch(&self, tokens: usize) -> TokenAnglesLaunch {
        TokenAnglesLaunch::new(
            self.start as u32,
            self.cosine.shape()[0] as u32 - 1,
            self.seq as u32,
            tokens as u32,
            self.direction,
        )
    }

    fn tensors(&self) -> (&CubeTensor, &CubeTensor, Option<CubeTensor>) {
        (&self.cosine, &self.sine, self.each.clone())
    }
}

/// Returns the number of cubes with `units` units for a launch with `items` units for each of `tokens` tokens.
///
/// The total number of units must fit into 32 bits. It exceeds 32 bits only for tensors with odd widths near the size
/// limit.
fn cubes(tokens: usize, items: usize, units: u32) -> usize {
    accept(check_size(NAME, &[tokens, items]));
    (tokens * items).div_ceil(units as usize)
}

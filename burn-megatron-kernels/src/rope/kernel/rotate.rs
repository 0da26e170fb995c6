//! The kernel that rotates one tensor.

use cubecl::prelude::*;

use super::RopePlan;
use crate::cube::instance::default_fields;

/// The positions of the tokens of a launch, and the direction of the rotation.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct TokenAngles {
    /// The table row of the first token of a sequence.
    start: u32,
    /// The last row of the table.
    last: u32,
    /// The number of tokens per sequence.
    seq: u32,
    pub tokens: u32,
    /// The direction of the rotation: 1, or -1 for the inverse rotation.
    pub direction: f32,
}

default_fields!(TokenAnglesCompilationArg [start last seq tokens direction]);

/// Returns the table row of a token, in vectors of the table.
#[cube]
pub(super) fn table_row(
    each: &ComptimeOption<OwnedTensor<i32>>,
    token: usize,
    angles: &TokenAngles,
    #[comptime] plan: RopePlan,
) -> usize {
    let mut position = angles.start + token as u32 % angles.seq;
    #[comptime]
    match each {
        ComptimeOption::Some(each) => {
            position = clamp(each.as_slice()[token], 0i32, angles.last as i32) as u32;
        }
        ComptimeOption::None => {}
    }
    position as usize * comptime!(plan.items * plan.loads)
}

/// Returns the cosines of an item, with one cosine for each element of its first vector.
#[cube]
pub(super) fn cosines<N: Size, T: Size>(
    table: &Tensor<Vector<f32, T>>,
    at: usize,
    #[comptime] plan: RopePlan,
) -> Vector<f32, N> {
    let mut angles = Vector::<f32, N>::new(0.0);
    #[unroll]
    for load in 0..plan.loads {
        let vector = table[at + load];
        #[unroll]
        for lane in 0..plan.lanes {
            let value = vector.extract(lane);
            let pair = comptime!(load * plan.lanes + lane);
            insert_pair(&mut angles, pair, value, value, plan);
        }
    }
    angles
}

/// Returns the factors that multiply the partners of the elements of an item's first vector. The factor is the negative
/// sine for the first element of a pair, and the sine for the second element.
#[cube]
pub(super) fn sines<N: Size, T: Size>(
    table: &Tensor<Vector<f32, T>>,
    at: usize,
    direction: f32,
    #[comptime] plan: RopePlan,
) -> Vector<f32, N> {
    let mut angles = Vector::<f32, N>::new(0.0);
    #[unroll]
    for load in 0..plan.loads {
        let vector = table[at + load];
        #[unroll]
        for lane in 0..plan.lanes {
            let value = vector.extract(lane) * direction;
            let pair = comptime!(load * plan.lanes + lane);
            insert_pair(&mut angles, pair, -value, value, plan);
        }
    }
    angles
}

/// Inserts the values of both elements of a pair. If the second element is in another vector, inserts only the value of
/// the first element.
#[cube]
fn insert_pair<N: Size>(
    angles: &mut Vector<f32, N>,
    #[comptime] pair: usize,
    first: f32,
    second: f32,
    #[comptime] plan: RopePlan,
) {
    if comptime!(plan.distance == 0) {
        angles.insert(comptime!(2 * pair), first);
        angles.insert(comptime!(2 * pair + 1), second);
    } else {
        angles.insert(pair, first);
    }
}

/// Returns the vector with adjacent elements swapped.
#[cube]
pub(super) fn swapped_neighbors<N: Size>(
    x: Vector<f32, N>,
    #[comptime] plan: RopePlan,
) -> Vector<f32, N> {
    let mut y = Vector::<f32, N>::new(0.0);
    #[unroll]
    for pair in 0..plan.vector / 2 {
        y.insert(comptime!(2 * pair), x.extract(comptime!(2 * pair + 1)));
        y.insert(comptime!(2 * pair + 1), x.extract(comptime!(2 * pair)));
    }
    y
}

/// Rotates an item of a group of heads. `at` is the index of the item's first vector in the first head.
#[cube]
pub(super) fn rotate_group<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    y: &mut Tensor<Vector<F, N>>,
    at: usize,
    cosine: Vector<f32, N>,
    sine: Vector<f32, N>,
    #[comptime] plan: RopePlan,
) {
    let mut first = Array::<Vector<f32, N>>::new(plan.group);
    let mut second = Array::<Vector<f32, N>>::new(plan.group);
    #[unroll]
    for head in 0..plan.group {
        let place = at + head * plan.features;
        first[head] = Vector::cast_from(x[place]);
        if comptime!(plan.distance > 0) {
            second[head] = Vector::cast_from(x[place + plan.distance]);
        }
    }
    #[unroll]
    for head in 0..plan.group {
        let place = at + head * plan.features;
        if comptime!(plan.distance > 0) {
            let (a, b) = (first[head], second[head]);
            y[place] = Vector::cast_from(a * cosine + b * sine);
            y[place + plan.distance] = Vector::cast_from(b * cosine - a * sine);
        } else {
            let a = first[head];
            y[place] = Vector::cast_from(a * cosine + swapped_neighbors(a, plan) * sine);
        }
    }
}

/// Rotates item `item` of a token. If the index is past the rotated items, copies the item.
#[cube]
pub(super) fn rotate_item<F: Float, N: Size, T: Size>(
    x: &Tensor<Vector<F, N>>,
    cosine: &Tensor<Vector<f32, T>>,
    sine: &Tensor<Vector<f32, T>>,
    y: &mut Tensor<Vector<F, N>>,
    token: usize,
    row: usize,
    item: usize,
    direction: f32,
    #[comptime] plan: RopePlan,
) {
    let base = token * comptime!(plan.heads * plan.features);
    let rotated_units = comptime!(plan.rotated_units());
    if item < rotated_units {
        let part = item % plan.items;
        let head = item / plan.items * plan.group;
        let angle = row + part * plan.loads;
        let cosine = cosines::<N, T>(cosine, angle, plan);
        let sine = sines::<N, T>(sine, angle, direction, plan);
        let at = base + head * plan.features + part * plan.stride + plan.first;
        rotate_group(x, y, at, cosine, sine, plan);
    } else {
        let at = base + unrotated_offset(item - rotated_units, plan);
        y[at] = x[at];
    }
}

/// Returns the offset within a token of a vector that is not rotated.
#[cube]
fn unrotated_offset(item: usize, #[comptime] plan: RopePlan) -> usize {
    let rest = comptime!(plan.features - plan.width);
    let within = comptime!(plan.rotated * rest);
    let mut place = item + comptime!(plan.rotated * plan.width);
    if comptime!(rest > 0) {
        if item < within {
            let feature = item % rest;
            place = item / rest * plan.features + feature;
            if feature >= plan.first {
                place += plan.width;
            }
        }
    }
    place
}

/// Processes one item of one token per unit, in cubes of `units` units.
#[cube(launch_unchecked)]
pub(super) fn rotate_kernel<F: Float, N: Size, T: Size>(
    x: &Tensor<Vector<F, N>>,
    cosine: &Tensor<Vector<f32, T>>,
    sine: &Tensor<Vector<f32, T>>,
    each: &ComptimeOption<OwnedTensor<i32>>,
    y: &mut Tensor<Vector<F, N>>,
    angles: &TokenAngles,
    #[comptime] plan: RopePlan,
    #[comptime] items: usize,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let unit = CUBE_POS * comptime!(units as usize) + UNIT_POS as usize;
    let token = unit / items;
    if token < angles.tokens as usize {
        let row = table_row(each, token, angles, plan);
        let (item, direction) = (unit % items, angles.direction);
        rotate_item(x, cosine, sine, y, token, row, item, direction, plan);
    }
}

//! Sums and maxima over the units of a cube.

use cubecl::prelude::*;

/// Returns the sum of a vector's lanes.
#[cube]
pub(crate) fn lane_sum<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..N::value() {
        sum += vector.extract(i);
    }
    sum
}

/// Returns the largest of a vector's lanes.
#[cube]
pub(crate) fn lane_max<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut largest = vector.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        largest = max(largest, vector.extract(i));
    }
    largest
}

/// Returns the sum of `value` over the `units` units of a one-dimensional cube. Every unit gets the sum.
///
/// With `planes`, the function uses plane operations. All units of the cube must call it.
#[cube]
pub(crate) fn cube_sum(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    if comptime!(planes) {
        let sum = plane_sum(value);
        if UNIT_POS_PLANE == 0 {
            shared[PLANE_POS as usize] = sum;
        }
        sync_cube();
        let mut total = 0.0f32;
        for i in 0..units / PLANE_DIM {
            total += shared[i as usize];
        }
        sync_cube();
        total
    } else {
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut jump = comptime!(units / 2).runtime();
        while jump > 0 {
            if UNIT_POS < jump {
                let other = shared[(UNIT_POS + jump) as usize];
                shared[UNIT_POS as usize] += other;
            }
            sync_cube();
            jump /= 2;
        }
        let total = shared[0];
        sync_cube();
        total
    }
}

/// Returns the maximum of `value` over the `units` units of a one-dimensional cube. See [`cube_sum`].
#[cube]
pub(crate) fn cube_max(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    if comptime!(planes) {
        let largest = plane_max(value);
        if UNIT_POS_PLANE == 0 {
            shared[PLANE_POS as usize] = largest;
        }
        sync_cube();
        let mut total = shared[0];
        for i in 1..units / PLANE_DIM {
            total = max(total, shared[i as usize]);
        }
        sync_cube();
        total
    } else {
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut jump = comptime!(units / 2).runtime();
        while jump > 0 {
            if UNIT_POS < jump {
                let other = shared[(UNIT_POS + jump) as usize];
                let own = shared[UNIT_POS as usize];
                shared[UNIT_POS as usize] = max(own, other);
            }
            sync_cube();
            jump /= 2;
        }
        let total = shared[0];
        sync_cube();
        total
    }
}

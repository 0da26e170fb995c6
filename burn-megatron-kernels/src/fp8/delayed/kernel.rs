//! The CubeCL kernels. One cube processes one slot. Floats are processed as bits, so that NaN and subnormal magnitudes
//! give the same results as on the CPU.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{LOG_COLUMNS, ScaleRules};
use crate::cube::instance::{AotList, instance};
use crate::cube::{RowPlan, cube_sum, empty, launch, own};
use crate::fp8::kernel::tile::UNITS;
use crate::fp8::quantize::kernel::reduce::cube_total;
use crate::launch::exactly;

/// The bits of infinity. The bits of NaN are larger.
const INFINITY: u32 = 0x7f80_0000;
/// The bits of -1, which stands for a missing magnitude. The bits of -0 and all larger bits are not magnitudes.
const NONE: u32 = 0xbf80_0000;
const SIGN: u32 = 0x8000_0000;

/// Adds statistics to an entry of a log: the bits of the largest magnitude, and the number of saturated values. The
/// statistics cover `elements` values. Only one unit may call this function.
#[cube]
pub(in crate::fp8) fn log_entry(log: &mut [u32], slot: u32, amax: u32, beyond: f32, elements: f32) {
    let at = slot as usize * LOG_COLUMNS;
    let before = log[at];
    log[at] = select(before >= SIGN, amax, max(before, amax));
    log[at + 1] = u32::reinterpret(f32::reinterpret(log[at + 1]) + beyond);
    log[at + 2] = u32::reinterpret(f32::reinterpret(log[at + 2]) + elements);
}

#[cube(launch_unchecked)]
fn log_kernel(log: &mut [u32], seen: &[u32], slot: u32, elements: f32, #[comptime] counts: bool) {
    if UNIT_POS == 0 {
        let mut beyond = 0.0f32;
        if comptime!(counts) {
            beyond = f32::reinterpret(seen[1]);
        }
        log_entry(log, slot, seen[0], beyond, elements);
    }
}

/// Adds statistics to a log. See [`log_magnitude`](super::log_magnitude).
pub(super) fn log(inputs: Vec<CubeTensor>, slot: usize, elements: usize) -> CubeTensor {
    let [log, seen] = exactly(inputs);
    let counts = seen.shape()[0] == 2;
    let log = own(log);
    let client = log.client.clone();
    // SAFETY: one unit accesses the statistics and an existing entry of the log.
    unsafe {
        launch!(
            log_kernel,
            [client, 1, 1],
            [],
            [&log, seen],
            (slot as u32, elements as f32),
            (counts)
        );
    }
    log
}

/// Returns the bits of `numerator / amax`, limited to the bits of the largest float. `amax` may be subnormal, even on a
/// device that treats subnormal numbers as 0. In this case the quotient is far above the largest float.
#[cube]
fn quotient(numerator: u32, amax: u32) -> u32 {
    let top = f32::reinterpret(numerator);
    let mut scale = u32::reinterpret(top / f32::reinterpret(amax));
    if amax < 0x0080_0000 {
        // The number is scaled by 2^149, and the exponent is corrected afterwards. The correction is not a
        // multiplication, because a compiler could merge two powers of two to one factor, which is infinite.
        let large = u32::reinterpret(top / f32::cast_from(amax));
        let is_finite = (large >> 23) + 149u32 < 255u32;
        scale = select(is_finite, large + (149u32 << 23), INFINITY);
    }
    min(scale, 0x7f7f_ffffu32)
}

/// Computes the scales. `table` has four numbers per slot. See [`ScaleRules`].
#[cube(launch_unchecked)]
fn next_scales_kernel(
    logs: &[u32],
    state: &[u32],
    table: &[u32],
    next: &mut [u32],
    log: &mut [u32],
    counts: &mut [f32],
    slots: u32,
    ranks: u32,
    #[comptime] planes: bool,
) {
    let slot = CUBE_POS;
    if slot < slots as usize {
        // The bits of the largest magnitude plus one, or 0 if there is no magnitude.
        let mut key = 0u32;
        let mut beyond = 0.0f32;
        let mut elements = 0.0f32;
        let mut rank = UNIT_POS;
        while rank < ranks {
            let at = (rank as usize * slots as usize + slot) * LOG_COLUMNS;
            let bits = logs[at];
            key = max(key, select(bits >= SIGN, 0u32, bits + 1));
            beyond += f32::reinterpret(logs[at + 1]);
            elements += f32::reinterpret(logs[at + 2]);
            rank += UNITS;
        }
        let key = cube_total(key, false, planes);
        let beyond = cube_sum(beyond, UNITS, planes);
        let elements = cube_sum(elements, UNITS, planes);

        let start = table[slot * 4] as usize;
        let history = table[slot * 4 + 1];
        let moves = u32::cast_from(key > 0);
        let mut most = 0u32;
        let mut at = UNIT_POS;
        // If there is a new magnitude, the oldest magnitude is dropped.
        while at + moves < history {
            let bits = state[start + at as usize];
            next[start + (at + moves) as usize] = bits;
            most = max(most, select(bits < INFINITY, bits, 0u32));
            at += UNITS;
        }
        let most = cube_total(most, false, planes);
        if UNIT_POS == 0 {
            let mut scale = state[slot];
            if key > 0 && history > 0 {
                let last = key - 1;
                next[start] = last;
                let amax = select(table[slot * 4 + 3] == 1, last, max(last, most));
                if last < INFINITY && amax > 0 {
                    scale = quotient(table[slot * 4 + 2], amax);
                }
            }
            next[slot] = scale;
            log[slot * LOG_COLUMNS] = NONE.runtime();
            log[slot * LOG_COLUMNS + 1] = 0u32.runtime();
            log[slot * LOG_COLUMNS + 2] = 0u32.runtime();
            counts[slot * 2] = beyond;
            counts[slot * 2 + 1] = elements;
        }
    }
}

/// Computes the scales. See [`next_scales`](super::next_scales).
pub(super) fn next_scales(rules: &ScaleRules, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let [logs, state, table] = exactly(inputs);
    let (client, slots) = (state.client.clone(), rules.slots());
    let ranks = logs.shape().num_elements() / (LOG_COLUMNS * slots);
    let plan = RowPlan::new(&client, DType::F32, 1);
    let outputs = [rules.state_len(), LOG_COLUMNS * slots, 2 * slots]
        .map(|length| empty(&state, [length], DType::F32));
    let [next, log, counts] = &outputs;
    // SAFETY: cubes past the slots access no memory, and the lengths of logs and state were checked.
    unsafe {
        launch!(
            next_scales_kernel,
            [client, slots, UNITS],
            [],
            [logs, state, table],
            [next, log, counts],
            (slots as u32, ranks as u32),
            (plan.planes())
        );
    }
    outputs.into()
}

pub(crate) fn aot_instances(list: &mut AotList) {
    instance!(
        list.other("fp8/next_scales"), UNITS,
        next_scales_kernel::NextScalesKernel [_ _ _ _ _ _ _ _] (true)
    );
}

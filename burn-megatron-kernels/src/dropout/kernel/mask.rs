//! The factors of a dropout mask, computed with Philox 4x32 with 10 rounds. The kernels use 32-bit arithmetic, because
//! not every device has 64-bit integers.

use cubecl::prelude::*;

use super::alignment::{MaskAlignment, WORDS};
use crate::cube::instance::default_fields;
use crate::dropout::{DropoutMask, halves};
use crate::philox::{MULTIPLIERS, ROUNDS, WEYL};

/// A 64-bit number, stored as two 32-bit halves.
#[derive(CubeLaunch, CubeType)]
pub(crate) struct U64Halves {
    low: u32,
    high: u32,
}

impl U64Halves {
    fn launch([low, high]: [u32; 2]) -> U64HalvesLaunch {
        U64HalvesLaunch::new(low, high)
    }
}

/// A [`DropoutMask`] as kernel arguments.
#[derive(CubeLaunch, CubeType)]
pub(crate) struct MaskArgs {
    key: U64Halves,
    position: U64Halves,
    first: U64Halves,
    pitch: U64Halves,
    run: u32,
    threshold: u32,
    scale: f32,
}

impl MaskArgs {
    /// Returns the arguments of a mask. Without a mask, the arguments drop nothing.
    pub(super) fn launch(mask: Option<&DropoutMask>) -> MaskArgsLaunch {
        let none = DropoutMask {
            key: [0; 2],
            position: [0; 2],
            first: 0,
            run: 1,
            pitch: 0,
            threshold: 0,
            scale: 1.0,
        };
        let mask = mask.copied().unwrap_or(none);
        MaskArgsLaunch::new(
            U64Halves::launch(mask.key),
            U64Halves::launch(mask.position),
            U64Halves::launch(halves(mask.first)),
            U64Halves::launch(halves(mask.pitch)),
            mask.run as u32,
            mask.threshold,
            mask.scale,
        )
    }
}

default_fields!(U64HalvesCompilationArg [low high]);
default_fields!(MaskArgsCompilationArg [key position first pitch run threshold scale]);

/// The words of one Philox block.
#[derive(CubeType)]
struct PhiloxBlock {
    a: u32,
    b: u32,
    c: u32,
    d: u32,
}

/// Returns the index of the random number of an element: `first + (element / run) * pitch + element % run`.
#[cube]
fn draw(mask: &MaskArgs, element: u32) -> U64Halves {
    let run = element / mask.run;
    let offset = element - run * mask.run;
    let jump = run * mask.pitch.low;
    let jump_high = u32::mul_hi(run, mask.pitch.low) + run * mask.pitch.high;
    let start = jump + mask.first.low;
    let start_high = jump_high + mask.first.high + u32::cast_from(start < jump);
    let low = start + offset;
    U64Halves {
        low,
        high: start_high + u32::cast_from(low < start),
    }
}

/// Returns the Philox block that holds the random number with this index.
#[cube]
fn block_of(mask: &MaskArgs, draw: &U64Halves) -> PhiloxBlock {
    let mut key_low = mask.key.low;
    let mut key_high = mask.key.high;
    let mut a = (draw.low >> 2u32) | (draw.high << 30u32);
    let mut b = draw.high >> 2u32;
    let mut c = mask.position.low;
    let mut d = mask.position.high;
    #[unroll]
    for _ in 0..ROUNDS {
        let first = comptime!(MULTIPLIERS[0]).runtime();
        let second = comptime!(MULTIPLIERS[1]).runtime();
        let next_a = u32::mul_hi(second, c) ^ b ^ key_low;
        let next_c = u32::mul_hi(first, a) ^ d ^ key_high;
        b = second * c;
        d = first * a;
        a = next_a;
        c = next_c;
        key_low += comptime!(WEYL[0]).runtime();
        key_high += comptime!(WEYL[1]).runtime();
    }
    PhiloxBlock { a, b, c, d }
}

#[cube]
fn factor(mask: &MaskArgs, word: u32) -> f32 {
    select(word < mask.threshold, mask.scale, 0.0f32)
}

/// Returns the mask factors of `count` elements, starting at `element`.
#[cube]
pub(super) fn factors(
    mask: &MaskArgs,
    element: u32,
    #[comptime] count: usize,
    #[comptime] draws: MaskAlignment,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(count);
    if comptime!(draws == MaskAlignment::Aligned) {
        #[unroll]
        for i in 0..count / WORDS {
            let at = draw(mask, element + (i * WORDS) as u32);
            let words = block_of(mask, &at);
            factors[i * WORDS] = factor(mask, words.a);
            factors[i * WORDS + 1] = factor(mask, words.b);
            factors[i * WORDS + 2] = factor(mask, words.c);
            factors[i * WORDS + 3] = factor(mask, words.d);
        }
    }
    if comptime!(draws == MaskAlignment::Any) {
        let start = draw(mask, element);
        let mut low = start.low;
        let mut high = start.high;
        // The start of the next run, counted from `element`.
        let mut next = mask.run - element % mask.run;
        let words = block_of(mask, &start);
        let mut held_low = low;
        let mut held_high = high;
        let mut a = words.a;
        let mut b = words.b;
        let mut c = words.c;
        let mut d = words.d;
        #[unroll]
        for i in 0..count {
            if comptime!(i > 0) {
                // The index increases by one for each element, except in a new run. Most elements therefore need no
                // division.
                low += 1u32;
                high += u32::cast_from(low == 0u32);
                if next == i as u32 {
                    let first = draw(mask, element + i as u32);
                    low = first.low;
                    high = first.high;
                    next += mask.run;
                }
            }
            // A new block is computed only if the previous block does not contain the word.
            if (low ^ held_low) >= 4u32 || high != held_high {
                let words = block_of(mask, &U64Halves { low, high });
                a = words.a;
                b = words.b;
                c = words.c;
                d = words.d;
                held_low = low;
                held_high = high;
            }
            let index = low & 3u32;
            let early = select(index == 0u32, a, b);
            let late = select(index == 2u32, c, d);
            factors[i] = factor(mask, select(index < 2u32, early, late));
        }
    }
    factors
}

/// Returns vector `i` of a group, multiplied by its mask factors.
#[cube]
pub(super) fn masked<N: Size>(
    value: Vector<f32, N>,
    factors: &Array<f32>,
    #[comptime] i: usize,
    #[comptime] draws: MaskAlignment,
) -> Vector<f32, N> {
    let mut factor = Vector::<f32, N>::new(1.0f32);
    if comptime!(draws != MaskAlignment::None) {
        #[unroll]
        for lane in 0..N::value() {
            factor.insert(lane, factors[i * N::value() + lane]);
        }
    }
    value * factor
}

//! Steps that compute lane by lane: what is common to arithmetic of all kinds.
//!
//! A step computes all 32 lanes and keeps those of its mask: its functions have no effects, and a loop
//! of fixed length becomes vector instructions of the host.

use super::{Scope, Target};
use crate::machine::{Action, Block, LANES, Lanes, Mask, Source, Warp};
use crate::ptx::{Instruction, Operand};

/// Where a step reads from.
enum Input {
    Register(usize),
    /// The same in each lane, spread out once and for all.
    Same(Box<Lanes>),
    Other(Source),
}

/// The inputs of a step.
pub(super) struct Inputs<const N: usize> {
    inputs: [Input; N],
    /// Whether some lanes are made anew at each step: those of `%tid.x` and its like.
    made: bool,
}

impl<const N: usize> Inputs<N> {
    pub fn of(sources: [Source; N]) -> Self {
        let made = |source: &Source| !matches!(source, Source::Register(_) | Source::Value(_));
        Self {
            made: sources.iter().any(made),
            inputs: sources.map(|source| match source {
                Source::Register(index) => Input::Register(index),
                Source::Value(bits) => Input::Same(Box::new([bits; LANES])),
                other => Input::Other(other),
            }),
        }
    }

    /// The lanes of each; `room` is for those that are made.
    #[inline(always)]
    pub fn view<'a>(
        &'a self,
        warp: &'a Warp,
        block: &Block<'_>,
        room: &'a mut Option<[Lanes; N]>,
    ) -> [&'a Lanes; N] {
        let room = if self.made {
            &*room.insert(self.make(warp, block))
        } else {
            &[[0; LANES]; N]
        };
        let mut views = room.each_ref();
        for (view, input) in views.iter_mut().zip(&self.inputs) {
            match input {
                Input::Register(index) => *view = &warp.registers[*index],
                Input::Same(lanes) => *view = lanes,
                Input::Other(_) => {}
            }
        }
        views
    }

    #[cold]
    fn make(&self, warp: &Warp, block: &Block<'_>) -> [Lanes; N] {
        self.inputs.each_ref().map(|input| match input {
            Input::Other(source) => source.read(warp, block),
            _ => [0; LANES],
        })
    }
}

/// A function of the lanes' bits, and nothing else.
pub(super) trait Pure<const N: usize, T>: Fn([u64; N]) -> T + Send + Sync + 'static {}

impl<const N: usize, T, F: Fn([u64; N]) -> T + Send + Sync + 'static> Pure<N, T> for F {}

/// Writes `function` of the sources to a register. What it gives has no bits above the width.
pub(super) fn map<const N: usize>(
    out: usize,
    sources: [Source; N],
    function: impl Pure<N, u64>,
) -> Action {
    let inputs = Inputs::of(sources);
    let wide = wide();
    Action::Step(Box::new(move |warp, mask, block| {
        let results = lanes(&inputs, warp, block, wide, &function);
        store(warp, out, &results, mask);
        Ok(())
    }))
}

/// Tests each lane; `then` gets the result as a bit a lane, and the mask.
pub(super) fn test<const N: usize>(
    sources: [Source; N],
    function: impl Pure<N, bool>,
    then: impl Fn(&mut Warp, u32, Mask) + Send + Sync + 'static,
) -> Action {
    let inputs = Inputs::of(sources);
    let wide = wide();
    Action::Step(Box::new(move |warp, mask, block| {
        let results = lanes(&inputs, warp, block, wide, &function);
        let bits = (0..LANES).fold(0, |bits, lane| bits | u32::from(results[lane]) << lane);
        then(warp, bits, mask);
        Ok(())
    }))
}

/// Writes the lanes of a mask.
#[inline]
pub(super) fn store(warp: &mut Warp, out: usize, results: &Lanes, mask: Mask) {
    let out = &mut warp.registers[out];
    if mask == Mask::ALL {
        *out = *results;
    } else {
        for lane in mask.lanes() {
            out[lane] = results[lane];
        }
    }
}

/// Writes the lanes of a mask to a predicate.
#[inline]
pub(super) fn store_predicate(warp: &mut Warp, out: usize, bits: u32, mask: Mask) {
    let out = &mut warp.predicates[out];
    *out = *out & !mask.0 | bits & mask.0;
}

#[inline(always)]
fn lanes<const N: usize, T: Copy + Default>(
    inputs: &Inputs<N>,
    warp: &Warp,
    block: &Block<'_>,
    wide: bool,
    function: &impl Fn([u64; N]) -> T,
) -> [T; LANES] {
    let mut room = None;
    let views = inputs.view(warp, block, &mut room);
    #[cfg(target_arch = "x86_64")]
    if wide {
        // SAFETY: `wide` is true only where the host has these instructions.
        return unsafe { every_lane_wide(views, function) };
    }
    let _ = wide;
    every_lane(views, function)
}

#[inline(always)]
fn every_lane<const N: usize, T: Copy + Default>(
    views: [&Lanes; N],
    function: &impl Fn([u64; N]) -> T,
) -> [T; LANES] {
    // Plain loops: what the methods of arrays become is no loop over vectors.
    let mut results = [T::default(); LANES];
    for lane in 0..LANES {
        let mut operands = [0; N];
        for (operand, view) in operands.iter_mut().zip(&views) {
            *operand = view[lane];
        }
        results[lane] = function(operands);
    }
    results
}

/// The same, compiled for vectors of 256 bits and fused products.
///
/// # Safety
///
/// The host must have these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn every_lane_wide<const N: usize, T: Copy + Default>(
    views: [&Lanes; N],
    function: &impl Fn([u64; N]) -> T,
) -> [T; LANES] {
    every_lane(views, function)
}

#[cfg(target_arch = "x86_64")]
fn wide() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
}

#[cfg(not(target_arch = "x86_64"))]
fn wide() -> bool {
    false
}

/// An instruction with what it may name.
#[derive(Clone, Copy)]
pub(super) struct Form<'a> {
    pub instruction: &'a Instruction,
    pub scope: &'a Scope<'a>,
}

impl<'a> Form<'a> {
    pub fn name(self) -> &'a str {
        &self.instruction.name
    }

    /// The last modifier, which mostly is a type; empty if there is none.
    pub fn of(self) -> &'a str {
        self.instruction.modifiers.last().map_or("", String::as_str)
    }

    pub fn has(self, modifier: &str) -> bool {
        self.instruction.has(modifier)
    }

    /// Refuses modifiers other than these, before the last `types`.
    pub fn only(self, types: usize, known: &[&str]) -> Result<(), String> {
        let modifiers = &self.instruction.modifiers;
        let count = modifiers.len().saturating_sub(types);
        let other = modifiers[..count]
            .iter()
            .find(|modifier| !known.contains(&modifier.as_str()));
        match other {
            Some(other) => Err(format!(".{other} is not known here")),
            None => Ok(()),
        }
    }

    pub fn operand(self, place: usize) -> Result<&'a Operand, String> {
        let operand = self.instruction.operands.get(place);
        operand.ok_or_else(|| format!("operand {place} is missing"))
    }

    /// Exactly `N` operands behind the result, each of a type.
    pub fn sources<const N: usize>(self, types: [&str; N]) -> Result<[Source; N], String> {
        let count = self.instruction.operands.len();
        if count != N + 1 {
            return Err(format!("{count} operands, not {}", N + 1));
        }
        let mut sources = [Source::Value(0); N];
        for (place, of) in types.into_iter().enumerate() {
            sources[place] = self.source(place + 1, of)?;
        }
        Ok(sources)
    }

    pub fn source(self, place: usize, of: &str) -> Result<Source, String> {
        match (self.operand(place)?, of) {
            // A number of f32 has no meaning in half the bits.
            (Operand::F32(_) | Operand::F64(_), "f16" | "bf16" | "f16x2" | "bf16x2") => {
                Err(format!("operand {place} is not a number of type {of}"))
            }
            _ => match self.scope.at(self.instruction, place, of)? {
                Source::Predicate(_) => Err(format!("operand {place} is a predicate")),
                source => Ok(source),
            },
        }
    }

    /// The register of the result, which has at least so many bits.
    pub fn out(self, bits: u32) -> Result<usize, String> {
        match self.scope.result(self.instruction)? {
            (index, width) if width >= bits => Ok(index),
            (_, width) => Err(format!("{bits} bits do not fit into {width}")),
        }
    }

    /// A predicate at a place: its number, and whether it is meant as it is.
    pub fn predicate(self, place: usize) -> Result<(Source, bool), String> {
        match self.operand(place)? {
            Operand::Not(index) => Ok((Source::Predicate(*index), false)),
            operand => match self.scope.source(operand, "u32")? {
                source @ (Source::Predicate(_) | Source::Value(_)) => Ok((source, true)),
                _ => Err(format!("operand {place} is not a predicate")),
            },
        }
    }

    /// `p`, and `p|q`: where two predicates go, if anywhere.
    pub fn predicates_out(self) -> Result<[Option<usize>; 2], String> {
        let one = |operand: &Operand| match self.scope.target(operand)? {
            Target::Predicate(index) => Ok(Some(index)),
            Target::Sink => Ok(None),
            Target::Data(..) => Err("the destination is not a predicate".to_owned()),
        };
        match self.operand(0)? {
            Operand::Pair(first, second) => Ok([one(first)?, one(second)?]),
            single => Ok([one(single)?, None]),
        }
    }
}

/// The bits of a predicate over the lanes, negated where `plain` is false.
#[inline]
pub(super) fn predicate_bits((source, plain): (Source, bool), warp: &Warp) -> u32 {
    let bits = match source {
        Source::Predicate(index) => warp.predicates[index],
        Source::Value(0) => 0,
        _ => u32::MAX,
    };
    if plain { bits } else { !bits }
}

//! Steps that compute each lane separately, shared by all kinds of arithmetic.
//!
//! A step computes all 32 lanes and stores the lanes of its mask. Its functions have no side effects. A loop of fixed
//! length compiles to vector instructions of the host.

use super::{Scope, Target};
use crate::machine::{Action, Block, LANES, Lanes, Mask, Source, Warp};
use crate::ptx::{Instruction, Operand};

/// Source of an operand of a step.
enum Input {
    Register(usize),
    /// The same value in each lane, broadcast once.
    Same(Box<Lanes>),
    Other(Source),
}

/// The inputs of a step.
pub(super) struct Inputs<const N: usize> {
    inputs: [Input; N],
    /// Whether some lanes must be computed at each step, such as the lanes of `%tid.x`.
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

    /// Returns the lanes of each input. `room` holds the lanes that are computed at this step.
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

/// A function of the lane's bits without side effects.
pub(super) trait Pure<const N: usize, T>: Fn([u64; N]) -> T + Send + Sync + 'static {}

impl<const N: usize, T, F: Fn([u64; N]) -> T + Send + Sync + 'static> Pure<N, T> for F {}

/// Writes `function` of the sources to a register. The result must have no bits above the width.
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

/// Tests each lane. `then` receives the results as one bit per lane, and the mask.
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

/// Stores the lanes of a mask.
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

/// Stores the lanes of a mask in a predicate.
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
        // SAFETY: `wide` is true only if the host supports these instructions.
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
    // Plain loops, since the compiler does not vectorize the methods of arrays.
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

/// Computes the same as [`every_lane`], compiled for 256-bit vectors and fused multiply-add.
///
/// # Safety
///
/// The host must support AVX2 and FMA.
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

/// An instruction, and the names that it can use.
#[derive(Clone, Copy)]
pub(super) struct Form<'a> {
    pub instruction: &'a Instruction,
    pub scope: &'a Scope<'a>,
}

impl<'a> Form<'a> {
    pub fn name(self) -> &'a str {
        &self.instruction.name
    }

    /// Returns the last modifier, which is usually a type, or an empty string.
    pub fn of(self) -> &'a str {
        self.instruction.modifiers.last().map_or("", String::as_str)
    }

    pub fn has(self, modifier: &str) -> bool {
        self.instruction.has(modifier)
    }

    /// Refuses all modifiers that are not in the list, except the last `types` modifiers.
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

    /// Returns exactly `N` operands behind the result, each of its type.
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
            // An f32 constant has no meaning in 16 bits.
            (Operand::F32(_) | Operand::F64(_), "f16" | "bf16" | "f16x2" | "bf16x2") => {
                Err(format!("operand {place} is not a number of type {of}"))
            }
            _ => match self.scope.at(self.instruction, place, of)? {
                Source::Predicate(_) => Err(format!("operand {place} is a predicate")),
                source => Ok(source),
            },
        }
    }

    /// Returns the register of the result. It must have at least `bits` bits.
    pub fn out(self, bits: u32) -> Result<usize, String> {
        match self.scope.result(self.instruction)? {
            (index, width) if width >= bits => Ok(index),
            (_, width) => Err(format!("{bits} bits do not fit into {width}")),
        }
    }

    /// Returns the predicate at an operand position, and `false` if it is negated.
    pub fn predicate(self, place: usize) -> Result<(Source, bool), String> {
        match self.operand(place)? {
            Operand::Not(index) => Ok((Source::Predicate(*index), false)),
            operand => match self.scope.source(operand, "u32")? {
                source @ (Source::Predicate(_) | Source::Value(_)) => Ok((source, true)),
                _ => Err(format!("operand {place} is not a predicate")),
            },
        }
    }

    /// Returns the predicates of a result `p` or `p|q`. A sink gives `None`.
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

/// Returns the bits of a predicate, one per lane. They are negated if `plain` is false.
#[inline]
pub(super) fn predicate_bits((source, plain): (Source, bool), warp: &Warp) -> u32 {
    let bits = match source {
        Source::Predicate(index) => warp.predicates[index],
        Source::Value(0) => 0,
        _ => u32::MAX,
    };
    if plain { bits } else { !bits }
}

//! Lowers `setp` and `set`.

use super::super::apply::{Form, Inputs, map, predicate_bits, store_predicate, test};
use super::super::number::quick::{flush, from_bf16, from_f16};
use super::whole::{Whole, by_type};
use crate::machine::{Action, Source};

/// A comparison, as the set of outcomes for which it holds: less, equal, greater, unordered.
#[derive(Clone, Copy)]
struct Holds(u32);

const LESS: u32 = 1;
const EQUAL: u32 = 2;
const GREATER: u32 = 4;
const UNORDERED: u32 = 8;

impl Holds {
    fn named(name: &str, float: bool) -> Option<Self> {
        let ordered = |name| {
            Some(match name {
                "eq" => EQUAL,
                "ne" => LESS | GREATER,
                "lt" => LESS,
                "le" => LESS | EQUAL,
                "gt" => GREATER,
                "ge" => GREATER | EQUAL,
                _ => return None,
            })
        };
        Some(Self(match name {
            "lo" | "ls" | "hi" | "hs" if float => return None,
            "lo" => LESS,
            "ls" => LESS | EQUAL,
            "hi" => GREATER,
            "hs" => GREATER | EQUAL,
            "num" if float => LESS | EQUAL | GREATER,
            "nan" if float => UNORDERED,
            _ => match name.strip_suffix('u').and_then(ordered) {
                Some(outcomes) if float => outcomes | UNORDERED,
                _ => ordered(name)?,
            },
        }))
    }

    #[inline(always)]
    fn of<T: PartialOrd>(self, a: T, b: T) -> bool {
        let (less, equal, greater) = (a < b, a == b, a > b);
        let outcome = (u32::from(less) * LESS)
            | (u32::from(equal) * EQUAL)
            | (u32::from(greater) * GREATER)
            | (u32::from(!(less | equal | greater)) * UNORDERED);
        outcome & self.0 != 0
    }
}

/// The combination with a second predicate, such as `.and.`.
#[derive(Clone, Copy)]
enum Combine {
    No,
    And,
    Or,
    Xor,
}

impl Combine {
    #[inline]
    fn apply(self, compared: u32, other: u32) -> u32 {
        match self {
            Self::No => compared,
            Self::And => compared & other,
            Self::Or => compared | other,
            Self::Xor => compared ^ other,
        }
    }
}

/// The comparison modifiers that both instructions have before their types.
struct Comparison {
    holds: Holds,
    combine: Combine,
    ftz: bool,
    sources: [Source; 2],
    /// The predicate to combine with. The default is true.
    with: (Source, bool),
}

fn comparison(form: Form<'_>, types: usize) -> Result<Comparison, String> {
    let of = form.of();
    let modifiers = &form.instruction.modifiers;
    let mut modifiers = modifiers[..modifiers.len().saturating_sub(types)].iter();
    let float = of.contains('f');
    let name = modifiers.next().map_or("", String::as_str);
    let holds = Holds::named(name, float).ok_or("the comparison is not known")?;
    if of.starts_with('b') && !float && !matches!(name, "eq" | "ne") {
        return Err(format!("unsupported comparison of .{of}"));
    }
    let (mut combine, mut ftz) = (Combine::No, false);
    for modifier in modifiers {
        match modifier.as_str() {
            "and" => combine = Combine::And,
            "or" => combine = Combine::Or,
            "xor" => combine = Combine::Xor,
            "ftz" if float => ftz = true,
            other => return Err(format!(".{other} is not known here")),
        }
    }
    let single = matches!(combine, Combine::No);
    if form.instruction.operands.len() != if single { 3 } else { 4 } {
        return Err("its operands are too few or too many".into());
    }
    Ok(Comparison {
        holds,
        combine,
        ftz,
        sources: [form.source(1, of)?, form.source(2, of)?],
        with: if single {
            (Source::Value(1), true)
        } else {
            form.predicate(3)?
        },
    })
}

/// Returns the value of a half. Subnormal numbers are flushed to zero if `ftz` is set.
#[inline(always)]
fn half(bits: u64, brain: bool, ftz: bool) -> f32 {
    match (brain, ftz && bits & 0x7c00 == 0) {
        (true, _) => from_bf16(bits & 0xffff),
        (false, true) => 0.0,
        (false, false) => from_f16(bits & 0xffff),
    }
}

pub fn setp(form: Form<'_>) -> Result<Action, String> {
    let Comparison {
        holds,
        combine,
        ftz,
        sources,
        with,
    } = comparison(form, 1)?;
    let [first, second] = form.predicates_out()?;
    let of = form.of();
    if matches!(of, "f16x2" | "bf16x2") {
        return setp_halves(form);
    }
    macro_rules! compared {
        ($function:expr) => {
            test(sources, $function, move |warp, bits, mask| {
                let other = predicate_bits(with, warp);
                if let Some(out) = first {
                    store_predicate(warp, out, combine.apply(bits, other), mask);
                }
                if let Some(out) = second {
                    store_predicate(warp, out, combine.apply(!bits, other), mask);
                }
            })
        };
    }
    let single = |bits: u64| f32::from_bits(bits as u32);
    Ok(match (of, ftz) {
        ("f32", false) => compared!(move |[a, b]| holds.of(single(a), single(b))),
        ("f32", true) => compared!(move |[a, b]| holds.of(flush(single(a)), flush(single(b)))),
        ("f64", false) => compared!(move |[a, b]| holds.of(f64::from_bits(a), f64::from_bits(b))),
        ("f16", _) => compared!(move |[a, b]| holds.of(half(a, false, ftz), half(b, false, ftz))),
        ("bf16", false) => compared!(move |[a, b]| holds.of(from_bf16(a), from_bf16(b))),
        (_, true) => return Err(format!(".{of} has no .ftz")),
        _ => by_type!(of, T => compared!(move |[a, b]| holds.of(T::of(a), T::of(b)))),
    })
}

/// Lowers `setp` of halves, with one predicate for the lower and one for the upper halves.
fn setp_halves(form: Form<'_>) -> Result<Action, String> {
    let Comparison {
        holds,
        combine,
        ftz,
        sources,
        with,
    } = comparison(form, 1)?;
    let out = form.predicates_out()?;
    let brain = form.of() == "bf16x2";
    let inputs = Inputs::of(sources);
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        let mut bits = [0u32; 2];
        {
            let mut room = None;
            let [a, b] = inputs.view(warp, block, &mut room);
            for (which, bits) in bits.iter_mut().enumerate() {
                for lane in mask.lanes() {
                    let of = |bits: u64| half(bits >> (16 * which), brain, ftz);
                    *bits |= u32::from(holds.of(of(a[lane]), of(b[lane]))) << lane;
                }
            }
        }
        let other = predicate_bits(with, warp);
        for (out, bits) in out.into_iter().zip(bits) {
            if let Some(out) = out {
                store_predicate(warp, out, combine.apply(bits, other), mask);
            }
        }
        Ok(())
    })))
}

/// Lowers `set`. The result is a number: all ones, or 1.0 in floating point.
pub fn set(form: Form<'_>) -> Result<Action, String> {
    let Comparison {
        holds,
        combine,
        ftz,
        sources: [a, b],
        with: (with, plain),
    } = comparison(form, 2)?;
    let of = form.of();
    let modifiers = &form.instruction.modifiers;
    let result = modifiers[modifiers.len() - 2].as_str();
    let (bits, yes) = match result {
        "u32" | "s32" => (32, 0xffff_ffff),
        "u16" | "s16" => (16, 0xffff),
        "f32" => (32, 0x3f80_0000),
        "f16" => (16, 0x3c00),
        "bf16" => (16, 0x3f80),
        "f16x2" | "bf16x2" => return set_halves(form, result),
        other => return Err(format!("unsupported result type .{other}")),
    };
    if matches!(of, "f16x2" | "bf16x2") {
        return set_halves(form, result);
    }
    let (out, sources) = (form.out(bits)?, [a, b, with]);
    let value = move |compared: bool, with: u64| {
        let with = (with != 0) == plain;
        let set = combine.apply(u32::from(compared), u32::from(with));
        if set != 0 { yes } else { 0 }
    };
    let single = move |bits: u64| {
        let number = f32::from_bits(bits as u32);
        if ftz { flush(number) } else { number }
    };
    Ok(match of {
        "f32" => map(out, sources, move |[a, b, with]| {
            value(holds.of(single(a), single(b)), with)
        }),
        "f64" if !ftz => map(out, sources, move |[a, b, with]| {
            value(holds.of(f64::from_bits(a), f64::from_bits(b)), with)
        }),
        "f16" => map(out, sources, move |[a, b, with]| {
            value(holds.of(half(a, false, ftz), half(b, false, ftz)), with)
        }),
        "bf16" if !ftz => map(out, sources, move |[a, b, with]| {
            value(holds.of(from_bf16(a), from_bf16(b)), with)
        }),
        _ if ftz => return Err(format!(".{of} has no .ftz")),
        _ => by_type!(of, T => map(out, sources, move |[a, b, with]| {
            value(holds.of(T::of(a), T::of(b)), with)
        })),
    })
}

/// Lowers `set.eq.f16x2.f16x2` and `set.eq.u32.f16x2`, with a result for each half.
fn set_halves(form: Form<'_>, result: &str) -> Result<Action, String> {
    let Comparison {
        holds,
        combine,
        ftz,
        sources: [a, b],
        with: (with, plain),
    } = comparison(form, 2)?;
    let brain = match form.of() {
        "f16x2" => false,
        "bf16x2" if !ftz => true,
        of => return Err(format!(".{of} has no halves")),
    };
    let yes = match result {
        "u32" | "s32" => 0xffff,
        "f16x2" => 0x3c00,
        "bf16x2" => 0x3f80,
        other => return Err(format!("unsupported result type .{other}")),
    };
    Ok(map(form.out(32)?, [a, b, with], move |[a, b, with]| {
        let with = u32::from((with != 0) == plain);
        let of = |shift: u32| {
            let compared = holds.of(half(a >> shift, brain, ftz), half(b >> shift, brain, ftz));
            let set = combine.apply(u32::from(compared), with);
            if set != 0 { yes << shift } else { 0 }
        };
        of(0) | of(16)
    }))
}

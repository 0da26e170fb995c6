//! Arithmetic of f16 and bf16, as scalars and in pairs.

use super::super::apply::{Form, map};
use super::super::bits;
use super::super::number::quick::{from_bf16, from_f16, odd_single, odd_sum, to_bf16, to_f16};
use super::extreme;
use super::single::saturated;
use crate::machine::{Action, Source};

extreme!(extreme, f32);

/// A 16-bit floating-point type.
pub(in super::super) trait Half: Send + Sync + 'static {
    /// The mask of the exponent.
    const EXPONENT: u64;
    fn wide(bits: u64) -> f32;
    fn narrow(number: f32) -> u64;

    /// Replaces a subnormal number with a zero of the same sign.
    #[inline(always)]
    fn flush(bits: u64) -> u64 {
        if bits & Self::EXPONENT == 0 {
            bits & 0x8000
        } else {
            bits
        }
    }
}

pub(in super::super) struct F16;
pub(in super::super) struct Bf16;

impl Half for F16 {
    const EXPONENT: u64 = 0x7c00;

    #[inline(always)]
    fn wide(bits: u64) -> f32 {
        from_f16(bits)
    }

    #[inline(always)]
    fn narrow(number: f32) -> u64 {
        to_f16(number)
    }
}

impl Half for Bf16 {
    const EXPONENT: u64 = 0x7f80;

    #[inline(always)]
    fn wide(bits: u64) -> f32 {
        from_bf16(bits)
    }

    #[inline(always)]
    fn narrow(number: f32) -> u64 {
        to_bf16(number)
    }
}

#[derive(Clone, Copy, Default)]
pub(in super::super) struct Modifiers {
    /// Flush subnormal numbers to zero.
    pub ftz: bool,
    /// Clamp to [0, 1]. NaN becomes 0.
    pub saturate: bool,
    /// Clamp negative results to 0.
    pub relu: bool,
}

/// Returns a step that applies a function to one or two halves per lane. The f64 result is rounded once.
pub(in super::super) fn step<H: Half, const N: usize>(
    out: usize,
    sources: [Source; N],
    pair: bool,
    finish: Modifiers,
    function: impl Fn([f64; N]) -> f64 + Send + Sync + 'static,
) -> Action {
    let Modifiers {
        ftz,
        saturate,
        relu,
    } = finish;
    let plain = !(ftz | saturate | relu);
    let wide = |bits: u64| f64::from(H::wide(bits & 0xffff));
    let finished = move |all: [u64; N]| {
        let flushed = |bits: u64| if ftz { H::flush(bits & 0xffff) } else { bits };
        let single = odd_single(function(all.map(|bits| wide(flushed(bits)))));
        if plain {
            return H::narrow(single);
        }
        let single = match (saturate, relu) {
            (true, _) => saturated(single),
            // A NaN is kept, and -0 becomes 0.
            (_, true) if single <= 0.0 => 0.0,
            _ => single,
        };
        let result = H::narrow(single);
        if ftz { H::flush(result) } else { result }
    };
    if pair {
        map(out, sources, move |all| {
            finished(all) | finished(all.map(|bits| bits >> 16)) << 16
        })
    } else {
        map(out, sources, finished)
    }
}

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    match form.of() {
        "f16" | "f16x2" => typed::<F16>(form),
        _ => typed::<Bf16>(form),
    }
}

fn typed<H: Half>(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    let (out, pair) = (form.out(bits(of))?, of.ends_with("x2"));
    let finish = Modifiers {
        ftz: form.has("ftz"),
        saturate: form.has("sat"),
        relu: form.has("relu"),
    };
    if (finish.ftz || finish.saturate) && of.starts_with('b') {
        return Err(format!(".{of} has neither .ftz nor .sat"));
    }
    match form.name() {
        "add" | "sub" | "mul" => form.only(1, &["rn", "ftz", "sat"])?,
        "fma" => form.only(1, &["rn", "ftz", "sat", "relu"])?,
        "min" | "max" => return extremes::<H>(form, out, pair, finish),
        other => return Err(format!("unsupported {other} of .{of}")),
    }
    Ok(match form.name() {
        "add" => step::<H, 2>(out, form.sources([of; 2])?, pair, finish, |[a, b]| a + b),
        "sub" => step::<H, 2>(out, form.sources([of; 2])?, pair, finish, |[a, b]| a - b),
        "mul" => step::<H, 2>(out, form.sources([of; 2])?, pair, finish, |[a, b]| a * b),
        _ => step::<H, 3>(out, form.sources([of; 3])?, pair, finish, |[a, b, c]| {
            odd_sum(a * b, c)
        }),
    })
}

fn extremes<H: Half>(
    form: Form<'_>,
    out: usize,
    pair: bool,
    finish: Modifiers,
) -> Result<Action, String> {
    form.only(1, &["ftz", "NaN", "xorsign", "abs"])?;
    let (greater, nan, sizes) = (form.name() == "max", form.has("NaN"), form.has("xorsign"));
    if sizes != form.has("abs") {
        return Err("its modifiers are not known".into());
    }
    let sources = form.sources([form.of(); 2])?;
    Ok(step::<H, 2>(out, sources, pair, finish, move |[a, b]| {
        let [a, b] = [a as f32, b as f32];
        if !sizes {
            return extreme(a, b, greater, nan).into();
        }
        let sign = (a.to_bits() ^ b.to_bits()) & 0x8000_0000;
        let size = extreme(a.abs(), b.abs(), greater, nan);
        f32::from_bits(size.to_bits() | sign).into()
    }))
}

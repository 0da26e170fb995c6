//! Arithmetic of f32, as scalars and in pairs.

use super::super::apply::{Form, Pure, map};
use super::super::number::quick::{bits, flush, odd_sum, single};
use super::super::number::{F32, Mode, exact};
use super::{extreme, mode};
use crate::machine::{Action, Source};

extreme!(extreme, f32);

/// The modifiers of operands and results.
#[derive(Clone, Copy)]
pub(in super::super) struct Modifiers {
    /// Flush subnormal numbers to zero.
    pub ftz: bool,
    /// Clamp to [0, 1]. NaN becomes 0.
    pub saturate: bool,
}

/// Returns a step that applies a function of f32 to each lane.
pub(in super::super) fn step<const N: usize>(
    out: usize,
    sources: [Source; N],
    finish: Modifiers,
    function: impl Fn([f32; N]) -> f32 + Send + Sync + 'static,
) -> Action {
    let of = |bits: u64| f32::from_bits(bits as u32);
    match (finish.ftz, finish.saturate) {
        (false, false) => map(out, sources, move |all| bits(function(all.map(of)))),
        (true, false) => map(out, sources, move |all| {
            bits(flush(function(all.map(|one| flush(of(one))))))
        }),
        (ftz, true) => map(out, sources, move |all| {
            let all = all.map(|one| if ftz { flush(of(one)) } else { of(one) });
            let result = function(all);
            bits(saturated(if ftz { flush(result) } else { result }))
        }),
    }
}

/// Clamps to [0, 1]. NaN and -0 become 0.
#[inline(always)]
pub(in super::super) fn saturated(number: f32) -> f32 {
    let above = if number > 0.0 { number } else { 0.0 };
    if above > 1.0 { 1.0 } else { above }
}

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    if form.of() == "f32x2" {
        return pairs(form);
    }
    let finish = Modifiers {
        ftz: form.has("ftz"),
        saturate: form.has("sat"),
    };
    match form.name() {
        "div" => return division(form, finish),
        "min" | "max" => return extremes(form, finish),
        _ => form.only(1, &["rn", "rz", "rm", "rp", "ftz", "sat"])?,
    }
    let (out, mode) = (form.out(32)?, mode(form));
    let near = mode == Mode::Nearest;
    macro_rules! of {
        ($count:literal, $near:expr, $directed:expr) => {{
            let sources = form.sources(["f32"; $count])?;
            if near {
                step(out, sources, finish, $near)
            } else {
                step(out, sources, finish, $directed)
            }
        }};
    }
    Ok(match form.name() {
        "add" => of!(2, |[a, b]| a + b, move |[a, b]| sum(
            a.into(),
            b.into(),
            mode
        )),
        "sub" => of!(2, |[a, b]| a - b, move |[a, b]| {
            let negative = -f64::from(b);
            sum(a.into(), negative, mode)
        }),
        "mul" => of!(2, |[a, b]| a * b, move |[a, b]| {
            // The product is exact: it has twice 24 bits, and the exponent has enough range.
            single(f64::from(a) * f64::from(b), mode)
        }),
        _ => of!(3, |[a, b, c]| a.mul_add(b, c), move |[a, b, c]| {
            sum(f64::from(a) * f64::from(b), c.into(), mode)
        }),
    })
}

/// Returns the sum of an f32, or of a product of two f32, with an f32.
#[inline(always)]
fn sum(a: f64, b: f64, mode: Mode) -> f32 {
    let sum = odd_sum(a, b);
    // With rounding down, a sum that cancels is -0.
    let cancels = sum == 0.0 && (a.is_sign_negative() != b.is_sign_negative());
    if cancels && mode == Mode::Down {
        return -0.0;
    }
    single(sum, mode)
}

fn extremes(form: Form<'_>, finish: Modifiers) -> Result<Action, String> {
    form.only(1, &["ftz", "NaN", "xorsign", "abs"])?;
    let (greater, nan) = (form.name() == "max", form.has("NaN"));
    let out = form.out(32)?;
    if form.has("xorsign") || form.has("abs") {
        if !(form.has("xorsign") && form.has("abs")) {
            return Err("its modifiers are not known".into());
        }
        return Ok(step(
            out,
            form.sources(["f32"; 2])?,
            finish,
            move |[a, b]| {
                let sign = (a.to_bits() ^ b.to_bits()) & 0x8000_0000;
                let size = extreme(a.abs(), b.abs(), greater, nan);
                f32::from_bits(size.to_bits() | sign)
            },
        ));
    }
    if form.instruction.operands.len() == 4 {
        return Ok(step(
            out,
            form.sources(["f32"; 3])?,
            finish,
            move |[a, b, c]| extreme(extreme(a, b, greater, nan), c, greater, nan),
        ));
    }
    let sources = form.sources(["f32"; 2])?;
    // The arguments are constants, so that the loop contains no branches.
    Ok(match (greater, nan) {
        (false, false) => step(out, sources, finish, |[a, b]| extreme(a, b, false, false)),
        (true, false) => step(out, sources, finish, |[a, b]| extreme(a, b, true, false)),
        _ => step(out, sources, finish, move |[a, b]| {
            extreme(a, b, greater, true)
        }),
    })
}

fn division(form: Form<'_>, finish: Modifiers) -> Result<Action, String> {
    form.only(1, &["rn", "rz", "rm", "rp", "approx", "full", "ftz"])?;
    let (out, sources, mode) = (form.out(32)?, form.sources(["f32"; 2])?, mode(form));
    Ok(if form.has("approx") {
        step(out, sources, finish, |[a, b]| {
            // Multiplies by the reciprocal, which is zero for a large divisor.
            let large = b.abs() > 2f32.powi(126);
            let divisor = if large { f32::INFINITY.copysign(b) } else { b };
            (f64::from(a) / f64::from(divisor)) as f32
        })
    } else if mode == Mode::Nearest {
        step(out, sources, finish, |[a, b]| a / b)
    } else {
        step(out, sources, finish, move |[a, b]| {
            let [a, b] = [a, b].map(|number| F32.decode(number.to_bits().into()));
            f32::from_bits(F32.encode(exact::divide(a, b), mode, false) as u32)
        })
    })
}

/// Lowers `add.f32x2` and similar instructions, which compute both halves of 64 bits.
fn pairs(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["rn", "rz", "rm", "rp", "ftz"])?;
    let (out, ftz, mode) = (form.out(64)?, form.has("ftz"), mode(form));
    fn both<const N: usize>(
        out: usize,
        sources: [Source; N],
        ftz: bool,
        function: impl Fn([f32; N]) -> f32 + Send + Sync + 'static,
    ) -> Action {
        let finished = move |number| if ftz { flush(number) } else { number };
        map(
            out,
            sources,
            of_halves(move |all: [f32; N]| finished(function(all.map(finished)))),
        )
    }
    Ok(match form.name() {
        "add" => both(out, form.sources(["b64"; 2])?, ftz, move |[a, b]| {
            sum(a.into(), b.into(), mode)
        }),
        "sub" => both(out, form.sources(["b64"; 2])?, ftz, move |[a, b]| {
            sum(a.into(), -f64::from(b), mode)
        }),
        "mul" => both(out, form.sources(["b64"; 2])?, ftz, move |[a, b]| {
            single(f64::from(a) * f64::from(b), mode)
        }),
        "fma" => both(out, form.sources(["b64"; 3])?, ftz, move |[a, b, c]| {
            sum(f64::from(a) * f64::from(b), c.into(), mode)
        }),
        other => return Err(format!("unsupported {other} of packed values")),
    })
}

fn of_halves<const N: usize>(
    function: impl Fn([f32; N]) -> f32 + Send + Sync + 'static,
) -> impl Pure<N, u64> {
    move |all: [u64; N]| {
        let half = |shift: u32| {
            let of = |bits: u64| f32::from_bits((bits >> shift) as u32);
            bits(function(all.map(of))) << shift
        };
        half(0) | half(32)
    }
}

//! Arithmetic of f64.

use super::super::apply::{Form, map};
use super::super::number::quick::bits64;
use super::super::number::{ExactNumber, F64, Mode, exact};
use super::{extreme, mode};
use crate::machine::{Action, Source};

extreme!(extreme, f64);

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    let (out, mode) = (form.out(64)?, mode(form));
    match form.name() {
        "min" | "max" => {
            form.only(1, &[])?;
            let greater = form.name() == "max";
            let sources = form.sources(["f64"; 2])?;
            return Ok(step(out, sources, move |[a, b]| {
                extreme(a, b, greater, false)
            }));
        }
        _ => form.only(1, &["rn", "rz", "rm", "rp"])?,
    }
    let near = mode == Mode::Nearest;
    Ok(match form.name() {
        "add" if near => step(out, form.sources(["f64"; 2])?, |[a, b]| a + b),
        "sub" if near => step(out, form.sources(["f64"; 2])?, |[a, b]| a - b),
        "mul" if near => step(out, form.sources(["f64"; 2])?, |[a, b]| a * b),
        "div" if near => step(out, form.sources(["f64"; 2])?, |[a, b]| a / b),
        "fma" | "mad" if near => step(out, form.sources(["f64"; 3])?, |[a, b, c]| a.mul_add(b, c)),
        "add" => directed(out, form.sources(["f64"; 2])?, mode, move |[a, b]| {
            exact::add(a, b, mode)
        }),
        "sub" => directed(out, form.sources(["f64"; 2])?, mode, move |[a, b]| {
            exact::add(a, b.negated(), mode)
        }),
        "mul" => directed(out, form.sources(["f64"; 2])?, mode, |[a, b]| {
            exact::multiply(a, b)
        }),
        "div" => directed(out, form.sources(["f64"; 2])?, mode, |[a, b]| {
            exact::divide(a, b)
        }),
        _ => directed(out, form.sources(["f64"; 3])?, mode, move |[a, b, c]| {
            exact::add(exact::multiply(a, b), c, mode)
        }),
    })
}

fn step<const N: usize>(
    out: usize,
    sources: [Source; N],
    function: impl Fn([f64; N]) -> f64 + Send + Sync + 'static,
) -> Action {
    map(out, sources, move |all| {
        bits64(function(all.map(f64::from_bits)))
    })
}

fn directed<const N: usize>(
    out: usize,
    sources: [Source; N],
    mode: Mode,
    function: impl Fn([ExactNumber; N]) -> ExactNumber + Send + Sync + 'static,
) -> Action {
    map(out, sources, move |all| {
        F64.encode(function(all.map(|bits| F64.decode(bits))), mode, false)
    })
}

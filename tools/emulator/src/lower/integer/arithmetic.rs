//! Integer sums, products and quotients.

use super::super::apply::{Form, map};
use super::whole::{Whole, by_type};
use crate::machine::Action;

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    match form.name() {
        "mul" | "mad" if form.has("wide") => return wide(form),
        "mul24" | "mad24" => return narrow(form),
        "mad" if form.has("sat") => return saturated_mad(form),
        "min" | "max" if form.has("relu") => return bounded(form, "relu"),
        "add" | "sub" if form.has("sat") => return bounded(form, "sat"),
        _ => {}
    }
    form.only(1, known(form.name()))?;
    if form.has("lo") == form.has("hi") && matches!(form.name(), "mul" | "mad") {
        return Err("which half of the product?".into());
    }
    by_type!(of, T => typed::<T>(form, of))
}

fn known(name: &str) -> &'static [&'static str] {
    match name {
        "mul" | "mad" => &["lo", "hi"],
        _ => &[],
    }
}

fn typed<T: Whole>(form: Form<'_>, of: &str) -> Result<Action, String> {
    let out = form.out(T::BITS)?;
    let high = form.has("hi");
    macro_rules! of_two {
        ($function:expr) => {
            map(out, form.sources([of; 2])?, |[a, b]| {
                $function(T::of(a), T::of(b)).bits()
            })
        };
    }
    macro_rules! of_three {
        ($function:expr) => {
            map(out, form.sources([of; 3])?, |[a, b, c]| {
                $function(T::of(a), T::of(b), T::of(c)).bits()
            })
        };
    }
    Ok(match form.name() {
        "add" => of_two!(T::add),
        "sub" => of_two!(T::sub),
        "mul" if high => of_two!(T::high),
        "mul" => of_two!(T::mul),
        "mad" if high => of_three!(|a: T, b, c| a.high(b).add(c)),
        "mad" => of_three!(|a: T, b, c| a.mul(b).add(c)),
        "div" => of_two!(T::div),
        "rem" => of_two!(T::rem),
        "min" => of_two!(T::min),
        "max" => of_two!(T::max),
        "sad" => of_three!(|a: T, b, c: T| c.add(a.distance(b))),
        "neg" => map(out, form.sources([of])?, |[a]| {
            T::of(0).sub(T::of(a)).bits()
        }),
        "abs" => map(out, form.sources([of])?, |[a]| T::of(a).abs().bits()),
        other => return Err(format!("{other} is not known")),
    })
}

/// Lowers a product with twice the bits, and an optional sum.
fn wide(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["wide"])?;
    let of = form.of();
    let (bits, sum) = match of {
        "u16" | "s16" => (32, "u32"),
        "u32" | "s32" => (64, "u64"),
        _ => return Err(format!("unsupported wide product of .{of}")),
    };
    let out = form.out(bits)?;
    let ones = u64::MAX >> (64 - bits);
    by_type!(of, T => Ok(match form.name() {
        "mul" => map(out, form.sources([of; 2])?, |[a, b]| T::wide(T::of(a), T::of(b))),
        _ => map(out, form.sources([of, of, sum])?, move |[a, b, c]| {
            T::wide(T::of(a), T::of(b)).wrapping_add(c) & ones
        }),
    }))
}

/// Lowers `mad.hi.sat.s32`.
fn saturated_mad(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["hi", "sat"])?;
    if form.of() != "s32" || !form.has("hi") {
        return Err("it saturates .hi.s32 alone".into());
    }
    let sources = form.sources(["s32"; 3])?;
    Ok(map(form.out(32)?, sources, |[a, b, c]| {
        i32::high(a as i32, b as i32)
            .saturating_add(c as i32)
            .bits()
    }))
}

/// Lowers `mul24` and `mad24`: the lower or upper 32 bits of a 48-bit product.
fn narrow(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["hi", "lo", "sat"])?;
    let (signed, high, saturated) = (form.of() == "s32", form.has("hi"), form.has("sat"));
    if !matches!(form.of(), "u32" | "s32") || saturated && !(signed && high) {
        return Err(format!("unsupported modifier .{}", form.of()));
    }
    let product = move |a: u64, b: u64| {
        let extend = |number: u64| {
            if signed {
                i64::from((number as i32) << 8 >> 8)
            } else {
                (number & 0xff_ffff) as i64
            }
        };
        let product = extend(a) * extend(b);
        if high { product >> 16 } else { product }
    };
    let out = form.out(32)?;
    Ok(match form.name() {
        "mul24" => map(out, form.sources(["u32"; 2])?, move |[a, b]| {
            (product(a, b) as u32).into()
        }),
        _ => map(out, form.sources(["u32"; 3])?, move |[a, b, c]| {
            let (product, c) = (product(a, b) as i32, c as i32);
            if saturated {
                product.saturating_add(c).bits()
            } else {
                product.wrapping_add(c).bits()
            }
        }),
    })
}

/// Lowers `min.relu.s32`, which is never below zero, and `add.sat.s32`, which saturates.
fn bounded(form: Form<'_>, modifier: &str) -> Result<Action, String> {
    form.only(1, &[modifier])?;
    if form.of() != "s32" {
        return Err("it is for s32 alone".into());
    }
    let (out, sources) = (form.out(32)?, form.sources(["s32"; 2])?);
    macro_rules! of_two {
        ($function:expr) => {
            map(out, sources, |[a, b]| $function(a as i32, b as i32).bits())
        };
    }
    Ok(match form.name() {
        "min" => of_two!(|a: i32, b| a.min(b).max(0)),
        "max" => of_two!(|a: i32, b| a.max(b).max(0)),
        "add" => of_two!(i32::saturating_add),
        _ => of_two!(i32::saturating_sub),
    })
}

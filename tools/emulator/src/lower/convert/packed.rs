//! Two numbers in one register: 16-bit floats, and formats of at most 8 bits.

use super::super::apply::{Form, map};
use super::super::number::quick::{from_bf16, to_bf16, to_f16};
use super::super::number::{BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, Format, Mode};
use super::{How, finished};
use crate::machine::Action;

/// Returns the distance of the two numbers in bits, and their format.
fn pair(name: &str) -> Option<(u32, Format)> {
    Some(match name {
        "f16x2" => (16, F16),
        "bf16x2" => (16, BF16),
        "e4m3x2" => (8, E4M3),
        "e5m2x2" => (8, E5M2),
        "e2m3x2" => (8, E2M3),
        "e3m2x2" => (8, E3M2),
        "e2m1x2" => (4, E2M1),
        _ => return None,
    })
}

pub fn lower(form: Form<'_>, how: How, to: &str, from: &str) -> Result<Action, String> {
    let mode = how.mode.ok_or("its rounding is missing")?;
    if how.whole || how.ftz || how.saturate {
        return Err("its modifiers are not known".into());
    }
    if to == "ue8m0x2" || from == "ue8m0x2" {
        return powers(form, how, mode, to, from);
    }
    let (apart, target) = pair(to).ok_or_else(|| format!(".{to} is not known"))?;
    let short = apart < 16;
    if short && (!how.finite || mode != Mode::Nearest) {
        return Err("it is for .rn.satfinite alone".into());
    }
    let out = form.out(2 * apart)?;
    if from == "f32" {
        let sources = form.sources(["f32"; 2])?;
        // The first operand is stored in the upper part.
        macro_rules! both {
            ($one:expr) => {
                map(out, sources, move |[high, low]| {
                    $one(high) << apart | $one(low)
                })
            };
        }
        let near = mode == Mode::Nearest && how.plain();
        return Ok(match to {
            "f16x2" if near => both!(|bits| to_f16(f32::from_bits(bits as u32))),
            "bf16x2" if near => both!(|bits| to_bf16(f32::from_bits(bits as u32))),
            _ => both!(|bits| finished(F32.decode(bits), target, how, mode)),
        });
    }
    let (own, source) = pair(from).ok_or_else(|| format!(".{from} is not known"))?;
    // Only conversions between f16 and shorter formats.
    if short == (own < 16) || source == BF16 || target == BF16 {
        return Err(format!("unsupported conversion from .{from} to .{to}"));
    }
    let sources = form.sources([if own == 16 { "b32" } else { "b16" }])?;
    Ok(map(out, sources, move |[a]| {
        let one = |bits: u64| finished(source.decode(bits & source.ones()), target, how, mode);
        one(a >> own) << apart | one(a)
    }))
}

/// Converts to and from powers of two without a sign. Their exponents are stored as in f32.
fn powers(form: Form<'_>, how: How, mode: Mode, to: &str, from: &str) -> Result<Action, String> {
    if how.relu {
        return Err("it has no .relu".into());
    }
    let code = move |number: f32| {
        let size = number.to_bits() & 0x7fff_ffff;
        let exponent = size >> 23;
        // A number above the smallest power. f32 stores the smallest power as a subnormal number.
        let above = size & 0x7f_ffff != 0 && size > 0x40_0000 && exponent < 0xff;
        let code = exponent + u32::from(above && mode == Mode::Up);
        match code {
            0xff if how.finite && size <= 0x7f80_0000 => 0xfe,
            _ => u64::from(code),
        }
    };
    match (to, from, mode) {
        ("ue8m0x2", "f32", Mode::Zero | Mode::Up) => {
            let sources = form.sources(["f32"; 2])?;
            Ok(map(form.out(16)?, sources, move |[high, low]| {
                let one = |bits: u64| code(f32::from_bits(bits as u32));
                one(high) << 8 | one(low)
            }))
        }
        ("ue8m0x2", "bf16x2", Mode::Zero | Mode::Up) => {
            let sources = form.sources(["b32"])?;
            Ok(map(form.out(16)?, sources, move |[a]| {
                code(from_bf16(a >> 16)) << 8 | code(from_bf16(a & 0xffff))
            }))
        }
        ("bf16x2", "ue8m0x2", Mode::Nearest) if !how.finite => {
            let one = |code: u64| match code & 0xff {
                0xff => 0x7fff,
                0 => 0x40,
                exponent => exponent << 7,
            };
            let sources = form.sources(["b16"])?;
            Ok(map(form.out(32)?, sources, move |[a]| {
                one(a >> 8) << 16 | one(a)
            }))
        }
        _ => Err(format!("unsupported rounding from .{from} to .{to}")),
    }
}

//! Selects one of two values: `selp` by a predicate, `slct` by a sign.

use super::super::apply::{Form, Inputs, map, predicate_bits, store};
use super::super::bits;
use super::super::number::quick::flush;
use crate::machine::Action;

const TYPES: [&str; 12] = [
    "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16",
];

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    match form.name() {
        "selp" => selp(form),
        _ => slct(form),
    }
}

fn selp(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &[])?;
    let of = known(form.of())?;
    if form.instruction.operands.len() != 4 {
        return Err("it has four operands".into());
    }
    let out = form.out(bits(of))?;
    let inputs = Inputs::of([form.source(1, of)?, form.source(2, of)?]);
    let predicate = form.predicate(3)?;
    let ones = u64::MAX >> (64 - bits(of));
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        let set = predicate_bits(predicate, warp);
        let results = {
            let mut room = None;
            let [a, b] = inputs.view(warp, block, &mut room);
            std::array::from_fn(|lane| {
                let chosen = 0u64.wrapping_sub(u64::from(set >> lane & 1));
                (a[lane] & chosen | b[lane] & !chosen) & ones
            })
        };
        store(warp, out, &results, mask);
        Ok(())
    })))
}

fn slct(form: Form<'_>) -> Result<Action, String> {
    form.only(2, &["ftz"])?;
    let modifiers = &form.instruction.modifiers;
    let of = modifiers
        .len()
        .checked_sub(2)
        .map(|at| modifiers[at].as_str());
    let of = known(of.unwrap_or(""))?;
    let (out, by) = (form.out(bits(of))?, form.of());
    let sources = form.sources([of, of, by])?;
    let ones = u64::MAX >> (64 - bits(of));
    let ftz = form.has("ftz");
    match by {
        "s32" if !ftz => Ok(map(out, sources, move |[a, b, c]| {
            ones & if c as i32 >= 0 { a } else { b }
        })),
        "f32" => Ok(map(out, sources, move |[a, b, c]| {
            let number = f32::from_bits(c as u32);
            let number = if ftz { flush(number) } else { number };
            ones & if number >= 0.0 { a } else { b }
        })),
        _ => Err(format!("unsupported type .{by} of the selector")),
    }
}

fn known(of: &str) -> Result<&str, String> {
    if TYPES.contains(&of) {
        Ok(of)
    } else {
        Err(format!("unsupported type .{of}"))
    }
}

//! Sums over several registers. The carry is a bit of the warp's state.

use super::super::apply::{Form, Inputs, store};
use crate::machine::{Action, Mask, Source};

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["cc", "lo", "hi"])?;
    let (of, name) = (form.of(), form.name());
    let width = match of {
        "u32" | "s32" | "b32" => 32,
        "u64" | "s64" | "b64" => 64,
        _ => return Err(format!(".{of} carries nothing")),
    };
    let out = form.out(width)?;
    if name.starts_with("mad") && form.has("lo") == form.has("hi") {
        return Err("which half of the product?".into());
    }
    let (takes, gives) = (name.ends_with('c'), form.has("cc"));
    let subtracts = name.starts_with("sub");
    let inputs = if name.starts_with("mad") {
        Inputs::of(form.sources([of; 3])?)
    } else {
        let [a, b] = form.sources([of; 2])?;
        // a * 1 + b
        let one = Source::Value(1);
        Inputs::of([a, one, b])
    };
    let (high, signed) = (form.has("hi"), of.starts_with('s'));
    let ones = u64::MAX >> (64 - width);
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        let old = if takes { warp.carry } else { 0 };
        let mut new = 0;
        let results = {
            let mut room = None;
            let [a, b, c] = inputs.view(warp, block, &mut room);
            std::array::from_fn(|lane| {
                let first = product(a[lane], b[lane], width, high, signed) & ones;
                let (second, carry) = (c[lane], u128::from(old >> lane & 1));
                let (first, second) = (u128::from(first), u128::from(second));
                // For a difference, the bits above the width are ones after a borrow.
                let sum = if subtracts {
                    first.wrapping_sub(second).wrapping_sub(carry)
                } else {
                    first + second + carry
                };
                new |= ((sum >> width & 1) as u32) << lane;
                sum as u64 & ones
            })
        };
        store(warp, out, &results, mask);
        if gives {
            let Mask(kept) = mask;
            warp.carry = warp.carry & !kept | new & kept;
        }
        Ok(())
    })))
}

/// Returns one half of a product.
fn product(a: u64, b: u64, width: u32, high: bool, signed: bool) -> u64 {
    if !high {
        return a.wrapping_mul(b);
    }
    let wide = match (signed, width) {
        (true, 32) => i128::from(a as i32) * i128::from(b as i32),
        (true, _) => i128::from(a as i64) * i128::from(b as i64),
        (false, _) => (u128::from(a) * u128::from(b)) as i128,
    };
    (wide >> width) as u64
}

//! Input checks of the rotations, which run before a kernel is launched.

use burn::tensor::Tensor;

use super::{MlaDims, Pairing, Positions, RopeOptions, RopeTable, RotaryHeads};
use crate::KernelError;
use crate::cpu::wide;

/// The name of the operation in error messages.
pub(super) const NAME: &str = "rope";

fn refuse<T>(message: String) -> Result<T, KernelError> {
    Err(KernelError::shape(NAME, message))
}

/// Checks the inputs of `rotate` and returns the part of the heads that is rotated.
pub(super) fn rotate(
    x: &Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Result<RotaryHeads, KernelError> {
    let [_, _, heads, features] = x.dims();
    let (first, width) = (options.first, table.width());
    let fits = first.checked_add(width).is_some_and(|end| end <= features);
    if !fits {
        return refuse(format!(
            "x {:?} has heads of {features} features, and {width} features from feature {first} on are rotated: expected \
                 at least {} features",
            x.dims(),
            first.saturating_add(width)
        ));
    }
    let rotated = options.heads.unwrap_or(heads);
    if rotated > heads {
        return refuse(format!(
            "x {:?} has {heads} heads, but {rotated} heads are to be rotated: expected at most {heads}",
            x.dims()
        ));
    }
    check_table(x, table)?;
    check_positions(x, table, positions)?;
    Ok(RotaryHeads {
        heads,
        features,
        rotated,
        first,
        width,
        pairing: options.pairing,
    })
}

/// Checks the inputs of `rotate_mla` and returns the part of `q` that is rotated.
pub(super) fn mla(
    (q, kv, k_rope): (&Tensor<4>, &Tensor<4>, &Tensor<3>),
    MlaDims { nope, value }: MlaDims,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> Result<RotaryHeads, KernelError> {
    for (name, width) in [("nope", nope), ("value", value)] {
        if width == 0 {
            return Err(KernelError::option(NAME, name, 0, "a positive number"));
        }
    }
    let [batch, seq, heads, _] = q.dims();
    if heads == 0 {
        return refuse(format!(
            "q {:?} has no heads: expected at least one",
            q.dims()
        ));
    }
    let width = table.width();
    let wanted = (
        [batch, seq, heads, nope.saturating_add(width)],
        [batch, seq, heads, nope.saturating_add(value)],
        [batch, seq, width],
    );
    if (q.dims(), kv.dims(), k_rope.dims()) != wanted {
        return refuse(format!(
            "q {:?}, kv {:?} and k_rope {:?} do not agree: expected {:?}, {:?} and {:?} for \
                 nope = {nope}, rotary width {width} and value = {value}",
            q.dims(),
            kv.dims(),
            k_rope.dims(),
            wanted.0,
            wanted.1,
            wanted.2
        ));
    }
    if kv.dtype() != q.dtype() || k_rope.dtype() != q.dtype() {
        return refuse(format!(
            "q is {:?}, kv {:?} and k_rope {:?}: expected one type",
            q.dtype(),
            kv.dtype(),
            k_rope.dtype()
        ));
    }
    check_table(q, table)?;
    check_positions(q, table, positions)?;
    Ok(RotaryHeads {
        heads,
        features: nope + width,
        rotated: heads,
        first: nope,
        width,
        pairing,
    })
}

fn check_table(x: &Tensor<4>, table: &RopeTable) -> Result<(), KernelError> {
    if table.dtype() != wide(x.dtype()) {
        return refuse(format!(
            "x is {:?} and the table {:?}: expected a table made for {:?}",
            x.dtype(),
            table.dtype(),
            x.dtype()
        ));
    }
    if table.device() != x.device().inner() {
        return refuse(format!(
            "x is on {:?} and the table on {:?}: move it with `RopeTable::to_device`",
            x.device(),
            table.device()
        ));
    }
    Ok(())
}

fn check_positions(
    x: &Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
) -> Result<(), KernelError> {
    let [batch, seq, _, _] = x.dims();
    match positions {
        Positions::From(row) => {
            let (start, max) = match table.short_rows() {
                Some(short) if *row >= short.start => (row - short.start, short.len()),
                _ => (*row, table.max_positions()),
            };
            if start.checked_add(seq).is_some_and(|end| end <= max) {
                return Ok(());
            }
            refuse(format!(
                "{seq} tokens from position {start} on reach past a table of {max} positions: expected at least {}",
                start.saturating_add(seq)
            ))
        }
        Positions::Each(each) if each.dims() != [batch, seq] => refuse(format!(
            "positions {:?} do not fit x {:?}: expected [{batch}, {seq}]",
            each.dims(),
            x.dims()
        )),
        Positions::Each(each) if each.device().inner() != x.device().inner() => refuse(format!(
            "x is on {:?} and the positions on {:?}: expected one device",
            x.device(),
            each.device()
        )),
        _ => Ok(()),
    }
}

//! What is refused, before anything is launched.

use burn::tensor::Tensor;

use super::{Heads, Latent, Pairing, Positions, RopeOptions, RopeTable};
use crate::KernelError;
use crate::cpu::wide;

/// The name that errors give the operations.
pub(super) const NAME: &str = "rope";

/// Checks the inputs of `rotate` and says what turns.
pub(super) fn rotate(
    x: &Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Result<Heads, KernelError> {
    let [_, _, heads, features] = x.dims();
    let (first, width) = (options.first, table.width());
    let fits = first.checked_add(width).is_some_and(|end| end <= features);
    if !fits {
        return Err(KernelError::shape(
            NAME,
            format!(
                "x {:?} has heads of {features} features; {width} features from feature {first} on \
                 turn, so at least {} are needed",
                x.dims(),
                first.saturating_add(width)
            ),
        ));
    }
    let turned = options.heads.unwrap_or(heads);
    if turned > heads {
        return Err(KernelError::shape(
            NAME,
            format!(
                "x {:?} has {heads} heads, of which {turned} cannot turn; at most {heads} can",
                x.dims()
            ),
        ));
    }
    check_table(x, table)?;
    check_positions(x, table, positions)?;
    Ok(Heads {
        heads,
        features,
        turned,
        first,
        width,
        pairing: options.pairing,
    })
}

/// Checks the inputs of `rotate_mla` and says what turns of `q`.
pub(super) fn mla(
    (q, kv, k_turned): (&Tensor<4>, &Tensor<4>, &Tensor<3>),
    Latent { nope, value }: Latent,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> Result<Heads, KernelError> {
    for (name, width) in [("nope", nope), ("value", value)] {
        if width == 0 {
            return Err(KernelError::Option {
                operation: NAME,
                name,
                value: "0".into(),
                fits: "a positive number",
            });
        }
    }
    let [batch, seq, heads, _] = q.dims();
    if heads == 0 {
        return Err(KernelError::shape(
            NAME,
            format!("q {:?} has no heads; at least one is needed", q.dims()),
        ));
    }
    let width = table.width();
    let wanted = (
        [batch, seq, heads, nope.saturating_add(width)],
        [batch, seq, heads, nope.saturating_add(value)],
        [batch, seq, width],
    );
    if (q.dims(), kv.dims(), k_turned.dims()) != wanted {
        return Err(KernelError::shape(
            NAME,
            format!(
                "q {:?}, kv {:?} and k_turned {:?} do not agree; with {nope} features without \
                 position, {width} turned ones and {value} of a value, {:?}, {:?} and {:?} do",
                q.dims(),
                kv.dims(),
                k_turned.dims(),
                wanted.0,
                wanted.1,
                wanted.2
            ),
        ));
    }
    if kv.dtype() != q.dtype() || k_turned.dtype() != q.dtype() {
        return Err(KernelError::shape(
            NAME,
            format!(
                "q is {:?}, kv {:?} and k_turned {:?}; all must have one type",
                q.dtype(),
                kv.dtype(),
                k_turned.dtype()
            ),
        ));
    }
    check_table(q, table)?;
    check_positions(q, table, positions)?;
    Ok(Heads {
        heads,
        features: nope + width,
        turned: heads,
        first: nope,
        width,
        pairing,
    })
}

fn check_table(x: &Tensor<4>, table: &RopeTable) -> Result<(), KernelError> {
    if table.dtype() != wide(x.dtype()) {
        return Err(KernelError::shape(
            NAME,
            format!(
                "x is {:?} and the table {:?}; a table made for {:?} fits",
                x.dtype(),
                table.dtype(),
                x.dtype()
            ),
        ));
    }
    if table.device() != x.device().inner() {
        return Err(KernelError::shape(
            NAME,
            format!(
                "x is on {:?} and the table on {:?}; `RopeTable::to_device` moves it",
                x.device(),
                table.device()
            ),
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
    let max = table.max_positions();
    match positions {
        Positions::From(start) if start.checked_add(seq).is_none_or(|end| end > max) => {
            Err(KernelError::shape(
                NAME,
                format!(
                    "{seq} tokens from position {start} on reach past a table of {max} positions; \
                     one of at least {} is needed",
                    start.saturating_add(seq)
                ),
            ))
        }
        Positions::Each(each) if each.dims() != [batch, seq] => Err(KernelError::shape(
            NAME,
            format!(
                "positions {:?} do not fit x {:?}; [{batch}, {seq}] do",
                each.dims(),
                x.dims()
            ),
        )),
        Positions::Each(each) if each.device().inner() != x.device().inner() => {
            Err(KernelError::shape(
                NAME,
                format!(
                    "x is on {:?} and the positions on {:?}; both must be on one device",
                    x.device(),
                    each.device()
                ),
            ))
        }
        _ => Ok(()),
    }
}

//! Reference rotations, composed of Burn's own operations and differentiated by Burn's autodiff.

use burn::tensor::Tensor;

use super::{MlaDims, Pairing, Positions, RopeOptions, RopeTable, RotaryHeads, check};
use crate::cpu::wide;
use crate::error::accept;

/// Computes [`rotate`](super::rotate) with Burn's operations: slices, multiplications and concatenations.
///
/// # Panics
///
/// Panics in the same cases as [`rotate`](super::rotate).
pub fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Tensor<4> {
    let heads = accept(check::rotate(&x, table, positions, options));
    match heads.rotated {
        0 => x,
        _ => rotate_heads(x, &angles(table, positions, heads), heads),
    }
}

/// Computes [`rotate_mla`](super::rotate_mla) with Burn's operations: slices, multiplications and concatenations.
///
/// # Panics
///
/// Panics in the same cases as [`rotate_mla`](super::rotate_mla).
#[allow(clippy::too_many_arguments)]
pub fn rotate_mla(
    q: Tensor<4>,
    kv: Tensor<4>,
    k_rope: Tensor<3>,
    nope: usize,
    value: usize,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    let mla = MlaDims { nope, value };
    let inputs = (&q, &kv, &k_rope);
    let heads = accept(check::mla(inputs, mla, table, positions, pairing));
    let [batch, seq, count, _] = q.dims();
    let angles = angles(table, positions, heads);
    let shared = rotate_pairs(k_rope.unsqueeze_dim(2), &angles, pairing);
    let shared = shared.expand([batch, seq, count, heads.width]);
    let k = Tensor::cat(vec![kv.clone().narrow(3, 0, nope), shared], 3);
    (
        rotate_heads(q, &angles, heads),
        k,
        kv.narrow(3, nope, value),
    )
}

/// Cosines and sines of the tokens, `[batch or 1, seq, 1, width / 2]`.
type Angles = (Tensor<4>, Tensor<4>);

fn angles(table: &RopeTable, positions: &Positions, heads: RotaryHeads) -> Angles {
    let (cosine, sine) = table.parts();
    let half = heads.width / 2;
    let last = table.rows() as i64 - 1;
    let at = |table: Tensor<2>| match positions {
        // The slice has the number of tokens of the tensor with which it is multiplied.
        Positions::From(start) => {
            let rest = table.dims()[0] - start;
            table.narrow(0, *start, rest).reshape([1, rest, 1, half])
        }
        Positions::Each(each) => {
            let [batch, seq] = each.dims();
            let rows = each.clone().inner().clamp(0, last).reshape([batch * seq]);
            table.select(0, rows).reshape([batch, seq, 1, half])
        }
    };
    (at(cosine), at(sine))
}

fn rotate_heads(x: Tensor<4>, angles: &Angles, heads: RotaryHeads) -> Tensor<4> {
    let end = heads.first + heads.width;
    let active = x.clone().narrow(2, 0, heads.rotated);
    let mut features = vec![];
    if heads.first > 0 {
        features.push(active.clone().narrow(3, 0, heads.first));
    }
    let rotated_units = active.clone().narrow(3, heads.first, heads.width);
    features.push(rotate_pairs(rotated_units, angles, heads.pairing));
    if end < heads.features {
        features.push(active.narrow(3, end, heads.features - end));
    }
    let rotated = Tensor::cat(features, 3);
    match heads.heads - heads.rotated {
        0 => rotated,
        rest => Tensor::cat(vec![rotated, x.narrow(2, heads.rotated, rest)], 2),
    }
}

/// Rotates all features of `x`.
fn rotate_pairs(x: Tensor<4>, (cosine, sine): &Angles, pairing: Pairing) -> Tensor<4> {
    let dtype = x.dtype();
    let [batch, seq, heads, width] = x.dims();
    let half = width / 2;
    let x = x.cast(wide(dtype));
    let cosine = cosine.clone().narrow(1, 0, seq);
    let sine = sine.clone().narrow(1, 0, seq);
    let rotated = |a: Tensor<4>, b: Tensor<4>| {
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        (first, b * cosine + a * sine)
    };
    let y = match pairing {
        Pairing::Halves => {
            let (a, b) = rotated(x.clone().narrow(3, 0, half), x.narrow(3, half, half));
            Tensor::cat(vec![a, b], 3)
        }
        Pairing::Interleaved => {
            let pairs: Tensor<5> = x.reshape([batch, seq, heads, half, 2]);
            let member = |i| pairs.clone().narrow(4, i, 1).squeeze_dim::<4>(4);
            let (a, b) = rotated(member(0), member(1));
            let pairs: Tensor<5> = Tensor::stack(vec![a, b], 4);
            pairs.reshape([batch, seq, heads, width])
        }
    };
    y.cast(dtype)
}

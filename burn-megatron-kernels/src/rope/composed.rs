//! The same operations made of Burn's own, differentiated by Burn.

use burn::tensor::Tensor;

use super::{Heads, Latent, Pairing, Positions, RopeOptions, RopeTable, check};
use crate::cpu::wide;
use crate::error::accept;

/// [`rotate`](super::rotate) by slices, products and concatenations.
///
/// # Panics
///
/// As [`rotate`](super::rotate) does.
pub fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Tensor<4> {
    let heads = accept(check::rotate(&x, table, positions, options));
    match heads.turned {
        0 => x,
        _ => turn_heads(x, &angles(table, positions, heads), heads),
    }
}

/// [`rotate_mla`](super::rotate_mla) by slices, products and concatenations.
///
/// # Panics
///
/// As [`rotate_mla`](super::rotate_mla) does.
#[allow(clippy::too_many_arguments)]
pub fn rotate_mla(
    q: Tensor<4>,
    kv: Tensor<4>,
    k_turned: Tensor<3>,
    nope: usize,
    value: usize,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    let latent = Latent { nope, value };
    let inputs = (&q, &kv, &k_turned);
    let heads = accept(check::mla(inputs, latent, table, positions, pairing));
    let [batch, seq, count, _] = q.dims();
    let angles = angles(table, positions, heads);
    let shared = turn(k_turned.unsqueeze_dim(2), &angles, pairing);
    let shared = shared.expand([batch, seq, count, heads.width]);
    let k = Tensor::cat(vec![kv.clone().narrow(3, 0, nope), shared], 3);
    (turn_heads(q, &angles, heads), k, kv.narrow(3, nope, value))
}

/// Cosines and sines of the tokens, `[batch or 1, seq, 1, width / 2]`.
type Angles = (Tensor<4>, Tensor<4>);

fn angles(table: &RopeTable, positions: &Positions, heads: Heads) -> Angles {
    let (cosine, sine) = table.parts();
    let half = heads.width / 2;
    let last = table.max_positions() as i64 - 1;
    let at = |table: Tensor<2>| match positions {
        // The number of tokens follows from what the slice is multiplied with.
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

fn turn_heads(x: Tensor<4>, angles: &Angles, heads: Heads) -> Tensor<4> {
    let end = heads.first + heads.width;
    let active = x.clone().narrow(2, 0, heads.turned);
    let mut features = vec![];
    if heads.first > 0 {
        features.push(active.clone().narrow(3, 0, heads.first));
    }
    let turning = active.clone().narrow(3, heads.first, heads.width);
    features.push(turn(turning, angles, heads.pairing));
    if end < heads.features {
        features.push(active.narrow(3, end, heads.features - end));
    }
    let turned = Tensor::cat(features, 3);
    match heads.heads - heads.turned {
        0 => turned,
        rest => Tensor::cat(vec![turned, x.narrow(2, heads.turned, rest)], 2),
    }
}

/// Turns all features of `x`.
fn turn(x: Tensor<4>, (cosine, sine): &Angles, pairing: Pairing) -> Tensor<4> {
    let dtype = x.dtype();
    let [batch, seq, heads, width] = x.dims();
    let half = width / 2;
    let x = x.cast(wide(dtype));
    let cosine = cosine.clone().narrow(1, 0, seq);
    let sine = sine.clone().narrow(1, 0, seq);
    let turned = |a: Tensor<4>, b: Tensor<4>| {
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        (first, b * cosine + a * sine)
    };
    let y = match pairing {
        Pairing::Halves => {
            let (a, b) = turned(x.clone().narrow(3, 0, half), x.narrow(3, half, half));
            Tensor::cat(vec![a, b], 3)
        }
        Pairing::Interleaved => {
            let pairs: Tensor<5> = x.reshape([batch, seq, heads, half, 2]);
            let member = |i| pairs.clone().narrow(4, i, 1).squeeze_dim::<4>(4);
            let (a, b) = turned(member(0), member(1));
            let pairs: Tensor<5> = Tensor::stack(vec![a, b], 4);
            pairs.reshape([batch, seq, heads, width])
        }
    };
    y.cast(dtype)
}

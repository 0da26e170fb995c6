//! The CPU implementation. It processes one token at a time, so that the token stays in the cache while its heads are
//! rotated.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;

use super::ops::RotateOp;
use super::{MlaDims, Pairing, RotaryHeads};
use crate::cpu::{Element, Real, for_rows, slice};

/// The cosines and sines of all tokens.
pub(super) struct CpuAngles<'a, E: Element> {
    cosine: &'a [E::Wide],
    sine: &'a [E::Wide],
    each: Option<&'a [i32]>,
    half: usize,
    start: usize,
    seq: usize,
    /// The direction of the rotation: 1, or -1 for the inverse rotation.
    direction: E::Wide,
}

/// The cosines and sines of one token.
#[derive(Clone, Copy)]
struct TokenAngle<'a, R> {
    cosine: &'a [R],
    sine: &'a [R],
    direction: R,
}

impl<'a, E: Element> CpuAngles<'a, E> {
    /// Creates the angles from the table and the positions, which are the last inputs of a launch.
    pub(super) fn new(inputs: &'a [FlexTensor], seq: usize, op: &RotateOp) -> Self {
        Self {
            cosine: slice(&inputs[0]),
            sine: slice(&inputs[1]),
            each: inputs.get(2).map(slice_of_positions),
            half: inputs[0].shape()[1],
            start: op.start,
            seq,
            direction: if op.is_back() {
                -E::Wide::ONE
            } else {
                E::Wide::ONE
            },
        }
    }

    #[inline(always)]
    fn of(&self, token: usize) -> TokenAngle<'a, E::Wide> {
        let last = self.cosine.len() / self.half - 1;
        let position = match self.each {
            Some(each) => (each[token].max(0) as usize).min(last),
            None => self.start + token % self.seq,
        };
        let row = position * self.half..(position + 1) * self.half;
        TokenAngle {
            cosine: &self.cosine[row.clone()],
            sine: &self.sine[row],
            direction: self.direction,
        }
    }
}

fn slice_of_positions(tensor: &FlexTensor) -> &[i32] {
    match tensor.as_slice() {
        Some(positions) => positions,
        None => unreachable!("positions were cast to i32 and made contiguous"),
    }
}

/// Rotates the features of one head.
#[inline(always)]
fn rotate_head<E: Element>(head: &mut [E], angle: TokenAngle<E::Wide>, pairing: Pairing) {
    let rotate = |a: &mut E, b: &mut E, cosine: E::Wide, sine: E::Wide| {
        let (x, y, sine) = (a.wide(), b.wide(), sine * angle.direction);
        *a = E::narrow(x * cosine - y * sine);
        *b = E::narrow(y * cosine + x * sine);
    };
    let angles = angle.cosine.iter().zip(angle.sine);
    match pairing {
        Pairing::Halves => {
            let (a, b) = head.split_at_mut(angle.cosine.len());
            for ((a, b), (cosine, sine)) in a.iter_mut().zip(b).zip(angles) {
                rotate(a, b, *cosine, *sine);
            }
        }
        Pairing::Interleaved => {
            for ([a, b], (cosine, sine)) in head.as_chunks_mut().0.iter_mut().zip(angles) {
                rotate(a, b, *cosine, *sine);
            }
        }
    }
}

/// Rotates the heads and features of one token that are to be rotated.
#[inline(always)]
fn rotate_token<E: Element>(token: &mut [E], angle: TokenAngle<E::Wide>, heads: RotaryHeads) {
    let rotated = heads.rotated * heads.features;
    for head in token[..rotated].chunks_exact_mut(heads.features) {
        let active = &mut head[heads.first..heads.first + heads.width];
        rotate_head(active, angle, heads.pairing);
    }
}

/// Rotates `x`. `x` is updated in place if no other tensor shares its memory.
pub(super) fn rotate<E: Element>(
    mut x: FlexTensor,
    angles: &CpuAngles<E>,
    heads: RotaryHeads,
) -> FlexTensor {
    let width = heads.heads * heads.features;
    if x.is_unique()
        && let Some((start, end)) = x.layout().contiguous_offsets()
    {
        for_rows(
            &mut x.storage_mut::<E>()[start..end],
            width,
            #[inline(always)]
            |number, token| rotate_token(token, angles.of(number), heads),
        );
        return x;
    }
    let mut y = FlexTensor::empty(x.shape(), x.dtype());
    let source = slice::<E>(&x);
    for_rows(
        y.storage_mut::<E>(),
        width,
        #[inline(always)]
        |number, token| {
            token.copy_from_slice(&source[number * width..(number + 1) * width]);
            rotate_token(token, angles.of(number), heads);
        },
    );
    y
}

/// Computes the keys. The key of a head consists of its part without a position, followed by the rotated part that all
/// heads share.
pub(super) fn mla_forward<E: Element>(
    kv: &FlexTensor,
    shared: &FlexTensor,
    angles: &CpuAngles<E>,
    heads: RotaryHeads,
    mla: MlaDims,
) -> FlexTensor {
    let mut shape = kv.shape();
    shape[3] = heads.features;
    let mut k = FlexTensor::empty(shape, kv.dtype());
    let (kv, shared) = (slice::<E>(kv), slice::<E>(shared));
    let row = mla.nope + mla.value;
    for_rows(
        k.storage_mut::<E>(),
        heads.heads * heads.features,
        #[inline(always)]
        |number, token| {
            let own = kv[number * heads.heads * row..].chunks_exact(row);
            let shared = &shared[number * heads.width..(number + 1) * heads.width];
            // The shared part of the key is rotated in the first head and copied from there to the other heads.
            let (first, rest) = token.split_at_mut(heads.features);
            let rotated = &mut first[mla.nope..];
            rotated.copy_from_slice(shared);
            rotate_head(rotated, angles.of(number), heads.pairing);
            let rotated = &first[mla.nope..];
            for head in rest.chunks_exact_mut(heads.features) {
                head[mla.nope..].copy_from_slice(rotated);
            }
            for (head, own) in token.chunks_exact_mut(heads.features).zip(own) {
                head[..mla.nope].copy_from_slice(&own[..mla.nope]);
            }
        },
    );
    k
}

/// Computes the gradient of `kv`, which is 0 for the values, and the gradient of the shared part of the key, which is
/// summed over the heads in order.
pub(super) fn mla_backward<E: Element>(
    dk: &FlexTensor,
    angles: &CpuAngles<E>,
    heads: RotaryHeads,
    mla: MlaDims,
) -> Vec<FlexTensor> {
    let (batch, seq) = (dk.shape()[0], dk.shape()[1]);
    let row = mla.nope + mla.value;
    let mut dkv = FlexTensor::empty([batch, seq, heads.heads, row].into(), dk.dtype());
    let mut shared = FlexTensor::empty([batch, seq, heads.width].into(), dk.dtype());
    let width = heads.heads * heads.features;
    let gradient = slice::<E>(dk);
    let of =
        |number: usize| gradient[number * width..(number + 1) * width].chunks_exact(heads.features);
    for_rows(
        dkv.storage_mut::<E>(),
        heads.heads * row,
        #[inline(always)]
        |number, token| {
            for (head, gradient) in token.chunks_exact_mut(row).zip(of(number)) {
                head[..mla.nope].copy_from_slice(&gradient[..mla.nope]);
            }
        },
    );
    for_rows(
        shared.storage_mut::<E>(),
        heads.width,
        #[inline(always)]
        |number, token| {
            let mut sums = vec![E::Wide::ZERO; heads.width];
            for gradient in of(number) {
                for (sum, gradient) in sums.iter_mut().zip(&gradient[mla.nope..]) {
                    *sum += gradient.wide();
                }
            }
            // The sums are rotated before they are rounded.
            rotate_head::<E::Wide>(&mut sums, angles.of(number), heads.pairing);
            for (gradient, sum) in token.iter_mut().zip(sums) {
                *gradient = E::narrow(sum);
            }
        },
    );
    vec![dkv, shared]
}

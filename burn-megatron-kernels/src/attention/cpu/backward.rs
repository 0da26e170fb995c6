//! The backward pass of one head.

use std::ops::Range;

use super::forward::{HeadInputs, dot, mask_row, panels_of, scores_stride};
use super::load::{HeadRows, matrix};
use super::product::{LANES, ROWS, add_transposed_times, times_panels, times_rows};
use crate::cpu::{Element, Real};

/// The number of queries that are processed at a time. They form the summed dimension of the matrix multiplications for
/// the gradients of keys and values.
const TILE: usize = 32;

/// The gradients of one head, whose rows are padded, and the gradient of its sink.
pub(super) struct HeadGradients<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub sink: T,
}

/// The results of the forward pass, and the gradient of the output.
#[derive(Clone, Copy)]
pub(super) struct SavedForward<'a, E: Element> {
    pub out: HeadRows<'a, E>,
    pub dout: HeadRows<'a, E>,
    pub lse: &'a [E::Wide],
}

/// A head in the layout that the matrix multiplications require: padded rows, and also panels for transposed right
/// operands.
struct PaddedHead<T> {
    /// The padded width of queries and keys.
    width: usize,
    /// The padded width of values.
    value_width: usize,
    /// The unpadded widths of queries and keys, and of values.
    depths: [usize; 2],
    q: Vec<T>,
    dout: Vec<T>,
    k: Vec<T>,
    k_panels: Vec<T>,
    v_panels: Vec<T>,
    scale: T,
}

/// The probabilities of [`TILE`] queries and the gradients of their scores.
struct ScoreTiles<T> {
    p: Vec<T>,
    ds: Vec<T>,
    stride: usize,
}

#[inline(always)]
pub(super) fn backward<E: Element, const FUSED: bool>(
    head: HeadInputs<'_, E>,
    given: SavedForward<'_, E>,
) -> HeadGradients<E::Wide> {
    let ((width, queries), (value_width, _)) = (head.q.padded(), head.v.padded());
    let (one, zero) = (E::Wide::ONE, E::Wide::ZERO);
    let (_, keys) = head.k.padded();
    let padded = PaddedHead {
        width,
        value_width,
        depths: [head.q.width, head.v.width],
        q: head.q.rows(head.scale),
        dout: given.dout.rows(one),
        k: head.k.rows(one),
        k_panels: head.k.panels(),
        v_panels: head.v.panels(),
        scale: head.scale,
    };
    let mut gradients = HeadGradients {
        q: vec![zero; queries.next_multiple_of(TILE) * width],
        k: vec![zero; keys * width],
        v: vec![zero; keys * value_width],
        sink: zero,
    };
    let stride = scores_stride(keys);
    let mut scores = ScoreTiles {
        p: vec![zero; TILE * stride],
        ds: vec![zero; TILE * stride],
        stride,
    };
    for (tile, visible) in head.visible.chunks(TILE).enumerate() {
        let row = tile * TILE;
        let all = panels_of(visible);
        let (first, columns) = (all.start * LANES, all.len() * LANES);
        for (strip, visible) in visible.chunks(ROWS).enumerate() {
            let (row, local) = (row + strip * ROWS, strip * ROWS);
            let panels = panels_of(visible);
            let offset = local * stride + (panels.start * LANES).saturating_sub(first);
            padded.products::<FUSED>(row, &panels, &mut scores, offset);
            for (i, range) in visible.iter().enumerate() {
                let lse = given.lse[row + i];
                let delta = dot(given.out.row(row + i), given.dout.row(row + i));
                if let Some(sink) = head.sink
                    && lse > E::Wide::NEG_INFINITY
                {
                    gradients.sink += -((sink - lse).exponential() * delta);
                }
                let (start, length) = (offset + i * stride, panels.len() * LANES);
                let p = &mut scores.p[start..][..length];
                let ds = &mut scores.ds[start..][..length];
                differentiate(p, ds, lse, delta);
                let line = (local + i) * stride;
                mask_row(&mut scores.p[line..][..columns], range, first, zero);
                mask_row(&mut scores.ds[line..][..columns], range, first, zero);
            }
            padded.queries::<FUSED>(&panels, &scores, offset, &mut gradients.q[row * width..]);
        }
        let depth = visible.len();
        let (p, ds) = (matrix(&scores.p, stride), matrix(&scores.ds, stride));
        let (q, dout) = (
            matrix(&padded.q, width).from(row),
            matrix(&padded.dout, value_width).from(row),
        );
        let (dv, dk) = (
            &mut gradients.v[first * value_width..],
            &mut gradients.k[first * width..],
        );
        add_transposed_times::<_, FUSED>(p, columns, depth, dout, dv);
        add_transposed_times::<_, FUSED>(ds, columns, depth, q, dk);
    }
    gradients
}

impl<T: Real> PaddedHead<T> {
    /// Computes the scores `q k^T` and the products `do v^T` of [`ROWS`] queries, starting at `row`.
    #[inline(always)]
    fn products<const FUSED: bool>(
        &self,
        row: usize,
        panels: &Range<usize>,
        scores: &mut ScoreTiles<T>,
        offset: usize,
    ) {
        let [depth, value_depth] = self.depths;
        let range = |depth| panels.start * depth * LANES..panels.end * depth * LANES;
        let (q, dout) = (
            matrix(&self.q, self.width),
            matrix(&self.dout, self.value_width),
        );
        let (k, v) = (
            &self.k_panels[range(depth)],
            &self.v_panels[range(value_depth)],
        );
        let (p, ds) = (&mut scores.p[offset..], &mut scores.ds[offset..]);
        times_panels::<_, FUSED>(q.from(row), depth, k, p, scores.stride);
        times_panels::<_, FUSED>(dout.from(row), value_depth, v, ds, scores.stride);
    }

    /// Computes the gradient `scale * ds k` of [`ROWS`] queries.
    #[inline(always)]
    fn queries<const FUSED: bool>(
        &self,
        panels: &Range<usize>,
        scores: &ScoreTiles<T>,
        offset: usize,
        out: &mut [T],
    ) {
        let out = &mut out[..ROWS * self.width];
        let ds = matrix(&scores.ds[offset..], scores.stride);
        let keys = matrix(&self.k, self.width).from(panels.start * LANES);
        times_rows::<_, FUSED>(ds, panels.len() * LANES, keys, out);
        out.iter_mut().for_each(|out| *out = *out * self.scale);
    }
}

/// Converts the scores and `do v^T` of a row to probabilities and score gradients.
#[inline(always)]
fn differentiate<T: Real>(p: &mut [T], ds: &mut [T], lse: T, delta: T) {
    for (p, ds) in p.chunks_exact_mut(LANES).zip(ds.chunks_exact_mut(LANES)) {
        for n in 0..LANES {
            p[n] = (p[n] - lse).exponential();
            ds[n] = p[n] * (ds[n] - delta);
        }
    }
}

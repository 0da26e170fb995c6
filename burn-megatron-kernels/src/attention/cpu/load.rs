//! Loads the rows of one head, converts them to f32 (f64 for f64) and pads them.

use crate::cpu::Element;

use super::product::{LANES, MatrixRows};

/// The rows of a head in a tensor. Each row has `width` adjacent elements, and rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, E> {
    pub values: &'a [E],
    pub stride: usize,
    pub count: usize,
    pub width: usize,
}

impl<'a, E: Element> HeadRows<'a, E> {
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &'a [E] {
        &self.values[row * self.stride..][..self.width]
    }

    /// Returns the width and the number of rows, both rounded up to complete tiles.
    #[inline(always)]
    pub(super) fn padded(&self) -> (usize, usize) {
        (
            self.width.next_multiple_of(LANES),
            self.count.next_multiple_of(LANES),
        )
    }

    /// Returns the rows times `factor`, padded with zeros.
    #[inline(always)]
    pub(super) fn rows(&self, factor: E::Wide) -> Vec<E::Wide> {
        let (width, count) = self.padded();
        let mut rows = vec![E::Wide::default(); width * count];
        for (i, wide) in rows.chunks_exact_mut(width).take(self.count).enumerate() {
            for (wide, value) in wide.iter_mut().zip(self.row(i)) {
                *wide = value.wide() * factor;
            }
        }
        rows
    }

    /// Returns the rows in panels of [`LANES`], `[panel][width][LANES]`, padded with zeros.
    #[inline(always)]
    pub(super) fn panels(&self) -> Vec<E::Wide> {
        let (_, count) = self.padded();
        let mut panels = vec![E::Wide::default(); self.width * count];
        for (first, panel) in panels.chunks_exact_mut(self.width * LANES).enumerate() {
            let first = first * LANES;
            for lane in 0..LANES.min(self.count - first) {
                for (at, value) in self.row(first + lane).iter().enumerate() {
                    panel[at * LANES + lane] = value.wide();
                }
            }
        }
        panels
    }
}

/// Returns padded rows as a matrix.
#[inline(always)]
pub(super) fn matrix<T>(values: &[T], stride: usize) -> MatrixRows<'_, T> {
    MatrixRows { values, stride }
}

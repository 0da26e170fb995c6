//! One task of the CPU implementation. It processes a range of rows, one chunk of columns at a time.

use burn::backend::flex::FlexTensor;

use super::curve::{Gaussian, Nonlinear, bounded};
use crate::activation::{ActivationOptions, FusedActivation};
use crate::cpu::{Element, Real, add, narrow, slice, widen};

/// The number of columns per chunk. Three buffers of this size fit into the L1 cache.
const CHUNK: usize = 512;
/// The number of partial sums, which is the number of f32 lanes of the widest SIMD vectors.
const LANES: usize = 16;

/// The clamp limits and the offset of a gated activation. The limits are infinite if there is no clamp.
#[derive(Clone, Copy)]
pub(super) struct GateLimits<R> {
    clamp: R,
    offset: R,
}

impl<R: Real> GateLimits<R> {
    pub fn new(options: &ActivationOptions) -> Self {
        Self {
            clamp: R::of(options.clamp.unwrap_or(f64::INFINITY)),
            offset: R::of(options.offset),
        }
    }
}

/// The inputs of an activation.
pub(super) struct ActivationRows<'a, E: Element> {
    pub x: &'a [E],
    pub bias: Option<&'a [E]>,
    pub weight: Option<&'a [E::Wide]>,
    pub width: usize,
    pub gated: bool,
    pub limits: GateLimits<E::Wide>,
}

/// The outputs of one backward task: the gradients of its rows, and its part of the bias gradient.
pub(super) struct GradientTask<'a, E: Element> {
    pub first: usize,
    pub rows: usize,
    pub dx: Option<&'a mut [E]>,
    pub dweight: Option<&'a mut [E::Wide]>,
    pub dbias: Option<Vec<E::Wide>>,
}

impl<'a, E: Element> ActivationRows<'a, E>
where
    E::Wide: Gaussian,
{
    /// Creates the inputs of an activation whose rows have `width` elements.
    pub fn new(fused: &FusedActivation, inputs: &'a [FlexTensor], width: usize) -> Self {
        let (x, bias, weight) = fused.split(inputs);
        Self {
            x: slice(x),
            bias: bias.map(slice),
            weight: weight.map(slice),
            width,
            gated: fused.kind.is_gated(),
            limits: GateLimits::new(&fused.options),
        }
    }

    fn output_width(&self) -> usize {
        if self.gated {
            self.width / 2
        } else {
            self.width
        }
    }

    /// Computes the output rows `y`, which start at row `first`.
    #[inline(always)]
    pub fn forward<S: Nonlinear>(&self, first: usize, y: &mut [E]) {
        let zero = <E::Wide as Real>::ZERO;
        let (mut a, mut b) = ([zero; CHUNK], [zero; CHUNK]);
        let output_width = self.output_width();
        for (i, y) in y.chunks_exact_mut(output_width).enumerate() {
            let row = first + i;
            let weight = self.weight_of(row);
            for (j, y) in y.chunks_mut(CHUNK).enumerate() {
                let (a, b) = (&mut a[..y.len()], &mut b[..y.len()]);
                self.load(row, j * CHUNK, a);
                if self.gated {
                    self.load(row, output_width + j * CHUNK, b);
                    gate::<S, _>(a, b, weight, self.limits);
                } else {
                    a.iter_mut().for_each(|a| *a = S::at(*a).0 * weight)
                }
                narrow(a, y);
            }
        }
    }

    /// Computes the gradients of a task's rows.
    #[inline(always)]
    pub fn backward<S: Nonlinear>(&self, gradient: &[E], task: &mut GradientTask<'_, E>) {
        let zero = <E::Wide as Real>::ZERO;
        let (mut a, mut b, mut g) = ([zero; CHUNK], [zero; CHUNK], [zero; CHUNK]);
        let output_width = self.output_width();
        for i in 0..task.rows {
            let row = task.first + i;
            let weight = self.weight_of(row);
            let mut dot = zero;
            let of_row = &gradient[row * output_width..(row + 1) * output_width];
            for (j, of_row) in of_row.chunks(CHUNK).enumerate() {
                let (a, b) = (&mut a[..of_row.len()], &mut b[..of_row.len()]);
                let g = &mut g[..of_row.len()];
                widen(of_row, g);
                self.load(row, j * CHUNK, a);
                if self.gated {
                    self.load(row, output_width + j * CHUNK, b);
                    gate_gradient::<S, _>(a, b, g, weight, self.limits);
                    task.store_gradient(i * self.width, output_width + j * CHUNK, b);
                } else {
                    gradient_in_place::<S, _>(a, g, weight);
                }
                task.store_gradient(i * self.width, j * CHUNK, a);
                if task.dweight.is_some() {
                    dot += sum(g);
                }
            }
            if let Some(dweight) = &mut task.dweight {
                dweight[i] = dot;
            }
        }
    }

    #[inline(always)]
    fn weight_of(&self, row: usize) -> E::Wide {
        self.weight
            .map_or(<E::Wide as Real>::ONE, |weight| weight[row])
    }

    /// Loads the sum of `x` and the bias in `row`, starting at `column`.
    #[inline(always)]
    fn load(&self, row: usize, column: usize, into: &mut [E::Wide]) {
        let at = row * self.width + column;
        let x = &self.x[at..at + into.len()];
        let Some(bias) = self.bias else {
            return widen(x, into);
        };
        let bias = &bias[column..column + into.len()];
        for ((into, x), bias) in into.iter_mut().zip(x).zip(bias) {
            *into = x.wide() + bias.wide();
        }
    }
}

impl<E: Element> GradientTask<'_, E> {
    /// Writes the gradients of the row that starts at element `row` of the task, starting at `column`.
    #[inline(always)]
    fn store_gradient(&mut self, row: usize, column: usize, gradient: &[E::Wide]) {
        if let Some(dx) = &mut self.dx {
            narrow(gradient, &mut dx[row + column..][..gradient.len()]);
        }
        if let Some(dbias) = &mut self.dbias {
            add(&mut dbias[column..][..gradient.len()], gradient);
        }
    }
}

/// Returns the sum of the values in a fixed order, which allows vectorization.
#[inline(always)]
fn sum<R: Real>(values: &[R]) -> R {
    let mut lanes = [R::ZERO; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        add(&mut lanes, chunk);
    }
    add(&mut lanes, chunks.remainder());
    lanes.into_iter().sum()
}

/// Replaces `a` by the output of a gated activation.
#[inline(always)]
fn gate<S: Nonlinear, R: Gaussian>(a: &mut [R], b: &[R], weight: R, limits: GateLimits<R>) {
    for (a, b) in a.iter_mut().zip(b) {
        let first = if *a > limits.clamp { limits.clamp } else { *a };
        let second = bounded(*b, -limits.clamp, limits.clamp) + limits.offset;
        *a = S::at(first).0 * second * weight;
    }
}

/// Replaces `a` and `b` by their gradients. Replaces the output gradient `g` by the gradient of the row weight.
#[inline(always)]
fn gate_gradient<S: Nonlinear, R: Gaussian>(
    a: &mut [R],
    b: &mut [R],
    g: &mut [R],
    weight: R,
    limits: GateLimits<R>,
) {
    for ((a, b), g) in a.iter_mut().zip(b).zip(g) {
        let first = if *a > limits.clamp { limits.clamp } else { *a };
        let second = bounded(*b, -limits.clamp, limits.clamp) + limits.offset;
        let (value, slope) = S::at(first);
        let upstream = *g * weight;
        *g = *g * value * second;
        *a = if *a > limits.clamp {
            R::ZERO
        } else {
            upstream * second * slope
        };
        *b = if b.magnitude() > limits.clamp {
            R::ZERO
        } else {
            upstream * value
        };
    }
}

/// Computes the same as [`gate_gradient`] for activations without a gate.
#[inline(always)]
fn gradient_in_place<S: Nonlinear, R: Gaussian>(a: &mut [R], g: &mut [R], weight: R) {
    for (a, g) in a.iter_mut().zip(g) {
        let (value, slope) = S::at(*a);
        *a = *g * weight * slope;
        *g = *g * value;
    }
}

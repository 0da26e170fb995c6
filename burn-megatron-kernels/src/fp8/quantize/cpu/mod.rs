//! The CPU implementation. It processes blocks of rows of a copy in parallel. Each block is processed in small tiles
//! with SIMD instructions.
//!
//! Blocks have a fixed height. Only maxima of bits and counts are reduced over blocks, so that results never depend on
//! the number of threads.

mod copy;
mod scale;
mod values;

use burn::backend::flex::FlexTensor;

use self::copy::{CopyTask, MatrixSource, QuantizedCopy, RangeStatistics};
use super::super::matrix::{transposed_codes, words};
use super::ops::QuantizeOp;
use super::scaling::{CurrentScale, ScalingKind};
use crate::cpu::{Element, ROW_GRAIN, for_float, map_tasks, slice, tensor, vector, vectorized};
use crate::fp8::delayed::log_entry;
use crate::fp8::format::Format;
use crate::fp8::matrix::BLOCK;

pub(super) use values::dequantize;

/// Quantizes a matrix. See [`QuantizeOp`].
pub(super) fn quantize(kernel: &QuantizeOp, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let log = kernel.slot.and_then(|slot| Some((slot, inputs.pop()?)));
    if let Some(activation) = &kernel.activation {
        let rest = inputs.split_off(1 + usize::from(activation.bias));
        inputs = vec![activation.on_cpu(inputs)];
        inputs.extend(rest);
    }
    for_float!(inputs[0].dtype(), E => quantize_as::<E>(kernel, &inputs, log))
}

fn quantize_as<E: Element>(
    kernel: &QuantizeOp,
    inputs: &[FlexTensor],
    log: Option<(usize, FlexTensor)>,
) -> Vec<FlexTensor> {
    let x = &inputs[0];
    let [rows, columns] = [x.layout().shape()[0], x.layout().shape()[1]];
    let given = inputs
        .get(1)
        .map_or(1.0, |scales| slice::<f32>(scales)[kernel.given]);
    let copy = |transposed| {
        let copy = CopyTask {
            source: MatrixSource {
                values: slice::<E>(x),
                sizes: [rows, columns],
                transposed,
            },
            kind: kernel.kind,
            given,
        };
        // With a constant format, the shifts are compile-time constants.
        match kernel.format {
            Format::E5M2 => copy.make(Format::E5M2),
            _ => copy.make(Format::E4M3),
        }
    };
    let (usage, kind) = (kernel.usage, kernel.kind);
    let rowwise = usage.rowwise.then(|| copy(false));
    let columnwise = usage.columnwise.then(|| match &rowwise {
        Some(rowwise) if kind.shares_codes() => transposed_copy(rowwise, [rows, columns]),
        _ => copy(true),
    });
    let first = rowwise.as_ref().or(columnwise.as_ref());
    let seen = match first {
        Some(copy) => copy.seen,
        None => RangeStatistics::default().with_amax(largest::<E>(slice(x))),
    };
    let pairs = [(rowwise, [rows, columns]), (columnwise, [columns, rows])];
    let mut all = vec![];
    for (copy, [rows, depth]) in pairs {
        let Some(copy) = copy else { continue };
        all.push(tensor(copy.codes, [rows, words(depth)]));
        let shape = kind.spec([rows, depth]).shape;
        let floats = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect();
        all.push(match kind {
            ScalingKind::Tensor => tensor(vec![1.0 / given], shape),
            ScalingKind::Blocks { .. } => tensor(floats(copy.scales), shape),
            ScalingKind::Mx => tensor(copy.scales, shape),
        });
    }
    let seen = [f32::from_bits(seen.amax), seen.beyond as f32];
    all.push(match log {
        Some((slot, log)) => log_entry(log, slot, seen, (rows * columns) as f32),
        None => vector(seen.to_vec()),
    });
    all
}

/// Returns the transposed copy, for kinds of scales with which both copies have the same codes.
fn transposed_copy(copy: &QuantizedCopy, [rows, depth]: [usize; 2]) -> QuantizedCopy {
    let [high, wide] = [rows.div_ceil(BLOCK), depth.div_ceil(BLOCK)];
    let scales = if copy.scales.is_empty() {
        vec![]
    } else {
        (0..wide)
            .flat_map(|left| (0..high).map(move |top| copy.scales[top * wide + left]))
            .collect()
    };
    QuantizedCopy {
        codes: transposed_codes(&copy.codes, [rows, depth]),
        scales,
        seen: copy.seen,
    }
}

/// Computes the largest magnitude. See [`amax`](super::amax).
pub(super) fn amax(x: &FlexTensor) -> FlexTensor {
    let largest = for_float!(x.dtype(), E => largest::<E>(slice(x)));
    vector(vec![f32::from_bits(largest)])
}

/// Returns the bits of the largest magnitude. The bits of NaN are larger than the bits of all numbers.
fn largest<E: Element>(values: &[E]) -> u32 {
    let of = |values: &[E]| {
        vectorized(
            #[inline(always)]
            || scale::largest(values.iter().map(|value| scale::single(*value))),
        )
    };
    let parts = map_tasks(values.chunks(ROW_GRAIN), of);
    parts.into_iter().max().unwrap_or(0)
}

/// Computes the scale. See [`current_scale`](super::current_scale).
pub(super) fn scale_of(amax: &FlexTensor, format: Format, options: CurrentScale) -> FlexTensor {
    let amax = slice::<f32>(amax)[0];
    vector(vec![scale::current(amax, format, options)])
}

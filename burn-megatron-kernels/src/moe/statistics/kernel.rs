//! The CubeCL kernels. A cube sums a strip of tokens, and [`fold`] adds the sums of the strips.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::backward::{SequenceSums, SumKind};
use crate::column_sum::kernel::{Partials, SumTarget, fold};
use crate::cube::instance::{AotList, given, instance, types};
use crate::cube::{cube_sum, empty, launch, matrix_sizes};
use crate::moe::permutation::sort::kernel::histogram;
use crate::moe::router::kernel::{AOT_CUBE, TokenCube, scores};
use crate::moe::score::kernel::{numerator, slope};
use crate::moe::score::row::row_denominator;

/// The minimum number of tokens per strip.
const STRIP: usize = 32;
/// The maximum total number of strips. This number of cubes fills a large device.
const MOST_STRIPS: usize = 2048;
/// The number of units of a cube that adds counts.
const UNITS: u32 = 256;

/// The compile-time parameters of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SumVariant {
    kind: SumKind,
    /// The number of sums in shared memory.
    size: usize,
    cube: TokenCube,
}

/// Returns whether a token is included in the sums.
#[cube]
fn counts(valid: &ComptimeOption<OwnedTensor<f32>>, token: usize) -> bool {
    let mut weight = 1.0f32;
    #[comptime]
    match valid {
        ComptimeOption::Some(valid) => {
            weight = valid.as_slice()[token];
        }
        ComptimeOption::None => {}
    }
    weight != 0.0f32
}

/// Sums `strip` tokens per cube. A sequence has `length` tokens. `partials` is `[strips, sequences, width]`.
#[cube(launch_unchecked)]
fn router_sums_kernel<F: Float>(
    logits: &Tensor<F>,
    valid: &ComptimeOption<OwnedTensor<f32>>,
    partials: &mut Tensor<f32>,
    sequences: u32,
    length: u32,
    strips: u32,
    strip: u32,
    experts: u32,
    #[comptime] variant: SumVariant,
    #[define(F)] _dtype: ElemType,
) {
    let units = comptime!(variant.cube.units);
    let planes = comptime!(variant.cube.planes);
    let score = comptime!(variant.kind.score());
    let mut sums = Shared::<[f32]>::new_slice(comptime!(variant.size));
    let cube = CUBE_POS as u32;
    if cube < sequences * strips {
        let sequence = cube / strips;
        let first = cube % strips * strip;
        let mut i = UNIT_POS;
        while i < comptime!(variant.size as u32) {
            sums[i as usize] = 0.0f32;
            i += units;
        }
        for position in first..min(first + strip, length) {
            let token = (sequence * length + position) as usize;
            let start = token * experts as usize;
            let shared = row_denominator::<F>(logits, start, experts, score, units, planes);
            let counts = counts(valid, token);
            // Each unit adds only its own sums.
            if comptime!(variant.kind == SumKind::SquaredLse) {
                let lse = shared.largest + shared.total.ln();
                if UNIT_POS == 0 && counts {
                    sums[0] += lse * lse;
                }
            } else {
                let mut expert = UNIT_POS;
                while expert < experts {
                    let z = f32::cast_from(logits[start + expert as usize]);
                    let value = numerator(z, shared.largest, score) / shared.total;
                    sums[expert as usize] += select(counts, value, 0.0f32);
                    expert += units;
                }
            }
        }
        let width = width(experts, variant.kind);
        let at = (cube % strips * sequences + sequence) * width;
        let mut i = UNIT_POS;
        while i < width {
            partials[(at + i) as usize] = sums[i as usize];
            i += units;
        }
    }
}

/// Returns the number of sums per sequence.
#[cube]
fn width(experts: u32, #[comptime] kind: SumKind) -> u32 {
    if comptime!(kind == SumKind::SquaredLse) {
        1u32.runtime()
    } else {
        experts
    }
}

/// Computes the gradient of one token per cube. A sequence has `length` tokens.
#[cube(launch_unchecked)]
fn router_sums_gradient_kernel<F: Float>(
    logits: &Tensor<F>,
    upstream: &Tensor<f32>,
    valid: &ComptimeOption<OwnedTensor<f32>>,
    gradient: &mut Tensor<F>,
    tokens: u32,
    length: u32,
    experts: u32,
    #[comptime] kind: SumKind,
    #[comptime] cube: TokenCube,
    #[define(F)] _dtype: ElemType,
) {
    let units = comptime!(cube.units);
    let planes = comptime!(cube.planes);
    let score = comptime!(kind.score());
    let token = CUBE_POS;
    if token < tokens as usize {
        let start = token * experts as usize;
        let at = token / length as usize * width(experts, kind) as usize;
        let shared = row_denominator::<F>(logits, start, experts, score, units, planes);
        let counts = counts(valid, token);
        let mut mean = 0.0f32;
        let mut factor = 1.0f32;
        if comptime!(kind == SumKind::SquaredLse) {
            let lse = shared.largest + shared.total.ln();
            factor = upstream[at] * (lse + lse);
        } else {
            let mut own = 0.0f32;
            let mut expert = UNIT_POS;
            while expert < experts {
                let z = f32::cast_from(logits[start + expert as usize]);
                let value = numerator(z, shared.largest, score) / shared.total;
                own += upstream[at + expert as usize] * value;
                expert += units;
            }
            mean = cube_sum(own, units, planes);
        }
        let mut expert = UNIT_POS;
        while expert < experts {
            let z = f32::cast_from(logits[start + expert as usize]);
            let slope = slope(z, shared.largest, score) / shared.total;
            let mut own = factor;
            if comptime!(kind != SumKind::SquaredLse) {
                own = upstream[at + expert as usize] - mean;
            }
            let value = select(counts, slope * own, 0.0f32);
            gradient[start + expert as usize] = F::cast_from(value);
            expert += units;
        }
    }
}

/// Adds the counts of the chunks, `[sequences, chunks, experts]`.
#[cube(launch_unchecked)]
fn add_counts_kernel(
    counts: &Tensor<i32>,
    output: &mut Tensor<i32>,
    all: u32,
    chunks: u32,
    experts: u32,
) {
    let at = ABSOLUTE_POS;
    if at < all as usize {
        let first = at / experts as usize * (chunks * experts) as usize + at % experts as usize;
        let mut total = 0i32;
        for chunk in 0..chunks {
            total += counts[first + (chunk * experts) as usize];
        }
        output[at] = total;
    }
}

fn zeros(like: &CubeTensor, length: usize) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    zeros_client(client, device, [length].into(), DType::F32)
}

/// Computes the sums. See [`StatisticsOp::Sums`](super::backward::StatisticsOp::Sums).
pub(super) fn sums(op: SequenceSums, mut inputs: Vec<CubeTensor>) -> CubeTensor {
    let logits = inputs.remove(0);
    let client = logits.client.clone();
    let [tokens, experts] = matrix_sizes(&logits);
    let width = op.sequences * op.kind.width(experts);
    if tokens == 0 {
        return zeros(&logits, width);
    }
    let length = tokens / op.sequences;
    let strip = tokens.div_ceil(MOST_STRIPS).max(STRIP);
    let strips = length.div_ceil(strip);
    let partials = empty(&logits, [strips, width], DType::F32);
    let variant = SumVariant {
        kind: op.kind,
        size: op.kind.width(experts).next_power_of_two(),
        cube: TokenCube::new(&client, &logits),
    };
    let dtype = dtype_to_storage_type(logits.dtype);
    // SAFETY: tokens past the strip and experts past the last one access no memory.
    unsafe {
        launch!(
            router_sums_kernel,
            [client, op.sequences * strips, variant.cube.units],
            [],
            [logits, inputs.pop(), &partials],
            (op.sequences as u32, length as u32),
            (strips as u32, strip as u32, experts as u32),
            (variant, dtype)
        );
    }
    let partials = Partials::of_rows(partials, width, strips);
    fold(partials, SumTarget::Each(DType::F32)).remove(0)
}

/// Computes the gradient. See [`StatisticsOp::Gradient`](super::backward::StatisticsOp::Gradient).
pub(super) fn gradient(op: SequenceSums, mut inputs: Vec<CubeTensor>) -> CubeTensor {
    let (upstream, logits) = (inputs.remove(1), inputs.remove(0));
    let client = logits.client.clone();
    let [tokens, experts] = matrix_sizes(&logits);
    let gradient = empty(&logits, [tokens, experts], logits.dtype);
    if tokens == 0 {
        return gradient;
    }
    let cube = TokenCube::new(&client, &logits);
    let dtype = dtype_to_storage_type(logits.dtype);
    // SAFETY: experts past the last one access no memory.
    unsafe {
        launch!(
            router_sums_gradient_kernel,
            [client, tokens, cube.units],
            [],
            [logits, upstream, inputs.pop(), &gradient],
            (
                tokens as u32,
                (tokens / op.sequences) as u32,
                experts as u32
            ),
            (op.kind, cube, dtype)
        );
    }
    gradient
}

/// Counts the choices. See [`StatisticsOp::Count`](super::backward::StatisticsOp::Count).
pub(super) fn count(indices: CubeTensor, experts: usize, sequences: usize) -> CubeTensor {
    let client = indices.client.clone();
    let output = empty(&indices, [sequences, experts], DType::I32);
    if indices.meta.shape().num_elements() == 0 {
        let (device, shape) = (indices.device.clone(), output.meta.shape().clone());
        return zeros_client(client, device, shape, DType::I32);
    }
    let (counts, chunks) = histogram(&indices, experts, sequences);
    let all = sequences * experts;
    // SAFETY: units past the counts access no memory.
    unsafe {
        launch!(
            add_counts_kernel,
            [client, all.div_ceil(UNITS as usize), UNITS],
            [],
            [counts, &output],
            (all as u32, chunks as u32, experts as u32)
        );
    }
    output
}

/// Adds AOT instances with 256 experts for each score function, and for the z-loss.
pub(crate) fn aot_instances(list: &mut AotList) {
    let mut kinds = scores()
        .map(|(name, score)| (name, SumKind::Scores(score)))
        .to_vec();
    kinds.push(("squared-lse", SumKind::SquaredLse));
    for (name, dtype, _) in types() {
        for (of, kind) in &kinds {
            let variant = SumVariant {
                kind: *kind,
                size: kind.width(256),
                cube: AOT_CUBE,
            };
            instance!(
                list.other("moe/sums/{name}/{of}"), AOT_CUBE.units,
                router_sums_kernel::RouterSumsKernel
                [_ (given(true)) _ _ _ _ _ _] (variant, dtype)
            );
            instance!(
                list.other("moe/sums-gradient/{name}/{of}"), AOT_CUBE.units,
                router_sums_gradient_kernel::RouterSumsGradientKernel
                [_ _ (given(true)) _ _ _ _] (*kind, AOT_CUBE, dtype)
            );
        }
    }
    instance!(
        list.other("moe/add-counts"), UNITS,
        add_counts_kernel::AddCountsKernel [_ _ _ _ _] ()
    );
}

//! Weights with one scale: from the masters to codes, which are gathered, to both copies.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::fp8::{self, Fp8Matrix};

use super::{Coming, Weights};
use crate::collective::{self, Move, start_all_gathers_of_words};
use crate::comm::ReduceOp;
use crate::data_parallel::layout::Placed;
use crate::data_parallel::plan::Plan;
use crate::data_parallel::usage::Category;
use crate::nn::fp8::QuantizedWeight;

/// Codes in a word.
const PACKED: usize = 4;

/// Starts gathering the codes of some buckets, given with the part of the master that this rank steps:
/// one reduction of magnitudes and one call for all of them.
pub(in crate::data_parallel) fn start(masters: &[(usize, Tensor<1>)], plan: &Plan) -> Vec<Weights> {
    let mut scales = scales(masters, plan).into_iter();
    let mut descales = vec![];
    let words = masters.iter().map(|(number, master)| {
        let count = plan.layout.bucket(*number).parameters.len();
        let scales: Vec<_> = scales.by_ref().take(count).collect();
        let words = encode(*number, master, &scales, plan);
        descales.push(scales.into_iter().map(Tensor::recip).collect::<Vec<_>>());
        words
    });
    let words: Vec<_> = words.collect();
    let pending = start_all_gathers_of_words(words, &plan.axes.shard).into_iter();
    let coming = |((pending, descales), (number, _)): ((_, _), &(usize, Tensor<1>))| {
        let held = plan.usage.hold(Category::Buffers, plan.elements(*number));
        let pending = Box::new(pending);
        Weights::Codes(Coming { pending, held }, descales)
    };
    pending.zip(descales).zip(masters).map(coming).collect()
}

/// The scale of each weight, `[1]`, by place in the buckets.
fn scales(masters: &[(usize, Tensor<1>)], plan: &Plan) -> Vec<Tensor<1>> {
    let amaxes = masters
        .iter()
        .map(|(number, master)| amaxes(*number, master, plan));
    let amaxes: Vec<_> = amaxes.flatten().collect();
    if amaxes.is_empty() {
        return vec![];
    }
    let own = Tensor::cat(amaxes, 0);
    // Not all engines let NaN win a maximum; infinity has the same scale.
    let own = own.clone().mask_fill(own.is_nan(), f32::INFINITY);
    let largest = [&plan.axes.data, &plan.tensor]
        .into_iter()
        .fold(own, |amax, comm| {
            collective::start(amax, &Move::AllReduce(ReduceOp::Max), comm).wait()
        });
    let weights = masters
        .iter()
        .flat_map(|(number, _)| &plan.layout.bucket(*number).parameters);
    let scale = |(at, placed): (usize, &Placed)| {
        plan.quantizer(placed.index)
            .scale(largest.clone().narrow(0, at, 1))
    };
    weights.enumerate().map(scale).collect()
}

/// The largest magnitude of each weight in what this rank steps of a bucket, `[1]` in f32: 0 of nothing.
fn amaxes(number: usize, master: &Tensor<1>, plan: &Plan) -> Vec<Tensor<1>> {
    let nothing = || Tensor::zeros([1], (&plan.device, DType::F32));
    let parameters = &plan.layout.bucket(number).parameters;
    let mut amaxes: Vec<_> = parameters.iter().map(|_| None).collect();
    for piece in plan.own_pieces(number) {
        let len = piece.of_range.len();
        let values = master.clone().slice([piece.of_range]).reshape([1, len]);
        amaxes[plan.position(number, piece.index)] = Some(fp8::amax(values));
    }
    let amax = |amax: Option<_>| amax.unwrap_or_else(nothing);
    amaxes.into_iter().map(amax).collect()
}

/// The codes of what this rank steps of a bucket, packed; zeros between the weights.
fn encode(number: usize, master: &Tensor<1>, scales: &[Tensor<1>], plan: &Plan) -> Tensor<1, Int> {
    let own = plan.own(number).len() / PACKED;
    let (mut parts, mut end) = (vec![], 0);
    let zeros = |words| Tensor::<1, Int>::zeros([words], (&plan.device, DType::U32));
    for piece in plan.own_pieces(number) {
        let begin = piece.of_range.start / PACKED;
        if begin > end {
            parts.push(zeros(begin - end));
        }
        let values: Tensor<1> = master.clone().slice([piece.of_range]).cast(FloatDType::F32);
        let scale = scales[plan.position(number, piece.index)].clone();
        let codes = fp8::encode(values * scale, plan.quantizer(piece.index).format());
        end = begin + codes.dims()[0];
        parts.push(codes);
    }
    if own > end || parts.is_empty() {
        parts.push(zeros(own - end));
    }
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

/// Both copies of each weight of a bucket, from its codes.
pub(super) fn weights(
    number: usize,
    words: &Tensor<1, Int>,
    descales: Vec<Tensor<1>>,
    plan: &Plan,
) -> Vec<QuantizedWeight> {
    let parameters = plan.layout.bucket(number).parameters.iter();
    let weight = |(placed, descale): (&Placed, Tensor<1>)| {
        let range = placed.range.start / PACKED..placed.range.end.div_ceil(PACKED);
        let codes = words.clone().slice([range]);
        let format = plan.quantizer(placed.index).format();
        let rowwise = Fp8Matrix::from_flat(codes, plan.matrix(placed.index), descale, format);
        let columnwise = rowwise.transposed();
        QuantizedWeight {
            rowwise,
            columnwise,
        }
    };
    parameters.zip(descales).map(weight).collect()
}

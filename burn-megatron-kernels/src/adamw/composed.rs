//! Reference implementations of the optimizer functions, composed of Burn's own operations.

use burn::tensor::{DType, Tensor};

use super::{AdamWBuffers, AdamWStep, Blocks, DECAY_BLOCK, Decay};
use crate::cpu::wide;

/// Computes [`adamw`](super::adamw) with Burn's operations.
pub fn adamw(
    buffers: AdamWBuffers,
    gradient: Tensor<1>,
    decay: &Decay,
    step: &AdamWStep,
    model: Option<Tensor<1>>,
) -> (AdamWBuffers, Option<Tensor<1>>) {
    let AdamWBuffers {
        master,
        first,
        second,
    } = buffers;
    let (own, moments) = (master.dtype(), first.dtype());
    let gradient = gradient.cast(own) * step.gradient_scale;
    let first = first.cast(own) * step.beta1 + gradient.clone() * (1.0 - step.beta1);
    let squares = gradient.clone() * gradient;
    let second = second.cast(own) * step.beta2 + squares * (1.0 - step.beta2);
    let correction = |beta: f64| 1.0 - beta.powf(step.step as f64);
    let mean = first.clone() / correction(step.beta1);
    let root = (second.clone() / correction(step.beta2)).sqrt();
    let below = root + step.epsilon;
    let unused = below.clone().equal_elem(0.0);
    let change = (mean / below).mask_fill(unused, 0.0);
    let length = master.dims()[0];
    let change = match decay {
        Decay::None => change,
        Decay::All => change + master.clone() * step.weight_decay,
        // Burn does not slice an empty tensor.
        Decay::Blocks(_) if length == 0 => change,
        Decay::Blocks(Blocks { decay, rate, first }) => {
            let each = |factors: &Tensor<1>| spread(factors.clone().cast(own), *first, length);
            let change = change + master.clone() * step.weight_decay * each(decay);
            match rate {
                Some(rate) => change * each(rate),
                None => change,
            }
        }
    };
    let master = master - change * step.rate;
    let copy = model.map(|model| master.clone().cast(model.dtype()));
    let buffers = AdamWBuffers {
        master,
        first: first.cast(moments),
        second: second.cast(moments),
    };
    (buffers, copy)
}

/// Returns the factor of each of `length` elements. `first` is the position of the first element in its block.
fn spread(factors: Tensor<1>, first: usize, length: usize) -> Tensor<1> {
    let [blocks] = factors.dims();
    let each = factors.reshape([blocks, 1]).repeat_dim(1, DECAY_BLOCK);
    let each = each.reshape([blocks * DECAY_BLOCK]);
    each.narrow(0, first, length)
}

/// Computes [`sum_of_squares`](super::sum_of_squares) with Burn's operations. Burn determines the order of the
/// summation.
pub fn sum_of_squares(x: Tensor<1>) -> Tensor<1> {
    let own = wide(x.dtype());
    let x = x.cast(own);
    (x.clone() * x).sum()
}

/// Computes [`sum_of_squares_of`](super::sum_of_squares_of) with Burn's operations. Burn determines the order of the
/// summation.
///
/// # Panics
///
/// Panics if `buffers` is empty.
pub fn sum_of_squares_of(buffers: &[Tensor<1>]) -> Tensor<1> {
    let double = buffers.iter().any(|buffer| buffer.dtype() == DType::F64);
    let own = if double { DType::F64 } else { DType::F32 };
    let sums = buffers
        .iter()
        .map(|buffer| sum_of_squares(buffer.clone().cast(own)));
    Tensor::cat(sums.collect(), 0).sum()
}

//! The reference implementation of [`bias_dropout_add`](super::bias_dropout_add), composed of Burn's own operations.

use burn::tensor::{Tensor, TensorData};

use super::{Draw, check};
use crate::cpu::wide;
use crate::error::accept;
use crate::philox::Stream;

/// Computes [`super::bias_dropout_add`] with Burn's operations and Burn's autodiff. The mask is computed on the host.
///
/// # Panics
///
/// Panics in the same cases as [`super::bias_dropout_add`].
pub fn bias_dropout_add<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
    draw: Option<Draw>,
) -> Tensor<D> {
    accept(check(&x, bias.as_ref(), residual.as_ref(), draw));
    let dims = x.dims();
    if dims.contains(&0) {
        return residual.unwrap_or(x);
    }
    let dtype = residual.as_ref().map_or(x.dtype(), Tensor::dtype);
    let computed = wide(x.dtype());
    let mut y = x.cast(computed);
    if let Some(bias) = bias {
        let mut shape = [1; D];
        shape[D - 1] = dims[D - 1];
        y = y + bias.cast(computed).reshape(shape);
    }
    if let Some(draw) = draw {
        let mask = TensorData::new(mask(&draw, dims.iter().product()), dims);
        let device = y.device().inner();
        y = y * Tensor::from_data(mask, (&device, computed));
    }
    if let Some(residual) = residual {
        y = residual.cast(computed) + y;
    }
    y.cast(dtype)
}

/// Returns a mask with `elements` elements. Each element is 0 or `1 / (1 - probability)`.
pub(super) fn mask(draw: &Draw, elements: usize) -> Vec<f32> {
    let stream = Stream::new(draw.key, draw.position);
    let keep = 1.0 - draw.probability;
    let threshold = (keep * 4_294_967_296.0) as u64;
    let scale = (1.0 / keep) as f32;
    let mut mask = vec![0.0; elements];
    for (i, run) in mask.chunks_mut(draw.run).enumerate() {
        let first = draw.first + i as u64 * draw.pitch;
        stream.words(first, run.len(), |i, word| {
            if u64::from(word) < threshold {
                run[i] = scale;
            }
        });
    }
    mask
}

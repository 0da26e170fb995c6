//! Tests of norms with a residual addition, but without a bias of `x`.

use burn::tensor::Tensor;

use crate::norm::{NormKind, NormOptions, add_normalise};

pub(super) fn add_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let (kind, bias) = (NormKind::Layer, bias.map(Into::into));
    add_normalise(kind, x, None, residual, weight.into(), bias, options)
}

pub(super) fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let kind = NormKind::Rms;
    add_normalise(kind, x, None, residual, weight.into(), None, options)
}

pub(super) mod composed {
    use super::*;
    pub use crate::norm::composed::{add_normalise, layer_norm, rms_norm};

    pub fn add_layer_norm<const D: usize>(
        x: Tensor<D>,
        residual: Tensor<D>,
        weight: Tensor<1>,
        bias: Option<Tensor<1>>,
        options: NormOptions,
    ) -> (Tensor<D>, Tensor<D>) {
        add_normalise(NormKind::Layer, x, None, residual, weight, bias, options)
    }

    pub fn add_rms_norm<const D: usize>(
        x: Tensor<D>,
        residual: Tensor<D>,
        weight: Tensor<1>,
        options: NormOptions,
    ) -> (Tensor<D>, Tensor<D>) {
        add_normalise(NormKind::Rms, x, None, residual, weight, None, options)
    }
}

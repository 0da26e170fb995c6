//! The FP8 matmuls of a linear layer.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::activation::Activation;
use burn_megatron_kernels::fp8::{
    Accumulation, Fp8Matrix, QuantizerInput, QuantizerUsage, accumulate_at, multiply,
};
use burn_megatron_kernels::gradient::{FlatGradients, Place};

use super::layer::TensorScale;
use super::weight::expect_copy;
use super::{Fp8Layer, Operand, QuantizedWeight};
use crate::nn::arithmetic::{
    NeededGradients, SavedInput, SavedTensors, WeightSource, flatten, rows,
};
use crate::nn::forward_context;
use crate::nn::hook::Pass;

/// FP8 matmuls, accumulated in f32 (in f64 for an f64 input), with results in the dtype of the input:
///
/// ```text
/// y  = x w        x rowwise    w columnwise
/// dx = dy w^T     dy rowwise   w rowwise
/// dw = x^T dy     x columnwise dy columnwise
/// ```
///
/// The backward pass quantizes the input and the weight again, from the same values and with the same scale, unless
/// their codes were saved.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Fp8Arithmetic {
    layer: Fp8Layer,
    /// Whether a backward pass follows. Magnitudes are only recorded if it does.
    is_recorded: bool,
    /// Whether the codes of the input are saved for the backward pass instead of the input.
    saves_codes: bool,
    /// The activation, with its bias, that produces the input.
    activation: Option<(Activation, Option<Tensor<1>>)>,
}

impl Fp8Arithmetic {
    /// Creates the arithmetic. `can_save_codes` is true if the backward pass multiplies the same input as the forward
    /// pass. This is not the case if the weight has no gradient, or if the rank gathers the sequence again.
    pub fn new(layer: &Fp8Layer, is_recorded: bool, can_save_codes: bool) -> Self {
        Self {
            saves_codes: is_recorded && can_save_codes && layer.shared.save_activations,
            layer: layer.clone(),
            is_recorded,
            activation: None,
        }
    }

    /// Sets an activation that [`output`](Self::output) applies to its input. The backward pass must not need the
    /// activation: if the weight has a gradient, the codes must be saved.
    pub fn activated(self, kind: Activation, bias: Option<Tensor<1>>) -> Self {
        let activation = Some((kind, bias));
        Self { activation, ..self }
    }

    /// Returns both copies of the weight, if they are given, or if the sink or the layer caches them.
    fn quantized_weight(
        &self,
        weight: &WeightSource<'_>,
        pass: Pass,
    ) -> Option<Arc<QuantizedWeight>> {
        let hooked = match weight {
            WeightSource::Hook(hooked) => hooked,
            WeightSource::Quantized(weight) => return Some((*weight).clone()),
            WeightSource::Graph(_) => return None,
        };
        let (handle, value) = (&hooked.handle, || hooked.value(pass));
        let of_layer = || {
            let caches = self.layer.caches_weight();
            caches.then(|| self.layer.cached_weight(value, self.is_recorded))
        };
        handle.sink.quantized(handle.index, pass).or_else(of_layer)
    }

    /// Returns the columnwise copy of the weight, and the scale with which the backward pass quantizes it again.
    fn weight(&self, weight: WeightSource<'_>) -> (Fp8Matrix, Option<TensorScale>) {
        let pass = forward_context::pass();
        if let Some(weight) = self.quantized_weight(&weight, pass) {
            return (weight.columnwise.clone(), None);
        }
        let value = weight.value(pass);
        let scale = self.layer.scale_of(Operand::Weight, &value);
        let usage = QuantizerUsage::COLUMNWISE;
        let [_, copy] = self.quantize(Operand::Weight, value.into(), scale.as_ref(), usage);
        (expect_copy(copy), scale)
    }

    /// Returns the rowwise and columnwise copies of a tensor. If a backward pass follows, also records the magnitude
    /// and measures the quantization error.
    fn quantize(
        &self,
        operand: Operand,
        x: QuantizerInput,
        scale: Option<&TensorScale>,
        usage: QuantizerUsage,
    ) -> [Option<Fp8Matrix>; 2] {
        if !self.is_recorded {
            return self.layer.quantize(operand, x, scale, usage).0;
        }
        let copies = self.layer.quantize_logged(operand, x.clone(), scale, usage);
        match &copies {
            [Some(copy), _] => self.layer.measure(operand, || x.into_values(), copy),
            [None, Some(copy)] => {
                let values = || x.into_values().transpose();
                self.layer.measure(operand, values, copy)
            }
            [None, None] => {}
        }
        copies
    }

    /// Returns the scales that the forward pass saved for the input and for the weight, if the backward pass quantizes
    /// them again.
    fn scales_of(&self, extra: &[DispatchTensor]) -> [Option<TensorScale>; 2] {
        let mut scales = extra.iter().cloned().map(Tensor::from_dispatch);
        let mut next = |operand| Some(self.layer.scale_in(operand, scales.next()?));
        let input = self.layer.has_one_scale() && !self.saves_codes;
        let input = input.then(|| next(Operand::Input)).flatten();
        [input, next(Operand::Weight)]
    }

    /// Returns the number of scales that a forward pass saves (see [`scales_of`](Self::scales_of)). `has_copies` is
    /// true if the rowwise and the columnwise FP8 copy of the weight were available.
    pub fn saved_scales(&self, has_copies: bool) -> usize {
        if self.layer.has_one_scale() {
            usize::from(!self.saves_codes) + usize::from(!has_copies)
        } else {
            0
        }
    }

    /// Returns the columnwise copy of the input.
    fn input(&self, x: SavedInput, tokens: usize, extra: &[DispatchTensor]) -> Fp8Matrix {
        match x {
            SavedInput::Codes(codes) => self.layer.matrix(Operand::Input, codes, tokens),
            SavedInput::Floats(x) => {
                let [scale, _] = self.scales_of(extra);
                let (x, usage) = (rows(x.wait()), QuantizerUsage::COLUMNWISE);
                let (copies, _) = self
                    .layer
                    .quantize(Operand::Input, x, scale.as_ref(), usage);
                let [_, columnwise] = copies;
                expect_copy(columnwise)
            }
        }
    }
}

/// The gradient of the output in FP8.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Fp8Gradient {
    rowwise: Option<Fp8Matrix>,
    columnwise: Option<Fp8Matrix>,
    /// The dtype before quantization.
    dtype: FloatDType,
}

impl Fp8Arithmetic {
    /// Returns `x weight + bias`, and the tensors that the backward pass needs.
    pub fn output(
        &self,
        x: Tensor<2>,
        weight: WeightSource<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, SavedTensors) {
        let dtype = FloatDType::from(x.dtype());
        let usage = QuantizerUsage {
            rowwise: true,
            columnwise: self.saves_codes,
        };
        let scale = self.layer.scale_of(Operand::Input, &x);
        let x = match self.activation.clone() {
            Some((kind, bias)) => QuantizerInput::activated(x, bias, kind),
            None => x.into(),
        };
        let [rowwise, columnwise] = self.quantize(Operand::Input, x, scale.as_ref(), usage);
        let (weight, weight_scale) = self.weight(weight);
        let y = multiply(
            &expect_copy(rowwise),
            &weight,
            bias,
            dtype,
            Accumulation::Fast,
        );
        let scale = scale.filter(|_| !self.saves_codes);
        let extra = scale.into_iter().chain(weight_scale);
        let saved = SavedTensors {
            input_codes: columnwise.map(|copy| copy.tensors()),
            extra: extra.map(|scale| scale.scales.into_dispatch()).collect(),
        };
        (y, saved)
    }

    /// Returns whether the codes of the input are saved instead of the input.
    pub fn saves_codes(&self) -> bool {
        self.saves_codes
    }

    /// Quantizes the gradient of the output for the computation of the gradients in `needed`.
    pub fn gradient(&self, dy: Tensor<2>, needed: NeededGradients) -> Fp8Gradient {
        let dtype = FloatDType::from(dy.dtype());
        let usage = QuantizerUsage {
            rowwise: needed.input,
            columnwise: needed.weight,
        };
        let [rowwise, columnwise] = if usage.rowwise || usage.columnwise {
            let scale = self.layer.scale_of(Operand::Gradient, &dy);
            self.quantize(Operand::Gradient, dy.into(), scale.as_ref(), usage)
        } else {
            [None, None]
        };
        Fp8Gradient {
            rowwise,
            columnwise,
            dtype,
        }
    }

    /// Returns `dy weight^T`. `extra` are the scales that the forward pass saved.
    pub fn input_gradient(
        &self,
        dy: &Fp8Gradient,
        weight: WeightSource<'_>,
        extra: &[DispatchTensor],
    ) -> Tensor<2> {
        let weight = match self.quantized_weight(&weight, Pass::Backward) {
            Some(weight) => weight.rowwise.clone(),
            None => {
                let value = weight.value(Pass::Backward);
                let [_, scale] = self.scales_of(extra);
                // A forward pass that found a cached weight has saved no scale.
                let scale = scale.or_else(|| self.layer.scale_of(Operand::Weight, &value));
                let usage = QuantizerUsage::ROWWISE;
                let (copies, _) =
                    self.layer
                        .quantize(Operand::Weight, value, scale.as_ref(), usage);
                let [rowwise, _] = copies;
                expect_copy(rowwise)
            }
        };
        multiply(
            &expect_copy(dy.rowwise.clone()),
            &weight,
            None,
            dy.dtype,
            Accumulation::Exact,
        )
    }

    /// Computes the flattened weight gradient `x^T dy`. If `target` is given, it must describe a single place in a flat
    /// buffer, and the gradient is written to this place.
    pub fn weight_gradient(
        &self,
        x: SavedInput,
        dy: Fp8Gradient,
        extra: &[DispatchTensor],
        target: Option<FlatGradients>,
    ) -> Tensor<1> {
        let gradient = expect_copy(dy.columnwise);
        let x = self.input(x, gradient.depth, extra);
        let _span = tracing::trace_span!("weight_gradient").entered();
        let Some(FlatGradients { flat, places }) = target else {
            return flatten(multiply(&x, &gradient, None, dy.dtype, Accumulation::Exact));
        };
        let Place { offset, add } = places[0];
        accumulate_at(&x, &gradient, flat, offset, add)
    }
}

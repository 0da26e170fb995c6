//! The products of a linear layer in 8 bits.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::fp8::{
    Accumulation, Fp8Matrix, Quantized, Ways, accumulate_at, multiply,
};

use super::weight::asked_for;
use super::{Fp8Layer, Operand, QuantizedWeight};
use crate::nn::arithmetic::{Arithmetic, Factor, Input, Kept, Wanted, flatten};
use crate::nn::door::{self, Pass, Place};
use crate::nn::linear::rows;

/// Products in 8 bits, summed up in f32 (in f64 for an input in f64) and given in the type of the input:
///
/// ```text
/// y  = x w        x rowwise    w columnwise
/// dx = dy w^T     dy rowwise   w rowwise
/// dw = x^T dy     x columnwise dy columnwise
/// ```
///
/// What the forward multiplies is quantised again in the backward, from the same values and with the
/// same scale, unless it was kept.
#[derive(Clone, Debug)]
pub(in crate::nn) struct In8Bits {
    layer: Fp8Layer,
    /// Whether a backward will follow: only then something is noted.
    is_recorded: bool,
    /// Whether the codes of the input wait for the backward, and not the input.
    keeps_codes: bool,
}

impl In8Bits {
    /// `whole` says whether this rank has the whole input, and not a part of the sequence, which it
    /// gathers again.
    pub fn new(layer: &Fp8Layer, is_recorded: bool, whole: bool) -> Self {
        Self {
            keeps_codes: is_recorded && whole && layer.shared.save_activations,
            layer: layer.clone(),
            is_recorded,
        }
    }

    /// Both copies of the weight, where somebody keeps them.
    fn kept(&self, weight: &Factor<'_>, pass: Pass) -> Option<Arc<QuantizedWeight>> {
        let Factor::Behind(behind, false) = weight else {
            return None;
        };
        let (exit, value) = (&behind.exit, || behind.value(pass));
        let here = || {
            let keeps = self.layer.keeps_weight();
            keeps.then(|| self.layer.kept_weight(value, self.is_recorded))
        };
        exit.sink.quantized(exit.index, pass).or_else(here)
    }

    /// The columnwise copy of the weight, and the scale with which the backward quantises it again.
    fn weight(&self, weight: Factor<'_>) -> (Fp8Matrix, Option<Tensor<1>>) {
        let pass = door::pass();
        if let Some(kept) = self.kept(&weight, pass) {
            return (kept.columnwise.clone(), None);
        }
        let value = weight.value(pass);
        let scale = self.layer.scale_of(Operand::Weight, &value);
        let copy = self.quantize(Operand::Weight, value, scale.as_ref(), Ways::COLUMNWISE);
        (asked_for(copy.columnwise), scale)
    }

    /// Copies of a tensor, noted and compared where a backward will follow.
    fn quantize(
        &self,
        operand: Operand,
        x: Tensor<2>,
        scale: Option<&Tensor<1>>,
        ways: Ways,
    ) -> Quantized {
        let made = self.layer.quantize(operand, x.clone(), scale, ways);
        if self.is_recorded {
            let elements = x.shape().num_elements();
            self.layer.note(operand, made.seen.clone(), elements);
            match (&made.rowwise, &made.columnwise) {
                (Some(copy), _) => self.layer.measure(operand, || x, copy),
                (None, Some(copy)) => self.layer.measure(operand, || x.transpose(), copy),
                (None, None) => {}
            }
        }
        made
    }

    /// What the forward kept beside the input: the scales of the input and of the weight, where the
    /// backward quantises these again.
    fn scales_of(&self, beside: &[DispatchTensor]) -> [Option<Tensor<1>>; 2] {
        let mut scales = beside.iter().cloned().map(Tensor::from_dispatch);
        let input = self.layer.has_one_scale() && !self.keeps_codes;
        [input.then(|| scales.next()).flatten(), scales.next()]
    }

    /// The columnwise copy of the input.
    fn input(&self, x: Input, tokens: usize, beside: &[DispatchTensor]) -> Fp8Matrix {
        match x {
            Input::Instead(codes) => self.layer.matrix(Operand::Input, codes, tokens),
            Input::Whole(x) => {
                let [scale, _] = self.scales_of(beside);
                let (x, scale) = (rows(x.wait()), scale.as_ref());
                let made = self
                    .layer
                    .quantize(Operand::Input, x, scale, Ways::COLUMNWISE);
                asked_for(made.columnwise)
            }
        }
    }
}

/// The gradient of the output in 8 bits.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Gradient {
    rowwise: Option<Fp8Matrix>,
    columnwise: Option<Fp8Matrix>,
    /// The type in which it came.
    dtype: FloatDType,
}

impl Arithmetic for In8Bits {
    const ASKS: bool = true;

    type Gradient = Gradient;

    fn output(
        &self,
        x: Tensor<2>,
        weight: Factor<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, Kept) {
        let dtype = FloatDType::from(x.dtype());
        let ways = Ways {
            rowwise: true,
            columnwise: self.keeps_codes,
        };
        let scale = self.layer.scale_of(Operand::Input, &x);
        let made = self.quantize(Operand::Input, x, scale.as_ref(), ways);
        let (weight, weight_scale) = self.weight(weight);
        let y = multiply(
            &asked_for(made.rowwise),
            &weight,
            bias,
            dtype,
            Accumulation::Fast,
        );
        let scale = scale.filter(|_| !self.keeps_codes);
        let beside = scale.into_iter().chain(weight_scale);
        let kept = Kept {
            instead: made.columnwise.map(|copy| copy.tensors()),
            beside: beside.map(Tensor::into_dispatch).collect(),
        };
        (y, kept)
    }

    fn keeps_instead(&self) -> bool {
        self.keeps_codes
    }

    fn gradient(&self, dy: Tensor<2>, wanted: Wanted) -> Gradient {
        let dtype = FloatDType::from(dy.dtype());
        let ways = Ways {
            rowwise: wanted.input,
            columnwise: wanted.weight,
        };
        if !(ways.rowwise || ways.columnwise) {
            return Gradient {
                rowwise: None,
                columnwise: None,
                dtype,
            };
        }
        let scale = self.layer.scale_of(Operand::Gradient, &dy);
        let made = self.quantize(Operand::Gradient, dy, scale.as_ref(), ways);
        Gradient {
            rowwise: made.rowwise,
            columnwise: made.columnwise,
            dtype,
        }
    }

    fn input_gradient(
        &self,
        dy: &Gradient,
        weight: Factor<'_>,
        beside: &[DispatchTensor],
    ) -> Tensor<2> {
        let weight = match self.kept(&weight, Pass::Backward) {
            Some(kept) => kept.rowwise.clone(),
            None => {
                let value = weight.value(Pass::Backward);
                let [_, scale] = self.scales_of(beside);
                // A forward that found it kept has left no scale.
                let scale = scale.or_else(|| self.layer.scale_of(Operand::Weight, &value));
                let (layer, scale) = (&self.layer, scale.as_ref());
                asked_for(
                    layer
                        .quantize(Operand::Weight, value, scale, Ways::ROWWISE)
                        .rowwise,
                )
            }
        };
        multiply(
            &asked_for(dy.rowwise.clone()),
            &weight,
            None,
            dy.dtype,
            Accumulation::Exact,
        )
    }

    fn weight_gradient(&self, x: Input, dy: Gradient, beside: &[DispatchTensor]) -> Tensor<2> {
        let gradient = asked_for(dy.columnwise);
        let x = self.input(x, gradient.depth, beside);
        let _span = tracing::trace_span!("weight_gradient").entered();
        multiply(&x, &gradient, None, dy.dtype, Accumulation::Exact)
    }

    fn weight_gradient_at(
        &self,
        x: Input,
        dy: Gradient,
        beside: &[DispatchTensor],
        place: Option<Place>,
    ) -> Tensor<1> {
        let Some(Place { flat, offset, add }) = place else {
            return flatten(self.weight_gradient(x, dy, beside));
        };
        let gradient = asked_for(dy.columnwise);
        let x = self.input(x, gradient.depth, beside);
        let _span = tracing::trace_span!("weight_gradient").entered();
        accumulate_at(&x, &gradient, flat, offset, add)
    }
}

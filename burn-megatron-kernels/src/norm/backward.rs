//! The autodiff functions of the norms: what is saved, and which kernel computes the gradients.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::NormOptions;
use super::cpu;
#[cfg(feature = "cubecl")]
use super::kernel;
use crate::column_sum::bias_gradient;
use crate::cpu::wide;
use crate::function::{Function, Gradients, MultiFunction, Tensors};
use crate::gradient::{self, Destination, FlatGradients, Place};
use crate::launch::{DeviceOp, Spec, launch};

/// The formula of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormFormula {
    /// The name of the operation.
    pub name: &'static str,
    /// Whether the mean is subtracted: LayerNorm.
    pub centred: bool,
    pub options: NormOptions,
}

impl NormFormula {
    /// Numbers kept of a row: one over the deviation, and for LayerNorm the mean in two parts,
    /// because one float cannot hold a large mean to a fraction of a small deviation.
    pub(super) fn statistics(&self) -> usize {
        if self.centred { 3 } else { 1 }
    }
}

/// The inputs beside `x` and the weight: `[x, residual?, weight, bias?, x_bias?]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormInputs {
    /// Whether there is a residual, which is added to `x`.
    pub residual: bool,
    pub bias: bool,
    /// The type of the bias of `x`; only with a residual.
    pub x_bias: Option<DType>,
}

/// [`NormInputs`] by name.
pub(super) struct NamedInputs<T> {
    pub x: T,
    pub residual: Option<T>,
    pub weight: T,
    pub bias: Option<T>,
    pub x_bias: Option<T>,
}

impl NormInputs {
    pub(super) fn split<T>(&self, inputs: impl IntoIterator<Item = T>) -> NamedInputs<T> {
        let mut inputs = inputs.into_iter();
        let x = inputs.next();
        let mut next = |given: bool| given.then(|| inputs.next()).flatten();
        let (residual, weight) = (next(self.residual), next(true));
        let (Some(x), Some(weight)) = (x, weight) else {
            unreachable!("a norm has an input and a weight")
        };
        NamedInputs {
            x,
            residual,
            weight,
            bias: next(self.bias),
            x_bias: next(self.x_bias.is_some()),
        }
    }
}

/// The requested gradients: of the input, or of the sum; and of the parameters, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NormGradients {
    /// Also where that of the bias of `x` is requested, which is the sum of its rows.
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
    pub x_bias: bool,
}

/// `[x, residual?, weight, bias?, x_bias?]` to `[y, statistics, sum?]`.
#[derive(Debug)]
pub(super) struct NormForwardOp {
    pub formula: NormFormula,
    pub inputs: NormInputs,
}

impl DeviceOp for NormForwardOp {
    fn name(&self) -> &'static str {
        self.formula.name
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let x = inputs[0].clone();
        let width = x.shape[x.shape.num_dims() - 1];
        let rows = x.shape.num_elements() / width;
        let statistics = Spec::new([rows, self.formula.statistics()], wide(x.dtype));
        let mut outputs = vec![x, statistics];
        if self.inputs.residual {
            outputs.push(inputs[1].clone());
        }
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::forward(self, &inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::forward(self, inputs)
    }
}

/// `[source, statistics, gradient, weight, so far?, flat?]` to the gradients that are requested;
/// with places, those of the parameters are the flat buffer.
#[derive(Debug)]
pub(super) struct NormBackwardOp {
    pub formula: NormFormula,
    pub wanted: NormGradients,
    /// The type of the gradients of the parameters.
    pub sums: DType,
    pub places: Option<Vec<Place>>,
}

impl DeviceOp for NormBackwardOp {
    fn name(&self) -> &'static str {
        self.formula.name
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let NormGradients {
            input,
            weight,
            bias,
            x_bias,
        } = self.wanted;
        let input = input.then(|| inputs[0].clone());
        let sums = match inputs.last().filter(|_| self.places.is_some()) {
            Some(flat) => vec![flat.clone()],
            None => {
                let sum = Spec::new(inputs[3].shape.clone(), self.sums);
                let wanted = [weight, bias, x_bias].into_iter().filter(|wanted| *wanted);
                wanted.map(|_| sum.clone()).collect()
            }
        };
        input.into_iter().chain(sums).collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(self, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::backward(self, inputs)
    }
}

/// The destinations of the gradients of the parameters. If there are none, the gradients go to the graph. If there are
/// some, the parameters without a destination are constants, such as frozen ones.
#[derive(Clone, Debug)]
pub(super) struct NormDestinations {
    pub weight: Option<Destination>,
    pub bias: Option<Destination>,
    pub x_bias: Option<Destination>,
}

impl NormDestinations {
    /// The destinations in the order of [`NormGradients`].
    pub(super) fn given(&self) -> Vec<&Destination> {
        let all = [&self.weight, &self.bias, &self.x_bias];
        all.into_iter().flatten().collect()
    }
}

/// A norm.
#[derive(Debug)]
pub(super) struct NormFunction {
    pub formula: NormFormula,
    pub inputs: NormInputs,
    pub destinations: NormDestinations,
}

impl Function for NormFunction {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let NamedInputs { x, weight, .. } = self.inputs.split(inputs.clone());
        let kernel = NormForwardOp {
            formula: self.formula,
            inputs: self.inputs,
        };
        let mut outputs = launch(kernel, inputs);
        let statistics = outputs.remove(1);
        (outputs.remove(0), vec![x, statistics, weight])
    }

    fn backward(&self, saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let source = BackwardSource {
            formula: self.formula,
            inputs: self.inputs,
            saved,
            gradient,
            so_far: None,
        };
        source.gradients(needed, &self.destinations)
    }
}

/// A norm of a residual stream as a [`MultiFunction`] with the outputs `[norm, sum]`, of rank `D`; the sum is
/// `(x + x_bias) + residual`, or is given.
///
/// Its inputs are those of a norm of a stream; it saves the sum and what its backward needs beside it.
#[derive(Debug)]
pub struct StreamNormFunction<const D: usize> {
    pub(super) formula: NormFormula,
    /// Without a residual the first input is the sum.
    pub(super) inputs: NormInputs,
    /// The type of `x`. The sum has that of the residual.
    pub(super) dtype: DType,
    pub(super) destinations: NormDestinations,
}

impl<const D: usize> MultiFunction for StreamNormFunction<D> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        if !self.inputs.residual {
            let sum = inputs[0].clone();
            let (norm, statistics) = self.of_sum(inputs.clone());
            let saved = vec![sum.clone(), statistics, inputs[1].clone()];
            return (vec![norm, sum], saved);
        }
        let weight = inputs[2].clone();
        let kernel = NormForwardOp {
            formula: self.formula,
            inputs: self.inputs,
        };
        let mut outputs = launch(kernel, inputs);
        let sum = outputs.remove(2);
        let statistics = outputs.remove(1);
        let saved = vec![sum.clone(), statistics, weight];
        (vec![outputs.remove(0), sum], saved)
    }

    fn backward(&self, saved: Tensors, mut of_outputs: Gradients, needed: &[bool]) -> Gradients {
        let (of_sum, of_norm) = (of_outputs.remove(1), of_outputs.remove(0));
        let terms = self.terms();
        let mut results = match (of_norm, of_sum) {
            (Some(gradient), of_sum) => {
                let source = BackwardSource {
                    formula: self.formula,
                    inputs: self.inputs,
                    saved,
                    gradient,
                    so_far: of_sum,
                };
                let of_sum = needed[..terms].contains(&true);
                let needed = [&[of_sum], &needed[terms..]].concat();
                source.gradients(&needed, &self.destinations)
            }
            (None, Some(of_sum)) => self.of_sum_alone(of_sum, needed),
            (None, None) => unreachable!("the backward runs for an output with a gradient"),
        };
        if terms == 1 {
            return results;
        }
        // The gradient of the sum is that of both of its terms.
        let gradient = results.remove(0);
        let to_x = |gradient| {
            let gradient = Tensor::<D>::from_dispatch(gradient);
            gradient.cast(self.dtype).into_dispatch()
        };
        let of_x = gradient.clone().filter(|_| needed[0]).map(to_x);
        [vec![of_x, gradient.filter(|_| needed[1])], results].concat()
    }
}

impl<const D: usize> StreamNormFunction<D> {
    /// The inputs that are added.
    fn terms(&self) -> usize {
        if self.inputs.residual { 2 } else { 1 }
    }

    /// The norm of `[sum, weight, bias?, ..]`, and its statistics.
    fn of_sum(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, DispatchTensor) {
        let of_sum = NormInputs {
            residual: false,
            x_bias: None,
            ..self.inputs
        };
        inputs.truncate(2 + usize::from(of_sum.bias));
        let kernel = NormForwardOp {
            formula: self.formula,
            inputs: of_sum,
        };
        let mut outputs = launch(kernel, inputs);
        let statistics = outputs.remove(1);
        (outputs.remove(0), statistics)
    }

    /// The norm once more, to the bit, from what the forward has saved and the bias that it was given.
    pub fn norm_again(
        &self,
        saved: &[DispatchTensor],
        bias: Option<&DispatchTensor>,
    ) -> DispatchTensor {
        let inputs = [&saved[0], &saved[2]].into_iter().chain(bias);
        self.of_sum(inputs.cloned().collect()).0
    }

    /// The number of the bias among the inputs, if there is one.
    pub fn bias_input(&self) -> Option<usize> {
        self.inputs.bias.then(|| self.terms() + 1)
    }

    /// Whether the gradient of some parameter goes to a buffer.
    pub fn has_buffer(&self) -> bool {
        !self.destinations.given().is_empty()
    }

    /// The gradients of `[sum, weight, bias?, x_bias?]` where the loss does not depend on the norm.
    fn of_sum_alone(&self, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let mut results = vec![None; needed.len() + 1 - self.terms()];
        if let (Some(dtype), Some(last)) = (self.inputs.x_bias, results.last_mut()) {
            let dtype = (needed.last() == Some(&true)).then_some(dtype);
            *last = bias_gradient(gradient.clone(), dtype, self.destinations.x_bias.as_ref());
        }
        results[0] = Some(gradient);
        results
    }
}

/// The values from which a backward computes the gradients.
struct BackwardSource {
    formula: NormFormula,
    inputs: NormInputs,
    /// `[source, statistics, weight]`
    saved: Vec<DispatchTensor>,
    /// The gradient of the norm.
    gradient: DispatchTensor,
    /// The gradient of the sum's other users, to which the kernel adds its own.
    so_far: Option<DispatchTensor>,
}

impl BackwardSource {
    /// The gradients of `[source, weight, bias?, x_bias?]`. Those of parameters with destinations go there.
    fn gradients(self, needed: &[bool], destinations: &NormDestinations) -> Gradients {
        let NormDestinations {
            weight: to_weight,
            bias: to_bias,
            x_bias: to_x_bias,
        } = destinations;
        let given = destinations.given();
        let mut parameters = needed[1..].iter();
        let mut wants = |has_parameter: bool, to: &Option<Destination>| {
            let is_needed = has_parameter && parameters.next() == Some(&true);
            if given.is_empty() {
                is_needed
            } else {
                to.is_some()
            }
        };
        let weight = wants(true, to_weight);
        let bias = wants(self.inputs.bias, to_bias);
        let x_bias = wants(self.inputs.x_bias.is_some(), to_x_bias);
        let wanted = NormGradients {
            input: needed[0] || x_bias,
            weight,
            bias,
            x_bias,
        };
        let results = if given.is_empty() {
            self.narrowed(wanted)
        } else {
            let sums = wide(self.gradient.dtype());
            gradient::accumulate(&given, |target| {
                let mut results = self.launch(wanted, sums, target);
                let sums = results.split_off(usize::from(wanted.input));
                let sums = sums.into_iter().map(Tensor::from_dispatch);
                (results, sums.collect())
            })
        };
        // One for the input even where only the bias of `x` needs it.
        let input = wanted.input && !needed[0];
        let mut results = results.into_iter().skip(usize::from(input));
        needed
            .iter()
            .map(|needed| needed.then(|| results.next()).flatten())
            .collect()
    }

    /// The requested gradients, those of the parameters in their types.
    fn narrowed(self, wanted: NormGradients) -> Vec<DispatchTensor> {
        let weight = self.saved[2].dtype();
        let x_bias = self.inputs.x_bias.unwrap_or(weight);
        let sums = if x_bias == weight {
            weight
        } else {
            wide(self.gradient.dtype())
        };
        let mut results = self.launch(wanted, sums, None);
        let first = results.len() - usize::from(wanted.x_bias);
        for (i, result) in results
            .iter_mut()
            .enumerate()
            .skip(usize::from(wanted.input))
        {
            let dtype = if i < first { weight } else { x_bias };
            let sum = Tensor::<1>::from_dispatch(result.clone());
            *result = sum.cast::<DType>(dtype).into_dispatch();
        }
        results
    }

    /// The requested gradients; with a target, those of the parameters are the flat buffer.
    fn launch(
        self,
        wanted: NormGradients,
        sums: DType,
        target: Option<FlatGradients>,
    ) -> Vec<DispatchTensor> {
        let mut inputs = self.saved;
        let width = inputs[2].shape().num_elements();
        let dtype = self.gradient.dtype();
        let (flat, places) = gradient::split(self.formula.name, target, width, dtype);
        inputs.insert(2, self.gradient);
        inputs.extend([self.so_far, flat].into_iter().flatten());
        let kernel = NormBackwardOp {
            formula: self.formula,
            wanted,
            sums,
            places,
        };
        launch(kernel, inputs)
    }
}

//! The norms as autodiff functions, and the device operations that compute the norm and its gradients.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};

use super::NormOptions;
use super::cpu;
#[cfg(feature = "cubecl")]
use super::kernel;
use crate::column_sum::bias_gradient;
use crate::cpu::wide;
use crate::function::{Function, Gradients, MultiFunction, Tensors};
use crate::gradient::{self, Destination, FlatGradients, Place};
use crate::launch::{SimpleOp, Spec, exactly, launch};

/// The formula of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormFormula {
    /// The name of the operation.
    pub name: &'static str,
    /// Whether the mean is subtracted (LayerNorm).
    pub centred: bool,
    pub options: NormOptions,
}

impl NormFormula {
    /// Returns the number of saved statistics per row. RMSNorm saves the reciprocal of the root mean square. LayerNorm
    /// saves the reciprocal of the standard deviation and the mean in two parts, because one float cannot hold a large
    /// mean with the precision of a small deviation.
    pub(super) fn statistics(&self) -> usize {
        if self.centred { 3 } else { 1 }
    }
}

/// The optional inputs of a norm. The order of all inputs is `[x, residual?, weight, bias?, x_bias?]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormInputs {
    /// Whether there is a residual to which `x` is added.
    pub residual: bool,
    pub bias: bool,
    /// The type of the bias of `x`. A norm with this bias must have a residual or get the sum.
    pub x_bias: Option<DType>,
}

/// The inputs of a norm, by name.
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

/// One value for each of the weight, the bias and the bias of `x`, in this order.
pub(super) type EachParameter<T> = [T; 3];

/// The index of the bias of `x` in [`EachParameter`].
const X_BIAS: usize = 2;

/// The gradients that are requested: of the input (or of the sum) and of the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NormGradients {
    /// Whether the gradient of the input is requested. It is also needed for the gradient of the bias of `x`, which is
    /// the sum of its rows.
    pub input: bool,
    pub parameters: EachParameter<bool>,
}

impl NormGradients {
    /// Returns the number of requested parameter gradients.
    pub(super) fn sums(&self) -> usize {
        self.parameters.iter().filter(|wanted| **wanted).count()
    }
}

/// The forward device operation. It computes `[y, statistics, sum?]` from `[x, residual?, weight, bias?, x_bias?]`.
#[derive(Debug)]
pub(super) struct NormForwardOp {
    pub formula: NormFormula,
    pub inputs: NormInputs,
}

/// The backward device operation. It computes the requested gradients from
/// `[source, statistics, gradient, weight, so far?, flat?]`. If the parameter gradients have places, the flat buffer
/// replaces them in the outputs.
#[derive(Debug)]
pub(super) struct NormBackwardOp {
    pub formula: NormFormula,
    pub wanted: NormGradients,
    /// The type of the parameter gradients.
    pub sums: DType,
    pub places: Option<Vec<Place>>,
}

/// A norm, and the destinations of its parameter gradients.
#[derive(Debug)]
pub(super) struct Norm {
    pub formula: NormFormula,
    pub inputs: NormInputs,
    /// The destinations of the parameter gradients. If no parameter has a destination, autodiff receives the gradients.
    /// If at least one parameter has a destination, parameters without a destination are constants, such as frozen
    /// parameters.
    pub destinations: EachParameter<Option<Destination>>,
}

impl Norm {
    fn given(&self) -> Vec<&Destination> {
        self.destinations.iter().flatten().collect()
    }

    fn forward(&self, inputs: NormInputs, tensors: Tensors) -> Tensors {
        let formula = self.formula;
        let x = Spec::of_any(&tensors[0]);
        let width = x.shape[x.shape.num_dims() - 1];
        let rows = x.shape.num_elements() / width;
        let statistics = Spec::new([rows, formula.statistics()], wide(x.dtype));
        let sum = inputs.residual.then(|| Spec::of_any(&tensors[1]));
        let op = SimpleOp {
            name: formula.name,
            parameters: NormForwardOp { formula, inputs },
            outputs: [Some(x), Some(statistics), sum]
                .into_iter()
                .flatten()
                .collect(),
            cpu: cpu::forward,
            #[cfg(feature = "cubecl")]
            cube: kernel::forward,
        };
        launch(op, tensors)
    }

    /// Computes the norm and its statistics from `[sum, weight, bias?, ..]`.
    fn of_sum(&self, mut tensors: Tensors) -> [DispatchTensor; 2] {
        let of_sum = NormInputs {
            residual: false,
            x_bias: None,
            ..self.inputs
        };
        tensors.truncate(2 + usize::from(of_sum.bias));
        exactly(self.forward(of_sum, tensors))
    }
}

/// The function of a norm without a residual and without a bias of `x`.
#[derive(Debug)]
pub(super) struct NormFunction(pub Norm);

impl Function for NormFunction {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (x, weight) = (inputs[0].clone(), inputs[1].clone());
        let [y, statistics] = self.0.of_sum(inputs);
        (y, vec![x, statistics, weight])
    }

    fn backward(&self, saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let source = BackwardSource {
            norm: &self.0,
            saved,
            gradient,
            so_far: None,
        };
        source.gradients(needed)
    }
}

/// The norm of a residual stream as a [`MultiFunction`] with the outputs `[norm, sum]`, which have `D` dimensions. The
/// sum is `(x + x_bias) + residual`. If there is no residual, the input `x` is the sum.
///
/// The function saves the sum, the weight and the statistics for its backward pass. See
/// [`StreamNorm::into_function`](super::StreamNorm::into_function) for the inputs.
#[derive(Debug)]
pub struct StreamNormFunction<const D: usize> {
    /// The norm. If it has no residual, the first input is the sum.
    pub(super) norm: Norm,
    /// The type of `x`. The sum has the type of the residual.
    pub(super) dtype: DType,
}

impl<const D: usize> MultiFunction for StreamNormFunction<D> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let weight = inputs[self.terms()].clone();
        let [norm, statistics, sum] = if self.norm.inputs.residual {
            exactly(self.norm.forward(self.norm.inputs, inputs))
        } else {
            let sum = inputs[0].clone();
            let [norm, statistics] = self.norm.of_sum(inputs);
            [norm, statistics, sum]
        };
        (vec![norm, sum.clone()], vec![sum, statistics, weight])
    }

    fn backward(&self, saved: Tensors, mut of_outputs: Gradients, needed: &[bool]) -> Gradients {
        let (of_sum, of_norm) = (of_outputs.remove(1), of_outputs.remove(0));
        let terms = self.terms();
        let mut results = match (of_norm, of_sum) {
            (Some(gradient), of_sum) => {
                let source = BackwardSource {
                    norm: &self.norm,
                    saved,
                    gradient,
                    so_far: of_sum,
                };
                let of_sum = needed[..terms].contains(&true);
                source.gradients(&[&[of_sum], &needed[terms..]].concat())
            }
            (None, Some(of_sum)) => self.of_sum_alone(of_sum, needed),
            (None, None) => unreachable!("the backward runs for an output with a gradient"),
        };
        if terms == 1 {
            return results;
        }
        // The gradient of the sum is also the gradient of `x` and of the residual.
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
    /// Returns the number of inputs whose sum is normalized, without the bias.
    fn terms(&self) -> usize {
        if self.norm.inputs.residual { 2 } else { 1 }
    }

    /// Recomputes the output of the norm from the tensors that the forward pass saved and from the bias. The result is
    /// bitwise identical to the output of the forward pass.
    pub fn norm_again(
        &self,
        saved: &[DispatchTensor],
        bias: Option<&DispatchTensor>,
    ) -> DispatchTensor {
        let inputs = [&saved[0], &saved[2]].into_iter().chain(bias);
        let [norm, _] = self.norm.of_sum(inputs.cloned().collect());
        norm
    }

    /// Returns the index of the norm's bias among the inputs, or `None` if the norm has no bias.
    pub fn bias_input(&self) -> Option<usize> {
        self.norm.inputs.bias.then(|| self.terms() + 1)
    }

    /// Returns whether the gradient of at least one parameter is written to a flat buffer.
    pub fn has_buffer(&self) -> bool {
        self.norm.destinations.iter().any(Option::is_some)
    }

    /// Returns the gradients of `[sum, weight, bias?, x_bias?]` for a loss that does not depend on the output of the
    /// norm.
    fn of_sum_alone(&self, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let mut results = vec![None; needed.len() + 1 - self.terms()];
        if let (Some(dtype), Some(last)) = (self.norm.inputs.x_bias, results.last_mut()) {
            let dtype = (needed.last() == Some(&true)).then_some(dtype);
            let destination = self.norm.destinations[X_BIAS].as_ref();
            *last = bias_gradient(gradient.clone(), dtype, destination);
        }
        results[0] = Some(gradient);
        results
    }
}

/// The values from which the backward pass computes the gradients.
struct BackwardSource<'a> {
    norm: &'a Norm,
    /// The saved tensors, `[source, statistics, weight]`.
    saved: Tensors,
    /// The gradient of the output of the norm.
    gradient: DispatchTensor,
    /// The gradient of the sum from its other uses. The kernel adds its own gradient to this gradient.
    so_far: Option<DispatchTensor>,
}

impl BackwardSource<'_> {
    /// Returns the gradients of `[source, weight, bias?, x_bias?]`. Gradients with a destination go to the flat buffer
    /// instead.
    fn gradients(self, needed: &[bool]) -> Gradients {
        let given = self.norm.given();
        let inputs = self.norm.inputs;
        let has_parameter = [true, inputs.bias, inputs.x_bias.is_some()];
        let mut of_parameters = needed[1..].iter();
        let parameters = std::array::from_fn(|i| {
            let is_needed = has_parameter[i] && of_parameters.next() == Some(&true);
            if given.is_empty() {
                is_needed
            } else {
                self.norm.destinations[i].is_some()
            }
        });
        let wanted = NormGradients {
            input: needed[0] || parameters[X_BIAS],
            parameters,
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
        // The gradient of the input is also computed if only the bias of `x` needs it.
        let input = wanted.input && !needed[0];
        let mut results = results.into_iter().skip(usize::from(input));
        needed
            .iter()
            .map(|needed| needed.then(|| results.next()).flatten())
            .collect()
    }

    /// Returns the requested gradients. Parameter gradients have the types of the parameters.
    fn narrowed(self, wanted: NormGradients) -> Tensors {
        let weight = self.saved[2].dtype();
        let x_bias = self.norm.inputs.x_bias.unwrap_or(weight);
        let sums = if x_bias == weight {
            weight
        } else {
            wide(self.gradient.dtype())
        };
        let mut results = self.launch(wanted, sums, None);
        let first = results.len() - usize::from(wanted.parameters[X_BIAS]);
        let of_parameters = results.iter_mut().enumerate();
        for (i, result) in of_parameters.skip(usize::from(wanted.input)) {
            let dtype = if i < first { weight } else { x_bias };
            let sum = Tensor::<1>::from_dispatch(result.clone());
            *result = sum.cast::<DType>(dtype).into_dispatch();
        }
        results
    }

    /// Returns the requested gradients. If there is a target, the flat buffer replaces the parameter gradients.
    fn launch(self, wanted: NormGradients, sums: DType, target: Option<FlatGradients>) -> Tensors {
        let mut inputs = self.saved;
        let formula = self.norm.formula;
        let width = inputs[2].shape().num_elements();
        let dtype = self.gradient.dtype();
        let (flat, places) = gradient::split(formula.name, target, width, dtype);
        let of_parameters = match &flat {
            Some(flat) => vec![Spec::of_any(flat)],
            None => vec![Spec::new([width], sums); wanted.sums()],
        };
        let input = wanted.input.then(|| Spec::of_any(&inputs[0]));
        inputs.insert(2, self.gradient);
        inputs.extend([self.so_far, flat].into_iter().flatten());
        let op = SimpleOp {
            name: formula.name,
            parameters: NormBackwardOp {
                formula,
                wanted,
                sums,
                places,
            },
            outputs: input.into_iter().chain(of_parameters).collect(),
            cpu: cpu::backward,
            #[cfg(feature = "cubecl")]
            cube: kernel::backward,
        };
        launch(op, inputs)
    }
}

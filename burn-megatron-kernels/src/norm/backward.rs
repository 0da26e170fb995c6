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
use crate::cpu::wide;
use crate::function::{Function, MultiFunction};
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

/// The requested gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NormGradients {
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
}

impl NormGradients {
    /// Number of sums over rows: the bias's comes after the weight's.
    pub(super) fn parameters(&self) -> usize {
        match (self.weight, self.bias) {
            (_, true) => 2,
            (true, false) => 1,
            (false, false) => 0,
        }
    }
}

/// `[x, residual?, weight, bias?]` to `[y, statistics, sum?]`.
#[derive(Debug)]
struct NormForwardOp {
    formula: NormFormula,
    residual: bool,
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
        if self.residual {
            outputs.push(inputs[1].clone());
        }
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::forward(self.formula, self.residual, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::forward(self.formula, self.residual, inputs)
    }
}

/// `[source, statistics, gradient, weight, so far?, flat?]` to the gradients that are requested;
/// with places, those of the parameters are the flat buffer.
#[derive(Debug)]
pub(super) struct NormBackwardOp {
    pub formula: NormFormula,
    pub wanted: NormGradients,
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
        } = self.wanted;
        let flat = inputs.last().filter(|_| self.places.is_some());
        let specs = match flat {
            Some(flat) => vec![(input, &inputs[0]), (true, flat)],
            None => vec![
                (input, &inputs[0]),
                (weight, &inputs[3]),
                (bias, &inputs[3]),
            ],
        };
        let wanted = specs.into_iter().filter(|(wanted, _)| *wanted);
        wanted.map(|(_, like)| like.clone()).collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(self, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::backward(self, inputs)
    }
}

/// A norm.
#[derive(Debug)]
pub(super) struct NormFunction {
    pub formula: NormFormula,
    pub destinations: NormDestinations,
}

/// Where the gradients of the weight and of the bias go, if not to the graph.
pub(super) type NormDestinations = [Option<Destination>; 2];

impl Function for NormFunction {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let kernel = NormForwardOp {
            formula: self.formula,
            residual: false,
        };
        let mut outputs = launch(kernel, inputs.clone());
        let statistics = outputs.remove(1);
        let weight = inputs.remove(1);
        (
            outputs.remove(0),
            vec![inputs.remove(0), statistics, weight],
        )
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let source = BackwardSource {
            formula: self.formula,
            saved,
            gradient,
            so_far: None,
        };
        gradients(source, needed, &self.destinations)
    }
}

/// `[norm, sum]` of `x + residual`, of rank `D`, for `[x, residual, weight, bias?]`.
#[derive(Debug)]
pub(super) struct AddNormFunction<const D: usize> {
    pub formula: NormFormula,
    /// The type of `x`. The sum has that of the residual.
    pub dtype: DType,
    pub destinations: NormDestinations,
}

impl<const D: usize> MultiFunction for AddNormFunction<D> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let weight = inputs[2].clone();
        let kernel = NormForwardOp {
            formula: self.formula,
            residual: true,
        };
        let mut outputs = launch(kernel, inputs);
        let sum = outputs.remove(2);
        let statistics = outputs.remove(1);
        let saved = vec![sum.clone(), statistics, weight];
        (vec![outputs.remove(0), sum], saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        mut of_outputs: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (of_sum, of_norm) = (of_outputs.remove(1), of_outputs.remove(0));
        let input = needed[0] || needed[1];
        let mut results = match of_norm {
            Some(of_norm) => {
                let needed = [&[input], &needed[2..]].concat();
                let source = BackwardSource {
                    formula: self.formula,
                    saved,
                    gradient: of_norm,
                    so_far: of_sum.filter(|_| input),
                };
                gradients(source, &needed, &self.destinations)
            }
            None => [vec![of_sum], vec![None; needed.len() - 2]].concat(),
        };
        let gradient = results.remove(0);
        let to_x = |gradient| {
            let gradient = Tensor::<D>::from_dispatch(gradient);
            gradient.cast(self.dtype).into_dispatch()
        };
        let of_x = gradient.clone().filter(|_| needed[0]).map(to_x);
        [vec![of_x, gradient.filter(|_| needed[1])], results].concat()
    }
}

/// What a backward computes the gradients from.
struct BackwardSource {
    formula: NormFormula,
    /// `[source, statistics, weight]`
    saved: Vec<DispatchTensor>,
    /// The gradient of the norm.
    gradient: DispatchTensor,
    /// The gradient of the sum's other users, to which the kernel adds its own.
    so_far: Option<DispatchTensor>,
}

/// The gradients of `[source, weight, bias?]`. Those of parameters with destinations go there.
fn gradients(
    source: BackwardSource,
    needed: &[bool],
    destinations: &NormDestinations,
) -> Vec<Option<DispatchTensor>> {
    let [of_weight, of_bias] = destinations;
    let wanted = NormGradients {
        input: needed[0],
        weight: needed[1] || of_weight.is_some(),
        bias: needed.get(2).is_some_and(|needed| *needed) || of_bias.is_some(),
    };
    let given: Vec<_> = destinations.iter().flatten().collect();
    let mut results = if given.is_empty() {
        source.launch(wanted, None)
    } else {
        gradient::accumulate(&given, |target| {
            let mut results = source.launch(wanted, target);
            let sums = results.split_off(usize::from(wanted.input));
            let sums = sums.into_iter().map(Tensor::from_dispatch);
            (results, sums.collect())
        })
    }
    .into_iter();
    needed
        .iter()
        .map(|needed| needed.then(|| results.next()).flatten())
        .collect()
}

impl BackwardSource {
    /// The requested gradients; with a target, those of the parameters are the flat buffer.
    fn launch(self, wanted: NormGradients, target: Option<FlatGradients>) -> Vec<DispatchTensor> {
        let mut inputs = self.saved;
        let width = inputs[2].shape().num_elements();
        let dtype = self.gradient.dtype();
        let (flat, places) = gradient::split(self.formula.name, target, width, dtype);
        inputs.insert(2, self.gradient);
        inputs.extend([self.so_far, flat].into_iter().flatten());
        let kernel = NormBackwardOp {
            formula: self.formula,
            wanted,
            places,
        };
        launch(kernel, inputs)
    }
}

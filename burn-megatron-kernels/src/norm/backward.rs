//! The autodiff functions of the norms: what is saved, and which kernel computes the gradients.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::NormOptions;
use super::cpu;
#[cfg(feature = "cubecl")]
use super::kernel;
use crate::cpu::wide;
use crate::function::{Function, MultiFunction};
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

/// `[source, statistics, gradient, weight, so far?]` to the gradients that are requested.
#[derive(Debug)]
struct NormBackwardOp {
    formula: NormFormula,
    wanted: NormGradients,
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
        let specs = [(input, 0), (weight, 3), (bias, 3)];
        let wanted = specs.into_iter().filter(|(wanted, _)| *wanted);
        wanted.map(|(_, like)| inputs[like].clone()).collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(self.formula, self.wanted, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::backward(self.formula, self.wanted, inputs)
    }
}

/// A norm.
#[derive(Debug)]
pub(super) struct NormFunction(pub NormFormula);

impl Function for NormFunction {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let kernel = NormForwardOp {
            formula: self.0,
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
        gradients(self.0, saved, gradient, needed, None)
    }
}

/// `[norm, sum]` of `x + residual`, of rank `D`, for `[x, residual, weight, bias?]`.
#[derive(Debug)]
pub(super) struct AddNormFunction<const D: usize> {
    pub formula: NormFormula,
    /// The type of `x`. The sum has that of the residual.
    pub dtype: DType,
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
                // The kernel adds the gradient of the sum's other users.
                let so_far = of_sum.filter(|_| input);
                gradients(self.formula, saved, of_norm, &needed, so_far)
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

/// The gradients of `[source, weight, bias?]`, from `[source, statistics, weight]` and the gradient
/// of the norm; `so_far` is added to that of the source.
fn gradients(
    formula: NormFormula,
    mut saved: Vec<DispatchTensor>,
    gradient: DispatchTensor,
    needed: &[bool],
    so_far: Option<DispatchTensor>,
) -> Vec<Option<DispatchTensor>> {
    let wanted = NormGradients {
        input: needed[0],
        weight: needed[1],
        bias: needed.get(2).copied().unwrap_or(false),
    };
    saved.insert(2, gradient);
    saved.extend(so_far);
    let mut results = launch(NormBackwardOp { formula, wanted }, saved).into_iter();
    needed
        .iter()
        .map(|needed| needed.then(|| results.next()).flatten())
        .collect()
}

//! The autodiff functions of the norms: what is saved, and which kernel computes the gradients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::NormOptions;
use super::cpu;
#[cfg(feature = "cubecl")]
use super::kernel;
use crate::Function;
use crate::cpu::wide;
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

/// State shared by the addition and the norm of one fused call.
#[derive(Debug, Default)]
pub(super) struct AddNormState {
    /// The output and the statistics, passed from the forward of the addition to that of the norm.
    forward_outputs: Mutex<Option<(DispatchTensor, DispatchTensor)>>,
    /// Whether the backward of the sum's other users has run.
    sum_gradient_ready: AtomicBool,
}

#[cfg(test)]
thread_local! {
    /// Number of backwards on this thread that fused the addition of the other gradient.
    pub(super) static FUSED_ADDITIONS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// A norm. With a shared state it takes the output that [`AddFunction`] has computed.
#[derive(Debug)]
pub(super) struct NormFunction {
    pub formula: NormFormula,
    pub shared_state: Option<Arc<AddNormState>>,
}

impl NormFunction {
    fn run(&self, inputs: &[DispatchTensor]) -> (DispatchTensor, DispatchTensor) {
        let forward_outputs = self.shared_state.as_ref().and_then(|shared_state| {
            let mut forward_outputs = shared_state
                .forward_outputs
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            forward_outputs.take()
        });
        forward_outputs.unwrap_or_else(|| {
            let kernel = NormForwardOp {
                formula: self.formula,
                residual: false,
            };
            let mut outputs = launch(kernel, inputs.to_vec());
            let statistics = outputs.remove(1);
            (outputs.remove(0), statistics)
        })
    }
}

impl Function for NormFunction {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (y, statistics) = self.run(&inputs);
        let weight = inputs.remove(1);
        (y, vec![inputs.remove(0), statistics, weight])
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.gradients(saved, gradient, needed, None)
    }

    fn onto(&self) -> Option<usize> {
        let shared_state = self.shared_state.as_ref()?;
        shared_state
            .sum_gradient_ready
            .load(Ordering::Acquire)
            .then_some(0)
    }

    fn backward_onto(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
        so_far: DispatchTensor,
    ) -> Vec<Option<DispatchTensor>> {
        #[cfg(test)]
        FUSED_ADDITIONS.set(FUSED_ADDITIONS.get() + 1);
        self.gradients(saved, gradient, needed, Some(so_far))
    }
}

impl NormFunction {
    fn gradients(
        &self,
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
        let kernel = NormBackwardOp {
            formula: self.formula,
            wanted,
        };
        saved.insert(2, gradient);
        saved.extend(so_far);
        let mut results = launch(kernel, saved).into_iter();
        let mut result = |wanted: bool| wanted.then(|| results.next()).flatten();
        let all = [
            result(wanted.input),
            result(wanted.weight),
            result(wanted.bias),
        ];
        all.into_iter().take(needed.len()).collect()
    }
}

/// `x + residual`, of rank `D`; its launch makes the norm of the sum as well.
#[derive(Debug)]
pub(super) struct AddFunction<const D: usize> {
    pub formula: NormFormula,
    /// The type of `x`. The sum has that of the residual.
    pub dtype: DType,
    /// The weight, and the bias if there is one.
    pub params: Vec<DispatchTensor>,
    pub shared_state: Arc<AddNormState>,
}

impl<const D: usize> Function for AddFunction<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        inputs.extend(self.params.iter().cloned());
        let (y, sum, statistics) = add(self.formula, inputs);
        let mut forward_outputs = self
            .shared_state
            .forward_outputs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *forward_outputs = Some((y, statistics));
        (sum, vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let to_x = |gradient| Tensor::<D>::from_dispatch(gradient).cast(self.dtype);
        vec![
            needed[0].then(|| to_x(gradient.clone()).into_dispatch()),
            needed[1].then_some(gradient),
        ]
    }
}

/// The norm of a sum, the sum, and the statistics, for `[x, residual, weight, bias?]`.
pub(super) fn add(
    formula: NormFormula,
    inputs: Vec<DispatchTensor>,
) -> (DispatchTensor, DispatchTensor, DispatchTensor) {
    let kernel = NormForwardOp {
        formula,
        residual: true,
    };
    let mut outputs = launch(kernel, inputs);
    let sum = outputs.remove(2);
    let statistics = outputs.remove(1);
    (outputs.remove(0), sum, statistics)
}

/// Passes a sum `[sum, later]` to its users other than the norm.
///
/// Its backward registers their gradient for the sum and sets a flag, so that the backward of the
/// norm, which runs later, can take that gradient and add its own. It runs later because `later` is
/// deeper in the graph than the sum.
#[derive(Debug)]
pub(super) struct SumBranch {
    pub shared_state: Arc<AddNormState>,
}

impl Function for SumBranch {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.shared_state
            .sum_gradient_ready
            .store(true, Ordering::Release);
        vec![Some(gradient.clone()), Some(gradient)]
    }
}

/// A node one level deeper than the sum, for [`SumBranch`]. It has no gradient.
#[derive(Debug)]
pub(super) struct OrderingNode;

impl Function for OrderingNode {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![None]
    }
}

//! How the norms are recorded: what is saved, and which kernel makes the gradients.

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
use crate::launch::{Kernel, Spec, launch};

/// The formula of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// The name of the operation.
    pub name: &'static str,
    /// Whether the mean is subtracted: LayerNorm.
    pub centred: bool,
    pub options: NormOptions,
}

impl Rule {
    /// Numbers kept of a row: one over the deviation, and for LayerNorm the mean in two parts,
    /// because one float cannot hold a large mean to a fraction of a small deviation.
    pub(super) fn statistics(&self) -> usize {
        match self.centred {
            true => 3,
            false => 1,
        }
    }
}

/// The gradients that a backward is to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gradients {
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
}

impl Gradients {
    /// Sums over the rows that are made: the bias's comes after the weight's.
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
struct ForwardKernel {
    rule: Rule,
    residual: bool,
}

impl Kernel for ForwardKernel {
    fn name(&self) -> &'static str {
        self.rule.name
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let x = inputs[0].clone();
        let width = x.shape[x.shape.num_dims() - 1];
        let rows = x.shape.num_elements() / width;
        let statistics = Spec::new([rows, self.rule.statistics()], wide(x.dtype));
        let mut outputs = vec![x, statistics];
        if self.residual {
            outputs.push(inputs[1].clone());
        }
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::forward(self.rule, self.residual, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::forward(self.rule, self.residual, inputs)
    }
}

/// `[source, statistics, gradient, weight, so far?]` to the gradients that are asked for.
#[derive(Debug)]
struct BackwardKernel {
    rule: Rule,
    asked: Gradients,
}

impl Kernel for BackwardKernel {
    fn name(&self) -> &'static str {
        self.rule.name
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let Gradients {
            input,
            weight,
            bias,
        } = self.asked;
        let specs = [(input, 0), (weight, 3), (bias, 3)];
        let asked = specs.into_iter().filter(|(asked, _)| *asked);
        asked.map(|(_, like)| inputs[like].clone()).collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(self.rule, self.asked, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::backward(self.rule, self.asked, inputs)
    }
}

/// What a fused addition and norm hands from the node of the sum to the node of the norm.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// The output and the statistics, on their way from the forward of one to that of the other.
    made: Mutex<Option<(DispatchTensor, DispatchTensor)>>,
    /// Whether the sum's other users have given their gradient.
    returned: AtomicBool,
}

#[cfg(test)]
thread_local! {
    /// Backwards on this thread that took the gradient of the sum's other users.
    pub(super) static JOINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// A norm. With a link it takes the output that [`Add`] has made.
#[derive(Debug)]
pub(super) struct Norm {
    pub rule: Rule,
    pub link: Option<Arc<Link>>,
}

impl Norm {
    fn run(&self, inputs: &[DispatchTensor]) -> (DispatchTensor, DispatchTensor) {
        let made = self.link.as_ref().and_then(|link| {
            let mut made = link.made.lock().unwrap_or_else(PoisonError::into_inner);
            made.take()
        });
        made.unwrap_or_else(|| {
            let kernel = ForwardKernel {
                rule: self.rule,
                residual: false,
            };
            let mut outputs = launch(kernel, inputs.to_vec());
            let statistics = outputs.remove(1);
            (outputs.remove(0), statistics)
        })
    }
}

impl Function for Norm {
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
        let link = self.link.as_ref()?;
        link.returned.load(Ordering::Acquire).then_some(0)
    }

    fn backward_onto(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
        so_far: DispatchTensor,
    ) -> Vec<Option<DispatchTensor>> {
        #[cfg(test)]
        JOINED.set(JOINED.get() + 1);
        self.gradients(saved, gradient, needed, Some(so_far))
    }
}

impl Norm {
    fn gradients(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
        so_far: Option<DispatchTensor>,
    ) -> Vec<Option<DispatchTensor>> {
        let asked = Gradients {
            input: needed[0],
            weight: needed[1],
            bias: needed.get(2).copied().unwrap_or(false),
        };
        let kernel = BackwardKernel {
            rule: self.rule,
            asked,
        };
        saved.insert(2, gradient);
        saved.extend(so_far);
        let mut results = launch(kernel, saved).into_iter();
        let mut result = |asked: bool| asked.then(|| results.next()).flatten();
        let all = [
            result(asked.input),
            result(asked.weight),
            result(asked.bias),
        ];
        all.into_iter().take(needed.len()).collect()
    }
}

/// `x + residual`, of rank `D`; its launch makes the norm of the sum as well.
#[derive(Debug)]
pub(super) struct Add<const D: usize> {
    pub rule: Rule,
    /// The type of `x`. The sum has that of the residual.
    pub dtype: DType,
    /// The weight, and the bias if there is one.
    pub params: Vec<DispatchTensor>,
    pub link: Arc<Link>,
}

impl<const D: usize> Function for Add<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        inputs.extend(self.params.iter().cloned());
        let (y, sum, statistics) = add(self.rule, inputs);
        let mut made = self
            .link
            .made
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *made = Some((y, statistics));
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
    rule: Rule,
    inputs: Vec<DispatchTensor>,
) -> (DispatchTensor, DispatchTensor, DispatchTensor) {
    let kernel = ForwardKernel {
        rule,
        residual: true,
    };
    let mut outputs = launch(kernel, inputs);
    let sum = outputs.remove(2);
    let statistics = outputs.remove(1);
    (outputs.remove(0), sum, statistics)
}

/// Hands a sum `[sum, later]` to its users other than the norm.
///
/// Its backward gives their gradient to the sum and says so, so that the norm's backward, which
/// comes after, can take it and add its own. It comes after because `later` is deeper than the sum.
#[derive(Debug)]
pub(super) struct Carry {
    pub link: Arc<Link>,
}

impl Function for Carry {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.link.returned.store(true, Ordering::Release);
        vec![Some(gradient.clone()), Some(gradient)]
    }
}

/// A step deeper than the sum, for [`Carry`]. It takes part in no gradient.
#[derive(Debug)]
pub(super) struct Later;

impl Function for Later {
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

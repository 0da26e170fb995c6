//! The matrix product of the parallel layers, with its communication in the backward.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply, gemm};

use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

use super::door::{Door, Exit};
use super::value_at;

/// The dimension of the sequence in `[batch, seq, hidden]`.
pub const SEQUENCE_DIM: usize = 1;

/// How the input of a linear layer lies on the ranks of its group.
#[derive(Clone, Debug)]
pub enum InputLies {
    /// Each rank has its own; nothing is exchanged.
    Local,
    /// Every rank has the same; the gradients of the ranks are parts of a sum.
    Replicated(Comm),
    /// Each rank has a part of the sequence, and needs all of it.
    SplitSequence(Comm),
}

/// The weight of a linear layer, and the way that its gradient takes.
#[derive(Clone, Debug)]
pub struct Weight {
    tensor: Tensor<2>,
    exit: Option<Exit>,
    transposed: bool,
}

impl Weight {
    /// The weight `[in, out]` of a layer with the input `x`.
    ///
    /// Behind a [`Door`] the product itself hands the gradient over, so that it can be put off.
    pub fn of(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let door = param.reparameterization::<Door>();
        match door.filter(|_| x.is_autodiff() && x.is_tracked()) {
            Some(door) => {
                let exit = door.exit().clone();
                exit.sink.expect(exit.index);
                Self {
                    tensor: param.base(),
                    exit: Some(exit),
                    transposed: false,
                }
            }
            None => value_at(param, x).into(),
        }
    }

    /// The same weight, stored as `[out, in]`.
    pub fn transposed(self) -> Self {
        Self {
            tensor: self.tensor.transpose(),
            transposed: !self.transposed,
            ..self
        }
    }
}

impl From<Tensor<2>> for Weight {
    /// A weight whose gradient stays in the graph.
    fn from(tensor: Tensor<2>) -> Self {
        Self {
            tensor,
            exit: None,
            transposed: false,
        }
    }
}

/// `x weight + bias`: `[batch, seq, in]`, `[in, out]`, `[out]` to `[batch, seq, out]`.
///
/// Where the gradients of the ranks must be summed, that collective is under way while the weight
/// gradient is computed. Of a split sequence only this rank's part is saved; the backward gathers
/// it again while it computes the input gradient (Korthikanti et al. 2022, arXiv:2205.05198).
///
/// `fused` says whether the products add the bias, and earlier weight gradients, themselves.
pub fn linear(
    x: Tensor<3>,
    weight: impl Into<Weight>,
    bias: Option<Tensor<1>>,
    input: InputLies,
    fused: bool,
) -> Tensor<3> {
    let Weight {
        tensor,
        exit,
        transposed,
    } = weight.into();
    let mut inputs = vec![x.into_dispatch(), tensor.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    apply(
        inputs,
        Linear {
            input,
            exit,
            transposed,
            fused,
        },
    )
}

#[derive(Debug)]
struct Linear {
    input: InputLies,
    /// Where the weight gradient goes, if not into the graph.
    exit: Option<Exit>,
    /// Whether it goes there as `[out, in]`.
    transposed: bool,
    /// Whether products go through the kernels' seam.
    fused: bool,
}

impl Function for Linear {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (x, weight) = (tensor::<3>(&inputs[0]), tensor::<2>(&inputs[1]));
        let x = match &self.input {
            InputLies::SplitSequence(comm) => start_all_gather(x, SEQUENCE_DIM, comm).wait(),
            InputLies::Local | InputLies::Replicated(_) => x,
        };
        let [batch, seq, _] = x.dims();
        let bias = inputs.get(2).map(tensor::<1>);
        let y = self.product(rows(x), weight, bias);
        let out = y.dims()[1];
        let mut saved = inputs;
        saved.truncate(2);
        (y.reshape([batch, seq, out]).into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (x, weight) = (tensor::<3>(&saved[0]), tensor::<2>(&saved[1]));
        let (needs_x, needs_weight) = (needed[0], needed[1] || self.exit.is_some());
        let gradient = Tensor::<3>::from_dispatch(gradient);
        let [batch, seq, _] = gradient.dims();
        let gradient = rows(gradient);

        let x = match &self.input {
            InputLies::SplitSequence(comm) if needs_weight => {
                start_all_gather(x, SEQUENCE_DIM, comm)
            }
            _ => PendingTensor::ready(x),
        };
        let input_gradient = needs_x.then(|| {
            let width = weight.dims()[0];
            let dx = self.product(gradient.clone(), weight.transpose(), None);
            let dx = dx.reshape([batch, seq, width]);
            match &self.input {
                InputLies::Local => PendingTensor::ready(dx),
                InputLies::Replicated(comm) => start_all_reduce(dx, ReduceOp::Sum, comm),
                InputLies::SplitSequence(comm) => start_reduce_scatter(dx, SEQUENCE_DIM, comm),
            }
        });
        let weight_gradient = match &self.exit {
            Some(exit) => {
                let (gradient, transposed, fused) = (gradient.clone(), self.transposed, self.fused);
                let later = move |sum: Option<Tensor<1>>| {
                    let (left, right) = match transposed {
                        true => (gradient, rows(x.wait())),
                        false => (rows(x.wait()), gradient),
                    };
                    weight_gradient(left, right, sum, fused).into_dispatch()
                };
                exit.sink.accumulate_later(exit.index, Box::new(later));
                None
            }
            None => needs_weight
                .then(|| weight_gradient(rows(x.wait()), gradient.clone(), None, self.fused)),
        };
        let bias_gradient = needed.get(2).is_some_and(|needed| *needed).then(|| {
            let sum: Tensor<2> = gradient.sum_dim(0);
            sum.squeeze_dim::<1>(0)
        });
        let input_gradient = input_gradient.map(PendingTensor::wait);

        let mut gradients = vec![
            input_gradient.map(Tensor::into_dispatch),
            weight_gradient.map(Tensor::into_dispatch),
        ];
        if needed.len() == 3 {
            gradients.push(bias_gradient.map(Tensor::into_dispatch));
        }
        gradients
    }
}

impl Linear {
    /// `[rows, in]`, `[in, out]`, `[out]` to `[rows, out]`.
    fn product(&self, x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        match self.fused {
            true => gemm::linear(x, weight, bias),
            false => gemm::composed::linear(x, weight, bias),
        }
    }
}

/// `left^T right`, of `[rows, a]` and `[rows, b]`, added to the flat `sum` where there is one.
fn weight_gradient(
    left: Tensor<2>,
    right: Tensor<2>,
    sum: Option<Tensor<1>>,
    fused: bool,
) -> Tensor<2> {
    let _span = tracing::trace_span!("weight_gradient").entered();
    let shape = [left.dims()[1], right.dims()[1]];
    let Some(sum) = sum.map(|sum| sum.reshape(shape)) else {
        return left.transpose().matmul(right);
    };
    // The kernel adds up in f32, or f64; sums in 16 bits are not its business.
    match fused && sum.dtype() == right.dtype() && sum.dtype().size() >= 4 {
        true => gemm::accumulate_weight_gradient(left, right, sum),
        false => sum + left.transpose().matmul(right),
    }
}

fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

/// `[batch, seq, width]` to `[batch * seq, width]`.
fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

//! The matrix product of the parallel layers, with its communication in the backward.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply, flat, gemm};

use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

use super::door::{Door, Exit, Pass, Place};
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
    exit: Option<Behind>,
    transposed: bool,
}

/// A weight behind a [`Door`]: the graph does not hold its value, which may be gathered again for
/// the backward.
#[derive(Clone, Debug)]
struct Behind {
    exit: Exit,
    /// What the module holds, of the weight's shape.
    base: Tensor<2>,
}

impl Weight {
    /// The weight `[in, out]` of a layer with the input `x`.
    ///
    /// Behind a [`Door`] the product itself hands the gradient over, so that it can be put off.
    pub fn of(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let door = param.reparameterization::<Door>();
        match door.filter(|_| x.is_autodiff() && x.is_tracked()) {
            Some(door) => {
                let (exit, base) = (door.exit().clone(), param.base());
                exit.expect();
                Self {
                    tensor: exit.value(base.clone()).0,
                    exit: Some(Behind { exit, base }),
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
    exit: Option<Behind>,
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
        saved.truncate(if self.exit.is_some() { 1 } else { 2 });
        (y.reshape([batch, seq, out]).into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let x = tensor::<3>(&saved[0]);
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
            let weight = self.weight(&saved);
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
            Some(Behind { exit, .. }) => {
                let (gradient, transposed, fused) = (gradient.clone(), self.transposed, self.fused);
                let later = move |place: Option<Place>| {
                    let (left, right) = match transposed {
                        true => (gradient, rows(x.wait())),
                        false => (rows(x.wait()), gradient),
                    };
                    weight_gradient_at(left, right, place, fused)
                };
                exit.sink.accumulate_later(exit.index, Box::new(later));
                None
            }
            None => needs_weight.then(|| weight_gradient(rows(x.wait()), gradient.clone())),
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
    /// The weight, in the backward.
    fn weight(&self, saved: &[DispatchTensor]) -> Tensor<2> {
        let Some(Behind { exit, base }) = &self.exit else {
            return tensor(&saved[1]);
        };
        let weight = exit.value_in(base.clone(), Pass::Backward).0;
        match self.transposed {
            true => weight.transpose(),
            false => weight,
        }
    }

    /// `[rows, in]`, `[in, out]`, `[out]` to `[rows, out]`.
    fn product(&self, x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        match self.fused {
            true => gemm::linear(x, weight, bias),
            false => gemm::composed::linear(x, weight, bias),
        }
    }
}

/// `left^T right`, of `[rows, a]` and `[rows, b]`.
fn weight_gradient(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let _span = tracing::trace_span!("weight_gradient").entered();
    left.transpose().matmul(right)
}

/// The same, flat, in a place of a buffer where there is one.
fn weight_gradient_at(
    left: Tensor<2>,
    right: Tensor<2>,
    place: Option<Place>,
    fused: bool,
) -> Tensor<1> {
    let Some(Place { flat, offset, add }) = place else {
        return flatten(weight_gradient(left, right));
    };
    // The product adds up in f32, or f64; sums in 16 bits are not its business.
    if fused && flat.dtype().size() >= 4 {
        let _span = tracing::trace_span!("weight_gradient").entered();
        return gemm::accumulate_weight_gradient_at(left, right, flat, offset, add);
    }
    flat::accumulate(flat, offset, flatten(weight_gradient(left, right)), add)
}

fn flatten(x: Tensor<2>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}

fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

/// `[batch, seq, width]` to `[batch * seq, width]`.
fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

//! The matrix product of the parallel layers, with its communication in the backward.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

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

/// `x weight + bias`: `[batch, seq, in]`, `[in, out]`, `[out]` to `[batch, seq, out]`.
///
/// Where the gradients of the ranks must be summed, that collective is under way while the weight
/// gradient is computed. Of a split sequence only this rank's part is saved; the backward gathers
/// it again while it computes the input gradient (Korthikanti et al. 2022, arXiv:2205.05198).
pub fn linear(
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    input: InputLies,
) -> Tensor<3> {
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    apply(inputs, Linear { input })
}

#[derive(Debug)]
struct Linear {
    input: InputLies,
}

impl Function for Linear {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (x, weight) = (tensor::<3>(&inputs[0]), tensor::<2>(&inputs[1]));
        let x = match &self.input {
            InputLies::SplitSequence(comm) => start_all_gather(x, SEQUENCE_DIM, comm).wait(),
            InputLies::Local | InputLies::Replicated(_) => x,
        };
        let [batch, seq, _] = x.dims();
        let mut y = rows(x).matmul(weight);
        if let Some(bias) = inputs.get(2) {
            y = y + tensor::<1>(bias).unsqueeze();
        }
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
        let (needs_x, needs_weight) = (needed[0], needed[1]);
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
            let dx = gradient
                .clone()
                .matmul(weight.transpose())
                .reshape([batch, seq, width]);
            match &self.input {
                InputLies::Local => PendingTensor::ready(dx),
                InputLies::Replicated(comm) => start_all_reduce(dx, ReduceOp::Sum, comm),
                InputLies::SplitSequence(comm) => start_reduce_scatter(dx, SEQUENCE_DIM, comm),
            }
        });
        let weight_gradient = needs_weight.then(|| {
            let x = x.wait();
            let _span = tracing::trace_span!("weight_gradient").entered();
            rows(x).transpose().matmul(gradient.clone())
        });
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

fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

/// `[batch, seq, width]` to `[batch * seq, width]`.
fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

//! The matrix product of the parallel layers, with its communication in the backward.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

use super::arithmetic::{Arithmetic, Factor, Input, Plain, Wanted};
use super::door::{self, Door, Exit, Pass};
use super::fp8::{Fp8Layer, In8Bits};
use super::value_at;
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

/// The weight of a linear layer, and the way that its gradient takes.
#[derive(Clone, Debug)]
pub struct Weight {
    tensor: Tensor<2>,
    behind: Option<Behind>,
    transposed: bool,
}

/// A weight behind a [`Door`].
#[derive(Clone, Debug)]
pub(super) struct Behind {
    pub exit: Exit,
    /// What the module holds, of the weight's shape.
    base: Tensor<2>,
    /// Whether the gradient leaves through it. The graph does not hold the value then, which may be
    /// gathered again for the backward.
    leaves: bool,
}

impl Behind {
    /// The value, as floats.
    pub fn value(&self, pass: Pass) -> Tensor<2> {
        self.exit.value_in(self.base.clone(), pass).0
    }
}

impl Weight {
    /// The weight `[in, out]` of a layer with the input `x`.
    ///
    /// Behind a [`Door`] the product itself hands the gradient over, so that it can be put off.
    pub fn of(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let door = param.reparameterization::<Door>();
        match door.filter(|_| is_tracked(x)) {
            Some(door) => {
                let behind = Behind::leaving(door, param);
                Self {
                    tensor: behind.exit.value(behind.base.clone()).0,
                    behind: Some(behind),
                    transposed: false,
                }
            }
            None => value_at(param, x).into(),
        }
    }

    /// The same for a product that asks for the value itself, which may be there in 8 bits alone.
    pub(super) fn asked_for(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let Some(door) = param.reparameterization::<Door>() else {
            return value_at(param, x).into();
        };
        let behind = match is_tracked(x) {
            true => Behind::leaving(door, param),
            false => Behind {
                exit: door.exit().clone(),
                base: param.base(),
                leaves: false,
            },
        };
        let tensor = match (behind.leaves, door::anchor().is_some()) {
            (true, _) => behind.base.clone(),
            // The gradient comes back through the graph.
            (false, true) => param.val(),
            (false, false) => {
                behind.exit.pass_by();
                behind.base.clone()
            }
        };
        Self {
            tensor,
            behind: Some(behind),
            transposed: false,
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

impl Behind {
    /// Announces a gradient that leaves here.
    fn leaving(door: &Door, param: &Param<Tensor<2>>) -> Self {
        let exit = door.exit().clone();
        exit.expect();
        Self {
            exit,
            base: param.base(),
            leaves: true,
        }
    }
}

impl From<Tensor<2>> for Weight {
    /// A weight whose gradient stays in the graph.
    fn from(tensor: Tensor<2>) -> Self {
        Self {
            tensor,
            behind: None,
            transposed: false,
        }
    }
}

fn is_tracked<const D: usize>(x: &Tensor<D>) -> bool {
    x.is_autodiff() && x.is_tracked()
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
    let weight = weight.into();
    let plain = Plain {
        fused,
        transposed: weight.transposed,
    };
    run(x, weight, bias, input, plain)
}

/// The same in 8 bits, with a weight that is [asked for](Weight::asked_for).
pub(super) fn linear_in_8_bits(
    x: Tensor<3>,
    weight: Weight,
    bias: Option<Tensor<1>>,
    input: InputLies,
    layer: &Fp8Layer,
) -> Tensor<3> {
    let is_recorded = is_tracked(&x) || is_tracked(&weight.tensor);
    let whole = !matches!(input, InputLies::SplitSequence(_));
    let arithmetic = In8Bits::new(layer, is_recorded, whole);
    run(x, weight, bias, input, arithmetic)
}

fn run<A: Arithmetic>(
    x: Tensor<3>,
    weight: Weight,
    bias: Option<Tensor<1>>,
    input: InputLies,
    arithmetic: A,
) -> Tensor<3> {
    let mut inputs = vec![x.into_dispatch(), weight.tensor.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    let function = Linear {
        input,
        behind: weight.behind,
        transposed: weight.transposed,
        arithmetic,
    };
    apply(inputs, function)
}

/// The product, whatever its arithmetic: what is exchanged, what is kept, and where gradients go.
#[derive(Debug)]
pub(super) struct Linear<A> {
    pub input: InputLies,
    /// Where the weight comes from and its gradient goes, if not from and into the graph.
    pub behind: Option<Behind>,
    /// Whether it lies there as `[out, in]`.
    pub transposed: bool,
    pub arithmetic: A,
}

impl<A: Arithmetic> Function for Linear<A> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (x, weight) = (tensor::<3>(&inputs[0]), tensor::<2>(&inputs[1]));
        let x = match &self.input {
            InputLies::SplitSequence(comm) => start_all_gather(x, SEQUENCE_DIM, comm).wait(),
            InputLies::Local | InputLies::Replicated(_) => x,
        };
        let [batch, seq, _] = x.dims();
        let bias = inputs.get(2).map(tensor::<1>);
        let factor = match self.asked().filter(|_| A::ASKS) {
            Some(behind) => Factor::Behind(behind, self.transposed),
            None => Factor::Here(weight),
        };
        let (y, kept) = self.arithmetic.output(rows(x), factor, bias);
        let out = y.dims()[1];
        let mut inputs = inputs.into_iter();
        let x = inputs.next();
        let mut saved = match kept.instead {
            Some(instead) => Vec::from(instead),
            None => Vec::from_iter(x),
        };
        saved.extend(inputs.next().filter(|_| self.asked().is_none()));
        saved.extend(kept.beside);
        (y.reshape([batch, seq, out]).into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (needs_x, needs_weight) = (needed[0], needed[1] || self.exit().is_some());
        let gradient = Tensor::<3>::from_dispatch(gradient);
        let [batch, seq, _] = gradient.dims();
        let gradient = rows(gradient);

        let (x, rest) = saved.split_at(if self.arithmetic.keeps_instead() {
            2
        } else {
            1
        });
        let (factor, beside) = match self.asked() {
            Some(behind) => (Factor::Behind(behind, self.transposed), rest),
            None => (Factor::Here(tensor(&rest[0])), &rest[1..]),
        };
        let beside = beside.to_vec();
        let x = match (x, &self.input) {
            ([codes, scales], _) => Input::Instead([codes.clone(), scales.clone()]),
            ([x, ..], InputLies::SplitSequence(comm)) if needs_weight => {
                Input::Whole(start_all_gather(tensor(x), SEQUENCE_DIM, comm))
            }
            ([x, ..], _) => Input::Whole(PendingTensor::ready(tensor(x))),
            ([], _) => unreachable!("the input was saved"),
        };
        let wanted = Wanted {
            input: needs_x,
            weight: needs_weight,
        };
        let dy = self.arithmetic.gradient(gradient.clone(), wanted);
        let input_gradient = needs_x.then(|| {
            let dx = self.arithmetic.input_gradient(&dy, factor, &beside);
            let width = dx.dims()[1];
            let dx = dx.reshape([batch, seq, width]);
            match &self.input {
                InputLies::Local => PendingTensor::ready(dx),
                InputLies::Replicated(comm) => start_all_reduce(dx, ReduceOp::Sum, comm),
                InputLies::SplitSequence(comm) => start_reduce_scatter(dx, SEQUENCE_DIM, comm),
            }
        });
        let weight_gradient = match self.exit() {
            Some(exit) => {
                let arithmetic = self.arithmetic.clone();
                let later = move |place| arithmetic.weight_gradient_at(x, dy, &beside, place);
                exit.sink.accumulate_later(exit.index, Box::new(later));
                None
            }
            None => needs_weight.then(|| self.arithmetic.weight_gradient(x, dy, &beside)),
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

impl<A: Arithmetic> Linear<A> {
    /// What is asked for the weight in the backward, where the graph does not hold it.
    fn asked(&self) -> Option<&Behind> {
        let behind = self.behind.as_ref();
        behind.filter(|behind| A::ASKS || behind.leaves)
    }

    /// Where the weight gradient goes, if not into the graph.
    fn exit(&self) -> Option<&Exit> {
        let behind = self.behind.as_ref().filter(|behind| behind.leaves);
        behind.map(|behind| &behind.exit)
    }
}

fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

/// `[batch, seq, width]` to `[batch * seq, width]`.
pub(super) fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

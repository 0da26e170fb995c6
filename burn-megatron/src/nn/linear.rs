//! The matrix product of the parallel layers, with its communication in the backward.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::activation::{self as kernels, ActivationFunction, ActivationOptions};
use burn_megatron_kernels::column_sum::bias_gradient;
use burn_megatron_kernels::gradient::{Destination, Parameter};
use burn_megatron_kernels::{Function, apply};

use super::arithmetic::{
    FloatArithmetic, LinearArithmetic, LinearKernels, NeededGradients, SavedInput, SavedTensors,
    WeightSource,
};
use super::forward_context::is_tracked;
use super::fp8::{ActivatedLinear, Fp8Arithmetic, Fp8Layer};
use super::hook::HookHandle;
use super::recompute::{ProductInput, SavesInput, apply_discarding};
use super::tp_comm_overlap::TpCommOverlapGroup;
use super::weight::{HookedWeight, Weight};
use super::{Bias, LinearInput};
use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

/// The dimension of the sequence in `[batch, seq, hidden]`.
pub const SEQUENCE_DIM: usize = 1;

/// The distribution of a linear layer's input over the ranks of its group.
#[derive(Clone, Debug)]
pub enum InputLayout {
    /// Each rank has its own input; nothing is communicated.
    Local,
    /// Every rank has the same input; the backward all-reduces its gradient.
    Replicated(Comm),
    /// Each rank has a part of the sequence: the forward all-gathers the input, the backward
    /// reduce-scatters its gradient.
    SplitSequence(Comm),
    /// The same, with the exchanges in chunks that travel while the products of other chunks are computed.
    SplitSequenceInChunks(TpCommOverlapGroup),
    /// Each rank has a part of the features of every token, and the output is a sum over the ranks: the forward
    /// reduce-scatters it along the sequence, the backward all-gathers its gradient, in chunks.
    SplitFeatures(TpCommOverlapGroup),
}

impl InputLayout {
    /// Returns the layout of the input of a layer whose columns are split over the ranks, with exchanges as a whole.
    pub(super) fn whole(comm: &Comm, sequence_parallel: bool) -> Self {
        match (comm.size(), sequence_parallel) {
            (1, _) => Self::Local,
            (_, false) => Self::Replicated(comm.clone()),
            (_, true) => Self::SplitSequence(comm.clone()),
        }
    }

    /// The input of the whole sequence.
    pub(super) fn gathered(&self, x: Tensor<3>) -> PendingTensor<3> {
        match self {
            Self::Local | Self::Replicated(_) | Self::SplitFeatures(_) => PendingTensor::ready(x),
            Self::SplitSequence(comm)
            | Self::SplitSequenceInChunks(TpCommOverlapGroup { comm, .. }) => {
                start_all_gather(x, SEQUENCE_DIM, comm)
            }
        }
    }

    /// The gradient of this rank's input, from this rank's part of that of the whole sequence.
    pub(super) fn reduced(&self, dx: Tensor<3>) -> PendingTensor<3> {
        match self {
            Self::Local | Self::SplitFeatures(_) => PendingTensor::ready(dx),
            Self::Replicated(comm) => start_all_reduce(dx, ReduceOp::Sum, comm),
            Self::SplitSequence(comm)
            | Self::SplitSequenceInChunks(TpCommOverlapGroup { comm, .. }) => {
                start_reduce_scatter(dx, SEQUENCE_DIM, comm)
            }
        }
    }

    /// The group of exchanges in chunks, and whether the output is the sum that is exchanged.
    pub(super) fn in_chunks(&self) -> Option<(&TpCommOverlapGroup, bool)> {
        match self {
            Self::SplitSequenceInChunks(group) => Some((group, false)),
            Self::SplitFeatures(group) => Some((group, true)),
            Self::Local | Self::Replicated(_) | Self::SplitSequence(_) => None,
        }
    }

    /// Whether each rank has a part of the sequence.
    fn splits_sequence(&self) -> bool {
        matches!(
            self,
            Self::SplitSequence(_) | Self::SplitSequenceInChunks(_)
        )
    }
}

/// `x weight + bias`: `[batch, seq, in]`, `[in, out]`, `[out]` to `[batch, seq, out]`.
///
/// Where the input gradient is summed over ranks, the collective is in flight while the weight
/// gradient is computed. Of a split sequence only this rank's part is saved; the backward gathers
/// it again while it computes the input gradient (Korthikanti et al. 2022, arXiv:2205.05198).
///
/// `kernels` tells how the products are computed: `true` for fused ones by the default engine.
pub fn linear(
    x: Tensor<3>,
    weight: impl Into<Weight>,
    bias: Option<Tensor<1>>,
    input: InputLayout,
    kernels: impl Into<LinearKernels>,
) -> Tensor<3> {
    let weight = weight.into();
    let bias = bias.map(Parameter::from);
    float_linear(x, weight, bias, input, kernels.into())
}

fn float_linear(
    x: Tensor<3>,
    weight: Weight,
    bias: Option<Parameter>,
    input: InputLayout,
    kernels: LinearKernels,
) -> Tensor<3> {
    let arithmetic = FloatArithmetic {
        kernels,
        transposed: weight.transposed,
    };
    run(x, weight, bias, input, arithmetic)
}

/// [`linear`] with a parameter as the weight, in 8 bits for an [`Fp8Layer`].
pub(super) fn linear_param(
    x: LinearInput,
    weight: &Param<Tensor<2>>,
    bias: Option<Parameter>,
    input: InputLayout,
    layer: Option<&Fp8Layer>,
    kernels: LinearKernels,
) -> Tensor<3> {
    let x = match x.into_discarded() {
        Ok((anchor, operation)) => {
            let operands = (layer, kernels);
            let [y] = linear_discarding(operation, &anchor, weight, bias, input, operands);
            return y;
        }
        Err(x) => *x,
    };
    if let LinearInput::Gelu(gelu) = x {
        // An MLP that has one has neither 8-bit layers nor exchanges in chunks, and the bias is added later.
        return gelu.product(weight, kernels);
    }
    let Some(layer) = layer else {
        let x = x.into_values();
        let weight = Weight::of(weight, &x);
        return float_linear(x, weight, bias, input, kernels);
    };
    let (x, activation) = for_quantiser(x, layer);
    let weight = Weight::unfetched(weight, &x);
    let trains_weight = weight.trains();
    let is_recorded = is_tracked(&x) || trains_weight;
    let whole = !input.splits_sequence();
    let arithmetic = Fp8Arithmetic::new(layer, is_recorded, whole && trains_weight);
    let Some((kind, activation_bias)) = activation else {
        return run(x, weight, bias, input, arithmetic);
    };
    let mut inputs = vec![x.into_dispatch(), weight.tensor.into_dispatch()];
    let destination = activation_bias.map(|Parameter { value, destination }| {
        inputs.push(value.into_dispatch());
        destination
    });
    let function = ActivatedLinear {
        activation: ActivationFunction::new(kind, destination),
        product: LinearFunction {
            input,
            hooked: weight.hooked,
            bias: None,
            transposed: weight.transposed,
            arithmetic,
        },
    };
    apply(inputs, function)
}

/// The product of `[batch, seq, in]` and an addend `[batch, seq, out]`, both of them terms of a sum over the ranks, each of
/// which has its part of the sequence of that sum: [`InputLayout::SplitFeatures`].
pub(super) fn linear_with_addend(
    x: Tensor<3>,
    weight: &Param<Tensor<2>>,
    addend: Tensor<3>,
    group: TpCommOverlapGroup,
    kernels: LinearKernels,
) -> Tensor<3> {
    let weight = Weight::of(weight, &x);
    let arithmetic = FloatArithmetic {
        kernels,
        transposed: false,
    };
    let input = InputLayout::SplitFeatures(group);
    let (function, others) = function_of(weight, None, input, arithmetic);
    let inputs = [
        vec![x.into_dispatch()],
        others,
        vec![addend.into_dispatch()],
    ];
    apply(inputs.concat(), function)
}

/// The values of an input, or what an activation of it is computed from, where the quantiser of the layer
/// can compute that.
fn for_quantiser(
    x: LinearInput,
    layer: &Fp8Layer,
) -> (Tensor<3>, Option<(kernels::Activation, Option<Parameter>)>) {
    match x {
        LinearInput::Activation {
            x,
            bias,
            activation,
            fused: true,
            ..
        } if layer.quantizes_activations()
            && activation.options() == ActivationOptions::default() =>
        {
            let (kind, bias) = (activation.kernel(), bias.map(Bias::into_parameter));
            let is_constant = |bias: &Parameter| !is_tracked(&bias.value);
            if is_tracked(&x) || bias.as_ref().is_none_or(is_constant) {
                (x, Some((kind, bias)))
            } else {
                // The weight is anchored to a tracked input.
                let options = ActivationOptions::default();
                (kernels::activate_with(x, bias, None, kind, options), None)
            }
        }
        other => (other.into_values(), None),
    }
}

fn run<A: LinearArithmetic>(
    x: Tensor<3>,
    weight: Weight,
    bias: Option<Parameter>,
    input: InputLayout,
    arithmetic: A,
) -> Tensor<3> {
    let (function, others) = function_of(weight, bias, input, arithmetic);
    apply([vec![x.into_dispatch()], others].concat(), function)
}

/// A product, and its inputs beside `x`.
pub(super) fn function_of<A: LinearArithmetic>(
    weight: Weight,
    bias: Option<Parameter>,
    input: InputLayout,
    arithmetic: A,
) -> (LinearFunction<A>, Vec<DispatchTensor>) {
    let mut others = vec![weight.tensor.into_dispatch()];
    let bias = bias.map(|Parameter { value, destination }| {
        others.push(value.into_dispatch());
        destination
    });
    let function = LinearFunction {
        input,
        hooked: weight.hooked,
        bias: bias.flatten(),
        transposed: weight.transposed,
        arithmetic,
    };
    (function, others)
}

/// The product of an input that is not kept, and the other outputs of the operation that computes it. `of_input` are
/// the inputs of that operation, and `anchor` one of them.
pub(super) fn linear_discarding<const K: usize>(
    (operation, of_input): (impl ProductInput, Vec<DispatchTensor>),
    anchor: &Tensor<3>,
    weight: &Param<Tensor<2>>,
    bias: Option<Parameter>,
    input: InputLayout,
    (layer, kernels): (Option<&Fp8Layer>, LinearKernels),
) -> [Tensor<3>; K] {
    let Some(layer) = layer else {
        let arithmetic = FloatArithmetic {
            kernels,
            transposed: false,
        };
        let weight = Weight::of(weight, anchor);
        let (product, others) = function_of(weight, bias, input, arithmetic);
        return apply_discarding(operation, of_input, product, others);
    };
    let weight = Weight::unfetched(weight, anchor);
    let is_recorded = is_tracked(anchor) || weight.trains();
    // Codes would be kept.
    let arithmetic = Fp8Arithmetic::new(layer, is_recorded, false);
    let (product, others) = function_of(weight, bias, input, arithmetic);
    apply_discarding(operation, of_input, product, others)
}

impl<A: LinearArithmetic> SavesInput for LinearFunction<A> {
    /// Only the gradient of the weight is computed from it.
    fn saves_input(&self) -> bool {
        !self.hooked.as_ref().is_some_and(|hooked| hooked.is_frozen)
    }

    fn reads_input(&self, needed: &[bool]) -> bool {
        self.needs_weight(needed[0])
    }
}

impl LinearFunction<Fp8Arithmetic> {
    /// The same product of an activation of the input.
    pub fn activated(&self, kind: kernels::Activation, bias: Option<Tensor<1>>) -> Self {
        Self {
            arithmetic: self.arithmetic.clone().activated(kind, bias),
            ..self.clone()
        }
    }
}

/// The product in any arithmetic: what is communicated, what is saved, and where gradients go.
#[derive(Clone, Debug)]
pub(super) struct LinearFunction<A> {
    pub input: InputLayout,
    /// Supplies the weight and takes its gradient; the graph does both where there is none.
    pub hooked: Option<HookedWeight>,
    /// Where the gradient of the bias goes, if not to the graph.
    pub bias: Option<Destination>,
    /// Whether the hooked weight is stored as `[out, in]`.
    pub transposed: bool,
    pub arithmetic: A,
}

impl<A: LinearArithmetic> Function for LinearFunction<A> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        if let Some(y) = self.forward_in_chunks(&inputs) {
            return (y, self.saved(inputs, SavedTensors::default()));
        }
        let (x, weight) = (tensor::<3>(&inputs[0]), tensor::<2>(&inputs[1]));
        let x = self.input.gathered(x).wait();
        let [batch, seq, _] = x.dims();
        let bias = inputs.get(2).map(tensor::<1>);
        let weight = match self.fetched_weight().filter(|_| A::FETCHES_WEIGHT) {
            Some(hooked) => WeightSource::Hook(hooked, self.transposed),
            None => WeightSource::Graph(weight),
        };
        let (y, tensors) = self.arithmetic.output(rows(x), weight, bias);
        let out = y.dims()[1];
        let saved = self.saved(inputs, tensors);
        (y.reshape([batch, seq, out]).into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (needs_x, needs_weight) = (needed[0], self.needs_weight(needed[1]));
        let dy = Tensor::<3>::from_dispatch(gradient);
        let [batch, seq, _] = dy.dims();
        let (x, (weight, extra)) = self.split_saved(&saved);
        if self.input.in_chunks().is_some() {
            let x = x.first().map(tensor);
            return self.backward_in_chunks(x.filter(|_| needs_weight), weight, dy, needed);
        }
        let gradient = rows(dy);
        let extra = extra.to_vec();
        let x = match x {
            _ if !needs_weight => None,
            [codes, scales] => Some(SavedInput::Codes([codes.clone(), scales.clone()])),
            [x, ..] => Some(SavedInput::Floats(self.input.gathered(tensor(x)))),
            [] => unreachable!("the input was saved"),
        };
        let needed_gradients = NeededGradients {
            input: needs_x,
            weight: needs_weight,
        };
        let dy = self.arithmetic.gradient(gradient.clone(), needed_gradients);
        let input_gradient = needs_x.then(|| {
            let dx = self.arithmetic.input_gradient(&dy, weight, &extra);
            let width = dx.dims()[1];
            self.input.reduced(dx.reshape([batch, seq, width]))
        });
        let weight_gradient = match (self.gradient_hook(), x) {
            (_, None) => None,
            (Some(handle), Some(x)) => {
                let arithmetic = self.arithmetic.clone();
                let compute = move |slice| arithmetic.weight_gradient_into(x, dy, &extra, slice);
                handle
                    .sink
                    .accumulate_later(handle.index, Box::new(compute));
                None
            }
            (None, Some(x)) => Some(self.arithmetic.weight_gradient(x, dy, &extra)),
        };
        let dtype = (needed.get(2) == Some(&true)).then_some(gradient.dtype());
        let bias_gradient = bias_gradient(gradient.into_dispatch(), dtype, self.bias.as_ref());
        let input_gradient = input_gradient.map(PendingTensor::wait);

        let mut gradients = vec![
            input_gradient.map(Tensor::into_dispatch),
            weight_gradient.map(Tensor::into_dispatch),
        ];
        if needed.len() == 3 {
            gradients.push(bias_gradient);
        }
        gradients
    }
}

impl<A: LinearArithmetic> LinearFunction<A> {
    /// Returns the tensors that the backward needs: of the inputs, and of the results of the product.
    pub(super) fn saved(
        &self,
        inputs: Vec<DispatchTensor>,
        tensors: SavedTensors,
    ) -> Vec<DispatchTensor> {
        let mut inputs = inputs.into_iter();
        let x = inputs.next();
        let mut saved = match tensors.input_codes {
            Some(codes) => Vec::from(codes),
            None => Vec::from_iter(x.filter(|_| self.saves_input())),
        };
        saved.extend(inputs.next().filter(|_| self.fetched_weight().is_none()));
        saved.extend(tensors.extra);
        saved
    }

    /// Splits the [saved](Self::saved) tensors: into the input, the weight, and the additional ones.
    pub(super) fn split_saved<'a>(
        &'a self,
        saved: &'a [DispatchTensor],
    ) -> (
        &'a [DispatchTensor],
        (WeightSource<'a>, &'a [DispatchTensor]),
    ) {
        let of_input = match (self.saves_input(), self.arithmetic.saves_codes()) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        };
        let (x, rest) = saved.split_at(of_input);
        let rest = match self.fetched_weight() {
            Some(hooked) => (WeightSource::Hook(hooked, self.transposed), rest),
            None => (WeightSource::Graph(tensor(&rest[0])), &rest[1..]),
        };
        (x, rest)
    }

    /// The hooked weight that the backward fetches, where the graph does not hold the value.
    fn fetched_weight(&self) -> Option<&HookedWeight> {
        let hooked = self.hooked.as_ref();
        hooked.filter(|hooked| A::FETCHES_WEIGHT || hooked.takes_gradient || hooked.is_frozen)
    }

    /// Returns whether the weight has a gradient, given whether the graph needs a gradient. A frozen weight has no gradient,
    /// and the input is not saved for it.
    fn needs_weight(&self, in_graph: bool) -> bool {
        self.gradient_hook().is_some() || in_graph && self.saves_input()
    }

    /// The hook that takes the weight gradient, if the graph does not.
    pub(super) fn gradient_hook(&self) -> Option<&HookHandle> {
        self.hooked.as_ref().and_then(HookedWeight::taking)
    }
}

pub(super) fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

/// `[batch, seq, width]` to `[batch * seq, width]`.
pub(super) fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

//! The matmul of a linear layer as a differentiable operation that includes the communication.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;
use burn_megatron_kernels::column_sum::bias_gradient;
use burn_megatron_kernels::gradient::{Destination, FlatGradients};

use super::arithmetic::{NeededGradients, SavedInput, SavedTensors, WeightSource, rows};
use super::hook::HookHandle;
use super::input_layout::InputLayout;
use super::layer_arithmetic::LayerArithmetic;
use super::recompute::SavesInput;
use super::weight::HookedWeight;
use crate::collective::PendingTensor;

/// The differentiable matmul of a linear layer, in any arithmetic. It handles the communication, the saved tensors and
/// the destinations of the gradients.
///
/// Inputs: `x`, the weight, and the bias or the addend, if any.
#[derive(Clone, Debug)]
pub(super) struct LinearFunction {
    pub input: InputLayout,
    /// The hook that supplies the weight and receives its gradient. With `None`, the weight comes from the autodiff
    /// graph, and its gradient goes to the graph.
    pub hooked: Option<HookedWeight>,
    /// The destination of the gradient of the bias. With `None`, the gradient goes to the autodiff graph.
    pub bias: Option<Destination>,
    pub arithmetic: LayerArithmetic,
}

impl Function for LinearFunction {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        if let Some(y) = self.forward_in_chunks(&inputs) {
            return (y, self.saved(inputs, SavedTensors::default()));
        }
        let x = self.input.gathered(tensor(&inputs[0])).wait();
        let [batch, seq, _] = x.dims();
        let bias = inputs.get(2).map(tensor::<1>);
        let fetches = self.arithmetic.fetches_weight();
        let weight = match self.fetched_weight().filter(|_| fetches) {
            Some(hooked) => WeightSource::Hook(hooked),
            None => WeightSource::Graph(tensor(&inputs[1])),
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
        let [batch, seq, out] = dy.dims();
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
            let dx = dy.input(weight, &extra);
            let width = dx.dims()[1];
            self.input.reduced(dx.reshape([batch, seq, width]))
        });
        let weight_gradient = x.and_then(|x| {
            self.pass_weight_gradient(out, move |target| dy.weight(x, &extra, target))
        });
        let dtype = (needed.get(2) == Some(&true)).then_some(gradient.dtype());
        let bias_gradient = bias_gradient(gradient.into_dispatch(), dtype, self.bias.as_ref());
        let input_gradient = input_gradient.map(PendingTensor::wait);

        let mut gradients = vec![input_gradient.map(Tensor::into_dispatch), weight_gradient];
        gradients.extend((needed.len() == 3).then_some(bias_gradient));
        gradients
    }
}

impl SavesInput for LinearFunction {
    /// Only the weight gradient needs the input.
    fn saves_input(&self) -> bool {
        !self.hooked.as_ref().is_some_and(|hooked| hooked.is_frozen)
    }

    fn reads_input(&self, needed: &[bool]) -> bool {
        self.needs_weight(needed[0])
    }
}

impl LinearFunction {
    /// Returns the inputs and results of the matmul that the backward pass needs.
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

    /// Splits the [saved](Self::saved) tensors into the input, the weight, and the additional tensors.
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
            Some(hooked) => (WeightSource::Hook(hooked), rest),
            None => (WeightSource::Graph(tensor(&rest[0])), &rest[1..]),
        };
        (x, rest)
    }

    /// Returns the hooked weight that the backward pass fetches, or `None` if the autodiff graph holds the value.
    fn fetched_weight(&self) -> Option<&HookedWeight> {
        let fetches = self.arithmetic.fetches_weight();
        let hooked = self.hooked.as_ref();
        hooked.filter(|hooked| fetches || hooked.takes_gradient || hooked.is_frozen)
    }

    /// Returns whether the weight gradient is needed. `in_graph` is true if the graph needs it. A frozen weight has no
    /// gradient, and its input is not saved.
    fn needs_weight(&self, in_graph: bool) -> bool {
        self.gradient_hook().is_some() || in_graph && self.saves_input()
    }

    /// Returns the hook that takes the weight gradient, or `None` if the graph takes it.
    fn gradient_hook(&self) -> Option<&HookHandle> {
        self.hooked.as_ref().and_then(HookedWeight::taking)
    }

    /// Passes the weight gradient to the hook, which may compute it later. Without a hook, computes the gradient and
    /// returns it for the graph: `[in, out]`.
    pub(super) fn pass_weight_gradient(
        &self,
        out: usize,
        compute: impl FnOnce(Option<FlatGradients>) -> Tensor<1> + Send + 'static,
    ) -> Option<DispatchTensor> {
        if let Some(HookHandle { index, sink }) = self.gradient_hook() {
            sink.accumulate_later(*index, Box::new(compute));
            return None;
        }
        let flat = compute(None);
        let width = flat.dims()[0] / out;
        Some(flat.reshape([width, out]).into_dispatch())
    }
}

pub(super) fn tensor<const D: usize>(tensor: &DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor.clone())
}

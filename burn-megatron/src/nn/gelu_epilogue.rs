//! GELU (tanh approximation) of an MLP, fused into the epilogues of the surrounding matmuls.
//!
//! The first matmul returns the input and the output of GELU. Autodiff tracks only the input of GELU. The second matmul
//! reads the output of GELU. Its backward pass returns the gradient of the input of GELU, and the gradient of the bias
//! of the first linear layer. The activation itself therefore launches no kernels.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::gemm::gelu::{GeluOutput, gelu_gradient, linear_gelu};
use burn_megatron_kernels::gradient::{self, Destination, Parameter};
use burn_megatron_kernels::{Function, MultiFunction, apply, apply_multi, flat};

use super::arithmetic::{SavedTensors, rows};
use super::hook::Pass;
use super::linear::LinearOperands;
use super::linear_function::{LinearFunction, tensor};
use super::product_span::product_span;

/// The input and the output of GELU, both computed by one matmul. The next linear layer takes this value as its input.
#[derive(Clone, Debug)]
pub struct GeluInput {
    /// The input of GELU: `[batch, seq, in]`.
    input: Tensor<3>,
    /// The output of GELU `[batch, seq, in]`, which autodiff does not track.
    activated: Tensor<3>,
    /// The bias that was added to the input. The next matmul computes the gradient of this bias.
    bias: Option<Parameter>,
}

impl GeluInput {
    /// Computes the input of GELU, `x weight + bias`, and the output of GELU.
    pub(super) fn of(x: Tensor<3>, mut operands: LinearOperands<'_>) -> Self {
        let bias = operands.bias.take();
        let constant = |bias: &Parameter| bias.value.clone().inner().into();
        operands.bias = bias.as_ref().map(constant);
        let (product, others) = operands.into_function(&x, false);
        let inputs = [vec![x.into_dispatch()], others].concat();
        let [input, activated] = apply_multi(inputs, LinearToGelu(product));
        Self {
            input,
            activated: activated.inner(),
            bias,
        }
    }

    /// Replaces the destination to which the gradient of the bias is written.
    pub fn map_bias_destination(self, map: impl FnOnce(Destination) -> Destination) -> Self {
        let bias = self.bias.map(|Parameter { value, destination }| {
            let destination = destination.map(map);
            Parameter { value, destination }
        });
        Self { bias, ..self }
    }

    /// Returns the matmul `gelu(input) weight`.
    pub(super) fn product(self, operands: LinearOperands<'_>) -> Tensor<3> {
        let (product, others) = operands.into_function(&self.input, false);
        let inputs = [self.input, self.activated].map(Tensor::into_dispatch);
        let mut inputs = [inputs.into(), others].concat();
        let bias = self.bias.map(|Parameter { value, destination }| {
            inputs.push(value.into_dispatch());
            destination
        });
        apply(inputs, GeluToLinear { product, bias })
    }
}

/// The first matmul. Inputs: the inputs of the matmul. Outputs: the input of GELU, and the output of GELU, which passes
/// on no gradient.
#[derive(Debug)]
struct LinearToGelu(LinearFunction);

impl MultiFunction for LinearToGelu {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let x = self.0.input.gathered(tensor::<3>(&inputs[0])).wait();
        let [batch, seq, _] = x.dims();
        let weight = tensor::<2>(&inputs[1]);
        let width = weight.dims()[1];
        let x = rows(x);
        let span = product_span(&x, width);
        let GeluOutput { activated, input } =
            linear_gelu(x, weight, inputs.get(2).map(tensor::<1>));
        drop(span);
        let outputs = [input, activated];
        let outputs = outputs.map(|y| y.reshape([batch, seq, width]).into_dispatch());
        (
            outputs.into(),
            self.0.saved(inputs, SavedTensors::default()),
        )
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        match gradients.remove(0) {
            Some(gradient) => self.0.backward(saved, gradient, needed),
            None => vec![None; needed.len()],
        }
    }
}

/// The second matmul. Inputs: the input of GELU, the output of GELU as a constant, the weight, and the bias that was
/// added to the input, if any.
#[derive(Debug)]
struct GeluToLinear {
    product: LinearFunction,
    /// The destination of the gradient of the bias, if there is a bias. With `Some(None)` the autodiff graph receives
    /// the gradient.
    bias: Option<Option<Destination>>,
}

impl Function for GeluToLinear {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let input = inputs.remove(0);
        // The bias is an input only because its gradient is computed here.
        inputs.truncate(2);
        let (y, of_product) = self.product.forward(inputs);
        (y, [vec![input], of_product].concat())
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let input = tensor::<3>(&saved.remove(0));
        let destination = self.bias.as_ref().and_then(Option::as_ref);
        let needs_bias = destination.is_some() || needed.get(3) == Some(&true);
        let (mut of_input, mut of_bias) = (None, None);
        if needed[0] || needs_bias {
            let (weight, _) = self.product.split_saved(&saved).1;
            let weight = weight.value(Pass::Backward);
            let (sizes, gradient) = (input.dims(), rows(tensor(&gradient)));
            let _span = product_span(&gradient, weight.dims()[0]);
            let (dx, bias) = gelu_gradient(gradient, weight, rows(input), needs_bias);
            of_input = Some(dx.reshape(sizes).into_dispatch());
            of_bias = bias.and_then(|bias| passed_on(bias, destination));
        }
        let mut of_product = self.product.backward(saved, gradient, &[false, needed[2]]);
        let mut gradients = vec![of_input, None, of_product.remove(1)];
        if self.bias.is_some() {
            gradients.push(of_bias.map(Tensor::into_dispatch));
        }
        gradients
    }
}

/// Returns the gradient of a bias for the graph, or `None` if it is added to a buffer.
fn passed_on(bias: Tensor<1>, destination: Option<&Destination>) -> Option<Tensor<1>> {
    let Some(destination) = destination else {
        return Some(bias);
    };
    gradient::accumulate(&[destination], |target| {
        let sum = match target {
            Some(target) => {
                let place = target.places[0];
                flat::accumulate(target.flat, place.offset, bias, place.add)
            }
            None => bias,
        };
        (None, vec![sum])
    })
}

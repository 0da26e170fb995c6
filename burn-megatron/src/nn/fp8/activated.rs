//! The FP8 matmul of an activation. The activation is quantized while it is computed, and its unquantized values are
//! not written to memory.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;
use burn_megatron_kernels::activation::ActivationFunction;

use crate::nn::layer_arithmetic::LayerArithmetic;
use crate::nn::linear_function::LinearFunction;

/// An activation function and the matmul of a linear layer in one operation. Inputs: the input of the activation
/// function, the weight, and the bias of the activation function, if any. The result is bit-identical to the result of
/// separate operations.
#[derive(Debug)]
pub(in crate::nn) struct ActivatedLinear {
    pub activation: ActivationFunction,
    /// A matmul without a bias. It must not gather its input.
    pub product: LinearFunction,
}

impl Function for ActivatedLinear {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let bias = inputs.split_off(2);
        let of_activation = inputs[..1].iter().chain(&bias).cloned().collect();
        let bias = bias.into_iter().next().map(Tensor::from_dispatch);
        let LayerArithmetic::Fp8(arithmetic) = self.product.arithmetic.clone() else {
            unreachable!("a product in 8 bits")
        };
        let product = LinearFunction {
            arithmetic: LayerArithmetic::Fp8(arithmetic.activated(self.activation.kind(), bias)),
            ..self.product.clone()
        };
        let (y, of_product) = product.forward(inputs);
        (y, [of_activation, of_product].concat())
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let of_product = saved.split_off(needed.len() - 1);
        let mut of_activation = vec![needed[0]];
        of_activation.extend(needed.get(2));
        let needs_input = of_activation.contains(&true) || self.activation.has_destination();
        let needed = [needs_input, needed[1]];
        let mut gradients = self.product.backward(of_product, gradient, &needed);
        let weight = gradients.remove(1);
        let mut gradients = match gradients.remove(0) {
            Some(gradient) => self.activation.backward(saved, gradient, &of_activation),
            None => of_activation.iter().map(|_| None).collect(),
        };
        gradients.insert(1, weight);
        gradients
    }
}

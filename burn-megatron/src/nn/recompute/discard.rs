//! A matmul whose input is discarded after the forward pass and recomputed in the backward pass.
//!
//! The backward of a matmul reads its input. Some inputs are cheap to compute from tensors that are kept in any case.
//! For example, a norm is computed from the residual stream, and an activation from the output of the previous
//! projection. This operation and the matmul are then recorded as one operation (the output-discarding recomputation of
//! Megatron Core).

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::activation::ActivationFunction;
use burn_megatron_kernels::norm::StreamNormFunction;
use burn_megatron_kernels::{Function, MultiFunction, apply_multi};

/// An operation whose first output is only used as the input of a matmul.
pub(in crate::nn) trait ProductInput:
    std::fmt::Debug + Send + Sync + 'static
{
    /// Returns the outputs, and the tensors that [`again`](Self::again) and [`backward`](Self::backward) need.
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>);

    /// Computes the first output again, bit-identically.
    fn again(&self, saved: &[DispatchTensor]) -> DispatchTensor;

    /// Returns a gradient for each input, given the gradients of the outputs.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>>;

    /// Returns the number of tensors that the operation saves, given the number of inputs.
    fn saved_tensors(&self, inputs: usize) -> usize;

    /// Returns whether the operation passes gradients to destinations outside the graph.
    fn has_destinations(&self) -> bool;
}

impl ProductInput for ActivationFunction {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let (y, saved) = Function::forward(self, inputs);
        (vec![y], saved)
    }

    fn again(&self, saved: &[DispatchTensor]) -> DispatchTensor {
        Function::forward(self, saved.to_vec()).0
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        match gradients.remove(0) {
            Some(gradient) => Function::backward(self, saved, gradient, needed),
            None => vec![None; needed.len()],
        }
    }

    fn saved_tensors(&self, inputs: usize) -> usize {
        inputs
    }

    fn has_destinations(&self) -> bool {
        self.has_destination()
    }
}

/// The operation also saves the bias of the norm, from which the norm is recomputed.
impl ProductInput for StreamNormFunction<3> {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let bias = self.bias_input().map(|index| inputs[index].clone());
        let (outputs, mut saved) = MultiFunction::forward(self, inputs);
        saved.extend(bias);
        (outputs, saved)
    }

    fn again(&self, saved: &[DispatchTensor]) -> DispatchTensor {
        self.norm_again(saved, saved.get(3))
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        if gradients.iter().all(Option::is_none) {
            return vec![None; needed.len()];
        }
        saved.truncate(3);
        MultiFunction::backward(self, saved, gradients, needed)
    }

    fn saved_tensors(&self, _inputs: usize) -> usize {
        3 + usize::from(self.bias_input().is_some())
    }

    fn has_destinations(&self) -> bool {
        self.has_buffer()
    }
}

/// A matmul whose first saved tensor is its first input.
pub(in crate::nn) trait SavesInput: Function {
    /// Returns whether the matmul saves its input. An input without rows may be omitted.
    fn saves_input(&self) -> bool {
        true
    }

    /// Returns whether the backward pass reads the input. `needed` contains a flag for each of the other inputs, which
    /// is true if the gradient of this input is needed.
    fn reads_input(&self, needed: &[bool]) -> bool;
}

/// An operation whose first output is replaced by the matmul of this output.
#[derive(Debug)]
struct DiscardingProduct<F, P> {
    input: F,
    /// The number of inputs of `input`. They are followed by the inputs of the matmul, without its first input.
    inputs: usize,
    product: P,
}

/// Returns the outputs of `input` for `inputs`. The first output is replaced by its matmul with `others`. The first
/// output itself is not kept, and the backward pass recomputes it.
pub(in crate::nn) fn apply_discarding<const O: usize, const K: usize>(
    input: impl ProductInput,
    inputs: Vec<DispatchTensor>,
    product: impl SavesInput,
    others: Vec<DispatchTensor>,
) -> [Tensor<O>; K] {
    let function = DiscardingProduct {
        inputs: inputs.len(),
        input,
        product,
    };
    apply_multi([inputs, others].concat(), function)
}

impl<F: ProductInput, P: SavesInput> MultiFunction for DiscardingProduct<F, P> {
    fn forward(
        &self,
        mut inputs: Vec<DispatchTensor>,
    ) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let others = inputs.split_off(self.inputs);
        let (mut outputs, mut saved) = self.input.forward(inputs);
        let of_product = [vec![outputs[0].clone()], others].concat();
        let (y, of_product) = self.product.forward(of_product);
        outputs[0] = y;
        let discarded = usize::from(self.product.saves_input());
        saved.extend(of_product.into_iter().skip(discarded));
        (outputs, saved)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (of_input, of_product) = needed.split_at(self.inputs);
        let mut saved_by_product = saved.split_off(self.input.saved_tensors(self.inputs));
        let others = match gradients[0].take() {
            Some(gradient) => {
                if self.product.saves_input() {
                    let x = if self.product.reads_input(of_product) {
                        self.input.again(&saved)
                    } else {
                        saved[0].clone()
                    };
                    saved_by_product.insert(0, x);
                }
                let needs_input = of_input.contains(&true) || self.input.has_destinations();
                let needed = [&[needs_input], of_product].concat();
                let mut found = self.product.backward(saved_by_product, gradient, &needed);
                gradients[0] = found.remove(0);
                found
            }
            None => vec![None; of_product.len()],
        };
        [self.input.backward(saved, gradients, of_input), others].concat()
    }
}

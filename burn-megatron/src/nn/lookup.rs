//! Rows of a weight by their numbers, with a gradient that is added up in f32.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor};
use burn_megatron_kernels::{Function, apply};

use super::door::{self, Door, Exit, passing_value};

/// The rows `numbers` of `[rows, width]`: `[numbers, width]`.
///
/// A row that is looked up often adds up as many gradients; in 16 bits the sum would stand still as
/// soon as it is some hundred times as large as each of them. Behind a [`Door`] it is made in f32.
pub(super) fn lookup(param: &Param<Tensor<2>>, numbers: Tensor<1, Int>) -> Tensor<2> {
    let door = param.reparameterization::<Door>();
    let (Some(door), Some(anchor)) = (door, door::anchor()) else {
        return passing_value(param).select(0, numbers);
    };
    let (exit, base) = (door.exit().clone(), param.base());
    exit.expect();
    let rows = base.dims()[0];
    let weight = exit.value(base).0;
    let lookup = Lookup {
        exit,
        numbers,
        rows,
    };
    apply(vec![weight.into_dispatch(), anchor], lookup)
}

#[derive(Debug)]
struct Lookup {
    exit: Exit,
    numbers: Tensor<1, Int>,
    rows: usize,
}

impl Function for Lookup {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let weight = Tensor::<2>::from_dispatch(inputs.swap_remove(0));
        let numbers = plain(&self.numbers, &weight);
        (weight.select(0, numbers).into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let wide = match gradient.dtype() {
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let gradient = gradient.cast(wide);
        let numbers = plain(&self.numbers, &gradient);
        let [_, width] = gradient.dims();
        let zeros = Tensor::zeros([self.rows, width], (&gradient.device(), gradient.dtype()));
        let sum: Tensor<2> = zeros.select_assign(0, numbers, gradient, IndexingUpdateOp::Add);
        self.exit
            .sink
            .accumulate(self.exit.index, sum.into_dispatch());
        vec![None, None]
    }
}

/// The numbers on the device of a tensor outside of autodiff.
fn plain(numbers: &Tensor<1, Int>, beside: &Tensor<2>) -> Tensor<1, Int> {
    match numbers.is_autodiff() && !beside.is_autodiff() {
        true => numbers.clone().inner(),
        false => numbers.clone(),
    }
}

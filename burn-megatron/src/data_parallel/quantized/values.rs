//! Weights with block scales: their values are gathered, and quantised where they arrive.

use burn::tensor::{FloatDType, Tensor};

use super::{Coming, Weights};
use crate::collective::start_all_gather;
use crate::data_parallel::layout::Placed;
use crate::data_parallel::memory::ZeroStage;
use crate::data_parallel::plan::Plan;
use crate::data_parallel::usage::Category;
use crate::nn::fp8::QuantizedWeight;

/// Starts gathering the values of a bucket in the type of the model, from the part of the master that
/// this rank steps.
pub(in crate::data_parallel) fn start(number: usize, master: &Tensor<1>, plan: &Plan) -> Weights {
    let dtype = plan.gathered(number);
    let part = match master.dtype() == dtype {
        true => plan.copy(master.clone()),
        false => master.clone().cast(FloatDType::from(dtype)),
    };
    // They are where the gradients were: see there in which category these count.
    let category = match plan.stage() >= ZeroStage::Gradients {
        true => Category::Buffers,
        false => Category::Gradients,
    };
    let held = plan
        .usage
        .hold(category, plan.elements(number) * dtype.size());
    let pending = Box::new(start_all_gather(part, 0, &plan.axes.shard));
    Weights::Values(Coming { pending, held })
}

/// Both copies of each weight of a bucket, from its values.
pub(super) fn weights(number: usize, values: &Tensor<1>, plan: &Plan) -> Vec<QuantizedWeight> {
    let weight = |placed: &Placed| {
        let weight = values.clone().slice([placed.range.clone()]);
        let weight = weight.reshape(plan.matrix(placed.index));
        plan.quantizer(placed.index).quantize(weight)
    };
    let parameters = plan.layout.bucket(number).parameters.iter();
    parameters.map(weight).collect()
}

/// Lets the values of a bucket go. Where they have the type of the gradients their memory is the next
/// gradients'; otherwise it is freed, as a pool would keep it beside that of the gradients.
pub(super) fn discard(number: usize, values: Tensor<1>, plan: &Plan) {
    let (_, main) = plan.types(number);
    if values.dtype() == main {
        plan.recycle(values);
    }
}

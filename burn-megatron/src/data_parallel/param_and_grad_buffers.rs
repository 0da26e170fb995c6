//! The parameter and gradient buckets of one rank, as the sink of the parameters' hooks.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::gradient_buckets::GradientBuckets;
use super::parameter_buckets::ParameterBuckets;
use super::sharding_plan::ShardingPlan;
use crate::nn::fp8::QuantizedWeight;
use crate::nn::hook::{
    Deferred, DeferringSink, GradientSink, ParameterValue, Pass, WeightGradientFn,
};

pub(super) struct ParamAndGradBuffers {
    pub plan: Arc<ShardingPlan>,
    pub parameters: ParameterBuckets,
    pub gradients: GradientBuckets,
}

impl ParamAndGradBuffers {
    pub fn new(plan: ShardingPlan) -> Self {
        let plan = Arc::new(plan);
        Self {
            parameters: ParameterBuckets::new(plan.clone()),
            gradients: GradientBuckets::new(plan.clone()),
            plan,
        }
    }

    /// Quantises the FP8 weights from the masters, and waits for all gathers, unless they overlap with the
    /// next forward. Collective: call on all ranks of the stage.
    pub fn finish_gathers(&self) {
        self.parameters.quantize();
        if !self.plan.config.overlap_param_gather {
            self.parameters.wait();
        }
    }

    /// Called when a forward begins; `stage` is the pipeline stage, if there are stages.
    pub fn begin_forward(&self, stage: Option<usize>) {
        self.parameters.begin_forward();
        self.gradients.begin_forward(stage);
    }
}

impl std::fmt::Debug for ParamAndGradBuffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (parameters, buckets) = (self.plan.parameters.len(), self.plan.buckets());
        write!(f, "{parameters} parameters in {buckets} buckets")
    }
}

impl GradientSink for ParamAndGradBuffers {
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        Some(self.parameters.value(index, pass))
    }

    fn quantized(&self, index: usize, _pass: Pass) -> Option<Arc<QuantizedWeight>> {
        self.parameters.quantized(index)
    }

    fn expect(&self, index: usize) {
        self.gradients.expect(index);
    }

    fn accumulate(&self, index: usize, gradient: DispatchTensor) {
        self.parameters.quantize_gathered();
        let dims = self.plan.parameters[index].shape.len();
        self.gradients.accumulate(index, flatten(gradient, dims));
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.parameters.quantize_gathered();
        self.gradients.accumulate_later(index, gradient);
    }
}

impl DeferringSink for ParamAndGradBuffers {
    fn set_deferring(&self, deferring: bool) {
        self.gradients.set_deferring(deferring);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        self.gradients.take_deferred()
    }

    fn begin_stage(&self, stage: usize) {
        self.begin_forward(Some(stage));
    }

    fn close_stage(&self, stage: usize) {
        self.gradients.end_forwards(Some(stage));
    }
}

/// Flattens a tensor. `dims` is its number of dims, which a `DispatchTensor` does not carry in its type.
fn flatten(tensor: DispatchTensor, dims: usize) -> Tensor<1> {
    fn of<const D: usize>(tensor: DispatchTensor) -> Tensor<1> {
        let tensor = Tensor::<D>::from_dispatch(tensor);
        let len = tensor.shape().num_elements();
        tensor.reshape([len])
    }
    match dims {
        1 => of::<1>(tensor),
        2 => of::<2>(tensor),
        3 => of::<3>(tensor),
        4 => of::<4>(tensor),
        5 => of::<5>(tensor),
        6 => of::<6>(tensor),
        7 => of::<7>(tensor),
        8 => of::<8>(tensor),
        dims => panic!("a parameter has {dims} dims, expected 1 to 8"),
    }
}

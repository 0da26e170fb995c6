//! What a rank's doors open to: the parameters come from here, and the gradients go here.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::buckets::Buckets;
use super::parameters::Parameters;
use super::plan::Plan;
use crate::nn::door::{Deferred, DeferringSink, GradientSink, LaterGradient, Pass, Value};
use crate::nn::fp8::QuantizedWeight;

pub(super) struct Store {
    pub plan: Arc<Plan>,
    pub parameters: Parameters,
    pub buckets: Buckets,
}

impl Store {
    pub fn new(plan: Plan) -> Self {
        let plan = Arc::new(plan);
        Self {
            parameters: Parameters::new(plan.clone()),
            buckets: Buckets::new(plan.clone()),
            plan,
        }
    }

    /// Makes the weights that are kept in 8 bits anew, and waits for all that is being gathered, unless
    /// gathers overlap with the next forward. Every rank of the stage must come.
    pub fn finish_gathers(&self) {
        self.parameters.quantize();
        if !self.plan.config.overlap_param_gather {
            self.parameters.wait();
        }
    }

    /// A forward begins, of a stage where there are stages.
    pub fn begin(&self, stage: Option<usize>) {
        self.parameters.begin();
        self.buckets.begin(stage);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (parameters, buckets) = (self.plan.parameters.len(), self.plan.buckets());
        write!(f, "{parameters} parameters in {buckets} buckets")
    }
}

impl GradientSink for Store {
    fn value(&self, index: usize, pass: Pass) -> Option<Value> {
        Some(self.parameters.value(index, pass))
    }

    fn quantized(&self, index: usize, _pass: Pass) -> Option<Arc<QuantizedWeight>> {
        self.parameters.quantized(index)
    }

    fn expect(&self, index: usize) {
        self.buckets.expect(index);
    }

    fn accumulate(&self, index: usize, gradient: DispatchTensor) {
        self.parameters.settle();
        let dims = self.plan.parameters[index].shape.len();
        self.buckets.accumulate(index, flatten(gradient, dims));
    }

    fn accumulate_later(&self, index: usize, gradient: LaterGradient) {
        self.parameters.settle();
        self.buckets.accumulate_later(index, gradient);
    }
}

impl DeferringSink for Store {
    fn set_deferring(&self, deferring: bool) {
        self.buckets.set_deferring(deferring);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        self.buckets.take_deferred()
    }

    fn begin_stage(&self, stage: usize) {
        self.begin(Some(stage));
    }

    fn close_stage(&self, stage: usize) {
        self.buckets.close(Some(stage));
    }
}

/// `dims` is the number of dims of the tensor, which a `DispatchTensor` does not carry in its type.
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
        dims => panic!("Burn has no parameters of {dims} dims"),
    }
}

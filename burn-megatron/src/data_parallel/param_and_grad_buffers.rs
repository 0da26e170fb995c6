//! The parameter and gradient buckets of one rank. They are the gradient sink of the parameters' hooks.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;
use burn_megatron_kernels::gradient::{ComputeGradients, FlatGradients};
use parking_lot::{Mutex, MutexGuard};

use super::config::ParameterGather;
use super::freed_memory::FreedMemory;
use super::frozen::FrozenParameters;
use super::gradient_buckets::GradientBuckets;
use super::gradient_check::GradientCheck;
use super::memory_usage::TrackedTensor;
use super::own_backward::OwnBackward;
use super::parameter_buckets::ParameterBuckets;
use super::sharding_plan::ShardingPlan;
use crate::nn::fp8::QuantizedWeight;
use crate::nn::hook::{
    Deferred, DeferringSink, GradientSink, ParameterValue, Pass, WeightGradientFn,
};

/// The buckets of a rank, behind locks. The closures of the backward graph hold this sink and use the buckets.
pub(super) struct ParamAndGradBuffers {
    pub plan: Arc<ShardingPlan>,
    /// The parameters without gradients, if there are any.
    pub frozen: Option<Arc<FrozenParameters>>,
    parameters: Mutex<ParameterBuckets>,
    gradients: Mutex<GradientBuckets>,
    /// Deferred weight gradients; `None` while gradients are computed immediately.
    deferred: Mutex<Option<Vec<Deferred>>>,
    /// The state of a function that calls the backward itself. It is set while such a function runs.
    pub own_backward: OwnBackward,
    pub freed_memory: FreedMemory,
}

impl ParamAndGradBuffers {
    pub fn new(plan: ShardingPlan, frozen: Option<Arc<FrozenParameters>>) -> Self {
        let plan = Arc::new(plan);
        let check = GradientCheck::new(&plan.layout, &plan.config, &plan.device);
        Self {
            parameters: Mutex::new(ParameterBuckets::new(&plan)),
            gradients: Mutex::new(GradientBuckets::new(&plan, check.map(Arc::new))),
            deferred: Mutex::new(None),
            own_backward: OwnBackward::default(),
            freed_memory: FreedMemory::new(!plan.config.static_buffers),
            frozen,
            plan,
        }
    }

    pub fn parameters(&self) -> MutexGuard<'_, ParameterBuckets> {
        self.parameters.lock()
    }

    pub fn gradients(&self) -> MutexGuard<'_, GradientBuckets> {
        self.gradients.lock()
    }

    /// Returns this rank's shard of a bucket's master weights. The shard is on the host if the bucket is offloaded.
    pub fn master_shard(&self, number: usize) -> Tensor<1> {
        self.parameters().master_shard(number)
    }

    /// Returns this rank's shard of a bucket's master weights, always on the device.
    pub fn master_on_device(&self, number: usize) -> Tensor<1> {
        self.master_shard(number).to_device(&self.plan.device)
    }

    /// Quantizes the FP8 weights from the master weights, and waits for the all-gathers that do not overlap with the
    /// next forward. Collective: call on all ranks of the stage.
    pub fn finish_gathers(&self) {
        let mut parameters = self.parameters();
        parameters.quantize();
        if self.plan.config.gathers() != ParameterGather::DuringForward {
            parameters.wait();
        }
    }

    /// Begins a forward. `stage` is the pipeline stage, if there are stages.
    pub fn begin_forward(&self, stage: Option<usize>) {
        self.parameters().prefetch.begin_forward();
        if let Some(frozen) = &self.frozen {
            frozen.buckets().prefetch.begin_forward();
        }
        self.gradients().tracker.begin_forward(stage);
        self.freed_memory.before_forward(&self.plan.device);
    }

    /// Frees gathered values whose memory the gradients need, and returns the factor of the gradients. Call it
    /// before a gradient is accumulated.
    fn begin_gradient(&self) -> f64 {
        if self.plan.config.fp8_param_gather {
            self.parameters().quantize_gathered();
        }
        let (weight, is_last) = self.own_backward.begin_gradient();
        if is_last {
            self.gradients().end_forwards(None);
        }
        weight
    }

    /// Passes the buffer of the bucket of these parameters to `compute`, which returns it after accumulating a
    /// gradient of each parameter.
    fn accumulate_with(
        &self,
        parameters: &[usize],
        compute: impl FnOnce(FlatGradients) -> Tensor<1>,
    ) {
        let taken = self.gradients().take_buffer(parameters);
        if let Some((target, allocation)) = taken {
            // The lock is not held while a gradient is computed.
            let tensor = compute(target);
            let buffer = TrackedTensor { tensor, allocation };
            self.gradients().put_buffer(parameters, buffer);
        }
    }

    /// Whether these parameters are in one bucket, and a gradient of each is pending.
    fn share_buffer(&self, parameters: &[usize]) -> bool {
        let gradients = self.gradients();
        let number = |index: &usize| self.plan.location(*index).0;
        let pending = |index: &usize| gradients.tracker.is_pending(*index);
        parameters.iter().all(pending)
            && parameters
                .windows(2)
                .all(|pair| number(&pair[0]) == number(&pair[1]))
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
        Some(self.parameters().value(index, pass))
    }

    fn quantized(&self, index: usize, _pass: Pass) -> Option<Arc<QuantizedWeight>> {
        self.parameters().quantized(index)
    }

    fn path(&self, index: usize) -> Option<String> {
        Some(self.plan.parameters[index].path.clone())
    }

    fn expect(&self, index: usize) {
        self.gradients().tracker.expect(index);
    }

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        let weight = self.begin_gradient();
        let gradient = if weight == 1.0 {
            gradient
        } else {
            let wide = gradient.cast(self.plan.parameters[index].main_dtype);
            wide.mul_scalar(weight)
        };
        self.accumulate_with(&[index], |FlatGradients { flat, places }| {
            flat::accumulate(flat, places[0].offset, gradient, places[0].add)
        });
    }

    fn accumulate_into(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        let weight = self.begin_gradient();
        if weight == 1.0 && self.share_buffer(parameters) {
            self.accumulate_with(parameters, |target| compute(Some(target)).swap_remove(0));
        } else {
            for (index, gradient) in parameters.iter().zip(compute(None)) {
                self.accumulate(*index, gradient);
            }
        }
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        let weight = self.begin_gradient();
        if let Some(deferred) = &mut *self.deferred.lock() {
            deferred.push((index, gradient));
            return;
        }
        if weight != 1.0 {
            self.accumulate(index, gradient(None));
            return;
        }
        self.accumulate_with(&[index], |target| gradient(Some(target)));
    }
}

impl DeferringSink for ParamAndGradBuffers {
    fn set_deferring(&self, deferring: bool) {
        *self.deferred.lock() = deferring.then(Vec::new);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        let mut deferred = self.deferred.lock();
        deferred.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn begin_stage(&self, stage: usize) {
        self.begin_forward(Some(stage));
    }

    fn close_stage(&self, stage: usize) {
        self.gradients().end_forwards(Some(stage));
    }
}

//! Any element-wise optimizer of Burn on this rank's shards of the parameter buckets.

use burn::module::Module;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::OptimizerError;
use super::group_segments::{self, GroupSegment};
use super::groups::ParameterGroup;
use crate::data_parallel::{DistributedDataParallel, Gradients, SteppedBucket};

/// One of Burn's optimizers over the parameters of a model.
///
/// It must update each element independently, as Adam, SGD and RMSProp do: shards begin and end anywhere in a
/// parameter. Its state is not counted in [`usage`](DistributedDataParallel::usage).
pub struct ElementWise<O: Optimizer> {
    buckets: Vec<Vec<SegmentOptimizer<O>>>,
}

/// A segment, with the optimizer for its weight decay.
struct SegmentOptimizer<O: Optimizer> {
    segment: GroupSegment,
    optimizer: O,
    state: Option<O::State<1>>,
}

impl<O: Optimizer> ElementWise<O> {
    /// `build` returns the optimizer for parameters whose weight decay is multiplied by its argument: 1 or 0,
    /// unless a group sets it. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for a group that is invalid, or matches no parameter of the model, and for state on the host.
    pub fn new<M: Module>(
        build: impl Fn(f64) -> O,
        groups: &[ParameterGroup],
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let fraction = ddp.config().offload.optimizer;
        if fraction > 0.0 {
            return Err(OptimizerError::Offload(fraction));
        }
        let optimizer = |segment: GroupSegment| SegmentOptimizer {
            optimizer: build(segment.decay),
            segment,
            state: None,
        };
        let buckets = group_segments::bucket_segments(groups, ddp)?
            .into_iter()
            .map(|segments| segments.into_iter().map(optimizer).collect())
            .collect();
        Ok(Self { buckets })
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let factor = gradients.factor();
        ddp.step_device_buckets(gradients, |bucket| {
            let mut master = bucket.master;
            for segment_optimizer in &mut self.buckets[bucket.number] {
                master = segment_optimizer.step(learning_rate, master, &bucket.gradient, factor);
            }
            SteppedBucket {
                master,
                model: None,
            }
        });
    }
}

impl ElementWise<AdamW> {
    /// Both moments of a bucket, written into `zeros`.
    pub(super) fn moments(&self, bucket: usize, zeros: [Tensor<1>; 2]) -> [Tensor<1>; 2] {
        let write = |[first, second]: [Tensor<1>; 2], optimizer: &SegmentOptimizer<AdamW>| {
            let Some(AdamWState { momentum }) = optimizer.state.clone() else {
                return [first, second];
            };
            let start = optimizer.segment.range.start;
            [
                flat::accumulate(first, start, momentum.moment_1, false),
                flat::accumulate(second, start, momentum.moment_2, false),
            ]
        };
        self.buckets[bucket].iter().fold(zeros, write)
    }

    /// Restores both moments of a bucket, as of `steps` steps.
    pub(super) fn restore(&mut self, bucket: usize, moments: [Tensor<1>; 2], steps: u64) {
        for segment_optimizer in &mut self.buckets[bucket] {
            let part = |of: &Tensor<1>| of.clone().slice([segment_optimizer.segment.range.clone()]);
            let [first, second] = [part(&moments[0]), part(&moments[1])];
            let momentum = AdaptiveMomentumState::new(steps as usize, first, second);
            // Before its first step Burn's AdamW has no state.
            segment_optimizer.state = (steps > 0).then(|| AdamWState::new(momentum));
        }
    }
}

impl<O: Optimizer> SegmentOptimizer<O> {
    /// Steps this segment; returns the shard with the new values.
    fn step(
        &mut self,
        learning_rate: f64,
        shard: Tensor<1>,
        sum: &Tensor<1>,
        factor: f64,
    ) -> Tensor<1> {
        let range = self.segment.range.clone();
        let gradient: Tensor<1> = sum.clone().slice([range.clone()]).mul_scalar(factor);
        let value = shard.clone().slice([range.clone()]);
        let state = self.state.take();
        let rate = learning_rate * self.segment.rate;
        let (value, state) = self.optimizer.step(rate, value, gradient, state);
        self.state = state;
        flat::accumulate(shard, range.start, value, false)
    }
}

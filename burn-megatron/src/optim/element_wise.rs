//! Applies any element-wise optimizer of Burn to this rank's shards of the parameter buckets.

use burn::module::Module;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer, RecordState, StateSink};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::flat;

use super::error::OptimizerError;
use super::group_segments::{self, GroupSegment};
use super::groups::ParameterGroup;
use super::rule_states::{ResumableOptimizer, StateTensors};
use super::state::{OptimizerState, ShardOptimizer, StateKind};
use crate::data_parallel::{
    BucketShard, BucketStep, DistributedDataParallel, Gradients, MemoryCategory, SteppedBucket,
    TrackedAllocation,
};

/// An element-wise optimizer of Burn for the parameters of a model.
///
/// The optimizer must update each element independently, as Adam, SGD and RMSProp do, because a shard can begin and end
/// anywhere in a parameter. The memory of the optimizer state is included in [`usage`](DistributedDataParallel::usage)
/// even before the first step. The number of bytes is computed from the tensors in Burn's record of the state.
pub struct ElementWise<O: Optimizer> {
    buckets: Vec<Vec<SegmentOptimizer<O>>>,
    /// The names of the tensors in the record of the state.
    names: Vec<String>,
    _allocation: TrackedAllocation,
}

/// A segment, with the optimizer for its weight decay.
struct SegmentOptimizer<O: Optimizer> {
    segment: GroupSegment,
    optimizer: O,
    state: Option<O::State<1>>,
}

impl<O: Optimizer> ElementWise<O> {
    /// Builds the optimizer. `build` is called with a multiplier of the weight decay, and returns Burn's optimizer for
    /// the parameters with this multiplier. The multiplier is 1 or 0, unless a parameter group sets another multiplier.
    /// Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid group, a group that matches no parameter of the model, or optimizer state in
    /// host memory.
    pub fn new<M: Module>(
        build: impl Fn(f64) -> O,
        groups: &[ParameterGroup],
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let segments = group_segments::bucket_segments(groups, ddp)?;
        Self::of_segments(build, segments, ddp)
    }

    /// Builds the optimizer for selected segments of each bucket.
    pub(super) fn of_segments<M: Module>(
        build: impl Fn(f64) -> O,
        segments: Vec<Vec<GroupSegment>>,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let fraction = ddp.config().offload.optimizer;
        if fraction > 0.0 {
            return Err(OptimizerError::Offload(fraction));
        }
        let names = state_names(&build(1.0));
        let sizes = segments.iter().zip(ddp.shards());
        let bytes = sizes.map(|(segments, shard)| {
            let elements: usize = segments.iter().map(|segment| segment.range.len()).sum();
            elements * names.len() * shard.dtype.size()
        });
        let allocation = ddp
            .usage()
            .track(MemoryCategory::Optimizer, bytes.sum::<usize>());
        let optimizer = |segment: GroupSegment| SegmentOptimizer {
            optimizer: build(segment.decay),
            segment,
            state: None,
        };
        let buckets = segments
            .into_iter()
            .map(|segments| segments.into_iter().map(optimizer).collect())
            .collect();
        Ok(Self {
            buckets,
            names,
            _allocation: allocation,
        })
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
            self.step_bucket(learning_rate, factor, bucket)
        });
    }

    /// Runs the optimizer step of the segments of a bucket. The gradient is multiplied by `factor`.
    pub(super) fn step_bucket(
        &mut self,
        learning_rate: f64,
        factor: f64,
        bucket: BucketStep,
    ) -> SteppedBucket {
        let mut master = bucket.master;
        for segment_optimizer in &mut self.buckets[bucket.number] {
            master = segment_optimizer.step(learning_rate, master, &bucket.gradient, factor);
        }
        SteppedBucket {
            master,
            model: None,
        }
    }
}

/// Returns the names of the tensors in the record of an optimizer's state, from a step of one element on the
/// host.
fn state_names<O: Optimizer>(optimizer: &O) -> Vec<String> {
    let one = || Tensor::<1>::ones([1], (&Device::flex(), DType::F32));
    let (_, state) = optimizer.step(0.0, one(), one(), None);
    let mut record = StateSink::default();
    if let Some(state) = state {
        state.state_flatten("", &mut record);
    }
    record.tensors.into_iter().map(|(name, _)| name).collect()
}

impl<O: ResumableOptimizer> ElementWise<O> {
    /// Returns the names of the tensors that are saved.
    fn saved(&self) -> impl Iterator<Item = &String> {
        let is_saved = |name: &&String| !O::UNSAVED.contains(&&name[..]);
        self.names.iter().filter(is_saved)
    }
}

impl<O: ResumableOptimizer> OptimizerState for ElementWise<O> {
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind> {
        let kind = |name: &String| {
            let prefix = format!("{}.{name}/", O::NAME);
            StateKind::of_all(prefix, masters.to_vec())
        };
        self.saved().map(kind).collect()
    }

    /// Returns tensors on the host, because Burn reads the tensors of a record there.
    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>> {
        let options = (&Device::flex(), shard.dtype);
        let zeros = |_| Tensor::<1>::zeros([shard.range.len()], options);
        let mut tensors: Vec<_> = self.saved().map(zeros).collect();
        for SegmentOptimizer { segment, state, .. } in &self.buckets[bucket] {
            let mut record = StateSink::default();
            if let Some(state) = state {
                state.state_flatten("", &mut record);
            }
            for (name, data) in record.tensors {
                if let Some(kind) = self.saved().position(|saved| *saved == name) {
                    let values = Tensor::from_data(data, options);
                    let start = segment.range.start;
                    tensors[kind] = flat::accumulate(tensors[kind].clone(), start, values, false);
                }
            }
        }
        tensors
    }

    fn restore(&mut self, bucket: usize, shard: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64) {
        let names: Vec<_> = self.saved().cloned().collect();
        for segment_optimizer in &mut self.buckets[bucket] {
            let range = &segment_optimizer.segment.range;
            let part = |of: &Tensor<1>| of.clone().slice([range.clone()]).to_device(&shard.device);
            let parts: StateTensors = names
                .iter()
                .cloned()
                .zip(tensors.iter().map(part))
                .collect();
            // There is no state before the first step.
            segment_optimizer.state = match steps {
                0 => None,
                _ => O::restored(steps as usize, parts),
            };
        }
    }
}

impl<O: ResumableOptimizer> ShardOptimizer for ElementWise<O>
where
    O::State<1>: Send,
{
    fn step_bucket(&mut self, rate: f64, factor: f64, bucket: BucketStep) -> SteppedBucket {
        self.step_bucket(rate, factor, bucket)
    }
}

impl ElementWise<AdamW> {
    /// Writes the first and the second moment of a bucket into `zeros`, and returns them.
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

    /// Restores the first and the second moment of a bucket. `steps` is the number of steps after which they were
    /// saved.
    pub(super) fn restore_moments(&mut self, bucket: usize, moments: &[Tensor<1>; 2], steps: u64) {
        for segment_optimizer in &mut self.buckets[bucket] {
            let part = |of: &Tensor<1>| of.clone().slice([segment_optimizer.segment.range.clone()]);
            let [first, second] = [part(&moments[0]), part(&moments[1])];
            let momentum = AdaptiveMomentumState::new(steps as usize, first, second);
            // Burn's AdamW has no state before its first step.
            segment_optimizer.state = (steps > 0).then(|| AdamWState::new(momentum));
        }
    }
}

impl<O: Optimizer> SegmentOptimizer<O> {
    /// Updates this segment and returns the shard with the new values.
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

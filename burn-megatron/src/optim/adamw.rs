//! AdamW on this rank's shards of the parameter buckets.

use burn::module::Module;
use burn::optim::AdamWConfig as BurnAdamWConfig;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_megatron_kernels::adamw::{AdamWBuffers, AdamWStep, Blocks, DECAY_BLOCK, Decay, adamw};

use super::element_wise::ElementWise;
use super::group_segments::{self, GroupSegment};
use super::{AdamWConfig, OptimizerError};
use crate::choice::Operation;
use crate::data_parallel::{
    DistributedDataParallel, Gradients, MemoryCategory, Moments as MomentType, ShardingPlan,
    TrackedAllocation, TrackedTensor,
};

/// The epsilon for Burn's AdamW where the setting is 0: the root of the smallest normal f32, below the root of
/// every normal second moment. It makes the step 0 instead of NaN where no gradient has been received.
const MIN_EPSILON: f32 = 1.084_202_2e-19;

/// AdamW over the parameters of a model.
///
/// The fused kernel reads and writes each bucket once, and in the same pass divides the gradient by the
/// tokens, unscales and clips it, and writes the copy in the dtype of the model. Unfused, Burn's AdamW is used.
pub struct ParallelAdamW {
    implementation: AdamWImpl,
}

enum AdamWImpl {
    Fused(FusedAdamW),
    Burn(Box<ElementWise<burn::optim::AdamW>>),
}

struct FusedAdamW {
    config: AdamWConfig,
    /// By bucket.
    decays: Vec<Decay>,
    moments: Vec<BucketMoments>,
    steps: u64,
}

/// The moments of this rank's shard of a bucket.
struct BucketMoments {
    first: Tensor<1>,
    second: Tensor<1>,
    _allocations: [TrackedAllocation; 2],
}

impl ParallelAdamW {
    /// The optimizer for the parameters of a model. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid setting or group, a group that matches no parameter of the model, and
    /// moments in bf16 where the optimizer is not fused.
    pub fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        config.check()?;
        if ddp.kernels().is_fused(Operation::Optimizer) {
            let implementation = AdamWImpl::Fused(FusedAdamW::new(config, ddp)?);
            return Ok(Self { implementation });
        }
        if ddp.config().moments == MomentType::Bf16 {
            return Err(OptimizerError::Moments);
        }
        let settings = config.clone();
        let epsilon = match settings.epsilon as f32 {
            0.0 => MIN_EPSILON,
            epsilon => epsilon,
        };
        let build = move |decay: f64| {
            BurnAdamWConfig::new()
                .with_beta_1(settings.beta1 as f32)
                .with_beta_2(settings.beta2 as f32)
                .with_epsilon(epsilon)
                .with_weight_decay((settings.weight_decay * decay) as f32)
                .build()
        };
        let burn = ElementWise::new(build, &config.groups, ddp)?;
        Ok(Self {
            implementation: AdamWImpl::Burn(Box::new(burn)),
        })
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        match &mut self.implementation {
            AdamWImpl::Fused(fused) => fused.step(learning_rate, ddp, gradients),
            AdamWImpl::Burn(burn) => burn.step(learning_rate, ddp, gradients),
        }
    }
}

impl ParallelAdamW {
    /// Both moments of this rank's shard of a bucket; zeros before the first step.
    pub(crate) fn moments(&self, bucket: usize, plan: &ShardingPlan) -> [Tensor<1>; 2] {
        match &self.implementation {
            AdamWImpl::Fused(fused) => {
                let BucketMoments { first, second, .. } = &fused.moments[bucket];
                [first.clone(), second.clone()]
            }
            AdamWImpl::Burn(burn) => {
                let options = (&plan.device, plan.model_and_main_dtypes(bucket).1);
                let zeros = || Tensor::zeros([plan.shard_range(bucket).len()], options);
                burn.moments(bucket, [zeros(), zeros()])
            }
        }
    }

    /// The dtype of the moments of a bucket.
    pub(crate) fn moment_dtype(&self, bucket: usize, plan: &ShardingPlan) -> DType {
        match &self.implementation {
            AdamWImpl::Fused(fused) => fused.moments[bucket].first.dtype(),
            AdamWImpl::Burn(_) => plan.model_and_main_dtypes(bucket).1,
        }
    }

    /// Restores both moments of this rank's shard of a bucket, in the dtypes that
    /// [`moments`](Self::moments) returns, as of `steps` steps.
    pub(crate) fn restore(&mut self, bucket: usize, moments: [Tensor<1>; 2], steps: u64) {
        match &mut self.implementation {
            AdamWImpl::Fused(fused) => {
                fused.steps = steps;
                let state = &mut fused.moments[bucket];
                [state.first, state.second] = moments;
            }
            AdamWImpl::Burn(burn) => burn.restore(bucket, moments, steps),
        }
    }
}

impl FusedAdamW {
    fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let plan = ddp.plan();
        let segments = group_segments::bucket_segments(&config.groups, ddp)?;
        let decays = segments
            .iter()
            .enumerate()
            .map(|(bucket, segments)| decay_of(plan, bucket, segments));
        let moments = |bucket: usize| {
            let (_, main) = plan.model_and_main_dtypes(bucket);
            let dtype = match (plan.config.moments, main) {
                (MomentType::Bf16, DType::F32) => DType::BF16,
                _ => main,
            };
            let zeros =
                || Tensor::<1>::zeros([plan.shard_range(bucket).len()], (&plan.device, dtype));
            let (first, second) = (zeros(), zeros());
            let allocation = [&first, &second];
            BucketMoments {
                _allocations: allocation
                    .map(|of| plan.usage.track_tensor(MemoryCategory::Optimizer, of)),
                first,
                second,
            }
        };
        Ok(Self {
            config: config.clone(),
            decays: decays.collect(),
            moments: (0..plan.buckets()).map(moments).collect(),
            steps: 0,
        })
    }

    fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        self.steps += 1;
        let step = AdamWStep {
            rate: learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            weight_decay: self.config.weight_decay,
            step: self.steps,
            gradient_scale: gradients.factor(),
        };
        let sums: Vec<_> = gradients.into_sums().enumerate().collect();
        // The last bucket has the first layers, which the next forward needs first.
        for (bucket, sum) in sums.into_iter().rev() {
            let _span = tracing::trace_span!("update", bucket).entered();
            self.step_bucket(bucket, &step, ddp, sum);
        }
        ddp.finish_step();
    }

    fn step_bucket<M: Module>(
        &mut self,
        bucket: usize,
        step: &AdamWStep,
        ddp: &mut DistributedDataParallel<M>,
        sum: TrackedTensor,
    ) {
        let TrackedTensor { tensor, allocation } = ddp.take_master(bucket);
        let state = &mut self.moments[bucket];
        let nothing = || Tensor::empty([0], &tensor.device());
        let buffers = AdamWBuffers {
            first: std::mem::replace(&mut state.first, nothing()),
            second: std::mem::replace(&mut state.second, nothing()),
            master: tensor,
        };
        let (model, main) = ddp.plan().model_and_main_dtypes(bucket);
        let model = (model != main).then(|| FloatDType::from(model));
        let gradient = sum.tensor.clone();
        let (buffers, model) = adamw(buffers, gradient, &self.decays[bucket], step, model);
        state.first = buffers.first;
        state.second = buffers.second;
        let master = TrackedTensor::from_parts(buffers.master, allocation);
        ddp.plan().recycle(sum.tensor);
        ddp.put_master(bucket, master, model);
    }
}

/// The multipliers of decay and learning rate of a bucket, from its segments.
fn decay_of(plan: &ShardingPlan, bucket: usize, segments: &[GroupSegment]) -> Decay {
    let all = |predicate: fn(&GroupSegment) -> bool| segments.iter().all(predicate);
    if all(|segment| segment.rate == 1.0) && all(|segment| segment.decay == 1.0) {
        return Decay::All;
    }
    if all(|segment| segment.rate == 1.0) && all(|segment| segment.decay == 0.0) {
        return Decay::None;
    }
    let shard = plan.shard_range(bucket);
    let first = shard.start % DECAY_BLOCK;
    let mut decay = vec![0f32; (first + shard.len()).div_ceil(DECAY_BLOCK)];
    let mut rate = vec![1f32; decay.len()];
    for segment in segments {
        // Parameters start at block boundaries, so no block has elements of two parameters.
        let blocks = (first + segment.range.start) / DECAY_BLOCK
            ..(first + segment.range.end).div_ceil(DECAY_BLOCK);
        decay[blocks.clone()].fill(segment.decay as f32);
        rate[blocks].fill(segment.rate as f32);
    }
    let tensor =
        |factors: Vec<f32>| Tensor::<1>::from_data(&factors[..], (&plan.device, DType::F32));
    let has_rates = rate.iter().any(|rate| *rate != 1.0);
    Decay::Blocks(Blocks {
        decay: tensor(decay),
        rate: has_rates.then(|| tensor(rate)),
        first,
    })
}

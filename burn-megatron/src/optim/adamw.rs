//! AdamW for this rank's shards of the parameter buckets.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::adamw::{
    AdamWBuffers, AdamWStep, Blocks, DECAY_BLOCK, Decay, adamw, adamw_with_outcome,
};

use parking_lot::Mutex;

use super::element_wise::ElementWise;
use super::error::OptimizerError;
use super::group_segments::{self, GroupSegment};
use super::rules::{AdamWConfig, RuleConfig};
use super::state::{FIRST, OptimizerState, SECOND, StateKind};
use crate::data_parallel::{
    BucketShard, BucketStep, DistributedDataParallel, Gradients, MemoryCategory,
    Moments as MomentType, StepFn, SteppedBucket, TrackedAllocation,
};
use crate::kernel_selection::Operation;

/// The AdamW optimizer for the parameters of a model.
///
/// The fused kernel reads and writes each bucket once. In the same pass it divides the gradient by the number of
/// tokens, unscales and clips the gradient, and writes the parameters in the dtype of the model. The unfused
/// implementation is Burn's AdamW.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::ParallelModule;
/// use burn_megatron::prelude::*;
///
/// let model = ParallelModule::replicated(LinearConfig::new(4, 1).init(&Device::flex()));
/// let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single())?;
/// let config = AdamWConfig { weight_decay: 0.01, ..AdamWConfig::default() };
/// let mut optimizer = ParallelAdamW::new(&config, &ddp)?;
/// let device = Device::flex().autodiff();
/// let mut losses = vec![];
/// for _ in 0..2 {
///     let x = Tensor::<2>::ones([1, 4], &device);
///     let loss = ddp.forward(&device, |model| model.forward(x).sub_scalar(100.0).square().sum());
///     losses.push(loss.clone().into_scalar::<f32>());
///     ddp.backward_last(loss);
///     let gradients = ddp.reduce(1)?;
///     optimizer.step(1e-2, &mut ddp, gradients);
/// }
/// assert!(losses[1] < losses[0]);
/// # Ok::<(), AnyError>(())
/// ```
pub struct ParallelAdamW {
    implementation: AdamWImpl,
    moments: MomentType,
}

enum AdamWImpl {
    Fused(FusedAdamW),
    Burn(Box<ElementWise<burn::optim::AdamW>>),
}

struct FusedAdamW {
    config: AdamWConfig,
    /// Locked, because another thread steps the buckets on the host.
    buckets: Arc<[Mutex<FusedBucket>]>,
    steps: u64,
}

/// The moments of this rank's shard of a bucket, and its multipliers of weight decay and learning rate.
struct FusedBucket {
    decay: Decay,
    first: Tensor<1>,
    second: Tensor<1>,
    _allocations: [TrackedAllocation; 2],
}

impl ParallelAdamW {
    /// Builds the optimizer for the parameters of a model. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid setting or group, or if a group matches no parameter of the model. Without the
    /// fused kernel, bf16 moments and optimizer state in host memory are also errors.
    pub fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        config.check()?;
        let moments = ddp.config().moments;
        if ddp.kernels().is_fused(Operation::Optimizer) {
            let implementation = AdamWImpl::Fused(FusedAdamW::new(config, ddp)?);
            return Ok(Self {
                implementation,
                moments,
            });
        }
        if moments == MomentType::Bf16 {
            return Err(OptimizerError::Moments);
        }
        let burn = ElementWise::new(|decay| config.build(decay), &config.groups, ddp)?;
        Ok(Self {
            implementation: AdamWImpl::Burn(Box::new(burn)),
            moments,
        })
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if an optimizer step on the host fails or takes more than 300 s.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        match &mut self.implementation {
            AdamWImpl::Fused(fused) => {
                let step = AdamWStep {
                    gradient_scale: gradients.factor(),
                    ..Self::hyperparameters(&fused.config, learning_rate, fused.steps)
                };
                fused.steps += 1;
                ddp.step_buckets(gradients, None, &fused.step_fn(step));
            }
            AdamWImpl::Burn(burn) => burn.step(learning_rate, ddp, gradients),
        }
    }

    /// Whether the optimizer is fused, so that [`step_with_outcome`](Self::step_with_outcome) can be called.
    pub(crate) fn is_fused(&self) -> bool {
        matches!(self.implementation, AdamWImpl::Fused(_))
    }

    /// Returns the hyperparameters of the next step. `rate` is the learning rate, and `taken` is the number of steps
    /// taken so far.
    pub fn hyperparameters(config: &AdamWConfig, rate: f64, taken: u64) -> AdamWStep {
        AdamWStep {
            rate,
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            weight_decay: config.weight_decay,
            step: taken + 1,
            gradient_scale: 1.0,
        }
    }

    /// Updates the parameters if `outcome`, a tensor on the device, indicates that the step is taken. The outcome also
    /// contains the learning rate and the step number. Call [`record_taken`](Self::record_taken) when the host has read
    /// the outcome. Collective: call on all ranks.
    ///
    /// # Panics
    ///
    /// If the optimizer is not fused.
    pub(crate) fn step_with_outcome<M: Module>(
        &mut self,
        outcome: &Tensor<1>,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        let AdamWImpl::Fused(fused) = &self.implementation else {
            unreachable!("only the fused AdamW reads an outcome")
        };
        // The outcome contains the rate and the step number.
        let step = Self::hyperparameters(&fused.config, 0.0, 0);
        ddp.step_buckets(gradients, Some(outcome), &fused.step_fn(step));
    }

    /// Sets the number of taken steps. Call it after steps whose outcome was only on the device.
    pub(crate) fn record_taken(&mut self, taken: u64) {
        if let AdamWImpl::Fused(fused) = &mut self.implementation {
            fused.steps = taken;
        }
    }

    /// Returns the first and the second moment of this rank's shard of a bucket. Both are zero before the first step.
    pub fn moments(&self, bucket: usize, shard: &BucketShard) -> [Tensor<1>; 2] {
        match &self.implementation {
            AdamWImpl::Fused(fused) => {
                let FusedBucket { first, second, .. } = &*fused.buckets[bucket].lock();
                [first.clone(), second.clone()]
            }
            AdamWImpl::Burn(burn) => {
                let zeros = || Tensor::zeros([shard.range.len()], (&shard.device, shard.dtype));
                burn.moments(bucket, [zeros(), zeros()])
            }
        }
    }

    /// Restores the first and the second moment of this rank's shard of a bucket. `steps` is the number of steps after
    /// which the moments were saved. The dtypes must be equal to the dtypes that [`moments`](Self::moments) returns.
    pub fn restore_moments(&mut self, bucket: usize, moments: [Tensor<1>; 2], steps: u64) {
        match &mut self.implementation {
            AdamWImpl::Fused(fused) => {
                fused.steps = steps;
                let state = &mut *fused.buckets[bucket].lock();
                [state.first, state.second] = moments;
            }
            AdamWImpl::Burn(burn) => burn.restore_moments(bucket, &moments, steps),
        }
    }
}

impl OptimizerState for ParallelAdamW {
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind> {
        let dtype = |main: &DType| moment_dtype(self.moments, *main);
        let kind = |prefix| StateKind::of_all(prefix, masters.iter().map(dtype).collect());
        vec![kind(FIRST), kind(SECOND)]
    }

    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>> {
        self.moments(bucket, shard).into()
    }

    fn restore(&mut self, bucket: usize, _: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64) {
        match <[Tensor<1>; 2]>::try_from(tensors) {
            Ok(moments) => self.restore_moments(bucket, moments, steps),
            Err(tensors) => unreachable!("AdamW has two moments, not {}", tensors.len()),
        }
    }
}

impl FusedAdamW {
    fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let segments = group_segments::bucket_segments(&config.groups, ddp)?;
        let bucket = |number: usize| FusedBucket::new(number, &segments[number], ddp);
        let buckets = (0..segments.len()).map(|number| Mutex::new(bucket(number)));
        Ok(Self {
            config: config.clone(),
            buckets: buckets.collect(),
            steps: 0,
        })
    }

    fn step_fn(&self, step: AdamWStep) -> Arc<StepFn> {
        let buckets = self.buckets.clone();
        Arc::new(move |bucket, outcome| buckets[bucket.number].lock().step(&step, outcome, bucket))
    }
}

impl FusedBucket {
    fn new<M: Module>(
        number: usize,
        segments: &[GroupSegment],
        ddp: &DistributedDataParallel<M>,
    ) -> Self {
        let shard = &ddp.shards()[number];
        let dtype = moment_dtype(ddp.config().moments, shard.dtype);
        let zeros = || Tensor::<1>::zeros([shard.range.len()], (&shard.device, dtype));
        let (first, second) = (zeros(), zeros());
        let category = if number < ddp.offload().buckets {
            MemoryCategory::HostOptimizer
        } else {
            MemoryCategory::Optimizer
        };
        let track = |of| ddp.usage().track_tensor(category, of);
        Self {
            decay: decay_of(shard, segments, &shard.device),
            _allocations: [&first, &second].map(track),
            first,
            second,
        }
    }

    fn step(
        &mut self,
        step: &AdamWStep,
        outcome: Option<&Tensor<1>>,
        bucket: BucketStep,
    ) -> SteppedBucket {
        let nothing = || Tensor::empty([0], &bucket.master.device());
        let buffers = AdamWBuffers {
            first: std::mem::replace(&mut self.first, nothing()),
            second: std::mem::replace(&mut self.second, nothing()),
            master: bucket.master,
        };
        let (gradient, model, decay) = (bucket.gradient, bucket.model, &self.decay);
        let (buffers, model) = match outcome {
            None => adamw(buffers, gradient, decay, step, model),
            Some(outcome) => {
                adamw_with_outcome(buffers, gradient, decay, step, outcome.clone(), model)
            }
        };
        self.first = buffers.first;
        self.second = buffers.second;
        let master = buffers.master;
        SteppedBucket { master, model }
    }
}

/// Returns the dtype of the moments of a parameter from the dtype of its master weight.
fn moment_dtype(moments: MomentType, main: DType) -> DType {
    match (moments, main) {
        (MomentType::Bf16, DType::F32) => DType::BF16,
        (_, main) => main,
    }
}

/// Returns the multipliers of weight decay and learning rate of a bucket, from its segments.
fn decay_of(shard: &BucketShard, segments: &[GroupSegment], device: &Device) -> Decay {
    let all = |predicate: fn(&GroupSegment) -> bool| segments.iter().all(predicate);
    if all(|segment| segment.rate == 1.0) && all(|segment| segment.decay == 1.0) {
        return Decay::All;
    }
    if all(|segment| segment.rate == 1.0) && all(|segment| segment.decay == 0.0) {
        return Decay::None;
    }
    let first = shard.range.start % DECAY_BLOCK;
    let mut decay = vec![0f32; (first + shard.range.len()).div_ceil(DECAY_BLOCK)];
    let mut rate = vec![1f32; decay.len()];
    for segment in segments {
        // Parameters start at block boundaries, so no block contains elements of two parameters.
        let blocks = (first + segment.range.start) / DECAY_BLOCK
            ..(first + segment.range.end).div_ceil(DECAY_BLOCK);
        decay[blocks.clone()].fill(segment.decay as f32);
        rate[blocks].fill(segment.rate as f32);
    }
    let tensor = |factors: Vec<f32>| Tensor::<1>::from_data(&factors[..], (device, DType::F32));
    let has_rates = rate.iter().any(|rate| *rate != 1.0);
    Decay::Blocks(Blocks {
        decay: tensor(decay),
        rate: has_rates.then(|| tensor(rate)),
        first,
    })
}

//! The parameters of one rank: unsharded in the dtype of the model or in FP8, or sharded and gathered one
//! FSDP unit at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::{flat, fp8};

use super::memory::ZeroStage;
use super::memory_usage::{MemoryCategory, TrackedAllocation, TrackedTensor};
use super::prefetch_order::PrefetchOrder;
use super::quantized::{self, Fp8Weights};
use super::sharding_plan::{ParameterFormat, ShardingPlan};
use crate::collective::{PendingTensor, start_all_gather};
use crate::nn::fp8::QuantizedWeight;
use crate::nn::hook::{ParameterValue, Pass};

/// The flat parameters of one rank, by bucket.
pub(super) struct ParameterBuckets {
    plan: Arc<ShardingPlan>,
    state: Mutex<ParameterBucketsState>,
}

struct ParameterBucketsState {
    buckets: Vec<ParameterBucket>,
    prefetch: PrefetchOrder,
    /// The unit in use; ZeRO-3 only.
    current: Option<usize>,
}

#[derive(Default)]
struct ParameterBucket {
    /// The master shard of this rank, unless it is a view of `model_params`.
    master: Option<TrackedTensor>,
    /// The shard that this rank contributes to a gather, unless it is the master; ZeRO-3 only.
    shard: Option<TrackedTensor>,
    model_params: ParamState,
    /// The weights of an FP8 bucket, which has no `model_params`.
    fp8_weights: Fp8Weights,
}

/// The parameters of a bucket in the dtype of the model.
#[derive(Default)]
enum ParamState {
    /// This rank has its shard only.
    #[default]
    Sharded,
    /// An all-gather is in flight.
    Gathering(Box<PendingTensor<1>>, [TrackedAllocation; 2]),
    /// This rank has all of them.
    Unsharded(Arc<UnshardedParams>),
}

/// All parameters of a bucket, in the dtype of the model. Recycled when the last reference is dropped.
struct UnshardedParams {
    /// `None` only once it is dropped.
    flat: Option<TrackedTensor>,
    plan: Arc<ShardingPlan>,
    /// Counts the unit, if it was gathered.
    _unit: Option<TrackedAllocation>,
}

impl UnshardedParams {
    /// Parameters that are not resharded after use.
    fn persistent(tensor: Tensor<1>, plan: &Arc<ShardingPlan>) -> ParamState {
        let flat = Some(plan.track(tensor, MemoryCategory::Parameters));
        let plan = plan.clone();
        ParamState::Unsharded(Arc::new(Self {
            flat,
            plan,
            _unit: None,
        }))
    }

    fn tensor(&self) -> Tensor<1> {
        match &self.flat {
            Some(flat) => flat.tensor.clone(),
            None => unreachable!("only `drop` takes it"),
        }
    }
}

impl Drop for UnshardedParams {
    fn drop(&mut self) {
        if let Some(flat) = self.flat.take() {
            self.plan.recycle(flat.tensor);
        }
    }
}

impl ParameterBuckets {
    /// Buckets of zeros; [`write`](Self::write) sets the values.
    pub fn new(plan: Arc<ShardingPlan>) -> Self {
        let bucket = |number: usize| {
            let (model, main) = plan.model_and_main_dtypes(number);
            let shard_elements = plan.shard_range(number).len();
            let zeros =
                |elements, dtype, category| plan.track(plan.zeros(elements, dtype), category);
            let is_sharded = plan.stage() == ZeroStage::Parameters;
            let is_fp8 = plan.parameter_format(number) != ParameterFormat::Float;
            ParameterBucket {
                master: (is_sharded || is_fp8 || model != main).then(|| {
                    // A master that is also what the model computes with counts as a parameter.
                    let category = if is_sharded && model == main {
                        MemoryCategory::Parameters
                    } else {
                        MemoryCategory::Optimizer
                    };
                    zeros(shard_elements, main, category)
                }),
                shard: (is_sharded && model != main)
                    .then(|| zeros(shard_elements, model, MemoryCategory::Parameters)),
                model_params: if is_sharded || is_fp8 {
                    ParamState::Sharded
                } else {
                    let elements = plan.elements(number);
                    let zeros = match plan.groups.shard.size() {
                        // Nothing is ever gathered, so the memory need not come from the pool.
                        1 => Tensor::zeros([elements], (&plan.device, model)),
                        _ => plan.zeros(elements, model),
                    };
                    UnshardedParams::persistent(zeros, &plan)
                },
                fp8_weights: Fp8Weights::Stale,
            }
        };
        let buckets = (0..plan.buckets()).map(bucket).collect();
        let state = ParameterBucketsState {
            buckets,
            prefetch: PrefetchOrder::default(),
            current: None,
        };
        Self {
            plan,
            state: Mutex::new(state),
        }
    }

    /// Sets a parameter to `value`, flat and in its main dtype, on this rank only. For FP8 weights call
    /// [`quantize`](Self::quantize) afterwards.
    pub fn write(&self, index: usize, value: &Tensor<1>) {
        let state = &mut *self.lock();
        let (number, range) = self.plan.location(index);
        let (model, _) = self.plan.model_and_main_dtypes(number);
        let shard_range = self.plan.shard_range(number);
        let bucket = &mut state.buckets[number];
        let overlap = shard_range.start.max(range.start)..shard_range.end.min(range.end);
        let part = |x: &Tensor<1>| {
            let part = overlap.start - range.start..overlap.end - range.start;
            x.clone().slice([part])
        };
        let model_value = value.clone().cast(model);
        if !overlap.is_empty() {
            let start = overlap.start - shard_range.start;
            if let Some(master) = &mut bucket.master {
                overwrite(master, start, part(value));
            }
            if let Some(shard) = &mut bucket.shard {
                overwrite(shard, start, part(&model_value));
            }
        }
        bucket.fp8_weights = Fp8Weights::Stale;
        match &mut bucket.model_params {
            ParamState::Unsharded(params) if self.plan.stage() != ZeroStage::Parameters => {
                let flat = Arc::get_mut(params).and_then(|params| params.flat.as_mut());
                match flat {
                    Some(flat) => overwrite(flat, range.start, model_value),
                    // Other references keep the old values.
                    None => {
                        let flat =
                            flat::accumulate(params.tensor(), range.start, model_value, false);
                        bucket.model_params = UnshardedParams::persistent(flat, &self.plan);
                    }
                }
            }
            // Gathered values are stale now.
            params => *params = ParamState::Sharded,
        }
    }

    /// The value of a parameter, and a reference to keep as long as it is in use.
    pub fn value(&self, index: usize, pass: Pass) -> ParameterValue {
        let state = &mut *self.lock();
        let (number, range) = self.plan.location(index);
        if let Some(weight) = state.quantized(index, &self.plan) {
            let model = FloatDType::from(self.plan.parameters[index].model_dtype);
            let values: Tensor<1> = fp8::dequantize(&weight.rowwise).reshape([range.len()]);
            return ParameterValue {
                flat: values.cast(model),
                keep: None,
            };
        }
        let is_sharded = self.plan.stage() == ZeroStage::Parameters;
        if is_sharded && state.current != Some(number) {
            state.switch_unit(number, pass, &self.plan);
        }
        let params = state.buckets[number].unsharded(number, &self.plan);
        let flat = params.tensor().slice([range]);
        if !is_sharded {
            return ParameterValue { flat, keep: None };
        }
        if self.plan.parameters[index].shape.len() < 2 {
            // A vector is copied, as a graph that saves a view of it would keep the whole unit alive.
            let flat = flat.mul_scalar(1.0);
            return ParameterValue { flat, keep: None };
        }
        ParameterValue {
            flat,
            keep: Some(params),
        }
    }

    /// Both copies of an FP8 weight; `None` for other parameters.
    pub fn quantized(&self, index: usize) -> Option<Arc<QuantizedWeight>> {
        self.lock().quantized(index, &self.plan)
    }

    /// Quantises the FP8 weights of all buckets from the masters. Collective: call on all ranks of the
    /// stage. Gathers of codes, and of the values of one bucket, may still be in flight when it returns.
    pub fn quantize(&self) {
        let (plan, state) = (&self.plan, &mut *self.lock());
        // The last bucket has the first layers, which the next forward needs first.
        let of_format = |format| {
            (0..plan.buckets())
                .rev()
                .filter(move |number| plan.parameter_format(*number) == format)
        };
        let masters: Vec<_> = of_format(ParameterFormat::Fp8PerTensor)
            .map(|number| (number, state.buckets[number].master_shard(number, plan)))
            .collect();
        let weights = quantized::start_codes(&masters, plan);
        for ((number, _), weights) in masters.into_iter().zip(weights) {
            state.buckets[number].fp8_weights = weights;
        }
        for number in of_format(ParameterFormat::Fp8Blockwise) {
            state.quantize_gathered(plan);
            let bucket = &mut state.buckets[number];
            let master = bucket.master_shard(number, plan);
            bucket.fp8_weights = quantized::start_values(number, &master, plan);
        }
    }

    /// Quantises gathered values, whose memory the gradients need. Call before a gradient is accumulated.
    pub fn quantize_gathered(&self) {
        if self.plan.config.fp8_param_gather {
            self.lock().quantize_gathered(&self.plan);
        }
    }

    /// Called when a forward begins.
    pub fn begin_forward(&self) {
        self.lock().prefetch.begin_forward();
    }

    /// Called after the last backward of a step: reshards all units. Returns the fingerprint of the order
    /// in which units were gathered.
    pub fn end_step(&self) -> u64 {
        let state = &mut *self.lock();
        state.quantize_gathered(&self.plan);
        if self.plan.stage() == ZeroStage::Parameters {
            state.reshard_all();
        }
        state.prefetch.end_step()
    }

    /// Takes this rank's master shard of a bucket, for the optimizer;
    /// [`put_master`](Self::put_master) must follow.
    pub fn take_master(&self, number: usize) -> TrackedTensor {
        let plan = &self.plan;
        let bucket = &mut self.lock().buckets[number];
        if let Some(master) = bucket.master.take() {
            // Copies of the old values are freed before the new ones are made.
            bucket.shard = None;
            bucket.model_params = ParamState::Sharded;
            bucket.fp8_weights = Fp8Weights::Stale;
            return master;
        }
        let params = bucket.unsharded(number, plan);
        bucket.model_params = ParamState::Sharded;
        let copy_shard = |params: &UnshardedParams| {
            let shard = params.tensor().slice([plan.shard_range(number)]);
            plan.track(plan.copy(shard), MemoryCategory::Buffers)
        };
        match Arc::try_unwrap(params) {
            Ok(mut params) if plan.groups.shard.size() == 1 => match params.flat.take() {
                Some(flat) => flat,
                None => unreachable!("only `drop` takes it"),
            },
            Ok(params) => copy_shard(&params),
            Err(shared) => copy_shard(&shared),
        }
    }

    /// Returns the stepped master shard, with its copy in the dtype of the model where that differs, and
    /// starts to gather the shards of the other ranks. FP8 buckets are [quantised](Self::quantize) once
    /// all buckets are stepped.
    pub fn put_master(&self, number: usize, master: TrackedTensor, model: Option<Tensor<1>>) {
        let TrackedTensor {
            tensor: master,
            allocation,
        } = master;
        drop(allocation);
        let plan = &self.plan;
        let bucket = &mut self.lock().buckets[number];
        if plan.parameter_format(number) != ParameterFormat::Float {
            bucket.master = Some(plan.track(master, MemoryCategory::Optimizer));
            return;
        }
        let is_sharded = plan.stage() == ZeroStage::Parameters;
        let (keeps_master, category) = match (is_sharded, model.is_some()) {
            (true, false) => (true, MemoryCategory::Parameters),
            (_, separate) => (separate, MemoryCategory::Optimizer),
        };
        let shard = if keeps_master {
            bucket.master = Some(plan.track(master, category));
            model
        } else {
            Some(master)
        };
        match (is_sharded, shard) {
            (true, shard) => {
                bucket.shard = shard.map(|shard| plan.track(shard, MemoryCategory::Parameters));
                bucket.model_params = ParamState::Sharded;
            }
            (false, Some(params)) if plan.groups.shard.size() == 1 => {
                bucket.model_params = UnshardedParams::persistent(params, plan);
            }
            (false, Some(shard)) => {
                // The old values are freed before the new ones are allocated.
                bucket.model_params = ParamState::Sharded;
                bucket.model_params = start_gather(number, shard, MemoryCategory::Parameters, plan);
            }
            (false, None) => unreachable!("a sharded step has something to gather"),
        }
    }

    /// Waits for all gathers in flight.
    pub fn wait(&self) {
        let state = &mut *self.lock();
        for (number, bucket) in state.buckets.iter_mut().enumerate() {
            if matches!(bucket.model_params, ParamState::Gathering(..)) {
                bucket.unsharded(number, &self.plan);
            }
            if bucket.fp8_weights.is_gathering() {
                bucket.fp8_weights.wait(number, &self.plan);
            }
        }
    }

    /// This rank's master shard of a bucket, in the main dtype.
    pub fn master_shard(&self, number: usize) -> Tensor<1> {
        self.lock().buckets[number].master_shard(number, &self.plan)
    }

    fn lock(&self) -> MutexGuard<'_, ParameterBucketsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ParameterBucketsState {
    /// ZeRO-3: starts to gather a unit and prefetches the next one; reshards the others.
    fn switch_unit(&mut self, number: usize, pass: Pass, plan: &Arc<ShardingPlan>) {
        let next = self.prefetch.next(number, self.buckets.len(), pass);
        self.current = Some(number);
        let keeps_others = plan.config.keep_gathered && pass == Pass::Forward;
        for (other, bucket) in self.buckets.iter_mut().enumerate() {
            if other != number && Some(other) != next && !keeps_others {
                bucket.model_params = ParamState::Sharded;
            }
        }
        for number in [Some(number), next].into_iter().flatten() {
            self.buckets[number].start_unshard(number, plan);
        }
    }

    /// Both copies of an FP8 weight; `None` for other parameters.
    fn quantized(&mut self, index: usize, plan: &ShardingPlan) -> Option<Arc<QuantizedWeight>> {
        plan.parameters[index].quantizer.as_ref()?;
        let (number, _) = plan.location(index);
        let weights = self.buckets[number].fp8_weights.wait(number, plan);
        Some(weights[plan.position(number, index)].clone())
    }

    /// Quantises gathered values. At most one bucket has any.
    fn quantize_gathered(&mut self, plan: &ShardingPlan) {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            if bucket.fp8_weights.is_gathering_values() {
                bucket.fp8_weights.wait(number, plan);
            }
        }
    }

    fn reshard_all(&mut self) {
        self.current = None;
        for bucket in &mut self.buckets {
            bucket.model_params = ParamState::Sharded;
        }
    }
}

impl ParameterBucket {
    /// This rank's master shard, in the main dtype.
    fn master_shard(&mut self, number: usize, plan: &Arc<ShardingPlan>) -> Tensor<1> {
        match &self.master {
            Some(master) => master.tensor.clone(),
            None => {
                let params = self.unsharded(number, plan);
                params.tensor().slice([plan.shard_range(number)])
            }
        }
    }

    /// Starts the all-gather, if the parameters are sharded.
    fn start_unshard(&mut self, number: usize, plan: &Arc<ShardingPlan>) {
        if !matches!(self.model_params, ParamState::Sharded) {
            return;
        }
        let shard = match (&self.shard, &self.master) {
            (Some(shard), _) | (None, Some(shard)) => plan.copy(shard.tensor.clone()),
            (None, None) => unreachable!("a rank has its shard of sharded parameters"),
        };
        self.model_params = start_gather(number, shard, MemoryCategory::Buffers, plan);
    }

    /// The unsharded parameters; starts and waits for the all-gather where needed.
    fn unsharded(&mut self, number: usize, plan: &Arc<ShardingPlan>) -> Arc<UnshardedParams> {
        self.start_unshard(number, plan);
        if matches!(self.model_params, ParamState::Gathering(..))
            && let ParamState::Gathering(pending, [allocation, unit]) =
                std::mem::take(&mut self.model_params)
        {
            let flat = Some(TrackedTensor::from_parts(pending.wait(), allocation));
            let plan = plan.clone();
            self.model_params = ParamState::Unsharded(Arc::new(UnshardedParams {
                flat,
                plan,
                _unit: Some(unit),
            }));
        }
        match &self.model_params {
            ParamState::Unsharded(params) => params.clone(),
            ParamState::Sharded | ParamState::Gathering(..) => {
                unreachable!("the gather has finished")
            }
        }
    }
}

/// Starts to gather a bucket from the shards of the ranks.
fn start_gather(
    number: usize,
    shard: Tensor<1>,
    category: MemoryCategory,
    plan: &ShardingPlan,
) -> ParamState {
    let bytes = plan.elements(number) * shard.dtype().size();
    let allocations = [plan.usage.track(category, bytes), plan.usage.track_unit()];
    let pending = start_all_gather(shard, 0, &plan.groups.shard);
    ParamState::Gathering(Box::new(pending), allocations)
}

/// Overwrites the elements from `start` on.
fn overwrite(flat: &mut TrackedTensor, start: usize, values: Tensor<1>) {
    let nothing = Tensor::empty([0], (&values.device(), values.dtype()));
    let tensor = std::mem::replace(&mut flat.tensor, nothing);
    flat.tensor = flat::accumulate(tensor, start, values, false);
}

//! The parameters of one rank. They are unsharded in the dtype of the model or in FP8, or sharded and gathered
//! one FSDP unit at a time.

use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::cuda_graph::memory_id;
use burn_megatron_kernels::{flat, fp8};

use super::bucket_step::SteppedBucket;
use super::memory_usage::{MemoryCategory, TrackedTensor};
use super::offload::host_stepper::HostStepped;
use super::prefetch_order::PrefetchOrder;
use super::quantized::{self, Fp8Weights};
use super::sharding_plan::{ParameterFormat, ShardingPlan};
use crate::mesh::ZeroStage;
use crate::nn::fp8::QuantizedWeight;
use crate::nn::hook::{ParameterValue, Pass};

mod bucket;

use bucket::{ParamState, ParameterBucket, UnshardedParams, master_category, start_gather};

/// The flat parameters of one rank, by bucket.
pub(super) struct ParameterBuckets {
    plan: Arc<ShardingPlan>,
    buckets: Vec<ParameterBucket>,
    pub prefetch: PrefetchOrder,
    /// The unit in use; only with ZeRO-3.
    current: Option<usize>,
}

impl ParameterBuckets {
    /// Creates buckets of zeros. [`write`](Self::write) sets the values.
    pub fn new(plan: &Arc<ShardingPlan>) -> Self {
        let bucket = |number: usize| {
            let (model, main) = plan.model_and_main_dtypes(number);
            let shard_elements = plan.shard_range(number).len();
            let zeros =
                |elements, dtype, category| plan.track(plan.zeros(elements, dtype), category);
            let is_sharded = plan.stage() == ZeroStage::Parameters;
            let is_fp8 = plan.parameter_format(number) != ParameterFormat::Float;
            let master = |category| {
                if plan.is_offloaded(number) {
                    let options = (&plan.state_device(number), main);
                    return plan.track(Tensor::zeros([shard_elements], options), category);
                }
                zeros(shard_elements, main, category)
            };
            ParameterBucket {
                master: master_category(number, plan).map(master),
                host_copy: None,
                shard: (is_sharded && plan.copies_masters(number))
                    .then(|| zeros(shard_elements, model, MemoryCategory::Parameters)),
                model_params: if is_sharded || is_fp8 {
                    ParamState::Sharded
                } else {
                    let elements = plan.elements(number);
                    let zeros = match plan.groups(number).shard.size() {
                        // Nothing is gathered, so the memory does not have to come from the pool.
                        1 => Tensor::zeros([elements], (&plan.device, model)),
                        _ => plan.zeros(elements, model),
                    };
                    UnshardedParams::persistent(zeros, plan)
                },
                static_params: None,
                fp8_weights: Fp8Weights::Stale,
            }
        };
        Self {
            plan: plan.clone(),
            buckets: (0..plan.buckets()).map(bucket).collect(),
            prefetch: PrefetchOrder::default(),
            current: None,
        }
    }

    /// Sets a parameter to `value` on this rank only. `value` is flat and has the dtype of the master weights. For FP8
    /// weights call [`quantize`](Self::quantize) afterwards.
    pub fn write(&mut self, index: usize, value: &Tensor<1>) {
        let plan = &self.plan;
        let (number, range) = plan.location(index);
        let (model, _) = plan.model_and_main_dtypes(number);
        let shard_range = plan.shard_range(number);
        let bucket = &mut self.buckets[number];
        let overlap = shard_range.start.max(range.start)..shard_range.end.min(range.end);
        let part = |x: &Tensor<1>| {
            let part = overlap.start - range.start..overlap.end - range.start;
            x.clone().slice([part])
        };
        let model_value = value.clone().cast(model);
        if !overlap.is_empty() {
            let start = overlap.start - shard_range.start;
            if let Some(master) = &mut bucket.master {
                master.overwrite(start, part(value).to_device(&master.tensor.device()));
            }
            if let Some(shard) = &mut bucket.shard {
                shard.overwrite(start, part(&model_value));
            }
        }
        bucket.fp8_weights = Fp8Weights::Stale;
        match &mut bucket.model_params {
            ParamState::Unsharded(params) if plan.stage() != ZeroStage::Parameters => {
                let flat = Arc::get_mut(params).and_then(|params| params.flat.as_mut());
                match flat {
                    Some(flat) => flat.overwrite(range.start, model_value),
                    // Other references keep the old values.
                    None => {
                        let flat =
                            flat::accumulate(params.tensor(), range.start, model_value, false);
                        bucket.model_params = UnshardedParams::persistent(flat, plan);
                    }
                }
            }
            // Gathered values are now stale.
            params => *params = ParamState::Sharded,
        }
    }

    /// Returns the value of a parameter, and a reference that must be kept while the value is in use.
    pub fn value(&mut self, index: usize, pass: Pass) -> ParameterValue {
        let plan = &self.plan.clone();
        let (number, range) = plan.location(index);
        if let Some(weight) = self.quantized(index) {
            let model = FloatDType::from(plan.parameters[index].model_dtype);
            let values: Tensor<1> = fp8::dequantize(&weight.rowwise).reshape([range.len()]);
            return ParameterValue {
                flat: values.cast(model),
                keep: None,
            };
        }
        let is_sharded = plan.stage() == ZeroStage::Parameters;
        if is_sharded && self.current != Some(number) {
            self.switch_unit(number, pass);
        }
        let params = self.buckets[number].unsharded(number, plan);
        let flat = params.tensor().slice([range]);
        if !is_sharded {
            return ParameterValue { flat, keep: None };
        }
        if plan.parameters[index].shape.len() < 2 {
            // A vector is copied, because a graph that saves a view of it would keep the complete unit alive.
            let flat = flat.mul_scalar(1.0);
            return ParameterValue { flat, keep: None };
        }
        ParameterValue {
            flat,
            keep: Some(params),
        }
    }

    /// Quantizes the FP8 weights of all buckets from the master weights. Collective: call on all ranks of the stage.
    /// When it returns, all-gathers of FP8 codes, and the all-gather of the values of one bucket, may still be in
    /// flight.
    pub fn quantize(&mut self) {
        let plan = &self.plan.clone();
        // The last bucket contains the first layers, which the next forward needs first.
        let of_format = |format| {
            (0..plan.buckets())
                .rev()
                .filter(move |number| plan.parameter_format(*number) == format)
        };
        for (grid, groups) in plan.all_groups() {
            let masters: Vec<_> = of_format(ParameterFormat::Fp8PerTensor)
                .filter(|number| plan.grid(*number) == grid)
                .map(|number| (number, self.buckets[number].master_shard(number, plan)))
                .collect();
            let weights = quantized::start_codes(groups, &masters, plan);
            for ((number, _), weights) in masters.into_iter().zip(weights) {
                self.buckets[number].fp8_weights = weights;
            }
        }
        for number in of_format(ParameterFormat::Fp8Blockwise) {
            self.quantize_gathered();
            let bucket = &mut self.buckets[number];
            let master = bucket.master_shard(number, plan);
            bucket.fp8_weights = quantized::start_values(number, &master, plan);
        }
    }

    /// Ends a step after its last backward and reshards all units. Returns the fingerprint of the order in
    /// which units were gathered.
    pub fn end_step(&mut self) -> u64 {
        self.quantize_gathered();
        self.reshard();
        self.prefetch.end_step()
    }

    /// Replaces this rank's shard of a bucket's master weights with the result of `step`, and starts the all-gather of
    /// the bucket. If the dtype of the model differs from the dtype of the master weights, `step` also gets a tensor
    /// for the new parameters. FP8 buckets are [quantized](Self::quantize) after the optimizer steps of all buckets.
    pub fn step(
        &mut self,
        number: usize,
        step: impl FnOnce(Tensor<1>, Option<Tensor<1>>) -> SteppedBucket,
    ) {
        let (master, copy) = self.take(number);
        let TrackedTensor { tensor, allocation } = master;
        let SteppedBucket { master, model } = step(tensor, copy);
        drop(allocation);
        self.put(number, master, model);
    }

    /// Replaces this rank's shard of the master weights of each bucket.
    pub fn replace(&mut self, masters: Vec<Tensor<1>>) {
        for (number, master) in masters.into_iter().enumerate().rev() {
            let model = None;
            self.step(number, |_, _| SteppedBucket { master, model });
        }
    }

    /// Takes out this rank's shard of a bucket's master weights, and a tensor for the new parameters in the dtype of
    /// the model. [`put`](Self::put) replaces both. Both are on the host if the bucket is offloaded.
    pub fn take(&mut self, number: usize) -> (TrackedTensor, Option<Tensor<1>>) {
        let plan = &self.plan;
        let bucket = &mut self.buckets[number];
        let is_gathered =
            plan.stage() != ZeroStage::Parameters && plan.groups(number).shard.size() > 1;
        if plan.config.static_buffers && is_gathered {
            let params = bucket.unsharded(number, plan);
            bucket.static_params = Some(params.tensor());
        }
        let copy = bucket.take_copy(number, plan);
        (self.take_master(number), copy)
    }

    /// Replaces this rank's shard of an offloaded bucket with the result of the step on the host.
    pub fn put_from_host(
        &mut self,
        number: usize,
        HostStepped {
            stepped,
            parameters,
        }: HostStepped,
    ) {
        self.buckets[number].host_copy = stepped.model;
        self.put(number, stepped.master, Some(parameters));
    }

    /// Replaces this rank's master shard of a bucket, and starts to gather the shards of the other ranks. `copy` is on
    /// the device, in the dtype of the model. If it is `None`, the copy is computed from the master weights.
    fn put(&mut self, number: usize, master: Tensor<1>, copy: Option<Tensor<1>>) {
        let plan = &self.plan;
        let bucket = &mut self.buckets[number];
        let copy = copy.or_else(|| {
            let (model, _) = plan.model_and_main_dtypes(number);
            let cast = || master.clone().cast(FloatDType::from(model));
            if plan.is_offloaded(number) {
                Some(plan.to_device(cast()))
            } else {
                plan.copies_masters(number).then(cast)
            }
        });
        let shard = match master_category(number, plan) {
            Some(category) => {
                bucket.master = Some(plan.track(master, category));
                copy
            }
            None => Some(master),
        };
        let category = MemoryCategory::Parameters;
        match (plan.stage(), shard) {
            (_, None) => {}
            (ZeroStage::Parameters, Some(shard)) => {
                bucket.shard = Some(plan.track(shard, category));
            }
            (_, Some(params)) if plan.groups(number).shard.size() == 1 => {
                bucket.model_params = UnshardedParams::persistent(params, plan);
            }
            (_, Some(shard)) => {
                bucket.model_params = start_gather(number, shard, category, plan);
            }
        }
    }

    /// Takes this rank's master shard of a bucket, and frees the copies of the old values.
    fn take_master(&mut self, number: usize) -> TrackedTensor {
        let plan = &self.plan;
        let bucket = &mut self.buckets[number];
        if let Some(master) = bucket.master.take() {
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
            Ok(mut params) if plan.groups(number).shard.size() == 1 => match params.flat.take() {
                Some(flat) => flat,
                None => unreachable!("only `drop` takes it"),
            },
            Ok(params) => copy_shard(&params),
            Err(shared) => copy_shard(&shared),
        }
    }

    /// Waits for all gathers in flight.
    pub fn wait(&mut self) {
        let plan = &self.plan;
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            if matches!(bucket.model_params, ParamState::Gathering(..)) {
                bucket.unsharded(number, plan);
            }
            if bucket.fp8_weights.is_gathering() {
                bucket.fp8_weights.wait(number, plan);
            }
        }
    }

    /// Returns this rank's shard of a bucket's master weights. The shard is on the host if the bucket is offloaded.
    pub fn master_shard(&mut self, number: usize) -> Tensor<1> {
        self.buckets[number].master_shard(number, &self.plan)
    }

    /// Replaces this rank's shard of a bucket's master weights, but not the copy in the dtype of the model.
    pub fn change_master(&mut self, number: usize, change: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        let plan = &self.plan;
        let bucket = &mut self.buckets[number];
        let changed = change(bucket.master_shard(number, plan));
        match &mut bucket.master {
            Some(master) => master.overwrite(0, changed),
            None => {
                let flat = bucket.unsharded(number, plan).tensor();
                let start = plan.shard_range(number).start;
                let flat = flat::accumulate(flat, start, changed, false);
                bucket.model_params = UnshardedParams::persistent(flat, plan);
            }
        }
    }

    /// Returns the gathered parameters of a bucket. Returns `None` if this rank's master weights are the parameters, or
    /// if the parameters are not gathered.
    pub fn copy(&self, number: usize) -> Option<Tensor<1>> {
        let bucket = &self.buckets[number];
        let is_master = bucket.master.is_none() && self.plan.groups(number).shard.size() == 1;
        match &bucket.model_params {
            ParamState::Unsharded(params) if !is_master => Some(params.tensor()),
            _ => None,
        }
    }

    /// Frees gathered parameters. This method has an effect only with ZeRO-3.
    pub fn reshard(&mut self) {
        if self.plan.stage() != ZeroStage::Parameters {
            return;
        }
        self.current = None;
        for bucket in &mut self.buckets {
            bucket.model_params = ParamState::Sharded;
        }
    }

    /// Starts to gather a unit, prefetches the next unit and reshards the other units, with ZeRO-3.
    fn switch_unit(&mut self, number: usize, pass: Pass) {
        let plan = &self.plan;
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

    /// Returns both copies of an FP8 weight, or `None` for other parameters.
    pub fn quantized(&mut self, index: usize) -> Option<Arc<QuantizedWeight>> {
        let plan = &self.plan;
        plan.parameters[index].quantizer.as_ref()?;
        let (number, _) = plan.location(index);
        let weights = self.buckets[number].fp8_weights.wait(number, plan);
        Some(weights[plan.position(number, index)].clone())
    }

    /// Returns the memory identifiers of the unsharded parameters.
    pub fn memory_ids(&self) -> Vec<Option<usize>> {
        let of = |bucket: &ParameterBucket| match &bucket.model_params {
            ParamState::Unsharded(params) => memory_id(&params.tensor()),
            _ => None,
        };
        self.buckets.iter().map(of).collect()
    }

    /// Quantizes gathered values, and frees their memory before gradients are allocated. At most one bucket has
    /// gathered values.
    pub fn quantize_gathered(&mut self) {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            if bucket.fp8_weights.is_gathering_values() {
                bucket.fp8_weights.wait(number, &self.plan);
            }
        }
    }
}

//! The parameters of one bucket.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::super::memory_usage::{MemoryCategory, TrackedAllocation, TrackedTensor};
use super::super::quantized::Fp8Weights;
use super::super::sharding_plan::{ParameterFormat, ShardingPlan};
use crate::collective::{PendingTensor, start_all_gather};
use crate::mesh::ZeroStage;

#[derive(Default)]
pub(super) struct ParameterBucket {
    /// This rank's shard of the master weights, unless the shard is a view of `model_params`. The shard is on the host
    /// if the bucket is offloaded.
    pub master: Option<TrackedTensor>,
    /// Host memory for the copy of an offloaded master in the dtype of the model.
    pub host_copy: Option<Tensor<1>>,
    /// The shard that this rank contributes to an all-gather, unless that shard is the shard of the master weights.
    /// This field is only set with ZeRO-3.
    pub shard: Option<TrackedTensor>,
    pub model_params: ParamState,
    /// With [static buffers](super::super::DataParallelConfig::static_buffers), the memory of the gathered parameters
    /// while the parameters are gathered again.
    pub static_params: Option<Tensor<1>>,
    /// The weights of an FP8 bucket, which has no `model_params`.
    pub fp8_weights: Fp8Weights,
}

/// The parameters of a bucket in the dtype of the model.
#[derive(Default)]
pub(super) enum ParamState {
    /// This rank only has its shard.
    #[default]
    Sharded,
    /// An all-gather is in flight.
    Gathering(Box<PendingTensor<1>>, [TrackedAllocation; 2]),
    /// This rank has all parameters.
    Unsharded(Arc<UnshardedParams>),
}

/// All parameters of a bucket, in the dtype of the model. Their memory is recycled when the last reference is
/// dropped.
pub(super) struct UnshardedParams {
    /// `None` only while the value is dropped.
    pub flat: Option<TrackedTensor>,
    plan: Arc<ShardingPlan>,
    /// Counts the unit, if the parameters were gathered.
    _unit: Option<TrackedAllocation>,
}

impl UnshardedParams {
    /// Returns parameters that are not resharded after use.
    pub fn persistent(tensor: Tensor<1>, plan: &Arc<ShardingPlan>) -> ParamState {
        let flat = Some(plan.track(tensor, MemoryCategory::Parameters));
        let plan = plan.clone();
        ParamState::Unsharded(Arc::new(Self {
            flat,
            plan,
            _unit: None,
        }))
    }

    pub fn tensor(&self) -> Tensor<1> {
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
impl ParameterBucket {
    /// Returns this rank's shard of the master weights.
    pub fn master_shard(&mut self, number: usize, plan: &Arc<ShardingPlan>) -> Tensor<1> {
        match &self.master {
            Some(master) => master.tensor.clone(),
            None => {
                let params = self.unsharded(number, plan);
                params.tensor().slice([plan.shard_range(number)])
            }
        }
    }

    /// Returns a tensor for the new copy of the shard in the dtype of the model. The tensor is the old copy, so that
    /// its address stays the same, or a new tensor if the old copy is gathered. The tensor is on the host if the bucket
    /// is offloaded. Returns `None` if the model uses the dtype of the master weights.
    pub fn take_copy(&mut self, number: usize, plan: &ShardingPlan) -> Option<Tensor<1>> {
        let (model, main) = plan.model_and_main_dtypes(number);
        if model == main {
            return None;
        }
        let elements = plan.shard_range(number).len();
        let new = || Tensor::empty([elements], (&plan.state_device(number), model));
        if plan.is_offloaded(number) {
            return Some(self.host_copy.take().unwrap_or_else(new));
        }
        let is_whole =
            plan.stage() != ZeroStage::Parameters && plan.groups(number).shard.size() == 1;
        let old = match std::mem::take(&mut self.model_params) {
            ParamState::Unsharded(params) if is_whole => {
                let params = Arc::try_unwrap(params).ok();
                params.and_then(|mut params| params.flat.take())
            }
            _ => self.shard.take(),
        };
        Some(old.map_or_else(new, |old| old.tensor))
    }

    /// Starts the all-gather, if the parameters are sharded.
    pub fn start_unshard(&mut self, number: usize, plan: &Arc<ShardingPlan>) {
        if !matches!(self.model_params, ParamState::Sharded) {
            return;
        }
        let shard = match (&self.shard, &self.master) {
            (Some(shard), _) | (None, Some(shard)) => plan.copy(shard.tensor.clone()),
            (None, None) => unreachable!("a rank has its shard of sharded parameters"),
        };
        self.model_params = start_gather(number, shard, MemoryCategory::Buffers, plan);
    }

    /// Returns the unsharded parameters. Starts the all-gather and waits for it if necessary.
    pub fn unsharded(&mut self, number: usize, plan: &Arc<ShardingPlan>) -> Arc<UnshardedParams> {
        self.start_unshard(number, plan);
        if matches!(self.model_params, ParamState::Gathering(..))
            && let ParamState::Gathering(pending, [allocation, unit]) =
                std::mem::take(&mut self.model_params)
        {
            let gathered = pending.wait();
            let tensor = match self.static_params.take() {
                Some(memory) => flat::accumulate(memory, 0, gathered, false),
                None => gathered,
            };
            self.model_params = ParamState::Unsharded(Arc::new(UnshardedParams {
                flat: Some(TrackedTensor { tensor, allocation }),
                plan: plan.clone(),
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
pub(super) fn start_gather(
    number: usize,
    shard: Tensor<1>,
    category: MemoryCategory,
    plan: &ShardingPlan,
) -> ParamState {
    let bytes = plan.elements(number) * shard.dtype().size();
    let allocations = [plan.usage.track(category, bytes), plan.usage.track_unit()];
    let pending = start_all_gather(shard, 0, &plan.groups(number).shard);
    ParamState::Gathering(Box::new(pending), allocations)
}

/// Returns the memory category of a bucket's master shard, or `None` if it is a view of `model_params`.
pub(super) fn master_category(number: usize, plan: &ShardingPlan) -> Option<MemoryCategory> {
    let (model, main) = plan.model_and_main_dtypes(number);
    let is_float = plan.parameter_format(number) == ParameterFormat::Float;
    match plan.stage() {
        _ if plan.is_offloaded(number) => Some(MemoryCategory::HostOptimizer),
        // The model also computes with this shard.
        ZeroStage::Parameters if is_float && model == main => Some(MemoryCategory::Parameters),
        _ if is_float && model == main => None,
        _ => Some(MemoryCategory::Optimizer),
    }
}

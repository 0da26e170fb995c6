//! Plans the memory of a model in a parallel layout.

use std::collections::HashMap;

use burn::tensor::{DType, Device};
use burn_megatron_kernels::record::ShapeSettings;
use parking_lot::Mutex;

use super::MemoryReport;
use crate::recorded_step::{
    ProfileError, ProfileRequest, RankProfile, goes_by_place, profile_rank,
};
use burn_megatron::comm::{CommError, ParallelContext};
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, MemoryPlan, ShardingEstimate,
};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::stages::{LayerSplit, StageLayout};
use burn_megatron::mesh::{Mesh, MeshError, ParallelConfig, ZeroStage};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::nn::{BuildError, ModelBuilder, RecomputeConfig};
use burn_megatron::pipeline::{LayoutScheduleError, schedule_of, stages_on_rank};

/// The settings of a training run whose memory is planned.
#[derive(Clone, Debug)]
pub struct MemoryRequest<'a> {
    /// The parallel layout.
    pub layout: &'a ParallelConfig,
    /// The number of ranks (world size).
    pub ranks: usize,
    /// The number of samples in a micro-batch on one rank.
    pub micro_batch_size: usize,
    /// The number of tokens in a sample.
    pub sequence_length: usize,
    /// The number of micro-batches per step on one rank.
    pub micro_batches: usize,
    /// The data-parallel settings, which include the sharding and the dtypes of the training state.
    pub sharding: &'a DataParallelConfig,
    /// The operations that use fused kernels.
    pub kernels: &'a KernelChoices,
    /// The layers that compute in FP8.
    pub fp8: &'a Fp8Config,
    /// The settings of LoRA adapters. If they are set, all other parameters are frozen.
    pub lora: Option<&'a LoraConfig>,
    /// The layers whose activations are recomputed in the backward.
    pub recompute: &'a RecomputeConfig,
    /// Settings of the shape-only run for properties that depend on data, such as the load imbalance of the experts.
    pub settings: ShapeSettings,
    /// The memory that the allocator needs for activations and temporary tensors, divided by the size of these tensors.
    /// 1 means that the allocator wastes no memory. A caching allocator needs about 1.05 to 1.1.
    pub slack: f64,
}

/// An error of [`plan_memory`].
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The layout is invalid for this number of ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The layout has no valid schedule.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// A process group cannot be created.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The model cannot be split over the layout.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The training state cannot be sharded with these settings.
    #[error(transparent)]
    Sharding(#[from] DataParallelError),
    /// The model has an operation that cannot run without data.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// A cache of the profiles of pipeline ranks, which speeds up planning several layouts of the same model.
///
/// The requests may differ in layout, micro-batch size, number of micro-batches, recomputation and sharding. A profile
/// does not depend on the schedule and the sharding. It is reused for all ranks that run the same computation.
#[derive(Debug, Default)]
pub struct RankProfiles(Mutex<HashMap<ProfileKey, Vec<(RecomputeConfig, RankProfile)>>>);

/// The key of a profile: the layout without its schedule and sharding, the numbers of samples and tokens of a
/// micro-batch, and the kind of the rank.
type ProfileKey = (ParallelConfig, [usize; 2], RankKind);

impl RankProfiles {
    fn get(
        &self,
        request: &MemoryRequest<'_>,
        layout: &ParallelConfig,
        kind: &RankKind,
        profile: impl FnOnce() -> Result<RankProfile, ProfileError>,
    ) -> Result<RankProfile, ProfileError> {
        let layout = ParallelConfig {
            schedule: None,
            virtual_stages: None,
            split: LayerSplit::default(),
            zero_stage: ZeroStage::default(),
            hsdp: None,
            ..layout.clone()
        };
        let shape = [request.micro_batch_size, request.sequence_length];
        let key = (layout, shape, kind.clone());
        let of_recompute = |profiles: &[(RecomputeConfig, RankProfile)]| {
            let mut profiles = profiles.iter();
            let found = profiles.find(|(recompute, _)| recompute == request.recompute);
            found.map(|(_, profile)| profile.clone())
        };
        let known = self.0.lock().get(&key).and_then(|it| of_recompute(it));
        if let Some(known) = known {
            return Ok(known);
        }
        let made = profile()?;
        let own = (request.recompute.clone(), made.clone());
        self.0.lock().entry(key).or_default().push(own);
        Ok(made)
    }
}

/// Plans the memory of every pipeline rank by running the model with tensor shapes but without data. Nothing is
/// allocated or sent.
///
/// # Errors
///
/// [`MemoryError`] if the layout is invalid for the model or the number of ranks, or if the model has an operation that
/// cannot be planned. The error names the operation.
pub fn plan_memory<C: ModelConfig>(
    config: &C,
    request: &MemoryRequest<'_>,
) -> Result<MemoryReport, MemoryError> {
    plan_memory_with(config, request, &RankProfiles::default())
}

/// Plans the memory like [`plan_memory`], and reuses profiles that earlier calls for the same model have stored in
/// `profiles`.
///
/// # Errors
///
/// See [`plan_memory`].
pub fn plan_memory_with<C: ModelConfig>(
    config: &C,
    request: &MemoryRequest<'_>,
    profiles: &RankProfiles,
) -> Result<MemoryReport, MemoryError> {
    let mesh = Mesh::new(request.layout, request.ranks)?;
    config.check_layout(request.layout)?;
    let schedule = schedule_of(mesh.config(), request.micro_batches)?;
    let (mut stages, mut states) = (vec![], vec![]);
    let mut known: HashMap<RankKind, (RankProfile, MemoryPlan)> = HashMap::new();
    let mut input = [0; 3];
    for pipeline in 0..mesh.config().pipeline {
        let own = stages_on_rank(mesh.config(), pipeline, config.layers())?;
        let kind = RankKind::new(config, request, (pipeline, input), &own);
        let (profile, state) = match known.get(&kind) {
            Some(known) => known.clone(),
            None => {
                let rank = (0..mesh.world_size())
                    .find(|rank| mesh.coordinates(*rank).pipeline == pipeline);
                let groups = ParallelContext::offline(mesh.clone(), rank.unwrap_or(0))?;
                let state = rank_state(config, request, &groups)?;
                let profile = || rank_profile(config, request, &groups, input);
                let profile = profiles.get(request, mesh.config(), &kind, profile)?;
                known.insert(kind, (profile.clone(), state));
                (profile, state)
            }
        };
        states.push(state);
        input = profile.output;
        let numbers = own.into_iter().map(|(number, _)| number);
        stages.extend(numbers.zip(profile.stages.into_iter().map(|(_, stage)| stage)));
    }
    stages.sort_by_key(|(number, _)| *number);
    let stages = stages.into_iter().map(|(_, profile)| profile).collect();
    let zero_stage = request.sharding.zero_stage;
    Ok(MemoryReport::new(
        &schedule,
        stages,
        states,
        zero_stage,
        request.slack,
        (request.recompute.offload, request.layout.receives_ahead()),
    ))
}

/// The kind of a pipeline rank: the properties that determine its profile and its training state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RankKind {
    /// The stages of the rank. For each stage: whether it has the embedding, the kinds of its layers, and whether it
    /// has the loss.
    stages: Vec<(bool, Vec<usize>, bool)>,
    input: [usize; 3],
    /// The index of the pipeline rank, if settings depend on the position of a layer.
    rank: Option<usize>,
}

impl RankKind {
    fn new<C: ModelConfig>(
        config: &C,
        request: &MemoryRequest<'_>,
        (rank, input): (usize, [usize; 3]),
        own: &[(usize, StageLayout)],
    ) -> Self {
        let stages = own.iter().map(|(_, stage)| {
            let kinds = stage.layers.clone().map(|number| config.layer_kind(number));
            (stage.embedding, kinds.collect(), stage.loss)
        });
        let by_place = goes_by_place(request.recompute, request.fp8, &request.sharding.freeze);
        Self {
            stages: stages.collect(),
            input,
            rank: by_place.then_some(rank),
        }
    }
}

/// Returns the size of the training state of a pipeline rank.
fn rank_state<C: ModelConfig>(
    config: &C,
    request: &MemoryRequest<'_>,
    groups: &ParallelContext,
) -> Result<MemoryPlan, MemoryError> {
    let precision = request.sharding.precision;
    let builder = ModelBuilder::with(groups, &Device::flex(), 0, precision.master());
    let builder = builder
        .with_compute_dtype(precision.of(precision.master()))
        .with_kernels(request.kernels)?
        .with_fp8(request.fp8)?
        .with_lora(request.lora)?;
    let model = config.init_with(builder.outline())?;
    Ok(ShardingEstimate::of(&model, groups, request.sharding)?.memory)
}

/// Returns the profile of a pipeline rank.
fn rank_profile<C: ModelConfig>(
    config: &C,
    request: &MemoryRequest<'_>,
    groups: &ParallelContext,
    input: [usize; 3],
) -> Result<RankProfile, ProfileError> {
    let precision = request.sharding.precision;
    profile_rank(
        config,
        &ProfileRequest {
            groups,
            dtype: precision.of(DType::F32),
            kernels: request.kernels,
            fp8: request.fp8,
            recompute: request.recompute,
            lora: request.lora,
            freeze: &request.sharding.freeze,
            shape: [request.micro_batch_size, request.sequence_length],
            input,
            settings: request.settings,
        },
    )
}

//! Builds the [`ShardingPlan`] of a module.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::flat::Ranges;

use super::config::DataParallelConfig;
use super::error::{DataParallelConfigError, DataParallelError};
use super::fsdp_unit::fsdp_unit_of;
use super::layout::{BucketRules, BufferLayout, ParameterSize};
use super::memory::MemoryRules;
use super::memory_usage::MemoryUsage;
use super::offload::OffloadPlan;
use super::quantized;
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::{ParameterInfo, ShardingPlan, main_dtype};
use crate::collective::buffer_dtype;
use crate::comm::{self, BufferPool, ParallelContext, ReduceOp};
use crate::mesh::{Grid, ZeroStage};
use crate::nn::fp8::WeightQuantizer;
use crate::nn::{ParameterEntry, ParameterTable};

/// The alignment of a view in bytes on devices other than the CPU. CUDA has the largest requirement.
const VIEW_BYTES: usize = 512;

/// The path of an FP8 weight and its quantizer.
pub(super) type NamedWeight = (String, Arc<dyn WeightQuantizer>);

/// The quantizers of the FP8 weights of a module, by path.
pub(super) type Quantizers = BTreeMap<String, Arc<dyn WeightQuantizer>>;

/// Lays out the trained parameters of a module, or its frozen parameters, which need no master weights. `quantizers`
/// contains the quantizers of the weights that are gathered in FP8. Collective: call on all ranks.
pub(super) fn build_plan<M: Module>(
    module: &M,
    (whole, frozen): (&ParameterTable, bool),
    groups: &ParallelContext,
    config: &DataParallelConfig,
    mut quantizers: Quantizers,
) -> Result<ShardingPlan, DataParallelError> {
    let ranks = data_ranks(groups, Grid::Dense);
    config.check(ranks)?;
    let mut collected = ParameterCollector::default();
    module.visit(&mut collected);
    let device = collected.device.unwrap_or_else(Device::flex);
    config.precision.check(&device)?;
    let info = |(entry, (shape, built)): (&ParameterEntry, (Vec<usize>, DType))| {
        let model_dtype = config.precision.of(built);
        let path = entry.path.clone();
        if buffer_dtype(built).is_none() {
            let dtype = format!("{built:?}");
            return Err(DataParallelError::Type { path, dtype });
        }
        Ok(ParameterInfo {
            quantizer: quantizers.remove(&path),
            path,
            shape,
            model_dtype,
            main_dtype: if frozen {
                model_dtype
            } else {
                main_dtype(model_dtype)
            },
        })
    };
    let table = &whole.filtered(frozen);
    let entries = whole.entries().iter().zip(collected.parameters);
    let parameters = entries
        .filter(|(entry, _)| entry.frozen == frozen)
        .map(info)
        .collect::<Result<Vec<_>, _>>()?;
    let align = match parameters
        .iter()
        .map(gather_dtype)
        .min_by_key(|dtype| dtype.size_of())
    {
        Some(dtype) if device != Device::flex() => BucketRules::alignment(VIEW_BYTES, dtype)?,
        _ => BucketRules::sharded(ranks).align,
    };
    let rules = BucketRules {
        size: match (config.zero_stage, config.bucket_size) {
            // An FSDP unit is gathered and reduced as one bucket.
            (ZeroStage::Parameters, None) => None,
            (_, size) => Some(size.unwrap_or_else(|| BucketRules::default_size(ranks))),
        },
        align,
        pad_for_bandwidth: config.pad_buckets,
        expert_ranks: Some(data_ranks(groups, Grid::Expert)),
        ..BucketRules::sharded(ranks)
    };
    let sizes = parameter_sizes(&parameters, table, config.zero_stage, &device);
    let layout = BufferLayout::new(&sizes, &rules)?;
    tracing::debug!("{layout}");
    let dense = ShardingGroups::new(groups, Grid::Dense, config)?;
    let has_experts = table
        .entries()
        .iter()
        .any(|entry| entry.grid == Grid::Expert);
    let expert = has_experts.then(|| ShardingGroups::new(groups, Grid::Expert, config));
    let pool = dense.data.pool().cloned();
    let gaps = (0..layout.bucket_count()).map(|bucket| layout.bucket(bucket).gaps());
    let gaps = gaps.map(|gaps| Ranges::new(gaps, &device)).collect();
    Ok(ShardingPlan {
        offload: OffloadPlan::new(&layout, &MemoryRules::of(config), config.offload.optimizer),
        layout,
        gaps,
        parameters,
        dense,
        expert: expert.transpose()?,
        config: config.clone(),
        device,
        pool: pool.unwrap_or_else(|| Arc::new(BufferPool::new())),
        usage: MemoryUsage::default(),
    })
}

/// Checks that at least one stage has FP8 weights if `fp8_param_gather` is set. Collective: call on all ranks
/// of the pipeline.
pub(super) fn check_quantizers(
    quantizers: &Quantizers,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<(), DataParallelError> {
    if !config.fp8_param_gather {
        return Ok(());
    }
    // A stage may have no FP8 weights if another stage has some.
    let own = quantizers.len() as i64;
    if groups.pipeline().all_reduce_scalar(own, ReduceOp::Sum)? == 0 {
        return Err(DataParallelConfigError::NoFp8Weights.into());
    }
    Ok(())
}

/// Returns the quantizers of the weights that are gathered in FP8. The result is empty without `fp8_param_gather`.
pub(super) fn quantizers(
    table: &ParameterTable,
    config: &DataParallelConfig,
    weights: Vec<NamedWeight>,
) -> Result<Quantizers, DataParallelError> {
    if !config.fp8_param_gather {
        return Ok(Quantizers::new());
    }
    let quantizers: Quantizers = weights.into_iter().collect();
    let is_matrix = |path: &str| {
        let entry = table.entries().iter().find(|entry| entry.path == path);
        entry.is_some_and(|entry| entry.shape.len() == 2 && !entry.frozen)
    };
    match quantizers.keys().find(|path| !is_matrix(path)) {
        Some(path) => Err(DataParallelConfigError::UnknownWeight { path: path.clone() }.into()),
        None => Ok(quantizers),
    }
}

/// Returns the number of ranks over which the gradients of a grid are summed.
pub(super) fn data_ranks(groups: &ParallelContext, grid: Grid) -> usize {
    groups.mesh_rank().among(grid, grid.data_axes()).size
}

/// Returns the dtype in which a parameter is gathered.
fn gather_dtype(parameter: &ParameterInfo) -> comm::DType {
    match &parameter.quantizer {
        Some(quantizer) if quantizer.has_one_scale() => comm::DType::U8,
        _ => buffer_dtype(parameter.model_dtype).unwrap_or(comm::DType::F32),
    }
}

fn parameter_sizes(
    parameters: &[ParameterInfo],
    table: &ParameterTable,
    stage: ZeroStage,
    device: &Device,
) -> Vec<ParameterSize> {
    let mut units: Vec<(usize, &str)> = vec![];
    let all = parameters.iter().zip(table.entries());
    let size = |(parameter, entry): (&ParameterInfo, &ParameterEntry)| {
        let matrix = parameter.shape.first_chunk::<2>();
        let quantized = parameter.quantizer.as_deref().zip(matrix);
        ParameterSize {
            elements: parameter.shape.iter().product(),
            parameter: gather_dtype(parameter),
            gradient: buffer_dtype(parameter.main_dtype).unwrap_or(comm::DType::F32),
            quantized_bytes: quantized
                .map(|(quantizer, matrix)| quantized::quantized_bytes(quantizer, *matrix, device)),
            grid: entry.grid,
            shared: entry.is_tied(),
            unit: 0,
        }
    };
    let mut sizes: Vec<_> = all.clone().map(size).collect();
    for (size, (parameter, entry)) in sizes.iter_mut().zip(all) {
        let fsdp_unit = match stage {
            ZeroStage::Parameters => fsdp_unit_of(&parameter.path),
            _ => "",
        };
        let unit = (entry.stage, fsdp_unit);
        size.unit = match units.iter().position(|other| *other == unit) {
            Some(known) => known,
            None => {
                units.push(unit);
                units.len() - 1
            }
        };
    }
    sizes
}

#[derive(Default)]
struct ParameterCollector {
    parameters: Vec<(Vec<usize>, DType)>,
    device: Option<Device>,
}

impl ModuleVisitor for ParameterCollector {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        self.device.get_or_insert_with(|| value.device().inner());
        self.parameters.push((value.dims().to_vec(), value.dtype()));
    }
}

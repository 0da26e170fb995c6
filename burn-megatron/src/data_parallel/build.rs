//! Moves the parameters of a module into flat buffers, and back.

use std::collections::{BTreeMap, VecDeque};
use std::iter::Zip;
use std::slice;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::flat::Ranges;

use super::config::DataParallelConfig;
use super::error::DataParallelConfigError;
use super::error::DataParallelError;
use super::frozen::FrozenParameters;
use super::fsdp_unit::fsdp_unit_of;
use super::gradient_check::GradientCheck;
use super::layout::{BucketRules, BufferLayout, ParameterSize};
use super::memory::{MemoryRules, ZeroStage};
use super::memory_usage::MemoryUsage;
use super::offload::OffloadPlan;
use super::param_and_grad_buffers::ParamAndGradBuffers;
use super::quantized;
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::{ParameterInfo, ShardingPlan, comm_dtype};
use crate::collective::{from_buffer, to_buffer};
use crate::comm::{self, BufferPool, ParallelContext, ReduceOp};
use crate::mesh::Grid;
use crate::nn::fp8::WeightQuantizer;
use crate::nn::hook::{ParameterHook, attach_each};
use crate::nn::{ParameterEntry, ParameterTable, placeholder};

/// The alignment of a view in bytes on devices other than the CPU; CUDA requires the most.
const VIEW_BYTES: usize = 512;

/// The path of an FP8 weight, and its quantizer.
pub(super) type NamedWeight = (String, Arc<dyn WeightQuantizer>);

/// The quantizers of the FP8 weights of a module, by path.
pub(super) type Quantizers = BTreeMap<String, Arc<dyn WeightQuantizer>>;

/// Lays out the parameters of a module that are trained, or those that are frozen, which need no masters; `quantizers`
/// has those of the weights that are gathered in FP8. Collective: call on all ranks.
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
    let info = |(entry, (shape, built)): (&crate::nn::ParameterEntry, (Vec<usize>, DType))| {
        let model_dtype = config.precision.of(built);
        let path = entry.path.clone();
        if comm_dtype(built).is_none() {
            let dtype = format!("{built:?}");
            return Err(DataParallelError::Type { path, dtype });
        }
        let main_dtype = match model_dtype {
            dtype if frozen => dtype,
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        Ok(ParameterInfo {
            quantizer: quantizers.remove(&path),
            path,
            shape,
            model_dtype,
            main_dtype,
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
        check: GradientCheck::new(&layout, config, &device),
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

/// With `fp8_param_gather`, checks that some stage has FP8 weights. Collective: call on all ranks of the
/// pipeline.
pub(super) fn check_quantizers(
    quantizers: &Quantizers,
    groups: &ParallelContext,
    config: &DataParallelConfig,
) -> Result<(), DataParallelError> {
    if !config.fp8_param_gather {
        return Ok(());
    }
    // A stage without FP8 weights is fine where another one has some.
    let own = quantizers.len() as i64;
    if groups.pipeline().all_reduce_scalar(own, ReduceOp::Sum)? == 0 {
        return Err(DataParallelConfigError::NoFp8Weights.into());
    }
    Ok(())
}

/// The quantizers of the weights that are gathered in FP8: none without `fp8_param_gather`.
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

/// The ranks over which the gradients of a grid are summed.
pub(super) fn data_ranks(groups: &ParallelContext, grid: Grid) -> usize {
    groups.mesh_rank().among(grid, grid.data_axes()).size
}

/// The dtype in which a parameter is gathered.
fn gather_dtype(parameter: &ParameterInfo) -> comm::DType {
    match &parameter.quantizer {
        Some(quantizer) if quantizer.has_one_scale() => comm::DType::U8,
        _ => comm_dtype(parameter.model_dtype).unwrap_or(comm::DType::F32),
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
    let size = |(parameter, entry): (&ParameterInfo, &'_ crate::nn::ParameterEntry)| {
        let matrix = parameter.shape.first_chunk::<2>();
        let quantized = parameter.quantizer.as_deref().zip(matrix);
        ParameterSize {
            elements: parameter.shape.iter().product(),
            parameter: gather_dtype(parameter),
            gradient: comm_dtype(parameter.main_dtype).unwrap_or(comm::DType::F32),
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

/// Where the parameters of a module are kept, in its order.
pub(super) struct Stores<'a> {
    entries: Zip<slice::Iter<'a, ParameterEntry>, slice::Iter<'a, bool>>,
    buffers: &'a Arc<ParamAndGradBuffers>,
    /// The numbers of the next one that is trained, and of the next frozen one.
    next: [usize; 2],
}

/// The next parameter of a module.
struct StoredParameter<'a> {
    entry: &'a ParameterEntry,
    /// Whether the module itself holds the value and its forwards update it.
    is_running: bool,
    index: usize,
    store: Store<'a>,
}

/// Where a parameter is kept.
enum Store<'a> {
    Trained(&'a Arc<ParamAndGradBuffers>),
    Frozen(&'a Arc<FrozenParameters>),
}

impl<'a> Stores<'a> {
    /// `whole` has all parameters. `running` marks the parameters that are running states.
    pub fn new(
        whole: &'a ParameterTable,
        running: &'a [bool],
        buffers: &'a Arc<ParamAndGradBuffers>,
    ) -> Self {
        Self {
            entries: whole.entries().iter().zip(running),
            buffers,
            next: [0; 2],
        }
    }

    fn next(&mut self) -> StoredParameter<'a> {
        let Some((entry, is_running)) = self.entries.next() else {
            unreachable!("the table has all parameters of the module")
        };
        let frozen = self.buffers.frozen.as_ref();
        let store = match frozen.filter(|_| entry.frozen) {
            Some(frozen) => Store::Frozen(frozen),
            None => Store::Trained(self.buffers),
        };
        let next = &mut self.next[usize::from(entry.frozen)];
        *next += 1;
        StoredParameter {
            entry,
            is_running: *is_running,
            index: *next - 1,
            store,
        }
    }
}

impl StoredParameter<'_> {
    fn info(&self) -> &ParameterInfo {
        let plan = match self.store {
            Store::Trained(buffers) => &*buffers.plan,
            Store::Frozen(frozen) => frozen.plan(),
        };
        &plan.parameters[self.index]
    }

    /// Sets it on this rank.
    fn write<const D: usize>(&self, value: Tensor<D>) {
        let len = value.shape().num_elements();
        let value = value.reshape([len]).cast(self.info().main_dtype);
        match self.store {
            Store::Trained(buffers) => buffers.write(self.index, &value),
            Store::Frozen(frozen) => frozen.write(self.index, &value),
        }
    }

    fn hook(&self) -> ParameterHook {
        match self.store {
            Store::Trained(buffers) => ParameterHook::new(self.index, buffers.clone()),
            Store::Frozen(frozen) => ParameterHook::frozen(self.index, frozen.clone()),
        }
    }
}

/// Moves the parameters of a module into the buffers, and attaches a hook to each. Values are broadcast from
/// the first rank that holds a parameter. The module keeps a placeholder of each parameter's shape, which
/// takes no memory, and its running states. Collective: call on all ranks of the stage.
pub(super) fn move_parameters<M: Module>(
    module: M,
    groups: &ParallelContext,
    stores: Stores<'_>,
) -> Result<M, DataParallelError> {
    let mut mover = ParameterMover {
        stores,
        groups,
        hooks: VecDeque::new(),
        error: None,
    };
    let module = module.map(&mut mover);
    if let Some(error) = mover.error {
        return Err(error);
    }
    let mut hooks = mover.hooks;
    Ok(attach_each(module.no_grad(), move || {
        match hooks.pop_front() {
            Some(hook) => hook,
            None => unreachable!("each parameter was moved"),
        }
    }))
}

struct ParameterMover<'a> {
    stores: Stores<'a>,
    groups: &'a ParallelContext,
    /// The hooks of the parameters that were moved.
    hooks: VecDeque<ParameterHook>,
    error: Option<DataParallelError>,
}

impl ModuleMapper for ParameterMover<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let parameter = self.stores.next();
        let entry = parameter.entry;
        self.hooks.push_back(parameter.hook());
        param.map(|tensor| {
            let tensor = without_autodiff(tensor);
            let (shape, device, dtype) = (tensor.dims(), tensor.device(), tensor.dtype());
            let options = (&device, parameter.info().model_dtype);
            if self.error.is_some() {
                return placeholder(shape, options);
            }
            let holders = self.groups.group(entry.grid, entry.replicated_axes());
            let value = holders.and_then(|holders| match holders.size() {
                1 => Ok(tensor),
                _ => holders
                    .broadcast(to_buffer(tensor), 0)
                    .map(|buffer| from_buffer(buffer, shape, &device, dtype)),
            });
            match value {
                Ok(value) => {
                    parameter.write(value.clone());
                    if parameter.is_running {
                        return Tensor::from_inner(value.cast(parameter.info().model_dtype));
                    }
                }
                Err(error) => {
                    self.error = Some(DataParallelError::Broadcast {
                        path: entry.path.clone(),
                        error: Box::new(error),
                    });
                }
            }
            placeholder(shape, options)
        })
    }
}

fn without_autodiff<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if tensor.is_autodiff() {
        tensor.inner()
    } else {
        tensor
    }
}

/// Sets the parameters of a module to values in the order of the table.
pub(super) struct ParameterFiller<V>(pub V);

impl<V: Iterator<Item = Tensor<1>>> ModuleMapper for ParameterFiller<V> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, base) = (param.id, param.base());
        match self.0.next() {
            Some(value) => Param::initialized(id, value.reshape(base.dims())),
            None => unreachable!("the table has all parameters of the module"),
        }
    }
}

/// Copies the parameters of a module without hooks into the buffers, but not its running states.
pub(super) struct ParameterLoader<'a>(pub Stores<'a>);

impl ModuleVisitor for ParameterLoader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let parameter = self.0.next();
        if !parameter.is_running {
            parameter.write(without_autodiff(param.base()));
        }
    }
}

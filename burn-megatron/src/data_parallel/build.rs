//! A module goes into flat buffers, and comes back out of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use super::axes::Axes;
use super::blocks::block_of;
use super::config::{DataParallelConfig, DataParallelConfigError};
use super::error::DataParallelError;
use super::layout::{BucketRules, BufferLayout, ParameterSize};
use super::memory::ZeroStage;
use super::plan::{Plan, Shape, wire};
use super::quantized;
use super::store::Store;
use super::usage::Usage;
use crate::collective::{from_buffer, to_buffer};
use crate::comm::{self, Buffer, BufferPool, CommError, Groups, ReduceOp};
use crate::nn::door::{Door, GradientSink};
use crate::nn::fp8::WeightQuantizer;
use crate::nn::{ParameterTable, Placement, placeholder};

/// Bytes at which a view must start on a device that is not the CPU; CUDA asks for the most.
const VIEW_BYTES: usize = 512;

/// An 8-bit weight by its path, and how it is quantised.
pub(super) type NamedWeight = (String, Arc<dyn WeightQuantizer>);

/// How the 8-bit weights of a module are quantised, by their paths.
pub(super) type Quantizers = BTreeMap<String, Arc<dyn WeightQuantizer>>;

/// Lays out the parameters of a module, of which `quantizers` has those that are gathered in 8 bits; every
/// rank must come.
pub(super) fn plan<M: Module>(
    module: &M,
    table: &ParameterTable,
    groups: &Groups,
    config: &DataParallelConfig,
    mut quantizers: Quantizers,
) -> Result<Plan, DataParallelError> {
    let ranks = groups.data().size();
    config.check(ranks)?;
    let mut found = Found::default();
    module.visit(&mut found);
    let device = found.device.unwrap_or_else(Device::flex);
    let shape = |(entry, (shape, own)): (&crate::nn::ParameterEntry, (Vec<usize>, DType))| {
        let model = config.precision.of(own);
        let path = entry.path.clone();
        if wire(own).is_none() {
            let dtype = format!("{own:?}");
            return Err(DataParallelError::Type { path, dtype });
        }
        let main = match model {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        Ok(Shape {
            quantizer: quantizers.remove(&path),
            path,
            shape,
            model,
            main,
        })
    };
    let parameters = table.entries().iter().zip(found.parameters);
    let parameters = parameters.map(shape).collect::<Result<Vec<_>, _>>()?;
    let align = match parameters
        .iter()
        .map(gathered)
        .min_by_key(|of| of.size_of())
    {
        Some(dtype) if device != Device::flex() => BucketRules::alignment(VIEW_BYTES, dtype)?,
        _ => BucketRules::sharded(ranks).align,
    };
    let rules = BucketRules {
        size: match (config.zero_stage, config.bucket_size) {
            // A block is gathered as a whole, and so it is summed.
            (ZeroStage::Parameters, None) => None,
            (_, size) => Some(size.unwrap_or_else(|| BucketRules::default_size(ranks))),
        },
        align,
        pad_for_bandwidth: config.pad_buckets,
        ..BucketRules::sharded(ranks)
    };
    let sizes = sizes(&parameters, table, config.zero_stage, &device);
    let layout = BufferLayout::new(&sizes, &rules)?;
    tracing::debug!("{layout}");
    let pool = groups.data().pool().cloned();
    Ok(Plan {
        layout,
        parameters,
        axes: Axes::new(groups, config.shard_ranks(ranks))?,
        tensor: groups.tensor().clone(),
        config: config.clone(),
        device,
        pool: pool.unwrap_or_else(|| Arc::new(BufferPool::new())),
        usage: Usage::default(),
    })
}

/// Checks that some rank has weights to be gathered in 8 bits where they are; every rank must come.
pub(super) fn check_quantizers(
    quantizers: &Quantizers,
    groups: &Groups,
    config: &DataParallelConfig,
) -> Result<(), DataParallelError> {
    if !config.fp8_param_gather {
        return Ok(());
    }
    // A stage may have no 8-bit weights where others have some.
    let own = Buffer::from(vec![quantizers.len() as i64]);
    let all = groups.pipeline().all_reduce(own, ReduceOp::Sum)?;
    match super::i64s(all) == [0] {
        true => Err(DataParallelConfigError::NoFp8Weights.into()),
        false => Ok(()),
    }
}

/// How the weights become 8 bits that are to be gathered so, if any are.
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
        entry.is_some_and(|entry| entry.shape.len() == 2)
    };
    match quantizers.keys().find(|path| !is_matrix(path)) {
        Some(path) => Err(DataParallelConfigError::NoSuchWeight { path: path.clone() }.into()),
        None => Ok(quantizers),
    }
}

/// The type in which a parameter is gathered.
fn gathered(parameter: &Shape) -> comm::DType {
    match &parameter.quantizer {
        Some(quantizer) if quantizer.has_one_scale() => comm::DType::U8,
        _ => wire(parameter.model).unwrap_or(comm::DType::F32),
    }
}

fn sizes(
    parameters: &[Shape],
    table: &ParameterTable,
    stage: ZeroStage,
    device: &Device,
) -> Vec<ParameterSize> {
    let mut parts: Vec<(usize, &str)> = vec![];
    let all = parameters.iter().zip(table.entries());
    let size = |(parameter, entry): (&Shape, &'_ crate::nn::ParameterEntry)| {
        let matrix = parameter.shape.first_chunk::<2>();
        let quantized = parameter.quantizer.as_deref().zip(matrix);
        ParameterSize {
            elements: parameter.shape.iter().product(),
            parameter: gathered(parameter),
            gradient: wire(parameter.main).unwrap_or(comm::DType::F32),
            quantized_bytes: quantized.map(|(how, matrix)| quantized::bytes(how, *matrix, device)),
            expert: false,
            shared: entry.at_both_ends,
            part: 0,
        }
    };
    let mut sizes: Vec<_> = all.clone().map(size).collect();
    for (size, (parameter, entry)) in sizes.iter_mut().zip(all) {
        let block = match stage {
            ZeroStage::Parameters => block_of(&parameter.path),
            _ => "",
        };
        let part = (entry.stage, block);
        size.part = match parts.iter().position(|other| *other == part) {
            Some(known) => known,
            None => {
                parts.push(part);
                parts.len() - 1
            }
        };
    }
    sizes
}

#[derive(Default)]
struct Found {
    parameters: Vec<(Vec<usize>, DType)>,
    device: Option<Device>,
}

impl ModuleVisitor for Found {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        self.device.get_or_insert_with(|| value.device().inner());
        self.parameters.push((value.dims().to_vec(), value.dtype()));
    }
}

/// Moves the parameters of a module into the store, equal on the ranks that hold the same, and
/// attaches the doors. What stays in the module has the shape of each parameter and no memory.
pub(super) fn detach<M: Module>(
    module: M,
    table: &ParameterTable,
    groups: &Groups,
    store: &Arc<Store>,
) -> Result<M, CommError> {
    let mut detach = Detach {
        table,
        groups,
        store,
        next: 0,
        error: None,
    };
    let module = module.map(&mut detach);
    if let Some(error) = detach.error {
        return Err(error);
    }
    let sink: Arc<dyn GradientSink> = store.clone();
    Ok(module.apply_reparameterization(Attach { sink, next: 0 }))
}

struct Detach<'a> {
    table: &'a ParameterTable,
    groups: &'a Groups,
    store: &'a Store,
    next: usize,
    error: Option<CommError>,
}

impl ModuleMapper for Detach<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.next;
        self.next += 1;
        let holders = match self.table.entries()[index].placement {
            Placement::Replicated => self.groups.stage(),
            Placement::Split { .. } => self.groups.data(),
        };
        param.map(|tensor| {
            let tensor = plain(tensor);
            let (shape, device, dtype) = (tensor.dims(), tensor.device(), tensor.dtype());
            let options = (&device, self.store.plan.parameters[index].model);
            if self.error.is_some() {
                return placeholder(shape, options);
            }
            let value = match holders.size() {
                1 => Ok(tensor),
                _ => holders
                    .broadcast(to_buffer(tensor), 0)
                    .map(|buffer| from_buffer(buffer, shape, &device, dtype)),
            };
            match value {
                Ok(value) => self
                    .store
                    .parameters
                    .write(index, &main(value, self.store, index)),
                Err(error) => self.error = Some(error),
            }
            placeholder(shape, options)
        })
    }
}

/// The values of a parameter, flat and in its main type.
fn main<const D: usize>(value: Tensor<D>, store: &Store, index: usize) -> Tensor<1> {
    let len = value.shape().num_elements();
    value.reshape([len]).cast(store.plan.parameters[index].main)
}

fn plain<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.is_autodiff() {
        true => tensor.inner(),
        false => tensor,
    }
}

/// Attaches the doors, in the order of the table.
struct Attach {
    sink: Arc<dyn GradientSink>,
    next: usize,
}

impl Reparameterizer for Attach {
    type Reparam = Door;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Door>) {
        let door = Door::new(self.next, self.sink.clone());
        self.next += 1;
        (param.set_require_grad(false), Some(door))
    }
}

/// Puts values into a module, in the order of the table, and takes its doors away.
pub(super) struct Fill<V>(pub V);

impl<V: Iterator<Item = Tensor<1>>> ModuleMapper for Fill<V> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, base) = (param.id, param.base());
        match self.0.next() {
            Some(value) => Param::initialized(id, value.reshape(base.dims())),
            None => unreachable!("the table has all parameters of the module"),
        }
    }
}

/// Puts the parameters of a module without doors into a store.
pub(super) struct Load<'a> {
    pub store: &'a Store,
    pub next: usize,
}

impl ModuleVisitor for Load<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = main(plain(param.base()), self.store, self.next);
        self.store.parameters.write(self.next, &value);
        self.next += 1;
    }
}

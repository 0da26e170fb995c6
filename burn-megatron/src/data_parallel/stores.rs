//! Functions that move the parameters of a module into flat buffers and back.

use std::collections::VecDeque;
use std::iter::Zip;
use std::slice;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::error::DataParallelError;
use super::frozen::FrozenParameters;
use super::param_and_grad_buffers::ParamAndGradBuffers;
use super::sharding_plan::ParameterInfo;
use crate::collective::{from_buffer, to_buffer};
use crate::comm::ParallelContext;
use crate::nn::hook::{ParameterHook, attach_each};
use crate::nn::{ParameterEntry, ParameterTable, placeholder};

/// The storage of the parameters of a module, in its order.
pub(super) struct Stores<'a> {
    entries: Zip<slice::Iter<'a, ParameterEntry>, slice::Iter<'a, bool>>,
    buffers: &'a Arc<ParamAndGradBuffers>,
    /// The indices of the next trained and of the next frozen parameter.
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

/// The storage of a parameter.
enum Store<'a> {
    Trained(&'a Arc<ParamAndGradBuffers>),
    Frozen(&'a Arc<FrozenParameters>),
}

impl<'a> Stores<'a> {
    /// Creates the stores. `whole` contains all parameters, and `running` marks the running states among them.
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
            Store::Trained(buffers) => &buffers.plan,
            Store::Frozen(frozen) => &frozen.plan,
        };
        &plan.parameters[self.index]
    }

    /// Sets the parameter on this rank.
    fn write<const D: usize>(&self, value: Tensor<D>) {
        let len = value.shape().num_elements();
        let value = value.reshape([len]).cast(self.info().main_dtype);
        let mut buckets = match self.store {
            Store::Trained(buffers) => buffers.parameters(),
            Store::Frozen(frozen) => frozen.buckets(),
        };
        buckets.write(self.index, &value);
    }

    fn hook(&self) -> ParameterHook {
        match self.store {
            Store::Trained(buffers) => ParameterHook::new(self.index, buffers.clone()),
            Store::Frozen(frozen) => ParameterHook::frozen(self.index, frozen.clone()),
        }
    }
}

/// Moves the parameters of a module into the buffers, and attaches a hook to each parameter. The values are broadcast
/// from the first rank that holds a parameter. The module keeps its running states. Each parameter is replaced with a
/// placeholder of the same shape, which uses no memory. Collective: call on all ranks of the stage.
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
            let tensor = tensor.inner();
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

/// Sets the parameters of a module to values in the order of the parameter table.
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
            parameter.write(param.base().inner());
        }
    }
}

//! Running states: tensors that the forwards of a module update, such as the mean of Burn's `BatchNorm`.
//!
//! A visitor passes a running state like a parameter, but a running state has no gradient, and no hook can supply its
//! value. So it is listed with the [frozen](super::frozen) parameters, whose buckets have the value for checkpoints.
//! The module keeps a value that the forwards of its rank update. Where the ranks need one value, it is the mean over the
//! data axis. Updates are linear, so the mean of all updates so far is the mean of each update.

use std::slice;

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, FloatDType, Tensor};

use super::DistributedDataParallel;
use crate::collective::start_all_reduce;
use crate::comm::ReduceOp;

/// Returns, for each parameter in the order of the module, whether it is a running state.
///
/// This is found by their ids: a parameter takes the id that a mapper gives it, and a running state keeps its own id.
pub fn running_states<M: Module>(module: &M) -> Vec<bool> {
    let mut ids = Ids {
        given: ParamId::new(),
        are_kept: vec![],
    };
    let module = module.clone().map(&mut ids);
    module.visit(&mut ids);
    ids.are_kept
}

struct Ids {
    given: ParamId,
    are_kept: Vec<bool>,
}

impl ModuleMapper for Ids {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.id = self.given;
        param
    }
}

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.are_kept.push(param.id != self.given);
    }
}

/// Returns a module with separate running states, without autodiff. The clones of a module share a running state and its
/// lock, and the ranks of a process have clones. A rank that holds the lock while it waits for another rank would wait
/// forever.
pub(super) fn unshared<M: Module>(module: &M) -> M {
    // A validation snapshot is the copy that Burn has. It turns off training flags, such as the flag of dropout.
    module.valid().map(&mut TrainingFlags)
}

struct TrainingFlags;

impl ModuleMapper for TrainingFlags {
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        flag.train()
    }
}

impl<M: Module> DistributedDataParallel<M> {
    fn has_running_states(&self) -> bool {
        self.running.contains(&true)
    }

    /// Sets the running states of the module, and their values for checkpoints, to the mean over the data axis.
    /// Collective: call on all ranks of the data axis.
    pub(crate) fn average_running_states(&self) {
        let data = &self.buffers.plan.dense.data;
        let mean = |state: Tensor<1>| {
            let dtype = state.dtype();
            let wide = match dtype {
                DType::F64 => FloatDType::F64,
                _ => FloatDType::F32,
            };
            let sum = start_all_reduce(state.cast(wide), ReduceOp::Sum, data).wait();
            sum.div_scalar(data.size() as f64)
                .cast(FloatDType::from(dtype))
        };
        let states = self.running_states();
        self.set_running_states(states.into_iter().map(mean).collect());
    }

    /// The running states of this rank, flat, in the order of the module.
    pub fn running_states(&self) -> Vec<Tensor<1>> {
        if !self.has_running_states() {
            return vec![];
        }
        // A snapshot has the last update too.
        self.running_states_of(&self.module.valid())
    }

    /// The running states of another module with the same parameters.
    pub(super) fn running_states_of(&self, module: &M) -> Vec<Tensor<1>> {
        let mut collector = StateCollector {
            running: self.running.iter(),
            states: vec![],
        };
        module.visit(&mut collector);
        collector.states
    }

    /// Sets the running states of this rank, and their values for checkpoints.
    pub(super) fn set_running_states(&self, states: Vec<Tensor<1>>) {
        let Some(frozen) = self
            .buffers
            .frozen
            .as_ref()
            .filter(|_| self.has_running_states())
        else {
            return;
        };
        for (number, state) in self.running_numbers().zip(&states) {
            frozen.write(number, state);
        }
        // A snapshot discards pending updates of the states. The clone shares the states with the module.
        drop(self.module.valid());
        self.module.clone().map(&mut StateSetter {
            running: self.running.iter(),
            states: states.into_iter(),
        });
    }

    /// Sets the running states of this rank to their values for checkpoints. Collective: call on all ranks of the data
    /// axis.
    pub(super) fn restore_running_states(&self) {
        if self.has_running_states() {
            let frozen = self.gathered_frozen_parameters();
            let states = self.running_numbers().map(|number| frozen[number].clone());
            self.set_running_states(states.collect());
        }
    }

    /// The numbers of the running states among the frozen parameters.
    fn running_numbers(&self) -> impl Iterator<Item = usize> {
        let entries = self.whole.entries().iter().zip(&self.running);
        let frozen = entries.filter(|(entry, _)| entry.frozen);
        let numbered = frozen.map(|(_, is_running)| *is_running).enumerate();
        numbered.filter_map(|(number, is_running)| is_running.then_some(number))
    }
}

struct StateCollector<'a> {
    running: slice::Iter<'a, bool>,
    states: Vec<Tensor<1>>,
}

impl ModuleVisitor for StateCollector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.running.next() == Some(&true) {
            let state = param.base();
            let state = if state.is_autodiff() {
                state.inner()
            } else {
                state
            };
            let elements = state.shape().num_elements();
            self.states.push(state.reshape([elements]));
        }
    }
}

struct StateSetter<'a, V> {
    running: slice::Iter<'a, bool>,
    states: V,
}

impl<V: Iterator<Item = Tensor<1>>> ModuleMapper for StateSetter<'_, V> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.running.next() != Some(&true) {
            return param;
        }
        let shape = param.lazy_shape();
        match self.states.next() {
            Some(state) => Param::initialized(param.id, Tensor::from_inner(state).reshape(shape)),
            None => unreachable!("there is a value for each running state"),
        }
    }
}

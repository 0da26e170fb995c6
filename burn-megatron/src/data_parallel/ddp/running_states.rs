//! The [running states](crate::data_parallel::running_state) of a wrapped module.

use std::slice;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{FloatDType, Tensor};

use super::DistributedDataParallel;
use crate::collective::start_all_reduce;
use crate::comm::ReduceOp;
use crate::data_parallel::sharding_plan::main_dtype;

impl<M: Module> DistributedDataParallel<M> {
    fn has_running_states(&self) -> bool {
        self.running.contains(&true)
    }

    /// Sets the running states of the module, and their values for checkpoints, to their mean over the data
    /// axis. Collective: call on all ranks of the data axis.
    pub(crate) fn average_running_states(&self) {
        let data = &self.buffers.plan.dense.data;
        let mean = |state: Tensor<1>| {
            let dtype = state.dtype();
            let wide = state.cast(FloatDType::from(main_dtype(dtype)));
            let sum = start_all_reduce(wide, ReduceOp::Sum, data).wait();
            sum.div_scalar(data.size() as f64)
                .cast(FloatDType::from(dtype))
        };
        let states = self.running_states();
        self.set_running_states(states.into_iter().map(mean).collect());
    }

    /// Returns the running states of this rank, such as the running means of batch norms, as flat tensors in the order
    /// of the module.
    pub fn running_states(&self) -> Vec<Tensor<1>> {
        if !self.has_running_states() {
            return vec![];
        }
        // A snapshot also contains the last update.
        self.running_states_of(&self.module.valid())
    }

    /// Returns the running states of another module with the same parameters.
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
        let frozen = self.buffers.frozen.as_ref();
        let Some(frozen) = frozen.filter(|_| self.has_running_states()) else {
            return;
        };
        for (number, state) in self.running_numbers().zip(&states) {
            frozen.buckets().write(number, state);
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

    /// Returns the indices of the running states among the frozen parameters.
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
            let state = param.base().inner();
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

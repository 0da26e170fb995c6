//! The optimizer over a table of parameters: AdamW, the global gradient norm, clipping.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamW, AdamWConfig as BurnAdamWConfig, Optimizer as _};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::data_parallel::{DistributedDataParallel, Gradients};
use crate::nn::ParameterTable;

mod norm;
#[cfg(test)]
mod tests;

pub use norm::{all_finite, global_norm};

/// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled decay of weights; norms and biases have none (see
    /// [`ParameterEntry::decay`](crate::nn::ParameterEntry::decay)).
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        }
    }
}

/// AdamW with one state per parameter of the table, on this rank's part of it.
pub struct ParallelAdamW {
    decayed: AdamW,
    plain: AdamW,
    states: Vec<Option<<AdamW as burn::optim::Optimizer>::State<1>>>,
}

impl ParallelAdamW {
    /// The optimizer for the parameters of a model.
    pub fn new<M: Module>(config: &AdamWConfig, ddp: &DistributedDataParallel<M>) -> Self {
        let build = |decay: f64| {
            BurnAdamWConfig::new()
                .with_beta_1(config.beta1 as f32)
                .with_beta_2(config.beta2 as f32)
                .with_epsilon(config.epsilon as f32)
                .with_weight_decay(decay as f32)
                .build()
        };
        let states = ddp.table().entries().iter().map(|_| None).collect();
        Self {
            decayed: build(config.weight_decay),
            plain: build(0.0),
            states,
        }
    }

    /// Updates the module with the reduced gradients of one step.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        let table = ddp.table().clone();
        let gradients = gradients.flat.into_iter();
        let mut update = Update {
            optimizer: self,
            learning_rate,
            table: &table,
            gradients,
            next: 0,
        };
        ddp.update(|module| module.map(&mut update));
    }
}

/// Steps one parameter after the other, in the order of the table.
struct Update<'a, G> {
    optimizer: &'a mut ParallelAdamW,
    learning_rate: f64,
    table: &'a ParameterTable,
    gradients: G,
    next: usize,
}

impl<G: Iterator<Item = Tensor<1>>> ModuleMapper for Update<'_, G> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.gradients.next() else {
            return param;
        };
        let index = self.next;
        self.next += 1;
        let _span = tracing::trace_span!("update", parameter = index).entered();
        let optimizer = match self.table.entries()[index].decay {
            true => &self.optimizer.decayed,
            false => &self.optimizer.plain,
        };
        let state = self.optimizer.states[index].take();
        let (learning_rate, states) = (self.learning_rate, &mut self.optimizer.states);
        param.map(|value| {
            let shape = value.dims();
            let flat = value.reshape([gradient.dims()[0]]);
            let (flat, state) = optimizer.step(learning_rate, flat, gradient, state);
            states[index] = state;
            flat.reshape(shape)
        })
    }
}

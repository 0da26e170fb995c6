//! AdamW with one state per parameter of the table, on this rank's part of it.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamW, AdamWConfig as BurnAdamWConfig, Optimizer as _};
use burn::tensor::Tensor;
use burn_megatron_kernels::adamw::{AdamWBuffers, AdamWStep, Decay, adamw};

use super::AdamWConfig;
use crate::choice::Operation;
use crate::data_parallel::{DistributedDataParallel, Gradients};

/// AdamW over the parameters of a model.
///
/// Fused, each parameter is read and written once, and the division by tokens and the clipping of
/// its gradient happen on the way. Otherwise it is Burn's AdamW.
pub struct ParallelAdamW {
    config: AdamWConfig,
    /// By parameter, whether it decays.
    decays: Vec<bool>,
    form: Form,
}

enum Form {
    Fused(Vec<Option<Moments>>),
    Burn(Box<BurnForm>),
}

/// What AdamW remembers of a parameter.
struct Moments {
    first: Tensor<1>,
    second: Tensor<1>,
    steps: u64,
}

struct BurnForm {
    decayed: AdamW,
    plain: AdamW,
    states: Vec<Option<<AdamW as burn::optim::Optimizer>::State<1>>>,
}

impl ParallelAdamW {
    /// The optimizer for the parameters of a model.
    pub fn new<M: Module>(config: &AdamWConfig, ddp: &DistributedDataParallel<M>) -> Self {
        let decays: Vec<_> = ddp.table().entries().iter().map(|e| e.decay).collect();
        let form = match ddp.kernels().is_fused(Operation::Optimizer) {
            true => Form::Fused(decays.iter().map(|_| None).collect()),
            false => Form::Burn(Box::new(BurnForm::new(config, decays.len()))),
        };
        Self {
            config: *config,
            decays,
            form,
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
        let mut update = Update {
            optimizer: self,
            learning_rate,
            factor: gradients.factor(),
            sums: gradients.into_sums().into_iter(),
            next: 0,
        };
        ddp.update(|module| module.map(&mut update));
    }

    /// One parameter, flat, and the sum that times `factor` is its gradient.
    fn step_one(
        &mut self,
        index: usize,
        learning_rate: f64,
        value: Tensor<1>,
        sum: Tensor<1>,
        factor: f64,
    ) -> Tensor<1> {
        let states = match &mut self.form {
            Form::Fused(states) => states,
            Form::Burn(form) => {
                let decay = self.decays[index];
                return form.step(index, decay, learning_rate, value, sum.mul_scalar(factor));
            }
        };
        let moments = states[index].take().unwrap_or_else(|| Moments {
            first: value.zeros_like(),
            second: value.zeros_like(),
            steps: 0,
        });
        let step = AdamWStep {
            rate: learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            weight_decay: self.config.weight_decay,
            step: moments.steps + 1,
            gradient_scale: factor,
        };
        let buffers = AdamWBuffers {
            master: value,
            first: moments.first,
            second: moments.second,
        };
        let decay = match self.decays[index] {
            true => Decay::All,
            false => Decay::None,
        };
        let (buffers, _) = adamw(buffers, sum, &decay, &step, None);
        states[index] = Some(Moments {
            first: buffers.first,
            second: buffers.second,
            steps: step.step,
        });
        buffers.master
    }
}

impl BurnForm {
    fn new(config: &AdamWConfig, parameters: usize) -> Self {
        let build = |decay: f64| {
            BurnAdamWConfig::new()
                .with_beta_1(config.beta1 as f32)
                .with_beta_2(config.beta2 as f32)
                .with_epsilon(config.epsilon as f32)
                .with_weight_decay(decay as f32)
                .build()
        };
        Self {
            decayed: build(config.weight_decay),
            plain: build(0.0),
            states: (0..parameters).map(|_| None).collect(),
        }
    }

    fn step(
        &mut self,
        index: usize,
        decay: bool,
        learning_rate: f64,
        value: Tensor<1>,
        gradient: Tensor<1>,
    ) -> Tensor<1> {
        let optimizer = if decay { &self.decayed } else { &self.plain };
        let state = self.states[index].take();
        let (value, state) = optimizer.step(learning_rate, value, gradient, state);
        self.states[index] = state;
        value
    }
}

/// Steps one parameter after the other, in the order of the table.
struct Update<'a, G> {
    optimizer: &'a mut ParallelAdamW,
    learning_rate: f64,
    factor: f64,
    sums: G,
    next: usize,
}

impl<G: Iterator<Item = Tensor<1>>> ModuleMapper for Update<'_, G> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(sum) = self.sums.next() else {
            return param;
        };
        let index = self.next;
        self.next += 1;
        let _span = tracing::trace_span!("update", parameter = index).entered();
        let (rate, factor) = (self.learning_rate, self.factor);
        param.map(|value| {
            let shape = value.dims();
            let flat = value.reshape([sum.dims()[0]]);
            let flat = self.optimizer.step_one(index, rate, flat, sum, factor);
            flat.reshape(shape)
        })
    }
}

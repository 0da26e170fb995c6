//! A chain of linear layers, one per stage, under every schedule.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};

use super::*;
use crate::comm::World;
use crate::nn::hook::{Deferred, GradientSink, WeightGradientFn, attach_hooks};
use crate::nn::{InputLayout, LinearOperands, linear};
use crate::pipeline::schedule::{ScheduleConfig, ScheduleKind, generate};
use timing::Clock;

mod faults;
mod gradients;
mod memory;
mod order;
mod p2p;
mod timing;

const WIDTH: usize = 3;

type RankError = Box<dyn std::error::Error + Send + Sync>;

/// The events on one rank, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    /// A weight gradient of a stage has arrived.
    Weight(usize),
    /// The backward of a stage and a micro-batch is over.
    Backward(usize, usize),
    /// The reduction of a stage's gradients may start.
    Reduce(usize),
}

/// Sums the weight gradients of a rank.
#[derive(Default)]
struct Sums {
    /// The stage and the gradient of each parameter of the rank.
    weights: Mutex<Vec<(usize, Option<Tensor<2>>)>>,
    deferred: Mutex<Option<Vec<Deferred>>>,
    seen: Mutex<Vec<Seen>>,
    /// Advances by one for each weight gradient.
    clock: Arc<Clock>,
}

impl GradientSink for Sums {
    fn expect(&self, _index: usize) {}

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        self.clock.compute();
        let gradient = gradient.reshape([WIDTH, WIDTH]);
        let (stage, sum) = &mut self.weights.lock().unwrap()[index];
        self.seen.lock().unwrap().push(Seen::Weight(*stage));
        *sum = Some(match sum.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        match &mut *self.deferred.lock().unwrap() {
            Some(deferred) => deferred.push((index, gradient)),
            None => self.accumulate(index, gradient(None)),
        }
    }
}

impl DeferringSink for Sums {
    fn set_deferring(&self, deferring: bool) {
        *self.deferred.lock().unwrap() = deferring.then(Vec::new);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        let mut deferred = self.deferred.lock().unwrap();
        deferred.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn close_stage(&self, stage: usize) {
        self.seen.lock().unwrap().push(Seen::Reduce(stage));
    }
}

/// The weights of one rank.
#[derive(Module, Debug)]
struct Weights {
    of_stages: Vec<Param<Tensor<2>>>,
}

/// The stages of one rank: `y = x w`, followed by the sum of squares in the last stage.
struct Chain {
    stages: usize,
    own: Vec<usize>,
    weights: Weights,
    sums: Arc<Sums>,
    inputs: Vec<[usize; 2]>,
    /// The gradients of the first stage's input, with the micro-batch.
    input_gradients: Mutex<Vec<(usize, Tensor<3>)>>,
    leaves: Mutex<Vec<(usize, Tensor<3>)>>,
    /// Advances by one for each forward and each input gradient.
    clock: Arc<Clock>,
}

impl Chain {
    /// Creates the stages of `rank`. `inputs` are the `[batch, seq]` of the micro-batches.
    fn new(schedule: &Schedule, rank: usize, inputs: &[[usize; 2]]) -> Self {
        let own = schedule.stages_of(rank);
        let clock = Arc::new(Clock::default());
        let sums = Arc::new(Sums {
            weights: Mutex::new(own.iter().map(|stage| (*stage, None)).collect()),
            clock: clock.clone(),
            ..Sums::default()
        });
        let of_stages = own
            .iter()
            .map(|stage| Param::from_tensor(weight(*stage, &Device::flex())))
            .collect();
        let weights = attach_hooks(Weights { of_stages }.no_grad(), sums.clone());
        Self {
            stages: schedule.stages(),
            own,
            weights,
            sums,
            inputs: inputs.to_vec(),
            input_gradients: Mutex::default(),
            leaves: Mutex::default(),
            clock,
        }
    }

    fn weight_of(&self, stage: usize) -> &Param<Tensor<2>> {
        let index = self.own.iter().position(|own| *own == stage).unwrap();
        &self.weights.of_stages[index]
    }

    /// Returns the gradients of this rank, by stage.
    fn gradients(&self) -> Vec<(usize, Vec<f64>)> {
        let sums = self.sums.weights.lock().unwrap();
        let gradient = |(stage, sum): &(usize, Option<Tensor<2>>)| {
            (*stage, values(sum.clone().expect("a gradient arrived")))
        };
        sums.iter().map(gradient).collect()
    }
}

impl Stage for Chain {
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        self.inputs[micro_batch]
    }

    fn forward(&self, stage: usize, micro_batch: usize, given: Option<Tensor<3>>) -> StageOutput {
        self.clock.compute();
        let x = given.unwrap_or_else(|| {
            let x = input(micro_batch, self.inputs[micro_batch]);
            let x = Tensor::from_inner(x).require_grad();
            self.leaves.lock().unwrap().push((micro_batch, x.clone()));
            x
        });
        let weight = self.weight_of(stage);
        let operands = LinearOperands::new(weight, InputLayout::Local, true);
        let y = linear(x.clone(), operands);
        if stage + 1 == self.stages {
            StageOutput::Loss((y.clone() * y).sum())
        } else {
            StageOutput::Activation(y)
        }
    }

    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        self.clock.compute();
        let backward = Seen::Backward(stage, micro_batch);
        self.sums.seen.lock().unwrap().push(backward);
        if stage == 0 {
            let mut kept = self.leaves.lock().unwrap();
            let at = kept.iter().position(|(of, _)| *of == micro_batch).unwrap();
            let (_, leaf) = kept.remove(at);
            let gradient = leaf.grad_remove(leaves).unwrap();
            let mut gradients = self.input_gradients.lock().unwrap();
            gradients.push((micro_batch, gradient));
        }
    }
}

/// Returns numbers between -1 and 1 that differ between seeds.
fn numbers<const D: usize>(seed: usize, shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let number = |i: usize| ((seed * 131 + i * 17) as f64).sin();
    let data = TensorData::new((0..len).map(number).collect::<Vec<f64>>(), shape);
    Tensor::from_data(data, (device, DType::F64))
}

fn weight(stage: usize, device: &Device) -> Tensor<2> {
    numbers(stage + 1, [WIDTH, WIDTH], device)
}

fn input(micro_batch: usize, [batch, seq]: [usize; 2]) -> Tensor<3> {
    numbers(100 + micro_batch, [batch, seq, WIDTH], &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().try_into_vec().unwrap()
}

/// Returns micro-batches of one size.
fn even(micro_batches: usize) -> Vec<[usize; 2]> {
    vec![[2, 4]; micro_batches]
}

fn schedule(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> Schedule {
    generate(&ScheduleConfig::new(kind, ranks, micro_batches)).unwrap()
}

/// Runs a chain on the ranks of a world, with communicators wrapped by `over`.
fn run_over<T: Send>(
    schedule: &Schedule,
    inputs: &[[usize; 2]],
    over: impl Fn(Comm, &Chain) -> Comm + Sync,
    look: impl Fn(EngineRun, &Chain) -> T + Sync,
) -> Vec<T> {
    let world = World::threads(schedule.ranks()).unwrap();
    let results = world.run(|rank| {
        let chain = Chain::new(schedule, rank.rank(), inputs);
        let comm = over(rank.communicator(), &chain);
        let sums = chain.sums.clone();
        let engine = Engine::new(schedule, &comm, &Device::flex(), sums.clone())?;
        comm.barrier()?;
        Ok::<_, RankError>(look(engine.run(&chain)?, &chain))
    });
    results.unwrap()
}

fn run<T: Send>(
    schedule: &Schedule,
    inputs: &[[usize; 2]],
    look: impl Fn(EngineRun, &Chain) -> T + Sync,
) -> Vec<T> {
    run_over(schedule, inputs, |comm, _| comm, look)
}

/// Returns the gradients of all stages.
fn weight_gradients(schedule: &Schedule, inputs: &[[usize; 2]]) -> Vec<Vec<f64>> {
    by_stage(run(schedule, inputs, |_, chain| chain.gradients()))
}

fn by_stage(ranks: Vec<Vec<(usize, Vec<f64>)>>) -> Vec<Vec<f64>> {
    let mut all: Vec<_> = ranks.into_iter().flatten().collect();
    all.sort_by_key(|(stage, _)| *stage);
    all.into_iter().map(|(_, gradient)| gradient).collect()
}

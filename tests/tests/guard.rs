//! Tests that a guard of a training loop names the fault on every rank.

use std::cell::Cell;

use burn::module::{Module, Param, RunningState};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron_verify::{Guard, GuardConfig, GuardError};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    scale: Param<Tensor<1>>,
    seen: RunningState<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || {
            let layer = LinearConfig::new(3, 3).with_bias(false).init(device);
            Linear {
                weight: Param::from_tensor(Tensor::ones([3, 3], device)),
                ..layer
            }
        };
        Self {
            layers: vec![linear(), linear()],
            scale: Param::from_tensor(Tensor::ones([1], device)),
            seen: RunningState::new(Tensor::zeros([1], device)),
        }
    }

    fn gradients(&self, input: f32) -> GradientsParams {
        let device = self.scale.val().device();
        let x = Tensor::<2>::full([2, 3], input, &device);
        let y = self
            .layers
            .iter()
            .fold(x, |x, layer| layer.forward(x).tanh());
        let loss = (y * self.scale.val().unsqueeze()).sum();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

const EVERY_STEP: GuardConfig = GuardConfig {
    repeat_every: 1,
    replicas_every: 1,
};

/// Runs three steps on two ranks. The functions give the input of a rank in a step, its second computation, and the
/// parameters after the step.
fn run(
    input: fn(usize, u64) -> f32,
    again: fn(usize, u64) -> f32,
    changed: fn(usize, u64, Net) -> Net,
) -> Vec<Option<GuardError>> {
    let ranks = World::threads(2).unwrap().run(|rank| {
        let context = ParallelContext::new(&ParallelConfig::new().with_data(2), &rank)?;
        let device = Device::flex().autodiff();
        let mut net = Net::new(&device);
        let mut optimizer = SgdConfig::new().init();
        let mut guard = Guard::of_ranks(EVERY_STEP, context.data().clone());
        let number = context.data().rank();
        for step in 1..=3 {
            let gradients = net.gradients(input(number, step));
            let second = || net.gradients(again(number, step));
            if let Err(error) = guard.gradients(&net, &gradients, second) {
                return Ok(Some(error));
            }
            net = optimizer.step(0.1, net, gradients);
            net = changed(number, step, net);
            if let Err(error) = guard.stepped(&net) {
                return Ok(Some(error));
            }
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(None)
    });
    ranks.unwrap()
}

fn same(_: usize, _: u64) -> f32 {
    0.5
}

#[track_caller]
fn assert_all(found: Vec<Option<GuardError>>, message: &str) {
    for error in found {
        let error = error.expect("an error on every rank").to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn replicas_of_a_sound_loop_pass() {
    let found = run(same, same, |_, _, net| net);
    assert!(found.iter().all(Option::is_none), "{found:?}");
}

#[test]
fn a_gradient_that_is_not_finite_is_named_with_its_rank() {
    let nan = |rank, step| {
        if (rank, step) == (1, 2) {
            f32::NAN
        } else {
            0.5
        }
    };
    assert_all(
        run(nan, same, |_, _, net| net),
        "step 2: the gradient of layers.0.weight on rank 1 is not finite",
    );
}

#[test]
fn a_step_that_cannot_be_repeated_is_named() {
    let other = |rank, step| {
        if (rank, step) == (0, 3) {
            0.5000001
        } else {
            0.5
        }
    };
    assert_all(
        run(same, other, |_, _, net| net),
        "step 3: computed twice, the gradient of layers.0.weight on rank 0 differs",
    );
}

#[test]
fn replicas_that_differ_are_named() {
    let changed = |rank, step, mut net: Net| {
        if (rank, step) == (1, 2) {
            net.scale = net
                .scale
                .map(|scale| scale.add_scalar(1e-6).detach().require_grad());
        }
        net
    };
    assert_all(
        run(same, same, changed),
        "step 2: scale differs between rank 0 and rank 1",
    );
}

/// Each rank has its own batches.
#[test]
fn running_states_may_differ() {
    let changed = |rank: usize, _, net: Net| {
        let device = net.scale.val().device();
        net.seen.update(Tensor::full([1], rank as f32, &device));
        net.seen.value_sync();
        net
    };
    let found = run(same, same, changed);
    assert!(found.iter().all(Option::is_none), "{found:?}");
}

/// A second computation runs when it is due, and never without the setting.
#[test]
fn steps_are_repeated_as_often_as_asked() {
    let net = Net::new(&Device::flex().autodiff());
    for (every, expected) in [(0, 0), (1, 6), (2, 3), (4, 1)] {
        let config = GuardConfig {
            repeat_every: every,
            ..GuardConfig::default()
        };
        let (mut guard, count) = (Guard::new(config), Cell::new(0));
        for _ in 0..6 {
            let again = || {
                count.set(count.get() + 1);
                net.gradients(0.5)
            };
            guard.gradients(&net, &net.gradients(0.5), again).unwrap();
            guard.stepped(&net).unwrap();
        }
        assert_eq!(count.get(), expected, "{every}");
    }
}

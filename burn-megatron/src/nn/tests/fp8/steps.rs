//! Tests the end of a step. With delayed scaling, only training adds magnitudes to the histories.

use burn::module::Module;
use burn::tensor::Tensor;

use super::super::over;
use super::*;
use crate::nn::hook::with_anchor;
use crate::testing::warnings;

const IN: usize = 24;
const OUT: usize = 16;

fn delayed(history: usize) -> Fp8Config {
    let settings = DelayedScaling {
        history,
        ..DelayedScaling::default()
    };
    config((Fp8Recipe::Delayed(settings), Fp8Format::Hybrid))
}

struct Setup {
    fp8: Fp8,
    layer: Fp8Linear,
}

fn setup(config: &Fp8Config) -> Setup {
    let fp8 = Fp8::new(config).unwrap();
    let mut layer = Fp8LinearConfig::new(IN, OUT)
        .with_bias(false)
        .init("layer", &fp8, &autodiff())
        .unwrap();
    layer.weight = parameter(spread([IN, OUT], 1.0));
    Setup { fp8, layer }
}

impl Setup {
    /// Runs the forward pass and the backward pass of some samples.
    fn train(&self, x: Tensor<3>, dy: Tensor<3>) {
        let x = leaf(x);
        let _ = backward(self.layer.forward(x), dy);
    }

    fn end_step(&self) -> Fp8LayerState {
        self.fp8.end_step_single_rank().unwrap();
        self.fp8.states()["layer"].clone()
    }
}

fn amax(x: &Tensor<3>) -> f32 {
    floats(x.clone())
        .into_iter()
        .fold(0.0, |amax, x| amax.max(x.abs()))
}

fn batch(phase: f64) -> [Tensor<3>; 2] {
    [spread([8, 3, IN], phase), spread([8, 3, OUT], phase + 0.3)]
}

#[test]
fn a_step_has_the_largest_magnitudes_of_all_its_micro_batches() {
    let [x, dy] = batch(0.5);
    let states = [1, 2, 8].map(|micro_batches| {
        let setup = setup(&delayed(2));
        for (x, dy) in x
            .clone()
            .chunk(micro_batches, 0)
            .into_iter()
            .zip(dy.clone().chunk(micro_batches, 0))
        {
            setup.train(x, dy);
        }
        setup.end_step()
    });
    assert!(states.iter().all(|state| *state == states[0]));
    assert_eq!(states[0].input.history, [amax(&x).to_bits(), 0]);
    assert_eq!(states[0].input.scale, (448.0 / amax(&x)).to_bits());
    assert_eq!(states[0].gradient.history, [amax(&dy).to_bits(), 0]);
    assert_eq!(states[0].gradient.scale, (57344.0 / amax(&dy)).to_bits());
    assert_ne!(states[0].weight.history[0], 0);
}

#[test]
fn scales_do_not_change_in_a_step() {
    let [x, dy] = batch(0.5);
    let setup = setup(&delayed(4));
    let run = || floats(setup.layer.forward(leaf(x.clone())).inner());
    let first = run();
    setup.train(x.clone().mul_scalar(100.0), dy.clone());
    assert_eq!(bits(&run()), bits(&first));
    setup.end_step();
    assert_ne!(bits(&run()), bits(&first));
}

#[test]
fn a_step_without_a_tensor_leaves_the_history_alone() {
    let [x, dy] = batch(0.5);
    let setup = setup(&delayed(4));
    setup.train(x.clone(), dy);
    let before = setup.end_step();
    assert_eq!(setup.end_step(), before);
    // A forward pass without its backward pass has no gradient.
    let _ = setup.layer.forward(leaf(x));
    let after = setup.end_step();
    assert_ne!(after.input, before.input);
    assert_eq!(after.gradient, before.gradient);
}

/// The slots of the new layer are added to buffers that are in use.
#[test]
fn a_layer_that_is_built_in_a_step_changes_no_other() {
    let states = [false, true].map(|adds| {
        let setup = setup(&delayed(2));
        let [x, dy] = batch(0.5);
        setup.train(x.clone(), dy.clone());
        let first = setup.end_step();
        setup.train(x.clone().mul_scalar(2.0), dy.clone());
        if adds {
            let config = Fp8LinearConfig::new(IN, OUT);
            config.init("second", &setup.fp8, &autodiff()).unwrap();
        }
        setup.train(x, dy);
        [first, setup.end_step()]
    });
    assert_eq!(states[0], states[1]);
    assert_eq!(states[0][1].input.history[1], states[0][0].input.history[0]);
}

#[test]
fn an_evaluation_leaves_no_trace() {
    let [x, dy] = batch(0.5);
    let large = x.clone().mul_scalar(1e3);
    let with = setup(&delayed(2));
    let without = setup(&delayed(2));
    for setup in [&with, &without] {
        setup.train(x.clone(), dy.clone());
        setup.end_step();
        setup.train(x.clone(), dy.clone());
    }
    let scales = floats(with.layer.forward(leaf(large.clone())).inner());
    with.fp8.measure(true);
    let frozen = with.layer.clone().no_grad();
    for evaluated in [
        with.layer.valid().forward(large.clone()),
        frozen.forward(Tensor::from_inner(large)).inner(),
    ] {
        // The evaluation uses the scales of training.
        assert_eq!(bits(&floats(evaluated)), bits(&scales));
    }
    let scaled = without.layer.forward(leaf(x.clone().mul_scalar(1e3)));
    assert_eq!(bits(&floats(scaled.inner())), bits(&scales));
    assert!(with.fp8.report().is_empty());
    assert_eq!(with.end_step(), without.end_step());
}

/// The first pass of a recomputed block is not recorded, and the second pass computes the same values.
#[test]
fn what_is_recomputed_counts_once() {
    let [x, dy] = batch(0.5);
    let outcomes = [false, true].map(|recomputed| {
        let setup = setup(&Fp8Config {
            // The counts show how often a tensor was recorded.
            saturation_limit: 0.0,
            ..delayed(3)
        });
        let (layer, x) = (setup.layer.clone().no_grad(), leaf(x.clone()));
        let y = with_anchor(&x, || {
            if recomputed {
                recompute(x.clone(), move |x| layer.forward(x))
            } else {
                layer.forward(x.clone())
            }
        });
        let gradients = backward(y, dy.clone());
        let dx = floats(x.grad(&gradients).unwrap());
        let warnings = warnings(|| drop(setup.end_step()));
        (bits(&dx), setup.fp8.states(), warnings)
    });
    assert!(!outcomes[0].2.is_empty());
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn a_value_that_is_no_number_holds_the_scale() {
    let [x, dy] = batch(0.5);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let most_recent = Fp8Recipe::Delayed(DelayedScaling {
            amax: AmaxAlgorithm::MostRecent,
            ..DelayedScaling::default()
        });
        let setup = setup(&config((most_recent, Fp8Format::Hybrid)));
        setup.train(x.clone(), dy.clone());
        let before = setup.end_step();
        // Only the first of two micro-batches has the bad value.
        let mask = Tensor::<3>::zeros_like(&x).slice_fill([0..1, 0..1, 0..1], bad);
        setup.train(x.clone() + mask, dy.clone());
        setup.train(x.clone(), dy.clone());
        let after = setup.end_step();
        assert_eq!(after.input.scale, before.input.scale);
        assert_eq!(after.input.history[0], bad.abs().to_bits());
        setup.train(x.clone().mul_scalar(2.0), dy.clone());
        let later = setup.end_step();
        let half = f32::from_bits(before.input.scale) / 2.0;
        assert_eq!(f32::from_bits(later.input.scale), half);
    }
}

/// One rank has a NaN, one rank has larger values, and one rank has no tensor.
#[test]
fn all_ranks_of_a_stage_have_one_scale() {
    let config = crate::mesh::ParallelConfig::new().with_data(3);
    let states = crate::comm::World::threads(3).unwrap().run(|rank| {
        let groups = ParallelContext::new(&config, &rank)?;
        let setup = setup(&delayed(4));
        let [x, dy] = batch(0.5);
        let mut states = vec![];
        for step in 0..3 {
            match (groups.rank(), step) {
                (0, _) => setup.train(x.clone(), dy.clone()),
                (1, 2) => setup.train(x.clone().mul_scalar(f64::NAN), dy.clone()),
                (1, _) => setup.train(x.clone().mul_scalar(2.0), dy.clone()),
                _ => {}
            }
            setup.fp8.end_step(&groups).unwrap();
            states.push(setup.fp8.states()["layer"].clone());
        }
        Ok::<_, crate::comm::ParallelContextError>(states)
    });
    let states = states.unwrap();
    assert!(states.iter().all(|rank| *rank == states[0]));
    let [x, _] = batch(0.5);
    assert_eq!(states[0][0].input.history[0], (2.0 * amax(&x)).to_bits());
    assert!(f32::from_bits(states[0][2].input.history[0]).is_nan());
    assert_eq!(states[0][2].input.scale, states[0][1].input.scale);
}

/// There is no communication over the data axis: the micro-batch of each rank has its own scale.
#[test]
fn current_scaling_is_of_one_micro_batch() {
    let current = config((
        Fp8Recipe::Current(CurrentScaling::default()),
        Fp8Format::Hybrid,
    ));
    let scale = |x: Tensor<3>, dy: Tensor<3>| {
        let setup = setup(&current);
        setup.fp8.measure(true);
        setup.train(x, dy);
        setup.fp8.report()
    };
    let [x, dy] = batch(0.5);
    let larger = x.clone().mul_scalar(2.0);
    let config = crate::mesh::ParallelConfig::new().with_data(2);
    let reports = crate::comm::World::threads(2).unwrap().run(|rank| {
        let groups = ParallelContext::new(&config, &rank)?;
        let x = if groups.rank() == 0 {
            x.clone()
        } else {
            larger.clone()
        };
        Ok::<_, crate::comm::ParallelContextError>(scale(x, dy.clone()))
    });
    let expected = [
        scale(x.clone(), dy.clone()),
        scale(larger.clone(), dy.clone()),
    ];
    assert_eq!(reports.unwrap(), expected);
    assert_eq!(expected[0][0].scale.0, 448.0 / amax(&x));
    assert_eq!(expected[1][0].scale.0, 224.0 / amax(&x));
}

#[test]
fn a_report_has_the_first_use_of_each_tensor() {
    let setup = setup(&delayed(2));
    let [x, dy] = batch(0.5);
    setup.train(x.clone(), dy.clone());
    assert!(setup.fp8.report().is_empty(), "measuring is off");
    setup.fp8.measure(true);
    setup.train(x.clone(), dy.clone());
    setup.train(x.clone().mul_scalar(3.0), dy.clone());
    let report = setup.fp8.report();
    let operands: Vec<_> = report.iter().map(|of| of.operand).collect();
    assert_eq!(operands, Operand::ALL);
    assert_eq!(report[0].amax, f64::from(amax(&x)));
    assert_eq!(
        (report[0].recipe, &report[0].path[..]),
        ("delayed", "layer")
    );
    assert_eq!(report[0].scale, (1.0, 1.0));
    let beyond = floats(x.clone()).iter().filter(|x| x.abs() > 448.0).count();
    assert_eq!(report[0].saturated, beyond as f64 / (8 * 3 * IN) as f64);
    assert!(beyond > 0 && report[0].flushed > 0.0 && report[0].snr_db > 0.0);
    // The next step starts again.
    setup.end_step();
    setup.train(x.clone().mul_scalar(3.0), dy.clone());
    assert_eq!(
        setup.fp8.report()[0].amax,
        f64::from(amax(&x.clone().mul_scalar(3.0)))
    );
    setup.fp8.measure(false);
    setup.end_step();
    setup.train(x.clone(), dy);
    assert_eq!(
        setup.fp8.report()[0].amax,
        f64::from(amax(&x.mul_scalar(3.0)))
    );
}

#[test]
fn saturation_beyond_the_limit_is_told_once() {
    let setup = setup(&Fp8Config {
        saturation_limit: 0.25,
        ..delayed(1)
    });
    // One value in three exceeds 448 with a scale of 1.
    let x = |large: f64| {
        let one = Tensor::<3>::ones([1, 1, IN], &burn::tensor::Device::flex());
        one.slice_fill([0..1, 0..1, 0..IN / 3], large)
    };
    let dy = Tensor::<3>::ones([1, 1, OUT], &burn::tensor::Device::flex());
    let step = |large: f64| {
        warnings(|| {
            setup.train(x(large), dy.clone());
            setup.end_step();
        })
    };
    let warned = step(1e3);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(
        warned[0].contains("33.33 % of the input of layer"),
        "{warned:?}"
    );
    assert!(warned[0].contains("limit of 25.00 %"), "{warned:?}");
    // Values still exceed the range, because the largest value has grown by the same factor.
    assert!(step(1e6).is_empty());
    // Values fall below the limit, and then exceed it again.
    assert!(step(1e6).is_empty());
    assert!(step(1.0).is_empty());
    assert_eq!(step(1e6).len(), 1);
}

#[test]
fn one_rank_of_a_stage_warns() {
    let [x, dy] = batch(0.5);
    let warned = over(2, |groups| {
        let setup = setup(&Fp8Config {
            saturation_limit: 0.0,
            ..delayed(1)
        });
        setup.train(x.clone(), dy.clone());
        warnings(|| setup.fp8.end_step(&groups).unwrap())
    });
    assert!(!warned[0].is_empty() && warned[1].is_empty(), "{warned:?}");
}

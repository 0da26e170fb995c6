//! Tests the FP8 layer for modules without a device mesh.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::tensor::{Device, Tensor};

use super::*;
use crate::comm::World;
use crate::data_parallel::DistributedDataParallel;
use crate::mesh::ParallelConfig;

fn off() -> Fp8 {
    Fp8::new(&Fp8Config::default()).unwrap()
}

fn current() -> Fp8Config {
    config((
        Fp8Recipe::Current(CurrentScaling::default()),
        Fp8Format::Hybrid,
    ))
}

#[test]
fn without_a_recipe_it_is_burns_layer() {
    let device = autodiff();
    let linear = LinearConfig::new(6, 4).init(&device);
    let ours = Fp8Linear::from_linear(linear.clone(), "layer", &off()).unwrap();
    assert!(ours.fp8().is_none());
    fn both<const D: usize>(linear: &Linear, ours: &Fp8Linear, shape: [usize; D]) {
        let x: Tensor<D> = Tensor::from_inner(spread(shape, 0.5));
        let (found, expected) = (ours.forward(x.clone()), linear.forward(x));
        assert_eq!(found.dims(), expected.dims());
        super::super::assert_near(
            "output",
            &values(found.inner()),
            &values(expected.inner()),
            1e-6,
        );
    }
    both(&linear, &ours, [6]);
    both(&linear, &ours, [3, 6]);
    both(&linear, &ours, [2, 3, 6]);
    both(&linear, &ours, [2, 2, 3, 6]);
}

#[test]
fn every_rank_of_tensor_gives_the_same_rows() {
    let fp8 = Fp8::new(&current()).unwrap();
    let layer = Fp8LinearConfig::new(6, 4)
        .init("layer", &fp8, &autodiff())
        .unwrap();
    let x: Tensor<3> = spread([2, 3, 6], 0.5);
    let rows = floats(layer.forward(x.clone().reshape([6, 6])));
    assert_eq!(bits(&floats(layer.forward(x.clone()))), bits(&rows));
    assert_eq!(
        bits(&floats(layer.forward(x.reshape([1, 2, 3, 6])))),
        bits(&rows)
    );
    let nothing = layer.forward(Tensor::<2>::zeros([0, 6], &Device::flex()));
    assert_eq!(nothing.dims(), [0, 4]);
}

#[test]
fn it_reads_the_records_of_burns_layer() {
    for layout in [LinearLayout::Row, LinearLayout::Col] {
        let device = autodiff();
        let linear = LinearConfig::new(6, 4).with_layout(layout).init(&device);
        let fp8 = Fp8::new(&current()).unwrap();
        let other = LinearConfig::new(6, 4).with_layout(layout).init(&device);
        let ours = Fp8Linear::from_linear(other, "layer", &fp8).unwrap();
        let ours = ours.load_record(linear.clone().into_record());
        let weights = [ours.weight.val(), linear.weight.val()].map(floats);
        assert_eq!(weights[0], weights[1]);
        let back = LinearConfig::new(6, 4).with_layout(layout).init(&device);
        let back = back.load_record(ours.into_record());
        assert_eq!(floats(back.weight.val()), weights[1]);
    }
}

#[test]
fn mxfp8_needs_no_settings() {
    let device = autodiff();
    let layer = Fp8LinearConfig::new(40, 8)
        .with_bias(false)
        .init_mxfp8(&device);
    assert_eq!(layer.fp8().unwrap().recipe(), &Fp8Recipe::MxFp8);
    assert!(layer.bias.is_none());
    let fp8 = Fp8::new(&config((Fp8Recipe::MxFp8, Fp8Format::Hybrid))).unwrap();
    let config = Fp8LinearConfig::new(40, 8).with_bias(false);
    let mut known = config.init("layer", &fp8, &device).unwrap();
    known.weight = layer.weight.clone();
    let x: Tensor<2> = spread([3, 40], 0.5);
    assert_eq!(
        bits(&floats(layer.forward(x.clone()))),
        bits(&floats(known.forward(x)))
    );
    assert_eq!(layer.into_record().len(), 1);
}

#[test]
fn an_input_of_another_width_is_told() {
    let layer = Fp8LinearConfig::new(6, 4).init_mxfp8(&Device::flex());
    let x = Tensor::<2>::ones([3, 5], &Device::flex());
    let panic = catch_unwind(AssertUnwindSafe(|| layer.forward(x))).unwrap_err();
    let panic = panic.downcast_ref::<String>().unwrap();
    insta::assert_snapshot!(
        panic,
        @"invalid input [3, 5] of a linear layer from 6 to 4 features: expected [.., 6]"
    );
}

#[derive(Module, Debug)]
struct Mlp {
    up: Fp8Linear,
    down: Fp8Linear,
}

impl Mlp {
    fn new(fp8: &Fp8) -> Self {
        let device = Device::flex();
        let linear = |path, [inputs, outputs]: [usize; 2], phase| {
            let config = Fp8LinearConfig::new(inputs, outputs).with_bias(false);
            let mut layer = config.init(path, fp8, &device).unwrap();
            layer.weight = Param::from_tensor(spread([inputs, outputs], phase));
            layer
        };
        Self {
            up: linear("up", [8, 16], 1.0),
            down: linear("down", [16, 8], 2.0),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.up.forward(x))
    }
}

/// Two data ranks with one micro-batch each equal one rank with two micro-batches.
#[test]
fn it_trains_over_data_ranks() {
    for recipe in recipes() {
        let run = |ranks: usize| {
            let layout = ParallelConfig::new().with_data(ranks);
            let all = World::threads(ranks).unwrap().run(|rank| {
                let groups = ParallelContext::new(&layout, &rank)?;
                let fp8 = Fp8::new(&config(recipe)).unwrap();
                let model = ParallelModule::replicated(Mlp::new(&fp8)).with_fp8(&fp8);
                let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
                let mut outcomes = vec![];
                for step in 0..3 {
                    let own = (0..2).filter(|micro_batch| micro_batch % ranks == groups.rank());
                    for micro_batch in own {
                        let x = spread([3, 8], f64::from(10 * step + micro_batch as i32));
                        let x: Tensor<2> = Tensor::from_inner(x);
                        let loss = ddp.forward(&autodiff(), |model| model.forward(x).sum());
                        ddp.backward(loss);
                    }
                    let gradients = ddp.reduce(1).unwrap();
                    ddp.fp8().end_step(&groups).unwrap();
                    let whole = ddp.full_gradients(&gradients);
                    let tokens = gradients.tokens as f64;
                    let whole = whole.into_iter().map(|x| x.mul_scalar(tokens));
                    outcomes.push(whole.flat_map(floats).collect::<Vec<_>>());
                }
                Ok::<_, crate::comm::ParallelContextError>((outcomes, ddp.fp8().states()))
            });
            all.unwrap()
        };
        let one = run(1).remove(0);
        assert_eq!(one.1.is_empty(), !matches!(recipe.0, Fp8Recipe::Delayed(_)));
        for (gradients, states) in run(2) {
            assert_eq!(states, one.1, "{recipe:?}");
            for (found, expected) in gradients.iter().zip(&one.0) {
                // The values were multiplied and divided by different numbers of tokens, so they differ by rounding.
                let [found, expected] =
                    [found, expected].map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
                super::super::assert_near(&format!("{recipe:?}"), &found, &expected, 1e-6);
            }
        }
    }
}

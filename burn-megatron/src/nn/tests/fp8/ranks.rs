//! Tests that several tensor ranks have the same scales as one rank, and that their results are bit-identical if the
//! sums are exact.

use burn::tensor::Tensor;

use super::super::{assemble, over};
use super::*;
use crate::nn::{Placement, SEQUENCE_DIM};

const SHAPE: [usize; 2] = [2, 8];
/// The width of both layers. The parts of 4 ranks are complete blocks.
const WIDTH: usize = 512;
const NARROW: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Column,
    Row,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    kind: Kind,
    sequence_parallel: bool,
    exact: bool,
}

impl Setting {
    /// Returns the numbers of input and output features.
    fn sizes(self) -> [usize; 2] {
        match self.kind {
            Kind::Column => [NARROW, WIDTH],
            Kind::Row => [WIDTH, NARROW],
        }
    }

    /// Returns the placements of input, weight, bias and output.
    fn placements(self, ranks: usize) -> [Placement; 4] {
        let between = if self.sequence_parallel {
            Placement::split(SEQUENCE_DIM, SHAPE[1], ranks)
        } else {
            Placement::Replicated
        };
        match self.kind {
            Kind::Column => [
                between,
                Placement::split(1, WIDTH, ranks),
                Placement::split(0, WIDTH, ranks),
                Placement::split(2, WIDTH, ranks),
            ],
            Kind::Row => [
                Placement::split(2, WIDTH, ranks),
                Placement::split(0, WIDTH, ranks),
                Placement::Replicated,
                between,
            ],
        }
    }

    fn values<const D: usize>(self, shape: [usize; D], phase: f64) -> Tensor<D> {
        if self.exact {
            integers(shape, phase)
        } else {
            spread(shape, phase)
        }
    }
}

/// The results of a rank: output, gradients of input, weight and bias, and the scales of one step and of the
/// next.
struct Outcome {
    parts: [Vec<f32>; 4],
    reports: Vec<OperandReport>,
    states: std::collections::BTreeMap<String, Fp8LayerState>,
}

fn run(groups: &ParallelContext, setting: Setting, fp8: &Fp8Config) -> Outcome {
    let place = groups.place();
    let [inputs, outputs] = setting.sizes();
    let [of_x, of_weight, of_bias, of_y] = setting.placements(place.size);
    let part_of =
        |x: Tensor<3>, of: &Placement| part(x.cast(DType::F64), of, place).cast(DType::F32);
    let x = leaf(part_of(
        setting.values([SHAPE[0], SHAPE[1], inputs], 0.5),
        &of_x,
    ));
    let weight = setting.values([inputs, outputs], 1.0).cast(DType::F64);
    let weight = parameter(part(weight, &of_weight, place).cast(DType::F32));
    let bias = setting.values([outputs], 2.0).cast(DType::F64);
    let bias = parameter(part(bias, &of_bias, place).cast(DType::F32));
    let dy = part_of(setting.values([SHAPE[0], SHAPE[1], outputs], 3.0), &of_y);

    let builder = builder(groups, fp8);
    let layer_builder = builder
        .child("layer")
        .with_sequence_parallel(setting.sequence_parallel);
    let (y, weight, bias) = match setting.kind {
        Kind::Column => {
            let mut layer = ColumnParallelLinearConfig::new(inputs, outputs)
                .init(&layer_builder)
                .unwrap();
            let (weight, bias) = (weight, Some(bias));
            layer.weight = weight;
            layer.bias = bias;
            builder.fp8().measure(true);
            (layer.forward(x.clone()), layer.weight, layer.bias)
        }
        Kind::Row => {
            let mut layer = RowParallelLinearConfig::new(inputs, outputs)
                .init(&layer_builder)
                .unwrap();
            let (weight, bias) = (weight, Some(bias));
            layer.weight = weight;
            layer.bias = bias;
            builder.fp8().measure(true);
            (layer.forward(x.clone()), layer.weight, layer.bias)
        }
    };
    let gradients = backward(y.clone(), dy);
    builder.fp8().end_step(groups).unwrap();
    Outcome {
        parts: [
            floats(y.inner()),
            floats(x.grad(&gradients).unwrap()),
            floats(weight.val().grad(&gradients).unwrap()),
            floats(bias.unwrap().val().grad(&gradients).unwrap()),
        ],
        reports: builder.fp8().report(),
        states: builder.fp8().states(),
    }
}

/// Assembles the parts of all ranks.
fn whole(setting: Setting, mut all: Vec<Outcome>) -> [Vec<f32>; 4] {
    let [of_x, of_weight, of_bias, of_y] = setting.placements(all.len());
    let [inputs, outputs] = setting.sizes();
    if setting.sequence_parallel && setting.kind == Kind::Row {
        // Each rank has processed a part of the sequence.
        let sum = |i: usize| all.iter().map(|rank| rank.parts[3][i]).sum();
        let sum: Vec<f32> = (0..outputs).map(sum).collect();
        all.iter_mut().for_each(|rank| rank.parts[3] = sum.clone());
    }
    let shapes = [
        vec![SHAPE[0], SHAPE[1], outputs],
        vec![SHAPE[0], SHAPE[1], inputs],
        vec![inputs, outputs],
        vec![outputs],
    ];
    let placements = [of_y, of_x, of_weight, of_bias];
    std::array::from_fn(|i| {
        let parts: Vec<_> = all.iter().map(|rank| rank.parts[i].clone()).collect();
        if placements[i] == Placement::Replicated {
            assert!(parts.iter().all(|part| bits(part) == bits(&parts[0])));
        }
        assemble(&placements[i], &shapes[i], &parts)
    })
}

fn settings(exact: bool) -> Vec<Setting> {
    let kinds = [Kind::Column, Kind::Row];
    let setting = |kind| {
        [false, true].map(|sequence_parallel| Setting {
            kind,
            sequence_parallel,
            exact,
        })
    };
    kinds.into_iter().flat_map(setting).collect()
}

#[test]
fn exact_sums_are_those_of_one_rank() {
    for setting in settings(true) {
        for recipe in recipes() {
            let fp8 = config(recipe);
            let one = whole(setting, over(1, |groups| run(&groups, setting, &fp8)));
            assert!(one.iter().flatten().all(|x| x.is_finite()));
            for ranks in [2, 4] {
                let many = whole(setting, over(ranks, |groups| run(&groups, setting, &fp8)));
                for (many, one) in many.iter().zip(&one) {
                    let what = format!("{setting:?}, {recipe:?}, {ranks}");
                    assert_eq!(bits(many), bits(one), "{what}");
                }
            }
        }
    }
}

#[test]
fn the_scales_are_those_of_one_rank() {
    for setting in settings(false) {
        for recipe in recipes() {
            let fp8 = config(recipe);
            let one = over(1, |groups| run(&groups, setting, &fp8)).remove(0);
            let scales = |outcome: &Outcome| -> Vec<_> {
                let scales = outcome.reports.iter().map(|of| (of.operand, of.scale));
                scales.collect()
            };
            assert_eq!(one.reports.len(), 3);
            for ranks in [2, 4] {
                let all = over(ranks, |groups| run(&groups, setting, &fp8));
                let what = format!("{setting:?}, {recipe:?}, {ranks}");
                for rank in &all {
                    assert_eq!(rank.states, one.states, "{what}");
                    if matches!(recipe.0, Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)) {
                        assert_eq!(scales(rank), scales(&one), "{what}");
                    }
                }
                // Each rank has some of the blocks. Together the ranks have the same blocks as one rank.
                for operand in 0..3 {
                    let of = |rank: &Outcome| rank.reports[operand].scale;
                    let low = all
                        .iter()
                        .map(|rank| of(rank).0)
                        .fold(f32::INFINITY, f32::min);
                    let high = all.iter().map(|rank| of(rank).1).fold(0.0, f32::max);
                    assert_eq!((low, high), of(&one), "{what}");
                }
            }
        }
    }
}

/// Each rank alone would have a different scale.
#[test]
fn the_parts_differ_in_their_magnitudes() {
    let setting = Setting {
        kind: Kind::Row,
        sequence_parallel: false,
        exact: false,
    };
    let current = config((
        Fp8Recipe::Current(CurrentScaling::default()),
        Fp8Format::Hybrid,
    ));
    let all = over(2, |groups| run(&groups, setting, &current));
    let amax = |operand: usize| all.iter().map(move |rank| rank.reports[operand].amax);
    for operand in [0, 1] {
        let (low, high) = (
            amax(operand).fold(f64::MAX, f64::min),
            amax(operand).fold(0.0, f64::max),
        );
        assert!(low < high, "operand {operand}");
    }
}

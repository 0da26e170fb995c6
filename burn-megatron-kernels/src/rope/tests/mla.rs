use proptest::prelude::*;

use super::*;
use crate::testing::{assert_gradients, compare, evaluate};

type Outputs = (Tensor<4>, Tensor<4>, Tensor<4>);

/// A call to [`rotate_mla`].
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    heads: usize,
    nope: usize,
    rotated: usize,
    value: usize,
    pairing: Pairing,
    each: bool,
}

const CASE: Case = Case {
    batch: 2,
    seq: 3,
    heads: 3,
    nope: 4,
    rotated: 6,
    value: 5,
    pairing: Pairing::Halves,
    each: false,
};

impl Case {
    fn inputs(&self) -> Vec<Input> {
        let Self {
            batch,
            seq,
            heads,
            nope,
            rotated,
            value,
            ..
        } = *self;
        vec![
            Input::wave([batch, seq, heads, nope + rotated], 0.1),
            Input::wave([batch, seq, heads, nope + value], 0.2),
            Input::wave([batch, seq, rotated], 0.4),
        ]
    }

    fn run(&self, fused: bool, leaves: &[Tensor<1>]) -> Outputs {
        let Self {
            batch,
            seq,
            heads,
            nope,
            rotated,
            value,
            ..
        } = *self;
        let q = leaves[0]
            .clone()
            .reshape([batch, seq, heads, nope + rotated]);
        let kv = leaves[1].clone().reshape([batch, seq, heads, nope + value]);
        let k_rope = leaves[2].clone().reshape([batch, seq, rotated]);
        let table = table(&q, rotated, seq + 5);
        let positions = if self.each {
            scattered(batch, seq, seq + 5, &q.device())
        } else {
            Positions::From(2)
        };
        let operation = if fused {
            rotate_mla
        } else {
            composed::rotate_mla
        };
        operation(q, kv, k_rope, nope, value, &table, &positions, self.pairing)
    }

    fn flat(&self, fused: bool, leaves: &[Tensor<1>]) -> Tensor<1> {
        let (q, k, v) = self.run(fused, leaves);
        Tensor::cat(vec![q.flatten(0, 3), k.flatten(0, 3), v.flatten(0, 3)], 0)
    }

    fn compare(&self) {
        compare(
            &format!("{self:?}"),
            &self.inputs(),
            |leaves| self.flat(true, leaves),
            |leaves| self.flat(false, leaves),
        );
    }
}

#[test]
fn queries_keys_and_values_agree_with_the_composition() {
    for pairing in [Pairing::Halves, Pairing::Interleaved] {
        for (heads, nope, rotated, value) in [
            (1, 1, 2, 1),
            (3, 4, 6, 5),
            (4, 8, 16, 8),
            (5, 32, 16, 24),
            (16, 128, 64, 128),
        ] {
            for each in [false, true] {
                Case {
                    heads,
                    nope,
                    rotated,
                    value,
                    pairing,
                    each,
                    ..CASE
                }
                .compare();
            }
        }
    }
}

#[test]
fn gradients_are_those_of_differences() {
    for pairing in [Pairing::Halves, Pairing::Interleaved] {
        let case = Case { pairing, ..CASE };
        assert_gradients("rope", &case.inputs(), |leaves| case.flat(true, leaves));
    }
}

/// The loss uses one output at a time, so that the backward pass of the other outputs does not run.
#[test]
fn each_output_has_its_gradients_alone() {
    let inputs = CASE.inputs();
    for (device, _) in devices() {
        for output in 0..3 {
            let one = |fused| {
                evaluate(&inputs, &device, DType::F32, DType::F32, &|leaves| {
                    let (q, k, v) = CASE.run(fused, leaves);
                    [q, k, v][output].clone().flatten(0, 3)
                })
            };
            let (ours, reference) = (one(true), one(false));
            let pairs = ours
                .gradients
                .iter()
                .flatten()
                .zip(reference.gradients.iter().flatten());
            for (ours, reference) in pairs {
                assert!(
                    (ours - reference).abs() < 1e-5,
                    "{output}: {ours} is not {reference}"
                );
            }
        }
    }
}

/// Only one input is tracked.
#[test]
fn untracked_inputs_are_constants() {
    for (device, _) in devices() {
        let device = device.autodiff();
        let leaf = |input: &Input| {
            let shape = [input.values.len()];
            let data = TensorData::new(input.values.clone(), shape).convert_dtype(DType::F32);
            Tensor::<1>::from_data(data, (&device, DType::F32))
        };
        for tracked in 0..3 {
            let mut leaves: Vec<_> = CASE.inputs().iter().map(leaf).collect();
            leaves[tracked] = leaves[tracked].clone().require_grad();
            let gradient = |fused| {
                let gradients = CASE.flat(fused, &leaves).sum().backward();
                leaves[tracked].grad(&gradients).unwrap()
            };
            let apart = (gradient(true) - gradient(false)).abs().max();
            assert!(apart.into_scalar::<f32>() < 1e-5, "input {tracked}");
        }
        // On a device without autodiff, no input is tracked.
        let leaves: Vec<_> = CASE
            .inputs()
            .iter()
            .map(|input| leaf(input).inner())
            .collect();
        let (ours, reference) = (CASE.flat(true, &leaves), CASE.flat(false, &leaves));
        let apart = (ours - reference).abs().max();
        assert!(apart.into_scalar::<f32>() < 1e-5);
    }
}

/// Megatron-LM's fused function moves even features to the front. This does not change the dot products of queries and
/// keys.
#[test]
fn products_do_not_depend_on_the_places_of_interleaved_features() {
    let case = Case {
        pairing: Pairing::Interleaved,
        ..CASE
    };
    let device = Device::flex();
    let mut leaves: Vec<Tensor<1>> = vec![];
    for input in case.inputs() {
        let shape = [input.values.len()];
        let data = TensorData::new(input.values, shape);
        leaves.push(Tensor::from_data(data, (&device, DType::F64)));
    }
    let product = |(q, k, _): Outputs| q.swap_dims(1, 2).matmul(k.swap_dims(1, 2).transpose());
    let kept = product(case.run(true, &leaves));
    // The even features come first, followed by the rotation of halves.
    let split = |x: Tensor<1>, width: usize, from: usize| {
        let x: Tensor<2> = x.reshape([-1, width as i32]);
        let order: Vec<i64> = (0..from)
            .chain((from..width).step_by(2))
            .chain((from + 1..width).step_by(2))
            .map(|i| i as i64)
            .collect();
        let order = Tensor::<1, Int>::from_data(order.as_slice(), &device);
        x.select(1, order).flatten::<1>(0, 1)
    };
    let moved = [
        split(leaves[0].clone(), 10, 4),
        leaves[1].clone(),
        split(leaves[2].clone(), 6, 0),
    ];
    let moved = product(CASE.run(true, &moved));
    let apart = (kept - moved).abs().max();
    assert!(apart.into_scalar::<f64>() < 1e-12);
}

#[test]
fn an_empty_batch_is_taken() {
    for (device, _) in devices() {
        let q = Tensor::<4>::zeros([0, 3, 2, 10], &device);
        let kv = Tensor::<4>::zeros([0, 3, 2, 9], &device);
        let shared = Tensor::<3>::zeros([0, 3, 6], &device);
        let table = table(&q, 6, 4);
        let (q, k, v) = rotate_mla(
            q,
            kv,
            shared,
            4,
            5,
            &table,
            &Positions::From(0),
            Pairing::Halves,
        );
        assert_eq!((q.dims(), k.dims()), ([0, 3, 2, 10], [0, 3, 2, 10]));
        assert_eq!(v.dims(), [0, 3, 2, 5]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn any_shape_agrees_with_the_composition(
        (batch, seq, heads) in (1usize..3, 1usize..4, 1usize..6),
        (nope, half, value) in (1usize..9, 1usize..9, 1usize..9),
        interleaved: bool,
        each: bool,
    ) {
        let pairing = [Pairing::Halves, Pairing::Interleaved][usize::from(interleaved)];
        Case { batch, seq, heads, nope, rotated: 2 * half, value, pairing, each }.compare();
    }
}

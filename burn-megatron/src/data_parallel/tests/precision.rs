//! Models that compute in 16 bits and are stepped in 32.

use burn::tensor::{DType, Int};

use super::guards::stage;
use super::*;
use crate::nn::{Init, Scope, VocabParallelEmbedding, Vocabulary};
use crate::optim::{AdamWConfig, ParallelAdamW};

fn half(precision: Precision, number: u8) -> DataParallelConfig {
    DataParallelConfig {
        precision,
        ..stage(number)
    }
}

fn wrapped(groups: &Groups, config: &DataParallelConfig) -> DistributedDataParallel<Pair> {
    let model = ParallelModule::replicated(pair(1.0, &Device::flex()));
    DistributedDataParallel::with(model, groups, config).unwrap()
}

#[test]
fn a_model_computes_in_16_bits_and_keeps_masters() {
    for (precision, dtype) in [(Precision::Bf16, DType::BF16), (Precision::F16, DType::F16)] {
        for number in 0..=3 {
            let mut ddp = wrapped(&Groups::single(), &half(precision, number));
            let loss = ddp.forward(&device(), |pair| {
                let first = pair.first.val();
                assert_eq!(first.dtype(), dtype);
                (first.sum() + pair.second.val().sum()).cast(DType::F32)
            });
            ddp.backward_last(loss);
            let gradients = ddp.reduce(1).unwrap();
            assert!(gradients.sums().all(|sum| sum.dtype() == DType::F32));
            let masters = ddp.parameters();
            assert!(masters.iter().all(|master| master.dtype() == DType::F32));
            assert_eq!(ddp.module().first.val().dtype(), dtype);
        }
    }
}

/// Steps of 2^-12 are lost on a weight of 1 in bf16, whose neighbours are 2^-8 away.
#[test]
fn small_steps_add_up_in_the_masters() {
    for number in 0..=3 {
        let run = |groups: &Groups| {
            let mut ddp = wrapped(groups, &half(Precision::Bf16, number));
            let adam = AdamWConfig {
                weight_decay: 0.0,
                epsilon: 1e-30,
                ..AdamWConfig::default()
            };
            let mut optimizer = ParallelAdamW::new(&adam, &ddp)?;
            for _ in 0..32 {
                let loss = ddp.forward(&device(), |pair| {
                    (pair.first.val().sum() + pair.second.val().sum()).cast(DType::F32)
                });
                ddp.backward_last(loss);
                let gradients = ddp.reduce(1)?;
                optimizer.step(1.0 / 4096.0, &mut ddp, gradients);
            }
            let model = ddp.module().second.val().cast(DType::F32);
            Ok((values(ddp.parameters().remove(1)), values(model)))
        };
        for (master, model) in over(1, 2, run).unwrap() {
            // 32 steps of 1/4096 each.
            assert!(
                master
                    .iter()
                    .all(|w| (w - (1.0 - 1.0 / 128.0)).abs() < 1e-5),
                "{master:?}"
            );
            assert_eq!(model, [1.0 - 1.0 / 128.0; 3]);
        }
    }
}

#[test]
fn gradients_that_travel_in_16_bits_are_added_up_in_f32() {
    let sums = |reduce_in_16_bits: bool| {
        let run = |groups: &Groups| {
            let config = DataParallelConfig {
                reduce_in_16_bits,
                ..half(Precision::Bf16, 2)
            };
            let mut ddp = wrapped(groups, &config);
            // 1 + 2^-8 is not there in bf16, but it is the sum of two numbers that are.
            let own = [1.0, 1.0 / 256.0][groups.rank()];
            let loss = ddp.forward(&device(), |pair| {
                let sum = (pair.first.val().sum() + pair.second.val().sum()).cast(DType::F32);
                sum.mul_scalar(own)
            });
            ddp.backward_last(loss);
            Ok(of_second(&mut ddp, 1))
        };
        over(1, 2, run).unwrap()
    };
    let expected = [[(1.0 + 1.0 / 256.0) / 2.0; 3]; 2];
    assert_eq!(sums(true), expected);
    assert_eq!(sums(false), expected);
}

#[test]
fn moments_in_16_bits_take_half_the_memory() {
    let bytes = |moments| {
        let config = DataParallelConfig {
            moments,
            ..half(Precision::Bf16, 1)
        };
        let ddp = wrapped(&Groups::single(), &config);
        let _optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp).unwrap();
        assert_eq!(
            ddp.usage().now().optimizer,
            ddp.memory_plan().unwrap().optimizer
        );
        ddp.usage().now().optimizer
    };
    // One bucket of 128 elements: masters of 4 bytes, and two moments.
    assert_eq!(bytes(Moments::F32), 128 * 12);
    assert_eq!(bytes(Moments::Bf16), 128 * 8);
}

/// In bf16 a sum of ones stands still at 256.
#[test]
fn the_gradient_of_a_token_that_comes_often_is_added_up_in_f32() {
    let groups = Groups::single();
    let scope = Scope::new(&groups, &Device::flex());
    let vocabulary = Vocabulary::padded(3, 1, 1);
    let child = scope.child("embedding");
    let embedding = VocabParallelEmbedding::new(vocabulary, 2, Init::Constant(0.5), false, &child);
    #[derive(Module, Debug)]
    struct Model {
        embedding: VocabParallelEmbedding,
    }
    let embedding = embedding.unwrap();
    let model = scope.finish(Model { embedding }).unwrap();
    let config = half(Precision::Bf16, 0);
    let mut ddp = DistributedDataParallel::with(model, &groups, &config).unwrap();
    let loss = ddp.forward(&device(), |model| {
        let tokens = Tensor::<2, Int>::ones([4, 1000], &device());
        model.embedding.forward(tokens).sum().cast(DType::F32)
    });
    ddp.backward_last(loss);
    let gradients = ddp.reduce(1).unwrap();
    let gradient = values(ddp.whole_gradients(&gradients).remove(0));
    assert_eq!(gradient, [0.0, 0.0, 4000.0, 4000.0, 0.0, 0.0]);
}

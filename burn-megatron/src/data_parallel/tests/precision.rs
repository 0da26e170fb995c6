//! Models that compute in 16 bits, with f32 master weights.

use burn::tensor::{DType, Int};

use super::gradient_checks::stage;
use super::*;
use crate::nn::{
    Init, ModelBuilder, VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};
use crate::optim::{AdamWConfig, ParallelAdamW};

fn half(precision: Precision, number: u8) -> DataParallelConfig {
    DataParallelConfig {
        precision,
        ..stage(number)
    }
}

fn wrapped(groups: &ParallelContext, config: &DataParallelConfig) -> DistributedDataParallel<Pair> {
    let model = ParallelModule::replicated(pair(1.0, &Device::flex()));
    DistributedDataParallel::with(model, groups, config).unwrap()
}

#[test]
fn a_model_computes_in_16_bits_and_keeps_masters() {
    for (precision, dtype) in [(Precision::Bf16, DType::BF16), (Precision::F16, DType::F16)] {
        for number in 0..=3 {
            let mut ddp = wrapped(&ParallelContext::single(), &half(precision, number));
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

/// In bf16, steps of 2^-12 are lost on a weight of 1, where the spacing is 2^-8.
#[test]
fn small_steps_add_up_in_the_masters() {
    for number in 0..=3 {
        let run = |groups: &ParallelContext| {
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

/// Returns the address of the memory of a value.
fn place(value: Tensor<1>) -> usize {
    let flex = value.try_into_primitive::<burn::backend::Flex>();
    flex.expect("the tensor is on Flex").bytes().as_ptr() as usize
}

/// Without sharding, the copy is written to the same address. If a value of the copy is still held, that value keeps
/// its bits and the copy gets a new address.
#[test]
fn the_copy_stays_in_place_unless_it_is_held() {
    let mut ddp = wrapped(&ParallelContext::single(), &half(Precision::Bf16, 0));
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp).unwrap();
    let mut step = |ddp: &mut DistributedDataParallel<Pair>| {
        let loss = ddp.forward(&device(), |pair| {
            (pair.first.val().sum() + pair.second.val().sum()).cast(DType::F32)
        });
        ddp.backward_last(loss);
        let gradients = ddp.reduce(1).unwrap();
        optimizer.step(0.25, ddp, gradients);
    };
    let copy = |ddp: &DistributedDataParallel<Pair>| ddp.module().second.val();
    let first = place(copy(&ddp));
    step(&mut ddp);
    assert_eq!(place(copy(&ddp)), first);
    let held = copy(&ddp);
    let before = held.clone().into_data();
    step(&mut ddp);
    held.clone().into_data().assert_eq(&before, true);
    assert_ne!(place(copy(&ddp)), place(held));
}

#[test]
fn gradients_communicated_in_16_bits_are_summed_in_f32() {
    let sums = |reduce_in_16_bits: bool| {
        let run = |groups: &ParallelContext| {
            let config = DataParallelConfig {
                reduce_in_16_bits,
                ..half(Precision::Bf16, 2)
            };
            let mut ddp = wrapped(groups, &config);
            // bf16 cannot represent 1 + 2^-8, but it can represent both summands.
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
        let ddp = wrapped(&ParallelContext::single(), &config);
        let _optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp).unwrap();
        assert_eq!(
            ddp.usage().now().optimizer,
            ddp.memory_plan().unwrap().optimizer
        );
        ddp.usage().now().optimizer
    };
    // One bucket of 128 elements: master weights of 4 bytes, and two moments.
    assert_eq!(bytes(Moments::F32), 128 * 12);
    assert_eq!(bytes(Moments::Bf16), 128 * 8);
}

/// In bf16 a sum of ones stops growing at 256.
#[test]
fn the_gradient_of_a_frequent_token_is_accumulated_in_f32() {
    let groups = ParallelContext::single();
    let scope = ModelBuilder::new(&groups, &Device::flex());
    let vocabulary = Vocabulary::padded(3, 1, 1);
    let child = scope.child("embedding");
    let embedding = VocabParallelEmbeddingConfig::new(vocabulary, 2)
        .with_init(Init::Constant(0.5))
        .init(&child);
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
    let gradient = values(ddp.full_gradients(&gradients).remove(0));
    assert_eq!(gradient, [0.0, 0.0, 4000.0, 4000.0, 0.0, 0.0]);
}

//! Tests of FP8 weights: training gives bitwise equal results with fewer communicated bytes.

use super::gradient_checks::stage;
use super::*;
use crate::optim::{AdamWConfig, ParallelAdamW};

mod bytes;
mod net;
mod refused;

use net::{RECIPES, Recipe, Trained, WEIGHTS, bits, bits_of};

const STEPS: usize = 4;

/// The step that is skipped.
const SKIPPED: usize = 2;

/// The losses, weights and master weights of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
struct TrainingRecord {
    losses: Vec<u64>,
    /// The codes and scales of both copies, by step and weight.
    weights: Vec<Vec<[[Vec<u32>; 2]; 2]>>,
    masters: Vec<Vec<u32>>,
}

/// Runs steps of two micro-batches and skips one of the micro-batches.
fn train(
    groups: &ParallelContext,
    recipe: Recipe,
    config: &DataParallelConfig,
) -> Result<(TrainingRecord, Trained), RankError> {
    let mut net = Trained::new(recipe, groups, config)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &net.ddp)?;
    let mut record = TrainingRecord::default();
    for step in 0..STEPS {
        for micro_batch in 0..2 {
            let key = (step * 10 + groups.rank()) * 10 + micro_batch;
            record.losses.push(net.run(key, micro_batch == 1).to_bits());
        }
        let copies = net.weights();
        let copies = copies
            .iter()
            .map(|weight| [&weight.rowwise, &weight.columnwise].map(bits_of));
        record.weights.push(copies.collect());
        let gradients = net.ddp.reduce(6)?;
        if recipe == Recipe::Delayed && step != SKIPPED {
            net.layers.iter().for_each(|layer| layer.end_step());
        }
        if step != SKIPPED {
            optimizer.step(0.01, &mut net.ddp, gradients);
            net.invalidate();
        }
    }
    net.ddp.check_replicas()?;
    record.masters = net.ddp.parameters().into_iter().map(bits).collect();
    Ok((record, net))
}

fn small(config: DataParallelConfig) -> DataParallelConfig {
    DataParallelConfig {
        // Several buckets.
        bucket_size: Some(1000),
        ..config
    }
}

fn with_fp8_gather(config: &DataParallelConfig) -> DataParallelConfig {
    DataParallelConfig {
        fp8_param_gather: true,
        ..config.clone()
    }
}

/// Returns the configurations that shard the optimizer.
fn sharding_configs(hybrid: bool) -> Vec<DataParallelConfig> {
    let mut configs = vec![];
    for number in [1, 2] {
        for overlap_param_gather in [false, true] {
            for hsdp in [None, Some(2)] {
                if hsdp.is_none() || hybrid {
                    configs.push(small(DataParallelConfig {
                        overlap_param_gather,
                        hsdp,
                        ..stage(number)
                    }));
                }
            }
        }
    }
    configs
}

fn assert_same(tensor: usize, data: usize, recipe: Recipe, config: &DataParallelConfig) {
    let run = |config: &DataParallelConfig| {
        over(tensor, data, |groups| Ok(train(groups, recipe, config)?.0)).unwrap()
    };
    let (with, without) = (run(&with_fp8_gather(config)), run(config));
    for (rank, (with, without)) in with.iter().zip(&without).enumerate() {
        let name = format!("{recipe:?} over {tensor} x {data}, rank {rank}, {config:?}");
        assert_eq!(with.losses, without.losses, "{name}: losses");
        assert!(with.weights == without.weights, "{name}: weights");
        assert!(with.masters == without.masters, "{name}: masters");
    }
    let differs = |of: &dyn Fn(&TrainingRecord) -> bool| with.iter().any(of);
    assert!(
        differs(&|record| record.weights[0] != record.weights[1]),
        "nothing was trained"
    );
}

#[test]
fn two_ranks_train_the_same_bits() {
    for recipe in RECIPES {
        for config in sharding_configs(false) {
            assert_same(1, 2, recipe, &config);
        }
    }
}

#[test]
fn four_ranks_train_the_same_bits_with_and_without_hsdp() {
    for recipe in RECIPES {
        for config in sharding_configs(true) {
            assert_same(1, 4, recipe, &config);
        }
    }
}

#[test]
fn three_ranks_train_the_same_bits() {
    for recipe in RECIPES {
        assert_same(1, 3, recipe, &small(stage(1)));
    }
}

#[test]
fn scales_are_those_of_all_tensor_ranks() {
    for recipe in RECIPES {
        for number in [1, 2] {
            assert_same(2, 2, recipe, &small(stage(number)));
        }
    }
    let scales = over(2, 2, |groups| {
        let config = with_fp8_gather(&small(stage(1)));
        let mut net = Trained::new(Recipe::Current, groups, &config)?;
        let scale = |weight: &Arc<crate::nn::fp8::QuantizedWeight>| bits_of(&weight.rowwise)[1][0];
        Ok(net.weights().iter().map(scale).collect::<Vec<_>>())
    });
    let scales = scales.unwrap();
    assert!(scales.iter().all(|other| *other == scales[0]), "{scales:?}");
}

/// Weights with block scales are quantized from the values in the dtype of the model.
#[test]
fn block_scales_give_the_same_bits_in_bf16() {
    for recipe in [Recipe::Square, Recipe::Mx] {
        for number in [1, 2] {
            for overlap_param_gather in [false, true] {
                let config = small(DataParallelConfig {
                    precision: Precision::Bf16,
                    overlap_param_gather,
                    ..stage(number)
                });
                assert_same(1, 2, recipe, &config);
            }
        }
    }
}

/// Modules in f64 have master weights in f64.
#[test]
fn a_module_in_f64_is_quantised_too() {
    struct Wide;
    impl ModuleMapper for Wide {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(burn::tensor::DType::F64))
        }
    }
    over(1, 2, |groups| {
        for recipe in RECIPES {
            let (mut model, layers) = net::model(recipe, groups);
            let narrow = model.module.second.base();
            model.module = model.module.map(&mut Wide);
            let (config, weights) = (with_fp8_gather(&small(stage(1))), net::named(&layers));
            let ddp = DistributedDataParallel::with_weights(model, groups, &config, weights)?;
            let copy = ddp
                .sink()
                .quantized(2, crate::nn::hook::Pass::Forward)
                .unwrap();
            let expected = crate::nn::fp8::WeightQuantizer::quantize(&*layers[1], narrow);
            assert_eq!(
                bits_of(&copy.rowwise),
                bits_of(&expected.rowwise),
                "{recipe:?}"
            );
            assert_eq!(ddp.module().second.val().dtype(), burn::tensor::DType::F64);
            assert_eq!(ddp.parameters()[2].dtype(), burn::tensor::DType::F64);
            // Only master weights, because no optimizer with moments was created.
            let masters = (1920 + 3840) / 2 * 8;
            assert_eq!(ddp.usage().now().optimizer, masters);
            assert_eq!(ddp.memory_plan()?.optimizer, masters * 3 + 2 * 64 * 8);
        }
        Ok(())
    })
    .unwrap();
}

/// With a per-tensor scale and bf16, codes are made from the f32 master weights, not from bf16 values.
#[test]
fn codes_are_made_from_the_masters() {
    let found = over(1, 2, |groups| {
        let config = with_fp8_gather(&DataParallelConfig {
            precision: Precision::Bf16,
            ..small(stage(1))
        });
        let (_, mut net) = train(groups, Recipe::Current, &config)?;
        let masters = net.ddp.parameters();
        let copies = net.weights();
        let same = WEIGHTS.into_iter().enumerate().all(|(at, index)| {
            let shape = [net::SIZES[at], net::SIZES[at + 1]];
            let expected = crate::nn::fp8::WeightQuantizer::quantize(
                &*net.layers[at],
                masters[index].clone().reshape(shape),
            );
            bits_of(&expected.rowwise) == bits_of(&copies[at].rowwise)
                && bits_of(&expected.columnwise) == bits_of(&copies[at].columnwise)
        });
        Ok(same)
    });
    assert_eq!(found.unwrap(), [true, true]);
}

#[test]
fn parameters_span_several_shards_and_buckets() {
    over(1, 4, |groups| {
        let net = Trained::new(Recipe::Current, groups, &with_fp8_gather(&small(stage(1))))?;
        let layout = net.ddp.layout();
        let kinds: Vec<_> = layout
            .buckets()
            .map(|(_, buffer, _)| buffer.key.to_string())
            .collect();
        // When backward finishes the shift, only the first weight is left.
        let (codes, floats) = ("u8/f32 dense fp8", "f32/f32 dense");
        assert_eq!(kinds, [codes, floats, codes]);
        let straddles = WEIGHTS.iter().filter(|index| {
            let place = layout.find(**index).unwrap();
            let shard = layout.bucket(place.bucket).shard_elements();
            place.range.start / shard != (place.range.end - 1) / shard
        });
        assert!(straddles.count() >= 2);
        assert!(layout.to_string().contains(codes), "{layout}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_skipped_step_does_not_change_the_weights() {
    over(1, 2, |groups| {
        for recipe in RECIPES {
            let mut net = Trained::new(recipe, groups, &with_fp8_gather(&small(stage(1))))?;
            let before = net.weights();
            net.run(1, true);
            drop(net.ddp.reduce(3)?);
            let after = net.weights();
            let same = before.iter().zip(&after).all(|(a, b)| Arc::ptr_eq(a, b));
            assert!(same, "{recipe:?}");
        }
        Ok(())
    })
    .unwrap();
}

/// The value of a weight is the dequantized value that the layers multiply with.
#[test]
fn values_are_those_of_the_codes_and_follow_an_update() {
    over(1, 2, |groups| {
        for (recipe, precision) in RECIPES
            .into_iter()
            .zip([Precision::F32, Precision::Bf16].repeat(2))
        {
            let config = with_fp8_gather(&DataParallelConfig {
                precision,
                ..small(stage(1))
            });
            let mut net = Trained::new(recipe, groups, &config)?;
            for factor in [1.0, 3.0] {
                net.ddp.update(|mut model| {
                    model.second = model.second.map(|weight| weight * factor);
                    model
                });
                let value = net.ddp.module().second.val();
                let dtype = precision.of(burn::tensor::DType::F32);
                assert_eq!(value.dtype(), dtype);
                let copy = net.weights().remove(1);
                let expected = burn_megatron_kernels::fp8::dequantize(&copy.rowwise);
                assert_eq!(bits(value.clone()), bits(expected.cast(dtype)));
                // The value is within half a quantization step of the master weights, which `to_module` returns.
                let master = net.ddp.to_module().second.base();
                let largest = master.clone().abs().max().into_scalar::<f32>();
                let away = (value.cast(burn::tensor::DType::F32) - master).abs().max();
                let away = away.into_scalar::<f32>();
                assert!(away > 0.0 && away < largest / 14.0, "{away} of {largest}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// A rank without a micro-batch calls the same gathers in the same order.
#[test]
fn a_rank_may_run_no_micro_batch() {
    for recipe in RECIPES {
        for overlap_param_gather in [false, true] {
            let config = with_fp8_gather(&small(DataParallelConfig {
                overlap_param_gather,
                ..stage(1)
            }));
            let run = |groups: &ParallelContext| {
                let mut net = Trained::new(recipe, groups, &config)?;
                let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &net.ddp)?;
                for step in 0..3 {
                    if groups.rank() == step % 2 {
                        net.run(step, true);
                    }
                    let tokens = u64::from(groups.rank() == step % 2);
                    let gradients = net.ddp.reduce(tokens)?;
                    optimizer.step(0.01, &mut net.ddp, gradients);
                }
                let (peak, planned) = (net.ddp.usage().peak(), net.ddp.memory_plan()?);
                assert_eq!(peak.gradients, planned.gradients, "{recipe:?}");
                let copies = net.weights();
                Ok(copies
                    .iter()
                    .map(|copy| bits_of(&copy.rowwise))
                    .collect::<Vec<_>>())
            };
            let found = over(1, 2, run).unwrap();
            assert!(found[0] == found[1], "{recipe:?}");
        }
    }
}

//! Tests of the number of communicated bytes and of the memory of FP8 weights.

use super::*;
use burn_megatron_comm_testing::Intercept;

/// Returns the collectives of the optimizer step on the data axis: their names, and the input bytes of a rank.
fn calls(recipe: Recipe, config: &DataParallelConfig) -> Vec<(&'static str, usize)> {
    let run = |groups: &ParallelContext| {
        let calls = Arc::<Mutex<Vec<_>>>::default();
        let started = Arc::clone(&calls);
        let data = Intercept::over(groups.data().clone(), move |inner, call, input| {
            let bytes = input.len() * input.dtype().size_of();
            started.lock().unwrap().push((call.name(), bytes));
            inner.start(call, input)
        });
        let groups = groups.clone().with_data(data);
        let mut net = Trained::new(recipe, &groups, config)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &net.ddp)?;
        net.run(1, true);
        let gradients = net.ddp.reduce(3)?;
        calls.lock().unwrap().clear();
        optimizer.step(0.01, &mut net.ddp, gradients);
        net.weights();
        Ok(std::mem::take(&mut *calls.lock().unwrap()))
    };
    over(1, 2, run).unwrap().remove(0)
}

/// The second bucket contains the shift, 128 elements with padding. The first weight has 1920 elements. The other
/// weights have 3840 elements, and the second of them starts at element 384.
#[test]
fn one_byte_is_communicated_per_element() {
    let config = with_fp8_gather(&small(DataParallelConfig {
        precision: Precision::Bf16,
        ..stage(1)
    }));
    // Each of the two ranks contributes half of a bucket.
    let shift = ("all_gather", 2 * 64);
    let amax = ("all_reduce", 3 * 4);
    for recipe in [Recipe::Current, Recipe::Delayed] {
        let expected = [shift, amax, ("all_gather", 960), ("all_gather", 1920)];
        assert_eq!(calls(recipe, &config), expected);
    }
    for recipe in [Recipe::Square, Recipe::Mx] {
        let expected = [shift, ("all_gather", 2 * 960), ("all_gather", 2 * 1920)];
        assert_eq!(calls(recipe, &config), expected);
    }
    let wide = DataParallelConfig {
        fp8_param_gather: false,
        ..config
    };
    let all: usize = calls(Recipe::Current, &wide)
        .iter()
        .map(|(_, bytes)| bytes)
        .sum();
    assert!(all >= 2 * (960 + 1855 + 24), "{all} bytes in bf16");
}

/// Gathered values reuse the memory of gradients, so the memory does not increase.
#[test]
fn measured_memory_is_as_computed() {
    for recipe in RECIPES {
        for precision in [Precision::F32, Precision::Bf16] {
            for config in sharding_configs(true) {
                let config = with_fp8_gather(&DataParallelConfig {
                    precision,
                    ..config
                });
                let held = over(1, 4, |groups| {
                    let (_, net) = train(groups, recipe, &config)?;
                    let (peak, now) = (net.ddp.usage().peak(), net.ddp.usage().now());
                    Ok((peak, now, net.ddp.memory_plan()?))
                });
                for (peak, now, planned) in held.unwrap() {
                    let name = format!("{recipe:?}, {config:?}: {peak:?} of {planned:?}");
                    assert_eq!(peak.parameters, planned.parameters, "{name}");
                    assert_eq!(peak.optimizer, planned.optimizer, "{name}");
                    assert_eq!(peak.gradients, planned.gradients, "{name}");
                    assert!(peak.buffers <= planned.buffers, "{name}");
                    if !config.overlap_param_gather {
                        assert_eq!((now.gradients, now.buffers), (0, 0), "{name}");
                    }
                }
            }
        }
    }
}

/// FP8 weights have two copies of one byte with their scales.
#[test]
fn memory_plans_include_both_copies() {
    let planned = |recipe| {
        let plans = over(1, 2, |groups| {
            let net = Trained::new(recipe, groups, &with_fp8_gather(&small(stage(1))))?;
            Ok(net.ddp.memory_plan()?)
        });
        plans.unwrap()[0]
    };
    // Rows end at multiples of 16 bytes.
    let codes = (40 * 48 + 48 * 48) + (48 * 80 + 70 * 48) + (70 * 16 + 5 * 80);
    let shift = 128 * 4;
    let scales = |recipe| planned(recipe).parameters - codes - shift;
    assert_eq!(scales(Recipe::Current), 3 * 2 * 4);
    assert_eq!(scales(Recipe::Square), 3 * 2 * 4);
    // Four blocks of 32 in a word: at most 70 elements are in one.
    assert_eq!(scales(Recipe::Mx), (40 + 48 + 48 + 70 + 70 + 5) * 4);
    // Half of all elements have master weights and two moments. The shift has no master.
    assert_eq!(
        planned(Recipe::Mx).optimizer,
        ((1920 + 3840) * 12 + 128 * 8) / 2
    );
}

/// Returns the bytes that the pool holds for the next step.
fn pooled(recipe: Recipe, config: &DataParallelConfig) -> Vec<u64> {
    let run = |groups: &ParallelContext| {
        train(groups, recipe, config)?;
        Ok(groups.data().pool().map_or(0, |pool| pool.free_bytes()))
    };
    over(1, 4, run).unwrap()
}

/// The memory of gathered values is reused by gradients or freed. The pool does not hold both.
#[test]
fn values_add_no_memory_to_the_pool() {
    for precision in [Precision::F32, Precision::Bf16] {
        let config = with_fp8_gather(&small(DataParallelConfig {
            precision,
            ..stage(1)
        }));
        // With gathered codes there are no values.
        let without = pooled(Recipe::Current, &config);
        assert!(without.iter().all(|bytes| *bytes > 0));
        for (with, without) in pooled(Recipe::Mx, &config).iter().zip(without) {
            assert!(*with <= without, "{precision:?}: {with} of {without}");
        }
    }
}

/// A gradient may be accumulated before every weight was used. The values of the last bucket are then quantized
/// first, and their memory is freed.
#[test]
fn values_are_freed_before_a_gradient_is_accumulated() {
    let run = |groups: &ParallelContext| {
        let config = with_fp8_gather(&small(DataParallelConfig {
            overlap_param_gather: true,
            ..stage(1)
        }));
        let net = Trained::new(Recipe::Mx, groups, &config)?;
        let quantized = || -> usize {
            let layers = net.layers.iter();
            layers
                .map(|layer| layer.quantized.load(std::sync::atomic::Ordering::Relaxed))
                .sum()
        };
        // One gather is in flight: the gather of the last layers, which the forward uses last.
        let (made, values) = (quantized(), net.ddp.usage().now().gradients);
        let bytes = 3840 * 4;
        assert_eq!(values, bytes);
        let sink = net.ddp.sink();
        net.ddp.forward(&Device::flex(), |_| sink.expect(1));
        sink.accumulate(1, Tensor::zeros([48], &Device::flex()));
        assert_eq!(quantized() - made, 2);
        assert_eq!(net.ddp.usage().now().gradients, 128 * 4);
        Ok(net.ddp.usage().peak().gradients)
    };
    assert_eq!(over(1, 2, run).unwrap(), [3840 * 4; 2]);
}

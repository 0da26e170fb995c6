//! The start and the order of reductions.

use std::sync::Mutex;

use super::gradient_checks::{Blocks, blocks, run, stage};
use super::*;
use burn_megatron_comm_testing::Intercept;

/// Records the started collectives, and the marks of the test between them.
#[derive(Clone, Debug, Default)]
struct CallLog(Arc<Mutex<Vec<String>>>);

impl CallLog {
    fn record(&self, event: impl Into<String>) {
        self.0.lock().unwrap().push(event.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Returns the calls of each rank in a step of four blocks on a data axis of two ranks, with marks of the test
/// in between.
fn step(config: DataParallelConfig, micro_batches: usize, closing: bool) -> Vec<Vec<String>> {
    let layout = ParallelConfig::new().with_data(2);
    step_in(&layout, config, micro_batches, closing, [0, 1, 2, 3])
}

fn step_in(
    layout: &ParallelConfig,
    config: DataParallelConfig,
    micro_batches: usize,
    closing: bool,
    order: [usize; 4],
) -> Vec<Vec<String>> {
    let events = |groups: &ParallelContext| {
        let log = CallLog::default();
        let calls = log.clone();
        let data = Intercept::over(groups.data().clone(), move |inner, call, input| {
            calls.record(format!("{} {}", call.name(), input.len()));
            inner.start(call, input)
        });
        let groups = groups.clone().with_data(data);
        let model: ParallelModule<Blocks> = ParallelModule::replicated(blocks(4));
        let mut ddp = DistributedDataParallel::with(model, &groups, &config)?;
        log.take();
        for micro_batch in 0..micro_batches {
            let loss = run(&ddp, &order);
            log.record("backward");
            if closing && micro_batch + 1 == micro_batches {
                ddp.backward_last(loss)
            } else {
                ddp.backward(loss)
            };
        }
        log.record("reduce");
        ddp.reduce(1)?;
        Ok(log.take())
    };
    over_layout(layout, events).unwrap()
}

/// Each block has a bucket of 128 elements: 16 + 4, where the second parameter starts at 64, padded to 128.
fn buckets(number: u8) -> DataParallelConfig {
    DataParallelConfig {
        bucket_size: Some(20),
        ..stage(number)
    }
}

const TOKENS: &str = "all_gather 3";

#[test]
fn a_bucket_is_reduced_while_the_last_backward_goes_on() {
    let sum = "reduce_scatter 128";
    for events in step(buckets(1), 2, true) {
        let expected = ["backward", "backward", sum, sum, sum, sum, "reduce", TOKENS];
        assert_eq!(events, expected);
    }
}

#[test]
fn without_backward_last_or_overlap_buckets_are_reduced_at_the_end() {
    let sum = "all_reduce 128";
    let expected = ["backward", "reduce", sum, sum, sum, sum, TOKENS];
    for events in step(buckets(0), 1, false) {
        assert_eq!(events, expected);
    }
    let without = DataParallelConfig {
        overlap_grad_reduce: false,
        ..buckets(0)
    };
    for events in step(without, 1, true) {
        assert_eq!(events, expected);
    }
}

#[test]
fn from_zero_2_on_each_micro_batch_is_reduced() {
    let sum = "reduce_scatter 128";
    for events in step(buckets(2), 2, false) {
        let expected = [
            "backward", sum, sum, sum, sum, "backward", sum, sum, sum, sum, "reduce", TOKENS,
        ];
        assert_eq!(events, expected);
    }
}

#[test]
fn zero_3_prefetches_one_unit() {
    let (gather, sum) = ("all_gather 64", "reduce_scatter 128");
    for events in step(stage(3), 1, true) {
        // The graph keeps the tensors that unmodified layers save, so their backward gathers nothing.
        let expected = [
            gather, gather, gather, gather, "backward", sum, sum, sum, sum, "reduce", TOKENS,
        ];
        assert_eq!(events, expected);
    }
}

/// The sum of a bucket within a node is followed by the sum between nodes while the next bucket is filled. This
/// also hides the slow link.
#[test]
fn sums_between_nodes_and_replicas_start_in_the_backward() {
    let layout = ParallelConfig::new().with_data(4).with_ranks_per_node(2);
    let (inside, between, gather) = ("reduce_scatter 128", "all_reduce 64", "all_gather 64");
    let nodes = DataParallelConfig {
        hierarchical_reduce: true,
        ..buckets(0)
    };
    let expected = [
        "backward", inside, inside, between, inside, between, inside, between, "reduce", between,
        gather, gather, gather, gather, TOKENS,
    ];
    // In reverse order all buckets are ready at once, with the last gradient of the first bucket.
    for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
        for events in step_in(&layout, nodes.clone(), 1, true, order) {
            assert_eq!(events, expected, "{order:?}");
        }
    }
    for number in [1, 2] {
        let replicas = DataParallelConfig {
            hsdp: Some(2),
            ..buckets(number)
        };
        let (first, last) = if number == 1 {
            ([inside, inside, between], [inside, between])
        } else {
            ([inside, between, inside], [between, inside])
        };
        let expected = [
            &["backward"][..],
            &first,
            &last,
            &last,
            &["reduce", between, TOKENS],
        ];
        for events in step_in(&layout, replicas.clone(), 1, true, [0, 1, 2, 3]) {
            assert_eq!(events, expected.concat(), "{number}");
        }
    }
}

#[test]
fn hsdp_reduces_within_shard_groups_and_then_across() {
    let events = over(1, 4, |groups| {
        let config = DataParallelConfig {
            hsdp: Some(2),
            ..buckets(1)
        };
        let model: ParallelModule<Blocks> = ParallelModule::replicated(blocks(2));
        let mut ddp = DistributedDataParallel::with(model, groups, &config)?;
        let own = (1u64 << groups.rank()) as f64;
        let loss = run(&ddp, &[0, 1]).mul_scalar(own);
        ddp.backward_last(loss);
        let gradients = ddp.reduce(1)?;
        let bias = ddp.full_gradients(&gradients).remove(3);
        Ok(values(bias.mul_scalar(4.0)))
    });
    // Two rows of ones, times 1 + 2 + 4 + 8.
    assert_eq!(events.unwrap(), [[30.0; 4]; 4]);
}

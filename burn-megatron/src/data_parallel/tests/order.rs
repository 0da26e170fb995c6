//! When sums begin, and in which order.

use std::sync::Mutex;

use super::guards::{Blocks, blocks, run, stage};
use super::*;
use crate::comm::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};

/// Notes the collectives that are started, and the marks of the test between them.
#[derive(Clone, Debug, Default)]
struct Journal(Arc<Mutex<Vec<String>>>);

impl Journal {
    fn note(&self, event: impl Into<String>) {
        self.0.lock().unwrap().push(event.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[derive(Debug)]
struct Noted {
    inner: Arc<dyn Communicator>,
    journal: Journal,
}

impl Communicator for Noted {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        self.journal
            .note(format!("{} {}", call.name(), input.len()));
        self.inner.start(call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let inner = self.inner.split(name, groups)?;
        let journal = self.journal.clone();
        Ok(Arc::new(Self { inner, journal }))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }
}

/// What a step of four blocks does on the data axis, by rank; `marks` are noted in between.
fn step(config: DataParallelConfig, micro_batches: usize, closing: bool) -> Vec<Vec<String>> {
    let events = |groups: &Groups| {
        let journal = Journal::default();
        let data: Arc<dyn Communicator> = Arc::new(Noted {
            inner: groups.data().clone(),
            journal: journal.clone(),
        });
        let groups = groups.clone().with_data(data);
        let model: ParallelModule<Blocks> = ParallelModule::replicated(blocks(4));
        let mut ddp = DistributedDataParallel::with(model, &groups, &config)?;
        journal.take();
        for micro_batch in 0..micro_batches {
            let loss = run(&ddp, &[0, 1, 2, 3]);
            journal.note("backward");
            match closing && micro_batch + 1 == micro_batches {
                true => ddp.backward_last(loss),
                false => ddp.backward(loss),
            };
        }
        journal.note("reduce");
        ddp.reduce(1)?;
        Ok(journal.take())
    };
    over(1, 2, events).unwrap()
}

/// Each block has a bucket of 128 elements: 16 + 4, the second on 64, padded to 128.
fn buckets(number: u8) -> DataParallelConfig {
    DataParallelConfig {
        bucket_size: Some(20),
        ..stage(number)
    }
}

const TOKENS: &str = "all_gather 3";

#[test]
fn a_bucket_is_summed_while_the_last_backward_goes_on() {
    let sum = "reduce_scatter 128";
    for events in step(buckets(1), 2, true) {
        let expected = ["backward", "backward", sum, sum, sum, sum, "reduce", TOKENS];
        assert_eq!(events, expected);
    }
}

#[test]
fn without_the_last_backward_or_overlap_sums_wait_for_the_reduction() {
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
fn from_zero_2_on_each_micro_batch_is_summed() {
    let sum = "reduce_scatter 128";
    for events in step(buckets(2), 2, false) {
        let expected = [
            "backward", sum, sum, sum, sum, "backward", sum, sum, sum, sum, "reduce", TOKENS,
        ];
        assert_eq!(events, expected);
    }
}

#[test]
fn full_sharding_gathers_one_block_ahead() {
    let (gather, sum) = ("all_gather 64", "reduce_scatter 128");
    for events in step(stage(3), 1, true) {
        // The graph keeps what unmodified layers use, so that their backward gathers nothing.
        let expected = [
            gather, gather, gather, gather, "backward", sum, sum, sum, sum, "reduce", TOKENS,
        ];
        assert_eq!(events, expected);
    }
}

#[test]
fn hybrid_sharding_sums_within_groups_and_then_across() {
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
        let bias = ddp.whole_gradients(&gradients).remove(3);
        Ok(values(bias.mul_scalar(4.0)))
    });
    // Two rows of ones, times 1 + 2 + 4 + 8.
    assert_eq!(events.unwrap(), [[30.0; 4]; 4]);
}

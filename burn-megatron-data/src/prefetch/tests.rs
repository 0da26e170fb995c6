use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use super::Prefetcher;
use crate::{DataError, Sample, Samples};
use burn_megatron_test_support::{TIMEOUT, wait_until};

/// Blocks a reader.
#[derive(Default)]
struct Gate {
    open: Mutex<u64>,
    opened: Condvar,
}

impl Gate {
    /// Unblocks the samples below `end`.
    fn open(&self, end: u64) {
        *self.open.lock().unwrap() = end;
        self.opened.notify_all();
    }

    fn pass(&self, number: u64) {
        let open = self.open.lock().unwrap();
        let is_shut = |open: &mut u64| number >= *open;
        drop(self.opened.wait_while(open, is_shut).unwrap());
    }
}

/// Samples with a single token, which is the number of the sample.
#[derive(Default)]
struct Numbers {
    read: AtomicU64,
    /// Blocks the samples whose number is at least a given number.
    gate: Option<Gate>,
    /// The number of the sample whose read fails.
    bad: Option<u64>,
}

impl Samples for Numbers {
    fn seq(&self) -> usize {
        1
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.read.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.gate {
            gate.pass(number);
        }
        if self.bad == Some(number) {
            Err(DataError::ZeroLength)
        } else {
            Ok(Sample {
                tokens: vec![number as i32],
                targets: vec![-1],
                documents: vec![],
                padding: 0,
            })
        }
    }
}

/// Returns ranges of two samples.
fn pairs(count: u64) -> impl Iterator<Item = Range<u64>> {
    (0..count).map(|pair| 2 * pair..2 * pair + 2)
}

fn ahead(numbers: &Arc<Numbers>, count: u64, ready: usize) -> Prefetcher {
    let numbers = Arc::clone(numbers);
    Prefetcher::new(numbers, pairs(count), ready).unwrap()
}

fn tokens(ahead: &Prefetcher, numbers: Range<u64>) -> Vec<i32> {
    ahead.batch(numbers).unwrap().tokens().to_vec()
}

/// Waits until `wanted` samples were read.
fn await_read(numbers: &Numbers, wanted: u64) {
    wait_until("all samples are read", || {
        numbers.read.load(Ordering::SeqCst) >= wanted
    });
}

#[test]
fn batches_come_in_order_and_are_read_once() {
    let numbers = Arc::new(Numbers::default());
    let ahead = ahead(&numbers, 6, 2);
    for pair in pairs(6) {
        assert_eq!(
            tokens(&ahead, pair.clone()),
            [pair.start as i32, pair.start as i32 + 1]
        );
    }
    assert_eq!(numbers.read.load(Ordering::SeqCst), 12);
    let stats = ahead.stats();
    assert_eq!((stats.batches, stats.out_of_order), (6, 0));
    // This batch is not in the announced ranges.
    assert_eq!(tokens(&ahead, 20..21), [20]);
    assert_eq!(ahead.stats().out_of_order, 1);
}

#[test]
fn no_more_is_read_than_is_wanted() {
    let numbers = Arc::new(Numbers::default());
    let ahead = ahead(&numbers, 100, 3);
    await_read(&numbers, 8);
    thread::sleep(Duration::from_millis(50));
    // Three batches are ready, and one batch waits to be sent.
    assert_eq!(numbers.read.load(Ordering::SeqCst), 8);
    tokens(&ahead, 0..2);
    await_read(&numbers, 10);
}

#[test]
fn what_is_ready_is_not_waited_for() {
    let numbers = Arc::new(Numbers::default());
    let ready = ahead(&numbers, 20, 2);
    for pair in pairs(20) {
        // The batch after this one is being read, so this one was sent.
        await_read(&numbers, (pair.end + 1).min(40));
        if pair.end == 40 {
            let thread = ready.thread.as_ref().unwrap();
            wait_until("the thread has ended", || thread.is_finished());
        }
        tokens(&ready, pair);
    }
    let stats = ready.stats();
    assert_eq!((stats.batches, stats.late), (20, 0), "{stats:?}");
    assert_eq!((stats.time, stats.start), (Duration::ZERO, Duration::ZERO));
}

#[test]
fn what_is_waited_for_is_counted() {
    let numbers = Arc::new(Numbers {
        gate: Some(Gate::default()),
        ..Numbers::default()
    });
    let mut ahead = ahead(&numbers, 3, 2);
    let wait = Duration::from_millis(5);
    ahead.deadline = wait;
    for asked in 1..=5 {
        let error = ahead.batch(0..2).unwrap_err();
        assert!(matches!(error, DataError::Stalled(_)), "{error}");
        let stats = ahead.stats();
        // The waits for the first two batches are counted as `start`.
        let late = u32::try_from(asked).unwrap().saturating_sub(2);
        assert_eq!((stats.batches, stats.late), (asked, u64::from(late)));
        assert!(stats.time >= late * wait, "{stats:?}");
        assert!(stats.start >= wait, "{stats:?}");
        assert_eq!(late == 0, stats.time.is_zero());
    }
    ahead.deadline = TIMEOUT;
    numbers.gate.as_ref().unwrap().open(u64::MAX);
    assert_eq!(tokens(&ahead, 0..2), [0, 1]);
    assert_eq!(ahead.stats().out_of_order, 0);
}

#[test]
fn an_error_comes_with_its_batch() {
    let numbers = Arc::new(Numbers {
        bad: Some(13),
        ..Numbers::default()
    });
    let ahead = ahead(&numbers, 10, 4);
    for pair in pairs(10) {
        let batch = ahead.batch(pair.clone());
        assert_eq!(batch.is_err(), pair.contains(&13), "{pair:?}");
    }
    assert_eq!(numbers.read.load(Ordering::SeqCst), 20);
}

#[test]
fn another_order_gives_the_same_batches() {
    let numbers = Arc::new(Numbers::default());
    let ahead = ahead(&numbers, 6, 2);
    assert_eq!(tokens(&ahead, 2..4), [2, 3]);
    // An earlier batch, a batch of another size, and the batches that follow.
    assert_eq!(tokens(&ahead, 0..2), [0, 1]);
    assert_eq!(tokens(&ahead, 4..7), [4, 5, 6]);
    assert_eq!(ahead.stats().out_of_order, 2);
    // The batch that was kept in the meantime.
    assert_eq!(tokens(&ahead, 4..6), [4, 5]);
    assert_eq!(tokens(&ahead, 6..8), [6, 7]);
    assert_eq!(tokens(&ahead, 10..12), [10, 11]);
    assert_eq!(ahead.stats().out_of_order, 2);
}

#[test]
fn it_ends_at_any_time() {
    for taken in 0..5 {
        let numbers = Arc::new(Numbers::default());
        let ahead = ahead(&numbers, u64::MAX / 2, 2);
        pairs(taken).for_each(|pair| drop(tokens(&ahead, pair)));
        drop(ahead);
        // The thread has dropped its reference.
        assert_eq!(Arc::strong_count(&numbers), 1);
    }
}

/// Samples that panic when number 4 is read for the first time.
struct Panics(AtomicU64);

impl Samples for Panics {
    fn seq(&self) -> usize {
        1
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        if number == 4 && self.0.fetch_add(1, Ordering::SeqCst) == 0 {
            panic!("on purpose");
        }
        Numbers::default().sample(number)
    }
}

#[test]
fn a_reader_that_panics_is_done_without() {
    let ahead = Prefetcher::new(Arc::new(Panics(AtomicU64::new(0))), pairs(5), 1).unwrap();
    for pair in pairs(5) {
        assert_eq!(tokens(&ahead, pair.clone())[0], pair.start as i32);
    }
    assert_eq!(ahead.stats().out_of_order, 3);
}

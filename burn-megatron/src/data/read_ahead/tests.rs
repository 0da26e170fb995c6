use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::ReadAhead;
use crate::data::{DataError, Sample, Samples};

/// Sample `n` is the token `n`.
#[derive(Default)]
struct Numbers {
    read: AtomicU64,
    slowly: Duration,
    /// The one that cannot be read.
    bad: Option<u64>,
}

impl Samples for Numbers {
    fn seq(&self) -> usize {
        1
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.read.fetch_add(1, Ordering::SeqCst);
        thread::sleep(self.slowly);
        match self.bad == Some(number) {
            true => Err(DataError::ZeroLength),
            false => Ok(Sample {
                tokens: vec![number as i32],
                targets: vec![-1],
                documents: vec![],
            }),
        }
    }
}

/// Batches of two.
fn pairs(count: u64) -> impl Iterator<Item = Range<u64>> {
    (0..count).map(|pair| 2 * pair..2 * pair + 2)
}

fn ahead(numbers: &Arc<Numbers>, count: u64, ready: usize) -> ReadAhead {
    let numbers = Arc::clone(numbers);
    ReadAhead::new(numbers, pairs(count), ready).unwrap()
}

fn tokens(ahead: &ReadAhead, numbers: Range<u64>) -> Vec<i32> {
    ahead.batch(numbers).unwrap().tokens
}

/// Waits until as many samples were read.
fn until(numbers: &Numbers, wanted: u64) {
    let started = Instant::now();
    while numbers.read.load(Ordering::SeqCst) < wanted {
        assert!(started.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(1));
    }
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
    let waits = ahead.waits();
    assert_eq!((waits.batches, waits.unforeseen), (6, 0));
    // Past what was said.
    assert_eq!(tokens(&ahead, 20..21), [20]);
    assert_eq!(ahead.waits().unforeseen, 1);
}

#[test]
fn no_more_is_read_than_is_wanted() {
    let numbers = Arc::new(Numbers::default());
    let ahead = ahead(&numbers, 100, 3);
    until(&numbers, 8);
    thread::sleep(Duration::from_millis(50));
    // Three that are ready, and one that has no place yet.
    assert_eq!(numbers.read.load(Ordering::SeqCst), 8);
    tokens(&ahead, 0..2);
    until(&numbers, 10);
}

#[test]
fn who_computes_longer_than_is_read_never_waits() {
    let slowly = Duration::from_millis(2);
    let numbers = Arc::new(Numbers {
        slowly,
        ..Numbers::default()
    });
    let ready = ahead(&numbers, 20, 2);
    for pair in pairs(20) {
        until(&numbers, (pair.end + 2).min(40));
        thread::sleep(Duration::from_millis(20));
        tokens(&ready, pair);
    }
    let waits = ready.waits();
    assert_eq!((waits.late, waits.time), (0, Duration::ZERO), "{waits:?}");

    let hasty = ahead(&numbers, 20, 2);
    for pair in pairs(20) {
        tokens(&hasty, pair);
    }
    let waits = hasty.waits();
    assert!(waits.late > 10 && waits.time > 10 * slowly, "{waits:?}");
    assert!(waits.start >= slowly, "{waits:?}");
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
    // One that is past, one of another size, and those that follow.
    assert_eq!(tokens(&ahead, 0..2), [0, 1]);
    assert_eq!(tokens(&ahead, 4..7), [4, 5, 6]);
    assert_eq!(ahead.waits().unforeseen, 2);
    // The one that was kept meanwhile.
    assert_eq!(tokens(&ahead, 4..6), [4, 5]);
    assert_eq!(tokens(&ahead, 6..8), [6, 7]);
    assert_eq!(tokens(&ahead, 10..12), [10, 11]);
    assert_eq!(ahead.waits().unforeseen, 2);
}

#[test]
fn it_ends_at_any_time() {
    let started = Instant::now();
    for taken in 0..5 {
        let numbers = Arc::new(Numbers::default());
        let ahead = ahead(&numbers, u64::MAX / 2, 2);
        pairs(taken).for_each(|pair| drop(tokens(&ahead, pair)));
        drop(ahead);
        // The thread had the other.
        assert_eq!(Arc::strong_count(&numbers), 1);
    }
    assert!(started.elapsed() < Duration::from_secs(20));
}

/// A reader that panics at number 4, once.
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
    let ahead = ReadAhead::new(Arc::new(Panics(AtomicU64::new(0))), pairs(5), 1).unwrap();
    for pair in pairs(5) {
        assert_eq!(tokens(&ahead, pair.clone())[0], pair.start as i32);
    }
    assert_eq!(ahead.waits().unforeseen, 3);
}

#[test]
fn a_reader_that_hangs_is_given_up() {
    let slowly = Duration::from_millis(500);
    let numbers = Arc::new(Numbers {
        slowly,
        ..Numbers::default()
    });
    let mut ahead = ahead(&numbers, 2, 1);
    ahead.deadline = Duration::from_millis(20);
    let error = ahead.batch(0..2).unwrap_err();
    assert!(matches!(error, DataError::Stalled(_)), "{error}");
}

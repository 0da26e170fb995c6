use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use super::ReadAhead;
use crate::comm::testing::{TIMEOUT, wait_until};
use crate::data::{DataError, Sample, Samples};

/// What holds a reader up.
#[derive(Default)]
struct Gate {
    open: Mutex<u64>,
    opened: Condvar,
}

impl Gate {
    /// Lets the samples below `end` through.
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

/// Sample `n` is the token `n`.
#[derive(Default)]
struct Numbers {
    read: AtomicU64,
    /// Samples from here on are not read before they may be.
    held: Option<Gate>,
    /// The one that cannot be read.
    bad: Option<u64>,
}

impl Samples for Numbers {
    fn seq(&self) -> usize {
        1
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.read.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.held {
            gate.pass(number);
        }
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
fn await_read(numbers: &Numbers, wanted: u64) {
    wait_until("as many are read", || {
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
    await_read(&numbers, 8);
    thread::sleep(Duration::from_millis(50));
    // Three that are ready, and one that has no place yet.
    assert_eq!(numbers.read.load(Ordering::SeqCst), 8);
    tokens(&ahead, 0..2);
    await_read(&numbers, 10);
}

#[test]
fn what_is_ready_is_not_waited_for() {
    let numbers = Arc::new(Numbers::default());
    let ready = ahead(&numbers, 20, 2);
    for pair in pairs(20) {
        // The batch after this one is being read, so that this one was handed over.
        await_read(&numbers, (pair.end + 1).min(40));
        if pair.end == 40 {
            let thread = ready.thread.as_ref().unwrap();
            wait_until("all is read", || thread.is_finished());
        }
        tokens(&ready, pair);
    }
    let waits = ready.waits();
    assert_eq!((waits.batches, waits.late), (20, 0), "{waits:?}");
    assert_eq!((waits.time, waits.start), (Duration::ZERO, Duration::ZERO));
}

#[test]
fn what_is_waited_for_is_counted() {
    let numbers = Arc::new(Numbers {
        held: Some(Gate::default()),
        ..Numbers::default()
    });
    let mut ahead = ahead(&numbers, 3, 2);
    let wait = Duration::from_millis(5);
    ahead.deadline = wait;
    for asked in 1..=5 {
        let error = ahead.batch(0..2).unwrap_err();
        assert!(matches!(error, DataError::Stalled(_)), "{error}");
        let waits = ahead.waits();
        // The first two are those of the start.
        let late = u32::try_from(asked).unwrap().saturating_sub(2);
        assert_eq!((waits.batches, waits.late), (asked, u64::from(late)));
        assert!(waits.time >= late * wait, "{waits:?}");
        assert!(waits.start >= wait, "{waits:?}");
        assert_eq!(late == 0, waits.time.is_zero());
    }
    ahead.deadline = TIMEOUT;
    numbers.held.as_ref().unwrap().open(u64::MAX);
    assert_eq!(tokens(&ahead, 0..2), [0, 1]);
    assert_eq!(ahead.waits().unforeseen, 0);
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
    for taken in 0..5 {
        let numbers = Arc::new(Numbers::default());
        let ahead = ahead(&numbers, u64::MAX / 2, 2);
        pairs(taken).for_each(|pair| drop(tokens(&ahead, pair)));
        drop(ahead);
        // The thread had the other.
        assert_eq!(Arc::strong_count(&numbers), 1);
    }
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

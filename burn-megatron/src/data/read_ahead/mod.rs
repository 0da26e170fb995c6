//! The batches of the next steps, read while the model computes.

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{Batch, DataError, Sample, Samples};

/// How long a batch may take before its reader is taken for dead.
const DEADLINE: Duration = Duration::from_secs(300);

/// How long the end of the thread is waited for.
const FAREWELL: Duration = Duration::from_secs(5);

/// A batch and the numbers of its samples.
type Prepared = (Range<u64>, Result<Batch, DataError>);

/// Samples whose next batches a thread prepares.
///
/// It is told the ranges of numbers that will be asked for, in their order, and keeps a few batches ready. A
/// batch that is asked for in another order is read at once, as without it. A batch that cannot be read
/// gives its error when it is asked for.
pub struct ReadAhead {
    samples: Arc<dyn Samples>,
    state: Mutex<State>,
    deadline: Duration,
    thread: Option<JoinHandle<()>>,
}

struct State {
    /// Nothing once the thread has ended.
    prepared: Option<Receiver<Prepared>>,
    /// One that was taken out and is for later.
    next: Option<Prepared>,
    /// How many are kept ready.
    ready: u64,
    waits: Waits,
}

/// How long training waited for data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Batches that were asked for.
    pub batches: u64,
    /// Those that were not ready when they were asked for.
    pub late: u64,
    /// The time until they were.
    pub time: Duration,
    /// The time until those were there that are asked for at the start, before the thread can have got ahead:
    /// as many as it keeps ready. They are not late.
    pub start: Duration,
    /// Those that were asked for in another order than was said, and read at once.
    pub unforeseen: u64,
}

impl ReadAhead {
    /// Prepares batches of `samples`, of the numbers in `ranges`: up to `ready` of them, and one more that
    /// is being read.
    ///
    /// # Errors
    ///
    /// [`DataError::Thread`] where the operating system has no thread.
    pub fn new(
        samples: Arc<dyn Samples>,
        ranges: impl Iterator<Item = Range<u64>> + Send + 'static,
        ready: usize,
    ) -> Result<Self, DataError> {
        let ready = ready.max(1);
        let (sender, prepared) = sync_channel(ready);
        let reader = Arc::clone(&samples);
        let thread = thread::Builder::new().name("read ahead".to_string());
        let thread = thread.spawn(move || prepare(&*reader, ranges, &sender));
        Ok(Self {
            samples,
            state: Mutex::new(State {
                prepared: Some(prepared),
                next: None,
                ready: ready as u64,
                waits: Waits::default(),
            }),
            deadline: DEADLINE,
            thread: Some(thread.map_err(DataError::Thread)?),
        })
    }

    /// How long it was waited for batches until now.
    pub fn waits(&self) -> Waits {
        self.lock().waits
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads one batch after the other, until nobody wants them any more.
fn prepare(
    samples: &dyn Samples,
    ranges: impl Iterator<Item = Range<u64>>,
    sender: &SyncSender<Prepared>,
) {
    for range in ranges {
        let batch = samples.batch(range.clone());
        if sender.send((range, batch)).is_err() {
            return;
        }
    }
}

impl State {
    /// The batch of these numbers, if it is prepared or will be; those before it are not wanted any more.
    fn take(
        &mut self,
        numbers: &Range<u64>,
        deadline: Duration,
    ) -> Result<Option<Result<Batch, DataError>>, DataError> {
        loop {
            let next = match self.next.take() {
                Some(next) => Some(next),
                None => self.receive(deadline)?,
            };
            match next {
                None => return Ok(None),
                Some((range, batch)) if range == *numbers => return Ok(Some(batch)),
                Some((range, _)) if range.start < numbers.start => {}
                Some(later) => {
                    self.next = Some(later);
                    return Ok(None);
                }
            }
        }
    }

    /// The next prepared batch; nothing if there are no more.
    fn receive(&mut self, deadline: Duration) -> Result<Option<Prepared>, DataError> {
        let Some(prepared) = &self.prepared else {
            return Ok(None);
        };
        match prepared.try_recv() {
            Ok(next) => return Ok(Some(next)),
            Err(TryRecvError::Disconnected) => {
                self.prepared = None;
                return Ok(None);
            }
            Err(TryRecvError::Empty) => {}
        }
        let started = Instant::now();
        let received = prepared.recv_timeout(deadline);
        let waited = started.elapsed();
        match self.waits.batches < self.ready {
            true => self.waits.start += waited,
            false => {
                self.waits.late += 1;
                self.waits.time += waited;
            }
        }
        match received {
            Ok(next) => Ok(Some(next)),
            Err(RecvTimeoutError::Disconnected) => {
                self.prepared = None;
                Ok(None)
            }
            Err(RecvTimeoutError::Timeout) => Err(DataError::Stalled(waited)),
        }
    }
}

impl Samples for ReadAhead {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number)
    }

    fn batch(&self, numbers: Range<u64>) -> Result<Batch, DataError> {
        let mut state = self.lock();
        let taken = state.take(&numbers, self.deadline);
        state.waits.batches += 1;
        match taken? {
            Some(batch) => batch,
            None => {
                state.waits.unforeseen += 1;
                drop(state);
                self.samples.batch(numbers)
            }
        }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        // The thread ends at the batch that nobody takes: at once, unless it hangs in the reading of it.
        self.lock().prepared = None;
        let Some(thread) = self.thread.take() else {
            return;
        };
        let started = Instant::now();
        while !thread.is_finished() {
            if started.elapsed() > FAREWELL {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        // If it panicked, its batch was read again by whoever asked for it.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests;

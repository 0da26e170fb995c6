//! Prefetches the batches of the next steps while the model runs the current step.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Batch, DataError, Sample, Samples};

/// The timeout of waiting for a batch.
const BATCH_TIMEOUT: Duration = Duration::from_secs(300);

/// The timeout of waiting for the thread to end.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A batch and the numbers of its samples.
type Prepared = (Range<u64>, Result<Batch, DataError>);

/// A source of samples that prefetches the next batches in a background thread.
///
/// The thread reads batches in the order in which they will be requested, and keeps a few batches ready. A batch that
/// is requested out of order is read synchronously. If reading a batch fails, the error is returned when the batch is
/// requested.
///
/// ```
/// use std::sync::Arc;
///
/// use burn_megatron_data::{Prefetcher, Samples, TextData, TextDocuments};
///
/// let mut documents = TextDocuments::default();
/// documents.push(b"a.txt", "abc".repeat(100).as_bytes());
/// let text = TextData::from_documents("memory".as_ref(), documents)?;
/// let samples: Arc<dyn Samples> = Arc::new(text.samples(8, 42)?);
/// // Two steps with 4 samples each.
/// let ranges = (0..2).map(|step: u64| 4 * step..4 * (step + 1));
/// let prefetcher = Prefetcher::new(samples.clone(), ranges, 1)?;
/// assert_eq!(prefetcher.batch(0..4)?, samples.batch(0..4)?);
/// assert_eq!(prefetcher.batch(4..8)?, samples.batch(4..8)?);
/// # Ok::<(), burn_megatron_data::DataError>(())
/// ```
pub struct Prefetcher {
    samples: Arc<dyn Samples>,
    state: Mutex<PrefetchState>,
    deadline: Duration,
    thread: Option<JoinHandle<()>>,
}

struct PrefetchState {
    /// `None` once the thread has ended.
    prepared: Option<Receiver<Prepared>>,
    /// A received batch for a later request.
    next: Option<Prepared>,
    /// The number of batches to keep ready.
    ready: u64,
    stats: PrefetchStats,
}

/// Statistics of the time for which training waited for data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStats {
    /// The number of requested batches.
    pub batches: u64,
    /// The number of batches that were not ready when they were requested.
    pub late: u64,
    /// The total time for which training waited for late batches.
    pub time: Duration,
    /// The total time for which training waited for the first batches. The number of these batches is the number of
    /// batches that are kept ready. They are requested before the thread can read ahead, so they are not counted as
    /// late.
    pub start: Duration,
    /// The number of batches that were requested out of order and read synchronously.
    pub out_of_order: u64,
}

impl Prefetcher {
    /// Starts to prefetch the batches of `samples` whose sample numbers are in `ranges`. Up to `ready` batches are kept
    /// ready, while another batch is being read.
    ///
    /// # Errors
    ///
    /// [`DataError::Thread`] if the thread cannot be started.
    pub fn new(
        samples: Arc<dyn Samples>,
        ranges: impl Iterator<Item = Range<u64>> + Send + 'static,
        ready: usize,
    ) -> Result<Self, DataError> {
        let ready = ready.max(1);
        let (sender, prepared) = sync_channel(ready);
        let reader = Arc::clone(&samples);
        let thread = thread::Builder::new()
            .name("read ahead".to_string())
            .spawn(move || prepare(&*reader, ranges, &sender));
        Ok(Self {
            samples,
            state: Mutex::new(PrefetchState {
                prepared: Some(prepared),
                next: None,
                ready: ready as u64,
                stats: PrefetchStats::default(),
            }),
            deadline: BATCH_TIMEOUT,
            thread: Some(thread.map_err(DataError::Thread)?),
        })
    }

    /// Returns the statistics of all requests so far.
    pub fn stats(&self) -> PrefetchStats {
        self.state.lock().stats
    }
}

/// Reads batches in order until the receiver is dropped.
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

impl PrefetchState {
    /// Returns the batch with these numbers, if it is or will be prefetched. Drops earlier batches.
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

    /// Returns the next prefetched batch; `None` if there are no more.
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
        if self.stats.batches < self.ready {
            self.stats.start += waited
        } else {
            self.stats.late += 1;
            self.stats.time += waited;
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

impl Samples for Prefetcher {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number)
    }

    fn batch(&self, numbers: Range<u64>) -> Result<Batch, DataError> {
        let mut state = self.state.lock();
        let taken = state.take(&numbers, self.deadline);
        state.stats.batches += 1;
        match taken? {
            Some(batch) => batch,
            None => {
                state.stats.out_of_order += 1;
                drop(state);
                self.samples.batch(numbers)
            }
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // The thread ends when it cannot send its batch: immediately, unless its read hangs.
        self.state.lock().prepared = None;
        let Some(thread) = self.thread.take() else {
            return;
        };
        let started = Instant::now();
        while !thread.is_finished() {
            if started.elapsed() > JOIN_TIMEOUT {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        // If the thread panicked, its batch was read again synchronously.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests;

//! A communicator that corrupts collectives, to simulate faults.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use burn_megatron::collective::Comm;
use burn_megatron::comm::{
    Buffer, BufferPool, Call, CommError, Communicator, DType, Group, Pending, ReduceOp,
};
use burn_megatron_kernels::adamw::outcome::columns;
use parking_lot::Mutex;

/// The kind of corruption that a [`CorruptedComm`] applies. Each kind corrupts certain calls, such as reductions of
/// floats. All other calls are forwarded unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// Skips reductions: each rank gets its own contribution back.
    Skip,
    /// Removes the sums of squares of the other ranks from the gathered statistics of a step. The gradient norm is
    /// computed from these statistics.
    OwnSquares,
    /// Skips max-reductions over the ranks.
    OwnMax,
    /// Skips reductions in process groups that are split from this group.
    SkipInSubgroups,
    /// Skips a reduction that directly follows another reduction, unless it reduces a single number. In a training
    /// step, these are the reductions of all gradient buckets after the first.
    SkipAfterFirst,
    /// Multiplies sums by the number of ranks, as if a mean was not divided by this number.
    Undivided,
    /// Adds the previous contribution of a rank to its next contribution of the same length, like a gradient buffer
    /// that is not cleared before the next step.
    NotCleared,
    /// Makes the values on the rank at index 1 slightly larger.
    Drift,
    /// Swaps the elements that an all-to-all in f64 sends to the first two receiving ranks, up to the smaller of the
    /// two counts.
    Misrouted,
    /// Sets the elements that are received from the rank at index 1 to zero in every third all-to-all in f64. Because
    /// the first two all-to-alls of a dispatch send tokens and weights, these elements are the results of the experts.
    LostResults,
    /// Replaces the data that an all-to-all in f64 sends with the data of another all-to-all of the same length that is
    /// still in flight. This mixes up two micro-batches.
    OtherMicroBatch,
    /// Replaces the result of an all-to-all with the data of the calling rank. A ring that is built from all-to-alls
    /// then drops one chunk and uses another chunk twice.
    OwnChunk,
    /// Replaces the result of an all-gather with the result of the previous all-gather of the same length. The chunks
    /// are then in the wrong order.
    PreviousChunk,
}

/// The relative error of [`Corruption::Drift`].
pub const DRIFT: f64 = 1e-12;

/// A communicator that corrupts some calls and forwards the others to another communicator. See [`Corruption`].
#[derive(Debug)]
pub struct CorruptedComm {
    inner: Comm,
    corruption: Corruption,
    /// Whether the previous call was a float reduction of several numbers.
    after_sum: AtomicBool,
    /// The number of all-to-alls in f64 so far.
    exchanges: AtomicUsize,
    /// The input of each all-to-all in f64 that is in flight, keyed by its number.
    under_way: Arc<Mutex<BTreeMap<usize, Buffer>>>,
    /// The last contribution to a sum, keyed by its number of elements.
    contributions: Mutex<BTreeMap<usize, Buffer>>,
    /// The result of the last completed all-gather.
    last_gathered: Arc<Mutex<Option<Buffer>>>,
}

impl CorruptedComm {
    /// Wraps `inner` in a communicator that applies `corruption`.
    pub fn wrap(inner: &Comm, corruption: Corruption) -> Comm {
        Arc::new(Self {
            inner: inner.clone(),
            corruption,
            after_sum: AtomicBool::new(false),
            exchanges: AtomicUsize::new(0),
            under_way: Arc::default(),
            contributions: Mutex::default(),
            last_gathered: Arc::default(),
        })
    }
}

impl Communicator for CorruptedComm {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let sums = matches!(call, Call::AllReduce(_) | Call::ReduceScatter(_));
        let sums = sums && input.dtype().is_float();
        let is_bucket = sums && input.len() > 1;
        let follows = self.after_sum.swap(is_bucket, Ordering::Relaxed);
        if let Call::AllToAll { send, receive } = &call
            && input.dtype() == DType::F64
        {
            match self.corruption {
                Corruption::Misrouted => {
                    let input = exchanged(input, send);
                    return self.inner.start(call, input);
                }
                Corruption::OtherMicroBatch => return self.start_confused(call, input),
                Corruption::LostResults
                    if self.exchanges.fetch_add(1, Ordering::Relaxed) % 3 == 2 =>
                {
                    let first: usize = receive[..1].iter().sum();
                    let lost = first..first + receive.get(1).copied().unwrap_or(0);
                    let pending = self.inner.start(call, input)?;
                    return Ok(Pending::new(move || Ok(without(pending.wait()?, lost))));
                }
                _ => {}
            }
        }
        match self.corruption {
            Corruption::SkipAfterFirst if is_bucket && follows => Ok(self.own_part(&call, input)),
            Corruption::Skip if sums => Ok(self.own_part(&call, input)),
            Corruption::OwnMax if sums && call == Call::AllReduce(ReduceOp::Max) => {
                Ok(Pending::ready(input))
            }
            Corruption::OwnSquares if call == Call::AllGather && input.dtype() == DType::F64 => {
                let (rank, width) = (self.rank(), input.len());
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(move || {
                    let gathered = pending.wait()?;
                    Ok(without_squares_of_others(gathered, rank, width))
                }))
            }
            Corruption::Drift if sums && self.rank() == 1 => {
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(|| Ok(times(pending.wait()?, 1.0 + DRIFT))))
            }
            Corruption::NotCleared if is_bucket => {
                let before = self.contributions.lock().remove(&input.len());
                let input = match before {
                    Some(before) => plus(input, before),
                    None => input,
                };
                self.contributions.lock().insert(input.len(), input.clone());
                self.inner.start(call, input)
            }
            Corruption::Undivided if sums => {
                let ranks = self.size() as f64;
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(move || {
                    let sum = pending.wait()?;
                    Ok(times(sum, ranks))
                }))
            }
            Corruption::OwnChunk if matches!(call, Call::AllToAll { .. }) => {
                let own = input.clone();
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(move || pending.wait().map(|_| own)))
            }
            Corruption::PreviousChunk if call == Call::AllGather => {
                let last = self.last_gathered.clone();
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(move || {
                    let gathered = pending.wait()?;
                    let previous = last.lock().replace(gathered.clone());
                    let same = previous.filter(|previous| previous.len() == gathered.len());
                    Ok(same.unwrap_or(gathered))
                }))
            }
            _ => self.inner.start(call, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        let part = self.inner.split(name, groups)?;
        Ok(match self.corruption {
            Corruption::SkipInSubgroups => Self::wrap(&part, Corruption::Skip),
            _ => part,
        })
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }

    fn begin_step(&self, step: u64) {
        self.inner.begin_step(step);
    }
}

impl CorruptedComm {
    /// Starts an all-to-all with the input of another all-to-all that is in flight.
    fn start_confused(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let number = self.exchanges.fetch_add(1, Ordering::Relaxed);
        let under_way = self.under_way.clone();
        let mut all = under_way.lock();
        let other = all.values().find(|other| other.len() == input.len());
        let sent = other.unwrap_or(&input).clone();
        all.insert(number, input);
        drop(all);
        let pending = self.inner.start(call, sent)?;
        Ok(Pending::new(move || {
            under_way.lock().remove(&number);
            pending.wait()
        }))
    }

    /// Returns the result of this rank as if all other ranks contributed zeros.
    fn own_part(&self, call: &Call, input: Buffer) -> Pending {
        let len = input.len() / self.size();
        Pending::ready(match call {
            Call::ReduceScatter(_) => input.slice(self.rank() * len..(self.rank() + 1) * len),
            _ => input,
        })
    }
}

/// Sets the sums of squares of the other ranks to zero in gathered statistics. The statistics of each rank have `width`
/// elements.
fn without_squares_of_others(buffer: Buffer, own: usize, width: usize) -> Buffer {
    let mut rows: Vec<f64> = buffer.into_vec();
    let others = rows.chunks_mut(width).enumerate();
    for (_, row) in others.filter(|(rank, _)| *rank != own) {
        row[columns::SQUARES..columns::SQUARES + 2].fill(0.0);
    }
    rows.into()
}

/// Swaps the elements for the first two ranks that receive any, up to the smaller of the two counts.
fn exchanged(buffer: Buffer, send: &[usize]) -> Buffer {
    let mut values: Vec<f64> = buffer.into_vec();
    let starts = send.iter().scan(0, |end, len| {
        *end += len;
        Some((*end - len, *len))
    });
    let some: Vec<_> = starts.filter(|(_, len)| *len > 0).take(2).collect();
    if let [(first, own), (second, other)] = some[..] {
        for at in 0..own.min(other) {
            values.swap(first + at, second + at);
        }
    }
    values.into()
}

/// Returns f64 values with zeros in a range.
fn without(buffer: Buffer, range: Range<usize>) -> Buffer {
    let mut values: Vec<f64> = buffer.into_vec();
    values[range].fill(0.0);
    values.into()
}

/// Returns the elementwise sum of f64 values.
fn plus(left: Buffer, right: Buffer) -> Buffer {
    let (left, right): (Vec<f64>, Vec<f64>) = (left.into_vec(), right.into_vec());
    let sums = left
        .into_iter()
        .zip(right)
        .map(|(left, right)| left + right);
    sums.collect::<Vec<_>>().into()
}

/// Multiplies f64 values by a factor. f64 is the default dtype of `verify`.
fn times(buffer: Buffer, factor: f64) -> Buffer {
    match buffer {
        Buffer::F64(values) => {
            let times = values.into_iter().map(|x| x * factor);
            times.collect::<Vec<_>>().into()
        }
        other => other,
    }
}

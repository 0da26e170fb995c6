//! A communicator that gets some of its sums wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_megatron::collective::Comm;
use burn_megatron::comm::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};

/// What a [`Disturbed`] communicator does to sums of floats; everything else it passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    /// They are left out: each rank gets its own contribution back.
    LeftOut,
    /// Those of a single number are left out.
    NumbersLeftOut,
    /// Those in the groups into which this one is split are left out.
    LeftOutInParts,
    /// Those that follow another with nothing between are left out: buckets after the first.
    LeftOutAfterFirst,
    /// The rank at index 1 gets each value a little too large.
    Drift,
}

/// The relative error of [`Disturbance::Drift`].
pub const DRIFT: f64 = 1e-12;

/// See [`Disturbance`].
#[derive(Debug)]
pub struct Disturbed {
    inner: Comm,
    disturbance: Disturbance,
    /// Whether the call before was a sum.
    after_sum: AtomicBool,
}

impl Disturbed {
    /// `inner`, disturbed.
    pub fn over(inner: &Comm, disturbance: Disturbance) -> Comm {
        Arc::new(Self {
            inner: inner.clone(),
            disturbance,
            after_sum: AtomicBool::new(false),
        })
    }
}

impl Communicator for Disturbed {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let sums = matches!(call, Call::AllReduce(_) | Call::ReduceScatter(_));
        let sums = sums && input.dtype().is_float();
        let follows = self.after_sum.swap(sums, Ordering::Relaxed);
        match self.disturbance {
            Disturbance::LeftOutAfterFirst if sums && follows => Ok(self.own_part(&call, input)),
            Disturbance::LeftOut if sums => Ok(self.own_part(&call, input)),
            Disturbance::NumbersLeftOut if sums && input.len() == 1 => {
                Ok(self.own_part(&call, input))
            }
            Disturbance::Drift if sums && self.rank() == 1 => {
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(|| pending.wait().map(drifted)))
            }
            _ => self.inner.start(call, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        let part = self.inner.split(name, groups)?;
        Ok(match self.disturbance {
            Disturbance::LeftOutInParts => Self::over(&part, Disturbance::LeftOut),
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

impl Disturbed {
    /// What this rank would get if the others gave zeros.
    fn own_part(&self, call: &Call, input: Buffer) -> Pending {
        let len = input.len() / self.size();
        Pending::ready(match call {
            Call::ReduceScatter(_) => input.slice(self.rank() * len..(self.rank() + 1) * len),
            _ => input,
        })
    }
}

fn drifted(buffer: Buffer) -> Buffer {
    match buffer {
        Buffer::F64(values) => values
            .into_iter()
            .map(|x| x * (1.0 + DRIFT))
            .collect::<Vec<_>>()
            .into(),
        other => other,
    }
}

//! The 16 barriers of a block.

use super::Fault;

/// A barrier.
#[derive(Clone, Copy, Debug, Default)]
struct Barrier {
    /// The number of completed rounds.
    passed: u64,
    /// The number of threads that this round waits for, or 0 for all threads of the block.
    wanted: usize,
    /// The number of threads that have arrived. A warp counts as a whole.
    arrived: usize,
    /// The number of individual threads that have arrived.
    threads: usize,
    /// The number of arrivals whose predicate is true, and the number of arrivals with a predicate.
    votes: (u32, u32),
    /// The votes of the last two rounds. A thread may read the result of a round after the next round has begun.
    results: [(u32, u32); 2],
}

/// Threads that arrive at a barrier.
pub(super) struct Arrival {
    pub number: u64,
    /// The number of threads that the barrier waits for, or 0 for all threads.
    pub wanted: usize,
    pub threads: usize,
    /// Whether these are all remaining threads of a warp.
    pub whole: bool,
    /// The number of threads whose predicate of `bar.red` is true.
    pub votes: Option<u32>,
}

/// The result of a barrier for the threads that pass it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarrierResult {
    /// The barrier has not been passed yet.
    No,
    /// All threads of the block have arrived.
    All,
    /// The requested number of threads has arrived.
    Some,
}

/// The barriers of a block, and the number of remaining threads.
#[derive(Clone, Debug)]
pub(super) struct Barriers {
    barriers: [Barrier; 16],
    size: usize,
    alive: usize,
}

impl Barriers {
    pub fn new(threads: usize) -> Self {
        Self {
            barriers: Default::default(),
            size: threads,
            alive: threads,
        }
    }

    /// Returns the number of threads that have not ended.
    pub fn alive(&self) -> usize {
        self.alive
    }

    /// Adds threads to a barrier. Returns the round that they wait for, and the result of the barrier.
    pub fn arrive(&mut self, arrival: &Arrival) -> Result<(u64, BarrierResult), Fault> {
        let Arrival { number, wanted, .. } = *arrival;
        let undefined = |what: String| Err(Fault::Undefined(what));
        let Some(barrier) = self.barriers.get_mut(number as usize) else {
            return undefined(format!("invalid barrier {number}: expected 0 to 15"));
        };
        // A count that covers all warps means the whole block.
        let wanted = if wanted >= self.size { 0 } else { wanted };
        if barrier.threads > 0 && barrier.wanted != wanted {
            let other = barrier.wanted;
            return undefined(format!(
                "barrier {number} waits for {other} threads, and for {wanted} (0: all)"
            ));
        }
        if !wanted.is_multiple_of(super::LANES) {
            return undefined(format!("a barrier of {wanted} threads: no whole warps"));
        }
        barrier.wanted = wanted;
        barrier.threads += arrival.threads;
        barrier.arrived += if arrival.whole {
            super::LANES
        } else {
            arrival.threads
        };
        if let Some(votes) = arrival.votes {
            barrier.votes.0 += votes;
            barrier.votes.1 += arrival.threads as u32;
        }
        let round = barrier.passed;
        Ok((round, barrier.close(self.alive)))
    }

    /// Removes threads that have exited, so that no barrier waits for them. Returns whether a barrier was passed by
    /// this.
    pub fn end(&mut self, threads: usize) -> BarrierResult {
        self.alive -= threads;
        let alive = self.alive;
        let waits = |barrier: &&mut Barrier| barrier.threads > 0 && barrier.wanted == 0;
        let closed = self.barriers.iter_mut().filter(waits);
        let closed = closed.map(|barrier| barrier.close(alive));
        closed.fold(BarrierResult::No, |any, one| {
            if one == BarrierResult::No { any } else { one }
        })
    }

    /// Returns whether a round of a barrier has ended.
    #[inline]
    pub fn over(&self, number: usize, round: u64) -> bool {
        self.barriers[number].passed > round
    }

    /// Returns the votes of a round: the number of votes for, and the number of all votes.
    pub fn votes(&self, number: usize, round: u64) -> Result<(u32, u32), Fault> {
        let barrier = &self.barriers[number];
        match barrier.passed - round {
            1 | 2 => Ok(barrier.results[round as usize % 2]),
            _ => Err(Fault::Undefined(format!(
                "barrier {number} was passed again before all knew what its votes were"
            ))),
        }
    }
}

impl Barrier {
    /// Ends the round if all threads have arrived.
    fn close(&mut self, alive: usize) -> BarrierResult {
        let complete = match self.wanted {
            0 => self.threads >= alive,
            wanted => self.arrived >= wanted,
        };
        if !complete {
            return BarrierResult::No;
        }
        self.results[self.passed as usize % 2] = self.votes;
        let all = self.wanted == 0;
        *self = Self {
            passed: self.passed + 1,
            results: self.results,
            ..Self::default()
        };
        if all {
            BarrierResult::All
        } else {
            BarrierResult::Some
        }
    }
}

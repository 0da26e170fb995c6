//! Inserts sends and receives between the computations of a schedule.

use std::collections::{HashMap, VecDeque};

use super::validate::{Required, RuleViolation, check_rank};
use super::wait_cycle::wait_cycle;
use super::{Action, ActionKind, InvalidSchedule, Schedule};

impl Schedule {
    /// Inserts sends and receives into this schedule. Existing sends and receives are replaced.
    ///
    /// The positions are found by simulating ranks whose sends block until the matching receive. A rank sends a tensor
    /// directly after it has computed the tensor, and receives a tensor directly before the tensor is used. If ranks
    /// then wait for each other in a cycle, one send of the cycle is received early. To select this send, all forwards,
    /// input gradients and weight gradients are assumed to take the same time. The send whose tensor is computed first
    /// is selected. If several tensors are computed at the same time, activations are received before gradients, and
    /// tensors of lower stages are received first.
    ///
    /// Under the assumption of equal times, every tensor that is received early has already arrived. A rank that blocks
    /// in each receive then loses no time. All ranks follow one global order of all transfers. Therefore the schedule
    /// does not deadlock, whether or not sends block.
    ///
    /// All receives of a pair are before the pair, and all of its sends are after the pair. A reduction of gradients
    /// stays directly after its computation, before the result of the computation is sent.
    ///
    /// # Errors
    ///
    /// [`InvalidSchedule`] if the computations of the schedule are invalid. If the schedule has reductions of
    /// gradients, it must also have a valid reduction for each stage.
    pub fn with_communication(self) -> Result<Self, InvalidSchedule> {
        let mut bare = self;
        for actions in &mut bare.ranks {
            actions.retain(|action| !action.kind.is_transfer());
        }
        let required = Required {
            transfers: false,
            reductions: bare.has_reductions(),
        };
        for rank in 0..bare.ranks() {
            check_rank(&bare, rank, required)?;
        }
        let ranks = TransferScheduler::new(&bare).run()?;
        Ok(Schedule { ranks, ..bare })
    }
}

/// Simulates all ranks and records their actions.
struct TransferScheduler<'a> {
    schedule: &'a Schedule,
    ranks: Vec<RankProgress>,
}

/// The progress of one rank.
#[derive(Default)]
struct RankProgress {
    /// The index of the next computation or reduction.
    next: usize,
    /// The end of the last computation, if sends do not block.
    clock: usize,
    /// The sends of the results of the last computation or pair, until they are recorded.
    unsent: VecDeque<Action>,
    /// The time at which the tensor of each receive was computed.
    received: HashMap<Action, usize>,
    recorded: Vec<Action>,
}

/// The next step of a rank.
enum NextStep {
    Compute,
    Transfer(Action),
    End,
}

impl<'a> TransferScheduler<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let ranks = (0..schedule.ranks())
            .map(|_| RankProgress::default())
            .collect();
        TransferScheduler { schedule, ranks }
    }

    fn run(mut self) -> Result<Vec<Vec<Action>>, InvalidSchedule> {
        let mut ready: Vec<usize> = (0..self.ranks.len()).collect();
        loop {
            while let Some(rank) = ready.pop() {
                ready.extend(self.advance(rank));
            }
            let unfinished =
                (0..self.ranks.len()).find(|rank| !matches!(self.next_step(*rank), NextStep::End));
            match unfinished {
                None => {
                    let recorded = self.ranks.into_iter().map(|progress| progress.recorded);
                    return Ok(recorded.collect());
                }
                Some(rank) => ready = self.break_cycle(rank)?,
            }
        }
    }

    fn next_step(&self, rank: usize) -> NextStep {
        let progress = &self.ranks[rank];
        if let Some(send) = progress.unsent.front() {
            return NextStep::Transfer(*send);
        }
        let actions = self.schedule.together(rank, progress.next);
        let mut receives = actions
            .iter()
            .filter_map(|action| self.schedule.receive_before(action));
        match receives.find(|receive| !progress.received.contains_key(receive)) {
            Some(receive) => NextStep::Transfer(receive),
            None if actions.is_empty() => NextStep::End,
            None => NextStep::Compute,
        }
    }

    /// Advances a rank until it blocks. Returns the ranks that a transfer has unblocked.
    fn advance(&mut self, rank: usize) -> Vec<usize> {
        loop {
            match self.next_step(rank) {
                NextStep::Compute => {
                    let schedule = self.schedule;
                    let progress = &mut self.ranks[rank];
                    let actions = schedule.together(rank, progress.next);
                    for action in actions {
                        let needs = schedule.receive_before(action);
                        let arrival = needs.and_then(|receive| progress.received.get(&receive));
                        progress.clock = progress.clock.max(arrival.copied().unwrap_or(0));
                    }
                    for action in actions {
                        progress.clock += duration(action);
                        progress.recorded.push(*action);
                        progress.unsent.extend(schedule.send_after(action));
                    }
                    progress.next += actions.len();
                    self.record_reductions(rank);
                }
                NextStep::Transfer(transfer) => {
                    let (peer, counterpart) = self.matching_transfer(&transfer);
                    let met = matches!(
                        self.next_step(peer), NextStep::Transfer(other) if other == counterpart
                    );
                    if !met {
                        return vec![];
                    }
                    self.record_transfer(rank, transfer);
                    return vec![peer, rank];
                }
                NextStep::End => return vec![],
            }
        }
    }

    /// Records the reductions that directly follow a computation. They take no time.
    fn record_reductions(&mut self, rank: usize) {
        let list = &self.schedule.ranks[rank];
        let progress = &mut self.ranks[rank];
        while let Some(action) = list.get(progress.next)
            && action.kind == ActionKind::ReduceGradients
        {
            progress.recorded.push(*action);
            progress.next += 1;
        }
    }

    /// Records a transfer on both of its ranks.
    fn record_transfer(&mut self, rank: usize, transfer: Action) {
        let (peer, counterpart) = self.matching_transfer(&transfer);
        let sender = if transfer.kind.is_send() { rank } else { peer };
        let computed = self.ranks[sender].clock;
        for (rank, action) in [(rank, transfer), (peer, counterpart)] {
            let progress = &mut self.ranks[rank];
            progress.recorded.push(action);
            if action.kind.is_send() {
                progress.unsent.pop_front();
            } else {
                progress.received.insert(action, computed);
            }
        }
    }

    /// Breaks a cycle of waiting ranks by receiving one of its sends early.
    fn break_cycle(&mut self, start: usize) -> Result<Vec<usize>, InvalidSchedule> {
        let cycle = wait_cycle(start, |rank| self.waits_for(rank).0);
        let send = cycle
            .iter()
            .filter_map(|rank| Some((*self.ranks[*rank].unsent.front()?, *rank)))
            .min_by_key(|(send, rank)| (self.ranks[*rank].clock, send.kind, send.stage));
        let Some((send, rank)) = send else {
            return Err(self.invalid(&cycle));
        };
        let peer = self.matching_transfer(&send).0;
        self.record_transfer(rank, send);
        Ok(vec![peer, rank])
    }

    /// Returns the rank that a rank waits for, and the transfer between them.
    fn waits_for(&self, rank: usize) -> (usize, Action) {
        match self.next_step(rank) {
            NextStep::Transfer(transfer) => (self.matching_transfer(&transfer).0, transfer),
            // No rank waits for a rank that has finished its list, and a rank that can compute does not wait.
            _ => unreachable!("rank {rank} does not wait"),
        }
    }

    /// Returns the error for ranks that all wait for a tensor that is computed too late.
    fn invalid(&self, cycle: &[usize]) -> InvalidSchedule {
        let rank = cycle[0];
        let position = self.ranks[rank].next;
        let cycle = cycle
            .iter()
            .map(|rank| (*rank, self.waits_for(*rank).1))
            .collect();
        InvalidSchedule {
            rank,
            position,
            actions: self.schedule.ranks[rank].len(),
            action: self.schedule.ranks[rank][position],
            reason: RuleViolation::Deadlock { cycle },
        }
    }

    fn matching_transfer(&self, transfer: &Action) -> (usize, Action) {
        self.schedule
            .matching_transfer(transfer)
            .expect("only transfers between ranks are recorded")
    }
}

/// Returns the time of a computation, which determines the order of transfers.
fn duration(action: &Action) -> usize {
    if action.kind == ActionKind::Backward {
        2
    } else {
        1
    }
}

//! Tracks the positions of the lanes of a warp, and which lanes wait for each other.
//!
//! Lanes that diverge at a branch are held at the reconvergence point until all of them have arrived, as on a GPU. If
//! no other lanes can continue, or if other lanes run for too long, the held lanes are released. A program may rely
//! on the progress of every lane.

use super::block::Block;
use super::flow::NOWHERE;
use super::program::Program;

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub at: usize,
    pub mask: u32,
    pub state: State,
    /// The number of instructions that the group has executed while other groups had to wait.
    pub spent: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The group can continue.
    Ready,
    /// The group waits for a round of a barrier.
    Barrier { number: usize, round: u64 },
    /// The group is at a `Meet` whose other lanes have not arrived.
    Meet,
    /// The group is at a `Gather` of these lanes.
    Gather(u32),
    /// The group is held at a reconvergence point.
    Held,
}

/// Lanes that diverged, and their reconvergence point.
#[derive(Clone, Copy, Debug)]
struct Reconvergence {
    at: usize,
    mask: u32,
}

/// The number of instructions that a group may execute while others wait. It is large enough for loops in which one
/// lane has more iterations than another lane.
const PATIENCE: u64 = 1 << 20;
/// The same limit after lanes were observed to wait for each other.
const LITTLE: u64 = 1 << 10;

/// The lanes of a warp.
pub(super) struct LaneGroups {
    /// Lanes that have not exited.
    pub alive: u32,
    pub all: Vec<Group>,
    /// The innermost reconvergence point is last.
    reconvergences: Vec<Reconvergence>,
    patience: u64,
}

impl LaneGroups {
    pub fn new(mask: u32) -> Self {
        Self {
            alive: mask,
            all: vec![Group {
                at: 0,
                mask,
                state: State::Ready,
                spent: 0,
            }],
            reconvergences: Vec::new(),
            patience: PATIENCE,
        }
    }

    /// Releases groups that no longer have to wait, and merges groups that can run together.
    pub fn settle(&mut self, block: &Block<'_>) {
        if let [group] = &mut self.all[..] {
            self.reconvergences.clear();
            group.spent = 0;
            if matches!(group.state, State::Held) {
                group.state = State::Ready;
            }
        }
        for group in &mut self.all {
            if let State::Barrier { number, round } = group.state
                && block.barriers.over(number, round)
            {
                group.state = State::Ready;
                group.at += 1;
            }
        }
        if self.all.len() > 1 {
            self.join();
            self.meet();
        }
        self.gather();
    }

    fn join(&mut self) {
        self.all.sort_unstable_by_key(|group| group.at);
        let mut kept = 0;
        for next in 0..self.all.len() {
            let group = self.all[next];
            let same = |other: &&mut Group| {
                let at_meet = |state| matches!(state, State::Ready | State::Meet);
                let held = group.state == State::Held && other.state == State::Held;
                other.at == group.at && (held || at_meet(group.state) && at_meet(other.state))
            };
            match self.all[..kept].iter_mut().find(same) {
                Some(other) => {
                    other.mask |= group.mask;
                    other.spent = other.spent.max(group.spent);
                    if other.state == State::Meet {
                        other.state = State::Ready;
                    }
                }
                None => {
                    self.all[kept] = group;
                    kept += 1;
                }
            }
        }
        self.all.truncate(kept);
    }

    /// Ends each reconvergence whose lanes have all arrived.
    fn meet(&mut self) {
        let mut any = false;
        while let Some(done) = self.reconvergences.iter().rposition(|meeting| {
            let here = |group: &&Group| group.at == meeting.at && group.state == State::Held;
            let here = self.all.iter().filter(here);
            let here = here.fold(0, |all, group| all | group.mask);
            meeting.mask & self.alive & !here == 0
        }) {
            let at = self.reconvergences.remove(done).at;
            self.let_go(at);
            any = true;
        }
        if any {
            self.join();
        }
    }

    /// Releases held lanes at an instruction if no reconvergence needs them.
    fn let_go(&mut self, at: usize) {
        let reconvergences = &self.reconvergences;
        let here = |group: &&mut Group| group.at == at && group.state == State::Held;
        for group in self.all.iter_mut().filter(here) {
            if held(reconvergences, at, group.mask) == 0 {
                group.state = State::Ready;
            }
        }
    }

    fn gather(&mut self) {
        for index in 0..self.all.len() {
            let State::Gather(named) = self.all[index].state else {
                continue;
            };
            let waits = |group: &&mut Group| group.state == State::Gather(named);
            let here = self.all.iter_mut().filter(waits);
            let here = here.fold(0, |all, group| all | group.mask);
            if named & self.alive & !here == 0 {
                for group in self.all.iter_mut().filter(waits) {
                    group.state = State::Ready;
                    group.at += 1;
                }
            }
        }
    }

    /// Returns the group that runs next. It is the group that is furthest behind among the groups with patience left.
    pub fn next(&mut self) -> Option<usize> {
        loop {
            let ready = || {
                let ready = |(_, group): &(usize, &Group)| group.state == State::Ready;
                self.all.iter().enumerate().filter(ready)
            };
            let fresh = ready().filter(|(_, group)| group.spent < self.patience);
            if let Some((index, _)) = fresh.min_by_key(|(_, group)| group.at) {
                return Some(index);
            }
            let several = ready().count() > 1;
            let tired = ready().count() > 0;
            let held = self.all.iter().any(|group| group.state == State::Held);
            if !tired && !held {
                return None;
            }
            if several || tired && held {
                self.patience = LITTLE;
            }
            self.all.iter_mut().for_each(|group| group.spent = 0);
            if tired {
                // A group runs for too long.
                self.reconvergences.clear()
            } else {
                // Only held groups remain.
                let _ = self.reconvergences.pop();
            }
            for index in 0..self.all.len() {
                self.let_go(self.all[index].at);
            }
        }
    }

    /// Returns the number of instructions that a group may still execute before another group runs.
    pub fn patience(&self, group: &Group) -> u64 {
        if self.all.is_empty() {
            u64::MAX
        } else {
            self.patience.saturating_sub(group.spent).max(1)
        }
    }

    /// Returns the cost that a group is charged for active waiting.
    pub fn price_of_waiting(&self) -> u64 {
        self.patience >> 8
    }

    /// Returns the next position of another group.
    pub fn limit(&self, at: usize) -> usize {
        let others = self.all.iter().map(|group| group.at);
        others.filter(|other| *other > at).min().unwrap_or(NOWHERE)
    }

    /// Lets lanes diverge. They reconverge at the instruction that the program defines.
    pub fn part(&mut self, program: &Program, at: usize, mask: u32) {
        let meeting = program.reconvergences[at];
        let inner = self
            .reconvergences
            .iter()
            .rfind(|other| other.mask & mask != 0);
        let known = inner.is_some_and(|inner| inner.at == meeting && mask & !inner.mask == 0);
        if meeting != NOWHERE && !known {
            self.reconvergences
                .push(Reconvergence { at: meeting, mask });
        }
    }

    /// Returns the lanes of `mask` that wait for other lanes at an instruction.
    #[inline]
    pub fn held(&self, at: usize, mask: u32) -> u32 {
        if self.reconvergences.is_empty() {
            0
        } else {
            held(&self.reconvergences, at, mask)
        }
    }

    /// Places lanes at an instruction, where they continue or are held.
    pub fn put(&mut self, at: usize, mask: u32, spent: u64) {
        let held = self.held(at, mask);
        for (mask, state) in [(mask & !held, State::Ready), (held, State::Held)] {
            self.put_as(at, mask, spent, state);
        }
    }

    pub fn put_as(&mut self, at: usize, mask: u32, spent: u64, state: State) {
        if mask != 0 {
            self.all.push(Group {
                at,
                mask,
                state,
                spent,
            });
        }
    }

    /// Removes lanes that exit. Lanes at a `Meet` may have waited for them.
    pub fn end(&mut self, mask: u32) {
        self.alive &= !mask;
        for group in &mut self.all {
            if group.state == State::Meet {
                group.state = State::Ready;
            }
        }
    }
}

fn held(reconvergences: &[Reconvergence], at: usize, mask: u32) -> u32 {
    let here = reconvergences.iter().filter(|meeting| meeting.at == at);
    here.fold(0, |all, meeting| all | meeting.mask & mask)
}

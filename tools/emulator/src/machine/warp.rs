//! A warp: 32 lanes that diverge at branches and reconverge.
//!
//! Lanes at the same instruction form a [group](super::groups), which runs as a unit. The group that is furthest
//! behind runs first, up to the position of the next group. Both groups are then merged. Compilers lay out code so
//! that lanes reconverge behind the branch at which they diverged.

use super::barrier::Arrival;
use super::groups::{Group, LaneGroups, State};
use super::program::{Action, Op, Program, Reduce, Source, Step, Wait};
use super::{Block, Fault, LANES, Lanes, Mask};

/// The number of instructions that a warp executes before another warp runs.
const TURN: u64 = 1 << 14;

/// A warp.
pub struct Warp {
    /// The number of the warp in the block.
    pub number: usize,
    /// `%tid`, by dimension.
    pub threads: [Lanes; 3],
    /// Data registers.
    pub registers: Vec<Lanes>,
    /// Predicates, one bit per lane.
    pub predicates: Vec<u32>,
    /// Local memory, one lane after the other.
    pub local: Vec<u8>,
    /// The number of executed instructions.
    pub clock: u64,
    /// The carry flags of `add.cc` and similar instructions, one bit per lane.
    pub carry: u32,
    /// The current instruction.
    pub at: usize,
    /// The number of times that the lanes have waited for each other.
    pub reconvergences: u32,
    groups: LaneGroups,
    /// The clock at which the current group would have begun if it had run without interruption.
    began: u64,
}

/// The reason why a warp stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WarpStop {
    /// No lane is left.
    Done,
    /// Every lane waits.
    Waits,
    /// Another warp runs next.
    Turn,
}

/// The continuation of a group.
enum Next {
    At(usize),
    /// The lanes have been returned to the groups.
    Parted,
    Yielded,
}

impl Warp {
    /// Creates warp `number` of a block with the given dimensions. All bits of its registers are ones, so that
    /// unwritten values are NaN.
    pub(super) fn new(number: usize, block: [u32; 3], program: &Program) -> Self {
        let [x, y, z] = block.map(u64::from);
        let first = (number * LANES) as u64;
        let threads = [
            std::array::from_fn(|lane| (first + lane as u64) % x),
            std::array::from_fn(|lane| (first + lane as u64) / x % y),
            std::array::from_fn(|lane| (first + lane as u64) / (x * y)),
        ];
        let lanes = (x * y * z - first).min(LANES as u64);
        let (registers, predicates) = program.registers;
        Self {
            number,
            threads,
            registers: vec![[u64::MAX; LANES]; registers],
            predicates: vec![0; predicates],
            local: vec![0xff; program.local * LANES],
            clock: 0,
            carry: 0,
            at: 0,
            reconvergences: 0,
            groups: LaneGroups::new((u64::MAX >> (64 - lanes)) as u32),
            began: 0,
        }
    }

    /// Returns the threads that have not exited.
    pub fn alive(&self) -> Mask {
        Mask(self.groups.alive)
    }

    /// Returns each barrier at which lanes wait, with their instruction.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (usize, usize, Mask)> + '_ {
        self.groups
            .all
            .iter()
            .filter_map(|group| match group.state {
                State::Barrier { number, .. } => Some((number, group.at, Mask(group.mask))),
                _ => None,
            })
    }

    /// Runs until no group can run or the turn is over.
    pub(super) fn run(
        &mut self,
        program: &Program,
        block: &mut Block<'_>,
    ) -> Result<WarpStop, Fault> {
        let end = self.clock + TURN;
        loop {
            self.learn(program, block)?;
            self.groups.settle(block);
            if self.groups.all.is_empty() {
                return Ok(WarpStop::Done);
            }
            let Some(next) = self.groups.next() else {
                return self.stopped();
            };
            if self.clock >= end {
                return Ok(WarpStop::Turn);
            }
            let group = self.groups.all.swap_remove(next);
            if self.advance(group, end, program, block)? {
                return Ok(WarpStop::Turn);
            }
        }
    }

    /// Handles the case that no group can continue.
    fn stopped(&mut self) -> Result<WarpStop, Fault> {
        let at_barrier = self.waiting().next().map(|(_, at, _)| at);
        if let Some(at) = at_barrier {
            self.at = at;
            return Ok(WarpStop::Waits);
        }
        let Group { at, mask, .. } = self.groups.all[0];
        self.at = at;
        Err(Fault::Deadlock(format!(
            "lanes {mask:#010x} wait for lanes that never come; alive are {:#010x}",
            self.groups.alive
        )))
    }

    /// Runs a group until it diverges, waits, exits, or reaches the position of another group. Returns whether it
    /// gave up its turn.
    fn advance(
        &mut self,
        group: Group,
        end: u64,
        program: &Program,
        block: &mut Block<'_>,
    ) -> Result<bool, Fault> {
        let Group { mut at, mask, .. } = group;
        let mut limit = self.groups.limit(at);
        let patience = self.groups.patience(&group);
        let end = end.min(self.clock.saturating_add(patience));
        self.began = self.clock.wrapping_sub(group.spent);
        loop {
            self.at = at;
            let op = &program.ops[at];
            self.clock += 1;
            block.counts.instruction(op.kind);
            let active = match op.guard {
                None => mask,
                Some(guard) => {
                    let bits = self.predicates[guard.predicate];
                    mask & if guard.negated { !bits } else { bits }
                }
            };
            match &op.action {
                _ if active == 0 => at += 1,
                Action::Step(step) => {
                    step(self, Mask(active), block)?;
                    at += 1;
                }
                Action::Jump(target) if active == mask => {
                    if *target <= at {
                        limit = self.groups.limit(*target);
                    }
                    at = *target;
                }
                _ => match self.leave(op, at, mask, Mask(active), program, block)? {
                    Next::At(next) => at = next,
                    Next::Parted => return Ok(false),
                    Next::Yielded => return Ok(true),
                },
            }
            if at >= limit || self.clock >= end || self.groups.held(at, mask) != 0 {
                self.put(at, mask, program, block);
                return Ok(false);
            }
        }
    }

    /// Executes an instruction after which lanes may not continue together.
    fn leave(
        &mut self,
        op: &Op,
        at: usize,
        mask: u32,
        active: Mask,
        program: &Program,
        block: &mut Block<'_>,
    ) -> Result<Next, Fault> {
        let rest = mask & !active.0;
        match &op.action {
            Action::Step(step) => {
                step(self, active, block)?;
                return Ok(Next::At(at + 1));
            }
            Action::Jump(target) => {
                self.groups.part(program, at, mask);
                self.put(*target, active.0, program, block);
            }
            Action::Table { index, targets } => {
                self.groups.part(program, at, mask);
                for (target, lanes) in self.choose(*index, targets, active, block)? {
                    self.put(target, lanes, program, block);
                }
            }
            Action::Exit => self.end(active.0, block),
            Action::Barrier {
                number,
                threads,
                wait,
            } => {
                let number = self.uniform(*number, active, block)?;
                let threads = match threads {
                    Some(threads) => self.uniform(*threads, active, block)?,
                    None => 0,
                };
                let round = self.arrive(number, threads, *wait, active, block)?;
                if *wait == Wait::Arrive {
                    return Ok(Next::At(at + 1));
                }
                let number = number as usize;
                let state = State::Barrier { number, round };
                let spent = self.spent();
                self.groups.put_as(at, active.0, spent, state);
            }
            Action::Gather { members } => {
                self.reconvergences += 1;
                // The common case: all lanes are here.
                if *members == Source::Value(u32::MAX.into()) && active.0 == self.groups.alive {
                    return Ok(Next::At(at + 1));
                }
                let sets = self.sets(*members, active, block)?;
                let spent = self.spent();
                for (named, lanes) in sets {
                    match named & self.groups.alive & !lanes {
                        0 => self.put(at + 1, lanes, program, block),
                        _ => self.groups.put_as(at, lanes, spent, State::Gather(named)),
                    }
                }
            }
            Action::Meet { members, step } => {
                let missing = self.meet(*members, step, active, block)?;
                if missing == 0 {
                    return Ok(Next::At(at + 1));
                }
                let spent = self.spent();
                self.groups.put_as(at, missing, spent, State::Meet);
                self.put(at + 1, mask & !missing, program, block);
                return Ok(Next::Parted);
            }
            Action::Yield(step) => {
                step(self, active, block)?;
                let price = self.groups.price_of_waiting();
                self.began = self.began.wrapping_sub(price);
                self.put(at + 1, mask, program, block);
                return Ok(Next::Yielded);
            }
        }
        self.put(at + 1, rest, program, block);
        Ok(Next::Parted)
    }

    fn spent(&self) -> u64 {
        self.clock.wrapping_sub(self.began)
    }

    /// Places lanes at an instruction. If all lanes exit there, they exit immediately, so that no other lane waits
    /// for them.
    fn put(&mut self, at: usize, mask: u32, program: &Program, block: &mut Block<'_>) {
        if mask != 0 && program.ops[at].ends() {
            self.clock += 1;
            block.counts.instruction(program.ops[at].kind);
            return self.end(mask, block);
        }
        let spent = self.spent();
        self.groups.put(at, mask, spent);
    }

    fn end(&mut self, mask: u32, block: &mut Block<'_>) {
        self.groups.end(mask);
        let passed = block.barriers.end(mask.count_ones() as usize);
        block.passed(passed);
    }

    fn arrive(
        &mut self,
        number: u64,
        wanted: u64,
        wait: Wait,
        active: Mask,
        block: &mut Block<'_>,
    ) -> Result<u64, Fault> {
        let here = |(other, at, _): (usize, usize, Mask)| other as u64 == number && at != self.at;
        if self.waiting().any(here) {
            return Err(Fault::Undefined(format!(
                "lanes of one warp come to barrier {number} at two instructions"
            )));
        }
        self.reconvergences += 1;
        let votes = match wait {
            Wait::Reduce(_, predicate, negated) => {
                let bits = self.predicates[predicate];
                Some((active.0 & if negated { !bits } else { bits }).count_ones())
            }
            _ => None,
        };
        let (round, passed) = block.barriers.arrive(&Arrival {
            number,
            wanted: wanted as usize,
            threads: active.count(),
            whole: active.0 == self.groups.alive,
            votes,
        })?;
        block.passed(passed);
        Ok(round)
    }

    /// Writes the votes of a passed barrier to its lanes.
    fn learn(&mut self, program: &Program, block: &Block<'_>) -> Result<(), Fault> {
        for group in &self.groups.all {
            let State::Barrier { number, round } = group.state else {
                continue;
            };
            let Action::Barrier { wait, .. } = &program.ops[group.at].action else {
                continue;
            };
            let Wait::Reduce(reduce, ..) = wait else {
                continue;
            };
            if !block.barriers.over(number, round) {
                continue;
            }
            let (ones, all) = block.barriers.votes(number, round)?;
            let mut predicate = |index: usize, value: bool| {
                let others = self.predicates[index] & !group.mask;
                self.predicates[index] = others | if value { group.mask } else { 0 };
            };
            match *reduce {
                Reduce::All(index) => predicate(index, ones == all),
                Reduce::Any(index) => predicate(index, ones > 0),
                Reduce::Count(index) => Mask(group.mask)
                    .lanes()
                    .for_each(|lane| self.registers[index][lane] = ones.into()),
            }
        }
        Ok(())
    }

    /// Returns the lanes that jump to each target.
    fn choose(
        &self,
        index: Source,
        targets: &[usize],
        active: Mask,
        block: &Block<'_>,
    ) -> Result<Vec<(usize, u32)>, Fault> {
        let indices = index.read(self, block);
        let mut chosen: Vec<(usize, u32)> = Vec::new();
        for lane in active.lanes() {
            let target = *targets.get(indices[lane] as u32 as usize).ok_or_else(|| {
                let (index, count) = (indices[lane], targets.len());
                Fault::Undefined(format!("lane {lane} jumps to target {index} of {count}"))
            })?;
            match chosen.iter_mut().find(|(other, _)| *other == target) {
                Some((_, lanes)) => *lanes |= 1 << lane,
                None => chosen.push((target, 1 << lane)),
            }
        }
        Ok(chosen)
    }

    /// Returns the value of a source that must be equal in all lanes.
    fn uniform(&self, source: Source, active: Mask, block: &Block<'_>) -> Result<u64, Fault> {
        let values = source.read(self, block);
        let mut lanes = active.lanes().map(|lane| values[lane]);
        let first = lanes.next().unwrap_or_default();
        if lanes.all(|value| value == first) {
            Ok(first)
        } else {
            Err(Fault::Undefined("lanes name different barriers".into()))
        }
    }

    /// Returns each mask that lanes name, and the lanes that name it.
    fn sets(
        &self,
        members: Source,
        active: Mask,
        block: &Block<'_>,
    ) -> Result<impl Iterator<Item = (u32, u32)> + use<>, Fault> {
        let values = members.read(self, block);
        let foreign = active
            .lanes()
            .find(|lane| !Mask(values[*lane] as u32).has(*lane));
        if let Some(lane) = foreign {
            let named = values[lane] as u32;
            return Err(Fault::Undefined(format!(
                "lane {lane} is not in its own mask {named:#010x}"
            )));
        }
        let mut left = active.0;
        Ok(std::iter::from_fn(move || {
            let named = values[Mask(left).lanes().next()?] as u32;
            let same = |lane: &usize| values[*lane] as u32 == named;
            let lanes = Mask(left).lanes().filter(same);
            let lanes = lanes.fold(0, |all, lane| all | 1 << lane);
            left &= !lanes;
            Some((named, lanes))
        }))
    }

    /// Executes the step with each complete set of lanes. Returns the lanes whose set is incomplete.
    fn meet(
        &mut self,
        members: Source,
        step: &Step,
        active: Mask,
        block: &mut Block<'_>,
    ) -> Result<u32, Fault> {
        self.reconvergences += 1;
        let alive = self.groups.alive;
        if let Source::Value(named) = members
            && named as u32 & alive == active.0
        {
            return step(self, active, block).map(|()| 0);
        }
        let mut missing = 0;
        for (named, lanes) in self.sets(members, active, block)? {
            match named & alive & !lanes {
                0 => step(self, Mask(lanes), block)?,
                _ => missing |= lanes,
            }
        }
        Ok(missing)
    }
}

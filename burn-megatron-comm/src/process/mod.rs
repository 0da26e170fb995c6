//! What the engines whose ranks are processes have in common.
//!
//! A [`ProcessCommunicator`] checks, numbers and logs a call and hands it to the engine's [`Transport`];
//! its wait watches the deadline and the other ranks. The [rendezvous](super::rendezvous) beside it knows
//! who lives.

#[cfg(any(test, feature = "cuda"))]
mod bulletin;
mod desk;
mod device;
mod on_device;
mod own_mail;
mod slot;
mod transport;
mod visit;
mod world;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::trace_span;

use super::buffer::{Buffer, DType};
use super::call::{Call, Operation, Signature, check_parts};
use super::communicator::{Communicator, Group};
use super::device::OnDevice;
use super::error::CommError;
use super::pending::Pending;
use super::pool::BufferPool;
#[cfg(any(test, feature = "cuda"))]
pub(super) use bulletin::{Bulletin, FileBulletin};
pub(super) use desk::Desk;
#[cfg(test)]
pub(super) use on_device::device_type;
#[cfg(any(test, feature = "cuda"))]
pub(super) use on_device::{DeviceFlight, DeviceJob, DeviceTransport};
use own_mail::OwnMail;
pub(super) use slot::Slot;
#[cfg(any(test, feature = "mpi", feature = "cuda"))]
pub(super) use transport::Job;
pub(super) use transport::{GroupId, Transport};
use visit::Visit;
pub(super) use world::ProcessWorld;

/// One rank's end of a group whose members are processes.
pub(super) struct ProcessCommunicator {
    world: Arc<ProcessWorld>,
    group: Arc<Group>,
    id: GroupId,
    /// The number of the next collective; the members number alike because they call alike.
    next: Arc<AtomicU64>,
    messages: Mutex<Messages>,
    own_mail: Arc<OwnMail>,
}

/// The numbers of the next messages, by peer.
#[derive(Debug, Default)]
struct Messages {
    sent: HashMap<usize, Arc<AtomicU64>>,
    claimed: HashMap<usize, u64>,
}

impl ProcessCommunicator {
    /// This rank's end of the group of all ranks.
    pub fn world(world: &Arc<ProcessWorld>, rank: usize, size: usize) -> Arc<dyn Communicator> {
        let group = Group::new("world", (0..size).collect(), rank);
        Self::over(world, Arc::new(group), GroupId::WORLD)
    }

    fn over(world: &Arc<ProcessWorld>, group: Arc<Group>, id: GroupId) -> Arc<dyn Communicator> {
        Arc::new(Self {
            world: Arc::clone(world),
            next: world.desk().counter(id, &group),
            group,
            id,
            messages: Mutex::default(),
            own_mail: Arc::default(),
        })
    }

    /// Numbers and logs a call.
    fn visit(&self, signature: &Arc<Signature>) -> Visit {
        let number = || self.next.fetch_add(1, Ordering::AcqRel);
        let sequence = match signature.operation {
            Operation::Call(Call::Send { to }) => self.next_sent(to),
            Operation::Call(Call::Receive { from, .. }) => self.next_claimed(from),
            // The number is out when the log has the call: who is asked in between has not come yet.
            _ => {
                let sequence = self.next.load(Ordering::Acquire);
                let visit = self.log(sequence, signature);
                number();
                return visit;
            }
        };
        self.log(sequence, signature)
    }

    fn log(&self, sequence: u64, signature: &Arc<Signature>) -> Visit {
        let journal = self.world.desk().journal();
        Visit {
            world: Arc::clone(&self.world),
            group: Arc::clone(&self.group),
            group_id: self.id,
            signature: Arc::clone(signature),
            sequence,
            key: journal.start(sequence, &self.group, signature),
        }
    }

    fn next_sent(&self, to: usize) -> u64 {
        let mut messages = self.messages();
        let pair = self.id.pair(self.group.index(), to);
        let count = messages
            .sent
            .entry(to)
            .or_insert_with(|| self.world.desk().counter(pair, &self.group));
        count.fetch_add(1, Ordering::AcqRel)
    }

    fn next_claimed(&self, from: usize) -> u64 {
        let mut messages = self.messages();
        let claimed = messages.claimed.entry(from).or_default();
        *claimed += 1;
        *claimed - 1
    }

    /// No code that can panic leaves the numbers half written.
    fn messages(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a call needs no other rank.
    fn is_own(&self, call: &Call) -> bool {
        let own = self.group.index();
        match call {
            Call::Send { to } => *to == own,
            Call::Receive { from, .. } => *from == own,
            _ => self.group.size() == 1,
        }
    }

    /// Carries out a call that needs no other rank.
    fn alone(&self, visit: Visit, call: &Call, input: Buffer) -> Pending {
        match call {
            Call::Send { .. } => {
                let empty = Buffer::empty(input.dtype());
                self.own_mail.post(visit.sequence, input);
                visit.complete();
                Pending::new(move || visit.finish_at_once(empty))
            }
            Call::Receive { .. } => {
                let slot = self.own_mail.slot(visit.sequence);
                Pending::new(move || visit.finish(&slot))
            }
            Call::Barrier => Pending::new(move || visit.finish_at_once(Buffer::empty(DType::U8))),
            _ => Pending::new(move || visit.finish_at_once(input)),
        }
    }
}

impl Communicator for ProcessCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let mut started = self.start_all(vec![(call, input)])?;
        Ok(started.remove(0))
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(&self.group, input)?;
        }
        self.world.check()?;
        let mut jobs = Vec::with_capacity(calls.len());
        let mut handles = Vec::with_capacity(calls.len());
        for (call, input) in calls {
            let signature = Arc::new(Signature::new(call.clone(), &input));
            let _span = trace_span!(
                "collective.start",
                op = signature.name(),
                group = self.group.name(),
                len = signature.len,
                dtype = signature.dtype.name(),
            )
            .entered();
            let visit = self.visit(&signature);
            if self.is_own(&call) {
                handles.push(self.alone(visit, &call, input));
                continue;
            }
            let slot = Arc::new(Slot::default());
            if matches!(call, Call::Send { .. }) {
                visit.complete();
            }
            jobs.push(visit.job(input, &slot));
            handles.push(Pending::new(move || visit.finish(&slot)));
        }
        if !jobs.is_empty() {
            self.world.transport().start(jobs);
        }
        Ok(handles)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        check_parts(&self.group, name, groups)?;
        self.world.check()?;
        let own = self.group.world_rank();
        let place = groups.iter().enumerate().find_map(|(number, ranks)| {
            let index = ranks.iter().position(|rank| *rank == own)?;
            Some((number, Group::new(name, ranks.clone(), index)))
        });
        let (number, part) = place.expect("the parts were checked to contain every rank");
        let part = Arc::new(part);
        let visit = self.visit(&Arc::new(Signature::split(name, groups)));
        let id = self.id.part(visit.sequence, number);
        match self.group.size() {
            1 => visit.finish_at_once(Buffer::empty(DType::U8))?,
            _ => {
                let slot = Arc::new(Slot::default());
                let job = visit.job(Buffer::empty(DType::U8), &slot);
                self.world.transport().split(job, part.clone(), id);
                visit.finish(&slot)?
            }
        };
        Ok(Self::over(&self.world, part, id))
    }

    fn begin_step(&self, step: u64) {
        self.world.desk().journal().begin_step(step);
        self.world.member().beat();
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(self.world.transport().pool())
    }

    fn on_device(&self) -> Option<&dyn OnDevice> {
        self.world
            .transport()
            .device()
            .map(|_| self as &dyn OnDevice)
    }
}

impl fmt::Debug for ProcessCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (engine, index) = (self.world.transport().name(), self.group.index());
        write!(
            f,
            "ProcessCommunicator({engine}, {}, index {index})",
            self.group
        )
    }
}

//! The code that all engines whose ranks are processes share.
//!
//! A [`ProcessCommunicator`] checks, numbers and records a call, and then passes it to the [`Transport`] of the engine.
//! While the rank waits for the call, the communicator checks the timeout and whether other ranks have failed. The
//! [rendezvous](burn_megatron_rendezvous) reports failed ranks.

#[cfg(any(test, feature = "cuda"))]
mod key_value_store;

mod call_tracker;
mod device;
mod loopback;
mod on_device;
mod process_call;
mod result_slot;
mod transport;
mod world;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, Signature, check_parts};
use crate::communicator::{Communicator, Group};
use crate::device::DeviceCommunicator;
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;
use crate::report::recorded_call::{RecordedCall, start_span};
use burn_megatron_rendezvous::GroupId;
pub(crate) use call_tracker::CallTracker;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use key_value_store::KeyValueStore;
#[cfg(test)]
pub(crate) use key_value_store::MemoryStore;
use loopback::Loopback;
#[cfg(test)]
pub(crate) use on_device::device_type;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use on_device::{DeviceJob, DeviceTransport, InFlightDeviceCall};
use process_call::ProcessCall;
pub(crate) use result_slot::ResultSlot;
#[cfg(any(test, feature = "mpi", feature = "cuda"))]
pub(crate) use transport::Job;
use transport::pair_id;
pub(crate) use transport::{Transport, part_id};
pub(crate) use world::{ProcessWorld, peer_failed};

/// The communicator of one rank for a group whose members are processes.
pub(crate) struct ProcessCommunicator {
    world: Arc<ProcessWorld>,
    group: Arc<Group>,
    id: GroupId,
    /// The sequence number of the next collective. It is equal on all members, because they issue the same collectives.
    next: Arc<AtomicU64>,
    messages: Mutex<Messages>,
    loopback: Arc<Loopback>,
}

/// The numbers of the next messages to and from each other member.
#[derive(Debug, Default)]
struct Messages {
    sent: HashMap<usize, Arc<AtomicU64>>,
    received: HashMap<usize, u64>,
}

impl ProcessCommunicator {
    /// Creates the communicator of this rank for the group of all ranks.
    pub fn world(world: &Arc<ProcessWorld>, rank: usize, size: usize) -> Arc<dyn Communicator> {
        let group = Group::new("world", (0..size).collect(), rank);
        Self::of_group(world, Arc::new(group), GroupId::WORLD)
    }

    fn of_group(
        world: &Arc<ProcessWorld>,
        group: Arc<Group>,
        id: GroupId,
    ) -> Arc<dyn Communicator> {
        Arc::new(Self {
            world: Arc::clone(world),
            next: world.tracker.counter(id, &group),
            group,
            id,
            messages: Mutex::default(),
            loopback: Arc::default(),
        })
    }

    /// Assigns a number to a call and records the call.
    fn begin(&self, signature: &Arc<Signature>) -> ProcessCall {
        let number = || self.next.fetch_add(1, Ordering::AcqRel);
        let sequence = match signature.operation {
            Operation::Call(Call::Send { to }) => self.next_sent(to),
            Operation::Call(Call::Receive { from, .. }) => self.next_received(from),
            // The count is increased after the call is recorded. A status query in between reports that this rank has
            // not joined.
            _ => {
                let sequence = self.next.load(Ordering::Acquire);
                let in_flight = self.record(sequence, signature);
                number();
                return in_flight;
            }
        };
        self.record(sequence, signature)
    }

    fn record(&self, sequence: u64, signature: &Arc<Signature>) -> ProcessCall {
        let recorder = self.world.tracker.recorder();
        ProcessCall {
            world: Arc::clone(&self.world),
            group_id: self.id,
            recorded: RecordedCall::begin(recorder, &self.group, Arc::clone(signature), sequence),
        }
    }

    fn next_sent(&self, to: usize) -> u64 {
        let mut messages = self.messages.lock();
        let pair = pair_id(self.id, self.group.index(), to);
        let count = messages
            .sent
            .entry(to)
            .or_insert_with(|| self.world.tracker.counter(pair, &self.group));
        count.fetch_add(1, Ordering::AcqRel)
    }

    fn next_received(&self, from: usize) -> u64 {
        let mut messages = self.messages.lock();
        let received = messages.received.entry(from).or_default();
        *received += 1;
        *received - 1
    }

    /// Returns whether a call requires no other rank.
    fn is_local(&self, call: &Call) -> bool {
        let own = self.group.index();
        match call {
            Call::Send { to } => *to == own,
            Call::Receive { from, .. } => *from == own,
            _ => self.group.size() == 1,
        }
    }

    /// Completes a call that requires no other rank.
    fn run_locally(&self, in_flight: ProcessCall, call: &Call, input: Buffer) -> Pending {
        match call {
            Call::Send { .. } => {
                let empty = Buffer::empty(input.dtype());
                self.loopback.deliver(in_flight.sequence, input);
                in_flight.complete();
                Pending::new(move || in_flight.finish_locally(empty))
            }
            Call::Receive { .. } => {
                let slot = self.loopback.slot(in_flight.sequence);
                Pending::new(move || in_flight.finish(&slot))
            }
            Call::Barrier => {
                Pending::new(move || in_flight.finish_locally(Buffer::empty(DType::U8)))
            }
            _ => Pending::new(move || in_flight.finish_locally(input)),
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
            let _span = start_span(&signature, &self.group);
            let in_flight = self.begin(&signature);
            if self.is_local(&call) {
                handles.push(self.run_locally(in_flight, &call, input));
                continue;
            }
            let slot = Arc::new(ResultSlot::default());
            if matches!(call, Call::Send { .. }) {
                in_flight.complete();
            }
            jobs.push(in_flight.job(input, &slot));
            handles.push(Pending::new(move || in_flight.finish(&slot)));
        }
        if !jobs.is_empty() {
            self.world.transport.start(jobs);
        }
        Ok(handles)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        check_parts(&self.group, name, groups)?;
        self.world.check()?;
        let found = self.group.part(name, groups);
        let (number, part) = found.expect("the parts were checked to contain every rank");
        let part = Arc::new(part);
        let in_flight = self.begin(&Arc::new(Signature::split(name, groups)));
        let id = part_id(self.id, in_flight.sequence, number);
        match self.group.size() {
            1 => in_flight.finish_locally(Buffer::empty(DType::U8))?,
            _ => {
                let slot = Arc::new(ResultSlot::default());
                let job = in_flight.job(Buffer::empty(DType::U8), &slot);
                self.world.transport.split(job, part.clone(), id);
                in_flight.finish(&slot)?
            }
        };
        Ok(Self::of_group(&self.world, part, id))
    }

    fn begin_step(&self, step: u64) {
        self.world.tracker.recorder().begin_step(step);
        self.world.rendezvous.send_heartbeat_now();
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(self.world.transport.pool())
    }

    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        self.world
            .transport
            .device()
            .map(|_| self as &dyn DeviceCommunicator)
    }
}

impl fmt::Debug for ProcessCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (engine, index) = (self.world.transport.name(), self.group.index());
        write!(
            f,
            "ProcessCommunicator({engine}, {}, index {index})",
            self.group
        )
    }
}

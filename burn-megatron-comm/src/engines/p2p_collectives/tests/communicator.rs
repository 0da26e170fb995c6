//! A minimal communicator over a transport, for tests. It numbers the calls and waits for their results.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::call::{Call, Signature};
use crate::process::{Job, ResultSlot, Transport, part_id};
use crate::{Buffer, BufferPool, CommError, Communicator, DType, Group, Pending};
use burn_megatron_rendezvous::GroupId;

/// The timeout of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallTimeout(pub Duration);

#[derive(Debug)]
pub struct TestCommunicator {
    transport: Arc<dyn Transport>,
    group: Arc<Group>,
    id: GroupId,
    timeout: CallTimeout,
    collectives: AtomicU64,
    /// The numbers of the next messages, keyed by rank and direction (sent or received).
    messages: Mutex<HashMap<(usize, bool), u64>>,
}

impl TestCommunicator {
    pub fn new(
        transport: Arc<dyn Transport>,
        group: Arc<Group>,
        id: GroupId,
        timeout: CallTimeout,
    ) -> Arc<Self> {
        Arc::new(Self {
            transport,
            group,
            id,
            timeout,
            collectives: AtomicU64::new(0),
            messages: Mutex::default(),
        })
    }

    /// Creates the group of all ranks.
    pub fn world(
        transport: Arc<dyn Transport>,
        rank: usize,
        size: usize,
        timeout: CallTimeout,
    ) -> Arc<Self> {
        let group = Group::new("world", (0..size).collect(), rank);
        Self::new(transport, Arc::new(group), GroupId::WORLD, timeout)
    }

    fn number(&self, call: &Call) -> u64 {
        let message = match call {
            Call::Send { to } => (*to, true),
            Call::Receive { from, .. } => (*from, false),
            _ => return self.collectives.fetch_add(1, Ordering::Relaxed),
        };
        let mut messages = self.messages.lock().unwrap();
        let number = messages.entry(message).or_default();
        *number += 1;
        *number - 1
    }

    fn job(&self, sequence: u64, signature: Signature, input: Buffer) -> (Job, PendingCall) {
        let (signature, slot) = (Arc::new(signature), Arc::<ResultSlot>::default());
        let job = Job {
            group: Arc::clone(&self.group),
            group_id: self.id,
            sequence,
            signature: Arc::clone(&signature),
            input,
            slot: Arc::clone(&slot),
        };
        let wait = PendingCall {
            slot,
            sequence,
            transport: Arc::clone(&self.transport),
            group: Arc::clone(&self.group),
            id: self.id,
            call: signature.describe(&self.group),
            timeout: self.timeout,
        };
        (job, wait)
    }

    fn prepare(&self, call: Call, input: Buffer) -> Result<(Job, PendingCall), CommError> {
        call.check(&self.group, &input)?;
        let sequence = self.number(&call);
        let signature = Signature::new(call, &input);
        Ok(self.job(sequence, signature, input))
    }
}

/// A started call.
struct PendingCall {
    slot: Arc<ResultSlot>,
    sequence: u64,
    transport: Arc<dyn Transport>,
    group: Arc<Group>,
    id: GroupId,
    call: String,
    timeout: CallTimeout,
}

impl PendingCall {
    fn wait(self) -> Result<Buffer, CommError> {
        if let Some(result) = self.slot.take_within(self.timeout.0) {
            return result;
        }
        let missing = self.transport.missing(self.id, self.sequence);
        let missing = missing.unwrap_or_default().into_iter();
        Err(CommError::Deadline {
            group: self.group.to_string(),
            sequence: self.sequence,
            call: self.call,
            missing: missing.map(|index| self.group.ranks()[index]).collect(),
            waiting: vec![self.group.world_rank()],
            waited: self.timeout.0,
        })
    }
}

impl Communicator for TestCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        if self.size() == 1 {
            return Ok(Pending::ready(input));
        }
        let (job, wait) = self.prepare(call, input)?;
        self.transport.start(vec![job]);
        Ok(Pending::new(move || wait.wait()))
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        let prepared = calls
            .into_iter()
            .map(|(call, input)| self.prepare(call, input));
        let (jobs, waits): (Vec<_>, Vec<_>) =
            prepared.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        self.transport.start(jobs);
        let pending = |wait: PendingCall| Pending::new(move || wait.wait());
        Ok(waits.into_iter().map(pending).collect())
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let own = self.group.world_rank();
        let place = |ranks: &Vec<usize>| ranks.iter().position(|rank| *rank == own);
        let parts = groups.iter().enumerate();
        let (number, index) = parts
            .filter_map(|(number, ranks)| Some((number, place(ranks)?)))
            .next()
            .expect("the parts hold this rank");
        let part = Arc::new(Group::new(name, groups[number].clone(), index));
        let sequence = self.collectives.fetch_add(1, Ordering::Relaxed);
        let id = part_id(self.id, sequence, number);
        if self.size() > 1 {
            let signature = Signature::split(name, groups);
            let (job, wait) = self.job(sequence, signature, Buffer::empty(DType::U8));
            self.transport.split(job, Arc::clone(&part), id);
            wait.wait()?;
        }
        let transport = Arc::clone(&self.transport);
        Ok(Self::new(transport, part, id, self.timeout))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(self.transport.pool())
    }
}

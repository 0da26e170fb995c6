//! The calls of one rank that are in flight, and their progress when messages arrive.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};

use super::collective::InFlightCollective;
use super::control::{ControlMessage, MAX_INLINE_BYTES, MessageKind};
use super::messages::{self, complete};
use super::p2p::{P2pEvent, P2pTransport};
use super::requests::{RequestKind, RequestTable};
use super::rounds::{RoundOutcome, first_round};
use crate::call::{Call, Operation};
use crate::error::CommError;
use crate::pool::{BufferPool, PooledBuffer};
use crate::process::{Job, ResultSlot};
use burn_megatron_rendezvous::CallId;

/// The key of a control message that arrived before this rank issued the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct EarlyMessage {
    call: CallId,
    /// The round of a collective, or `None` for a point-to-point message.
    round: Option<u8>,
    from: usize,
}

/// The kind of event for which the thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// The thread waits for no event.
    Idle,
    /// The thread waits for control messages from other ranks, or until its own control messages have been sent.
    Waiting,
    /// The thread waits for payloads that are in flight.
    Transferring,
}

pub type Reply<T> = Sender<Result<T, CommError>>;

/// The byte strings that were received from rank 0, and the callers that wait for them.
#[derive(Default)]
struct ShareQueue {
    received: VecDeque<Vec<u8>>,
    waiting: VecDeque<Reply<Vec<u8>>>,
}

/// Passes control messages to a collective that arrived before the collective was started. Passes only the messages of
/// the current round.
fn receive_early<W: P2pTransport>(
    requests: &mut RequestTable<W>,
    early: &mut HashMap<EarlyMessage, ControlMessage>,
    call: CallId,
    collective: &mut InFlightCollective,
) -> Result<(), CommError> {
    let round = Some(collective.round());
    for (index, from) in collective.other_members() {
        if let Some(message) = early.remove(&EarlyMessage { call, round, from }) {
            collective.receive_control(requests, index, message, true)?;
        }
    }
    Ok(())
}

fn fail(slot: &Weak<ResultSlot>, error: &CommError) {
    if let Some(slot) = slot.upgrade() {
        slot.fulfil(Err(error.clone()));
    }
}

/// The state of the collectives and messages of one rank.
pub struct RankState<W> {
    requests: RequestTable<W>,
    pool: Arc<BufferPool>,
    collectives: HashMap<CallId, InFlightCollective>,
    /// The receives whose message has not arrived, keyed by call and sender.
    receives: HashMap<(CallId, usize), Job>,
    early: HashMap<EarlyMessage, ControlMessage>,
    shared: ShareQueue,
    events: Vec<P2pEvent>,
    closing: bool,
    /// The ranks that have sent their last control message.
    closed: Vec<usize>,
}

impl<W: P2pTransport> RankState<W> {
    pub fn new(transport: W, engine: &'static str, pool: Arc<BufferPool>) -> Self {
        Self {
            requests: RequestTable::new(transport, engine),
            pool,
            collectives: HashMap::new(),
            receives: HashMap::new(),
            early: HashMap::new(),
            shared: ShareQueue::default(),
            events: Vec::new(),
            closing: false,
            closed: Vec::new(),
        }
    }

    /// Starts a call. If the transport fails, the call fails too.
    pub fn start(&mut self, job: Job) -> Result<(), CommError> {
        // A weak reference, so that a slot whose other end was dropped is still recognized.
        let slot = Arc::downgrade(&job.slot);
        self.begin(job).inspect_err(|error| fail(&slot, error))
    }

    fn begin(&mut self, job: Job) -> Result<(), CommError> {
        let call = CallId {
            group: job.group_id,
            sequence: job.sequence,
        };
        match job.signature.operation {
            Operation::Call(Call::Send { .. }) => {
                messages::send(&mut self.requests, job, &self.pool)
            }
            Operation::Call(Call::Receive { from, .. }) => {
                let from = job.group.ranks()[from];
                let round = None;
                match self.early.remove(&EarlyMessage { call, round, from }) {
                    Some(message) => {
                        messages::receive(&mut self.requests, job, message, &self.pool)
                    }
                    None => {
                        self.receives.insert((call, from), job);
                        Ok(())
                    }
                }
            }
            _ => self.start_collective(call, job),
        }
    }

    fn start_collective(&mut self, call: CallId, job: Job) -> Result<(), CommError> {
        let input = PooledBuffer::new(job.input, &self.pool);
        let first = first_round(&job.signature, &job.group, input, &self.pool);
        let mut collective =
            InFlightCollective::new(call, job.group, job.signature, job.slot, first);
        // If another rank has rejected the call, or if the calls do not match, no payload is sent.
        let mismatch = collective.other_members().find_map(|(index, from)| {
            let round = Some(0);
            let early = self.early.get(&EarlyMessage { call, round, from })?;
            collective.check_early(index, early)
        });
        match mismatch {
            Some(error) => collective.reject(&mut self.requests, error)?,
            None => collective.send_round(&mut self.requests)?,
        }
        receive_early(&mut self.requests, &mut self.early, call, &mut collective)?;
        self.collectives.insert(call, collective);
        self.advance(call)
    }

    /// Advances a collective as far as possible without waiting.
    fn advance(&mut self, call: CallId) -> Result<(), CommError> {
        while let Some(collective) = self.collectives.get_mut(&call)
            && let Some(outcome) = collective.take_outcome()
        {
            match outcome {
                Some(RoundOutcome::Next(round)) => {
                    collective.start_round(round);
                    collective.send_round(&mut self.requests)?;
                    receive_early(&mut self.requests, &mut self.early, call, collective)?;
                }
                // Without a result, the members disagree and all control messages have arrived.
                done => {
                    let over = self.collectives.remove(&call);
                    if let (Some(over), Some(RoundOutcome::Done(result))) = (over, done) {
                        complete(over.slot, result, &self.pool);
                    }
                }
            }
        }
        Ok(())
    }

    /// Polls the transport and handles its events. Returns whether there was an event.
    pub fn poll(&mut self) -> Result<bool, CommError> {
        let mut events = mem::take(&mut self.events);
        self.requests.transport.poll(&mut events)?;
        let any_event = !events.is_empty();
        for event in events.drain(..) {
            match event {
                P2pEvent::Control { from, bytes } => {
                    let message = ControlMessage::decode(bytes, self.requests.engine, from)?;
                    self.on_message(from, message)?;
                }
                P2pEvent::Completed(request) => match self.requests.complete(request) {
                    None | Some(RequestKind::Discarded) => {}
                    Some(RequestKind::MessageReceive(receive)) => receive.complete(&self.pool),
                    Some(RequestKind::Send { call, .. }) => {
                        self.update(call, |collective| collective.payload_sent())?;
                    }
                    Some(RequestKind::CollectiveReceive { call, index }) => {
                        self.update(Some(call), |collective| collective.payload_received(index))?;
                    }
                },
            }
        }
        self.events = events;
        Ok(any_event)
    }

    fn update(
        &mut self,
        call: Option<CallId>,
        change: impl FnOnce(&mut InFlightCollective),
    ) -> Result<(), CommError> {
        match call.and_then(|call| Some((call, self.collectives.get_mut(&call)?))) {
            None => Ok(()),
            Some((call, collective)) => {
                change(collective);
                self.advance(call)
            }
        }
    }

    fn on_message(&mut self, from: usize, message: ControlMessage) -> Result<(), CommError> {
        let call = CallId {
            group: message.header.group,
            sequence: message.header.sequence,
        };
        match message.header.kind {
            MessageKind::Share => {
                self.shared.received.push_back(message.body);
                self.answer_share_requests();
                Ok(())
            }
            MessageKind::Close => {
                self.closed.push(from);
                Ok(())
            }
            MessageKind::Send => match self.receives.remove(&(call, from)) {
                Some(job) => {
                    let slot = Arc::downgrade(&job.slot);
                    messages::receive(&mut self.requests, job, message, &self.pool)
                        .inspect_err(|error| fail(&slot, error))
                }
                None => {
                    let round = None;
                    self.store_early(EarlyMessage { call, round, from }, message)
                }
            },
            _ => self.on_collective_message(call, from, message),
        }
    }

    fn on_collective_message(
        &mut self,
        call: CallId,
        from: usize,
        message: ControlMessage,
    ) -> Result<(), CommError> {
        let round = message.header.round;
        match self.collectives.get_mut(&call) {
            Some(collective) if collective.round() == round => {
                let index = collective.index_of(from).ok_or_else(|| {
                    self.requests.error(format!(
                        "rank {from} sent call {} of a group that it is not a member of",
                        call.sequence
                    ))
                })?;
                collective.receive_control(&mut self.requests, index, message, false)?;
                self.advance(call)
            }
            _ => {
                let round = Some(round);
                self.store_early(EarlyMessage { call, round, from }, message)
            }
        }
    }

    fn store_early(
        &mut self,
        early: EarlyMessage,
        message: ControlMessage,
    ) -> Result<(), CommError> {
        match self.early.insert(early, message) {
            None => Ok(()),
            Some(_) => Err(self
                .requests
                .error(format!("a rank has sent the same message twice: {early:?}"))),
        }
    }

    /// Returns the ranks that have not sent their last control message.
    pub fn unclosed(&self) -> Vec<usize> {
        let own = self.requests.transport.rank();
        let open = |rank: &usize| *rank != own && !self.closed.contains(rank);
        (0..self.requests.transport.size()).filter(open).collect()
    }

    /// Returns the members whose message for a collective has not arrived. Returns `None` if the collective is not in
    /// flight.
    pub fn missing(&self, call: CallId) -> Option<Vec<usize>> {
        self.collectives.get(&call).map(InFlightCollective::missing)
    }

    /// Broadcasts bytes from rank 0 to all other ranks, which wait for these bytes.
    pub fn share(
        &mut self,
        bytes: Option<Vec<u8>>,
        reply: Reply<Vec<u8>>,
    ) -> Result<(), CommError> {
        match bytes {
            None => {
                self.shared.waiting.push_back(reply);
                self.answer_share_requests();
            }
            Some(bytes) if bytes.len() > MAX_INLINE_BYTES => {
                let error = self.requests.error(format!(
                    "cannot share {} bytes at the start: expected at most {MAX_INLINE_BYTES}",
                    bytes.len()
                ));
                let _ = reply.send(Err(error));
            }
            Some(bytes) => {
                let message = ControlMessage::for_world(MessageKind::Share, bytes);
                self.send_control_to_all(&message)?;
                // The caller may have stopped waiting.
                let _ = reply.send(Ok(message.body));
            }
        }
        Ok(())
    }

    fn send_control_to_all(&mut self, message: &ControlMessage) -> Result<(), CommError> {
        let own = self.requests.transport.rank();
        let others = (0..self.requests.transport.size()).filter(|rank| *rank != own);
        for rank in others {
            self.requests
                .transport
                .send_control(rank, message.encode())?;
        }
        Ok(())
    }

    fn answer_share_requests(&mut self) {
        while !self.shared.received.is_empty()
            && let Some(reply) = self.shared.waiting.pop_front()
        {
            let bytes = self.shared.received.pop_front().unwrap_or_default();
            let _ = reply.send(Ok(bytes));
        }
    }

    /// Informs all ranks that this rank issues no more calls.
    pub fn close(&mut self) -> Result<(), CommError> {
        if !mem::replace(&mut self.closing, true) {
            self.send_control_to_all(&ControlMessage::for_world(MessageKind::Close, Vec::new()))?;
        }
        Ok(())
    }

    /// Returns whether every rank has sent its last control message and all messages are complete.
    pub fn is_closed(&mut self) -> Result<bool, CommError> {
        if !self.closing || self.closed.len() + 1 < self.requests.transport.size() {
            return Ok(false);
        }
        // The last control message of a rank arrives after all its other messages, so no call will receive the early
        // messages.
        let unclaimed = mem::take(&mut self.early);
        for (early, message) in unclaimed {
            self.requests
                .discard(early.from, message.header.payload_mode)?;
        }
        Ok(self.collectives.is_empty() && self.requests.is_idle())
    }

    /// Closes the transport.
    pub fn finish(self) -> Result<(), CommError> {
        self.requests.transport.finish()
    }

    /// Fails every call in flight.
    pub fn fail_all(&mut self, error: &CommError) {
        let collectives = self.collectives.values().map(|collective| &collective.slot);
        let receives = self.receives.values().map(|job| &job.slot);
        for slot in collectives.chain(receives) {
            slot.fulfil(Err(error.clone()));
        }
        self.requests.fail_receives(error);
        for reply in self.shared.waiting.drain(..) {
            let _ = reply.send(Err(error.clone()));
        }
    }

    pub fn activity(&self) -> Activity {
        let waiting = !self.collectives.is_empty()
            || !self.receives.is_empty()
            || !self.shared.waiting.is_empty()
            || self.closing
            || !self.requests.transport.is_idle();
        match (self.requests.has_transfers(), waiting) {
            (true, _) => Activity::Transferring,
            (false, true) => Activity::Waiting,
            (false, false) => Activity::Idle,
        }
    }
}

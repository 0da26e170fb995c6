//! A collective in flight, with the progress of the messages of each member in the current round.

use std::sync::Arc;

use super::control::{ControlHeader, ControlMessage, PayloadMode};
use super::memory::{ReceiveSlice, SendSlice};
use super::mismatch::{decode_mismatch, encode_mismatch, split_description};
use super::p2p::P2pTransport;
use super::requests::{MessageBody, RequestKind, RequestTable};
use super::rounds::{Round, RoundOutcome};
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;
use crate::process::ResultSlot;
use burn_megatron_rendezvous::CallId;

/// The progress of the message from one member in the current round.
enum PeerProgress {
    /// No message has arrived from the member. Contains the slice that receives the elements, or `None` if the member
    /// sends no elements.
    Pending(Option<ReceiveSlice>),
    /// The control message has arrived, and the payload is being received.
    Receiving,
    Complete,
}

/// The state of a collective in flight on this rank.
pub struct InFlightCollective {
    pub slot: Arc<ResultSlot>,
    group: Arc<Group>,
    signature: Arc<Signature>,
    call: CallId,
    round: u8,
    peers: Vec<PeerProgress>,
    sends: Vec<Option<SendSlice>>,
    /// The number of payloads of this rank that have not been sent yet.
    sends_in_flight: usize,
    finish: Option<Box<dyn FnOnce() -> RoundOutcome>>,
    /// Whether the members have issued different calls. In this case, the collective stays in flight until all control
    /// messages have arrived, so that each control message finds its collective.
    failed: bool,
}

impl InFlightCollective {
    pub fn new(
        call: CallId,
        group: Arc<Group>,
        signature: Arc<Signature>,
        slot: Arc<ResultSlot>,
        first: Round,
    ) -> Self {
        let mut collective = Self {
            slot,
            group,
            signature,
            call,
            round: 0,
            peers: Vec::new(),
            sends: Vec::new(),
            sends_in_flight: 0,
            finish: None,
            failed: false,
        };
        collective.set_round(first);
        collective
    }

    fn set_round(&mut self, round: Round) {
        let initial = |(index, slice)| {
            if index == self.group.index() {
                PeerProgress::Complete
            } else {
                PeerProgress::Pending(slice)
            }
        };
        self.peers = round
            .receives
            .into_iter()
            .enumerate()
            .map(initial)
            .collect();
        self.sends = round.sends;
        self.finish = Some(round.finish);
    }

    /// Starts the next round.
    pub fn start_round(&mut self, round: Round) {
        self.round += 1;
        self.set_round(round);
    }

    pub fn round(&self) -> u8 {
        self.round
    }

    /// Returns the index in the group of the rank with the world rank `rank`.
    pub fn index_of(&self, rank: usize) -> Option<usize> {
        self.group.ranks().iter().position(|member| *member == rank)
    }

    /// Returns the index and the world rank of each other member. The order starts after this rank, so that not all
    /// ranks send to the same member first.
    pub fn other_members(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (group, size) = (Arc::clone(&self.group), self.group.size());
        (1..size).map(move |step| {
            let index = (group.index() + step) % size;
            (index, group.ranks()[index])
        })
    }

    /// Returns the indices of the members whose message in this round has not arrived.
    pub fn missing(&self) -> Vec<usize> {
        let absent = |(index, peer): (usize, &PeerProgress)| {
            (!matches!(peer, PeerProgress::Complete)).then_some(index)
        };
        self.peers.iter().enumerate().filter_map(absent).collect()
    }

    /// Fails the collective with its first error. Later errors are ignored.
    fn fail(&mut self, error: CommError) {
        if !self.failed {
            self.failed = true;
            self.slot.fulfil(Err(error));
            // The memory of the round is dropped, except for the memory in flight.
            self.finish = None;
        }
    }

    /// Compares this rank's call with a control message that arrived before the call. Returns an error if the calls
    /// differ.
    pub fn check_early(&self, index: usize, message: &ControlMessage) -> Option<CommError> {
        match message.header.payload_mode {
            PayloadMode::Rejected => decode_mismatch(&message.body, &self.group),
            _ => message.mismatch(index, &self.signature, &self.group, true),
        }
    }

    /// Fails the collective. Sends the mismatch to all other members instead of this rank's payloads.
    pub fn reject<W: P2pTransport>(
        &mut self,
        requests: &mut RequestTable<W>,
        error: CommError,
    ) -> Result<(), CommError> {
        let encoded = encode_mismatch(&error);
        self.fail(error);
        for (index, rank) in self.other_members() {
            let body = MessageBody::Rejection(encoded.clone());
            requests.send(rank, self.header(index), body, None)?;
        }
        Ok(())
    }

    /// Sends this rank's messages of the current round.
    pub fn send_round<W: P2pTransport>(
        &mut self,
        requests: &mut RequestTable<W>,
    ) -> Result<(), CommError> {
        let description = split_description(&self.signature, &self.group);
        for (index, rank) in self.other_members() {
            let body = match self.sends[index].take() {
                None => MessageBody::Description(description.clone()),
                payload => MessageBody::Payload(payload),
            };
            let header = self.header(index);
            if requests.send(rank, header, body, Some(self.call))? {
                self.sends_in_flight += 1;
            }
        }
        Ok(())
    }

    fn header(&self, receiver: usize) -> ControlHeader {
        let CallId { group, sequence } = self.call;
        ControlHeader::new(&self.signature, group, sequence, self.round, receiver)
    }

    /// Handles the control message of a member for the current round.
    pub fn receive_control<W: P2pTransport>(
        &mut self,
        requests: &mut RequestTable<W>,
        index: usize,
        message: ControlMessage,
        sender_was_first: bool,
    ) -> Result<(), CommError> {
        let from = self.group.ranks()[index];
        let peer = std::mem::replace(&mut self.peers[index], PeerProgress::Complete);
        let PeerProgress::Pending(slice) = peer else {
            return Err(requests.error(format!(
                "rank {from} has sent two messages for call {} over {}",
                self.call.sequence, self.group
            )));
        };
        if let PayloadMode::Rejected = message.header.payload_mode {
            match decode_mismatch(&message.body, &self.group) {
                Some(error) => self.fail(error),
                None => return Err(self.unexpected_payload(requests, index, 0, &message)),
            }
        } else if let Some(error) =
            message.mismatch(index, &self.signature, &self.group, sender_was_first)
        {
            self.fail(error);
        }
        if self.failed {
            return requests.discard(from, message.header.payload_mode);
        }
        match (message.header.payload_mode, slice) {
            (PayloadMode::None, None) => Ok(()),
            (PayloadMode::Inline, Some(slice)) if slice.len() == message.body.len() => {
                slice.fill(&message.body);
                Ok(())
            }
            (PayloadMode::Tagged { tag, bytes }, Some(slice)) if slice.len() as u64 == bytes => {
                self.peers[index] = PeerProgress::Receiving;
                let call = self.call;
                requests.receive(
                    from,
                    tag,
                    slice,
                    RequestKind::CollectiveReceive { call, index },
                )
            }
            (_, slice) => Err(self.unexpected_payload(
                requests,
                index,
                slice.map_or(0, |slice| slice.len()),
                &message,
            )),
        }
    }

    /// Creates the error for an unexpected payload. If the calls match, this can only happen if the ranks run different
    /// programs.
    fn unexpected_payload<W: P2pTransport>(
        &self,
        requests: &RequestTable<W>,
        index: usize,
        bytes: usize,
        message: &ControlMessage,
    ) -> CommError {
        requests.error(format!(
            "rank {} sends {:?} with {} bytes in round {} of call {} {} over {}, where {bytes} bytes are \
             expected; do all ranks run the same build of this program?",
            self.group.ranks()[index],
            message.header.payload_mode,
            message.body.len(),
            self.round,
            self.call.sequence,
            self.signature.describe(&self.group),
            self.group
        ))
    }

    /// Records that the payload of a member has been received.
    pub fn payload_received(&mut self, index: usize) {
        self.peers[index] = PeerProgress::Complete;
    }

    /// Records that a payload of this rank has been sent.
    pub fn payload_sent(&mut self) {
        self.sends_in_flight -= 1;
    }

    /// Returns the outcome of the round if the round is complete. The inner value is `None` if the members have issued
    /// different calls.
    pub fn take_outcome(&mut self) -> Option<Option<RoundOutcome>> {
        let is_complete = |peer: &PeerProgress| matches!(peer, PeerProgress::Complete);
        let is_over = self.sends_in_flight == 0 && self.peers.iter().all(is_complete);
        is_over.then(|| self.finish.take().map(|finish| finish()))
    }
}

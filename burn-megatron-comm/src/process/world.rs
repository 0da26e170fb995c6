//! What all communicators of one process share.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::desk::Desk;
use super::device::Overdue;
use super::transport::Transport;
use crate::error::CommError;
use crate::rendezvous::{Cause, CauseKind, Member};

/// The rank's connection to the others: its transport, and the rendezvous beside it.
#[derive(Debug)]
pub(crate) struct ProcessWorld {
    member: Arc<Member>,
    transport: Arc<dyn Transport>,
    desk: Arc<Desk>,
    /// The last call that failed on this rank.
    failed_call: Mutex<Option<CommError>>,
    overdue: Overdue,
}

impl ProcessWorld {
    /// The world of a rank that has joined it.
    pub fn new(
        member: Arc<Member>,
        transport: Arc<dyn Transport>,
        desk: &Arc<Desk>,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            member,
            transport,
            desk: Arc::clone(desk),
            failed_call: Mutex::default(),
            overdue: Overdue::start()?,
        }))
    }

    /// The watch over calls on the device.
    pub fn overdue(&self) -> &Overdue {
        &self.overdue
    }

    /// Ends the world for a call of this rank that has failed while the rank may be doing something else.
    pub fn fail_by(&self, error: &CommError) {
        self.note(error);
        if let Some(cause) = self.cause_of(error.to_string()) {
            let _ = self.member.fail(cause, self.desk.journal().position());
        }
    }

    /// The connection to the rendezvous.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// What carries the calls.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// What the rank knows of its calls.
    pub fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }

    /// Fails once any rank of the world has failed.
    pub fn check(&self) -> Result<(), CommError> {
        match self.member.failure() {
            None => Ok(()),
            Some(failure) => Err(CommError::PeerFailed {
                rank: failure.rank,
                message: failure.message,
            }),
        }
    }

    /// Remembers that a call has failed.
    pub fn note(&self, error: &CommError) {
        let mut failed = self
            .failed_call
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *failed = Some(error.clone());
    }

    /// How telling the failure of this rank is, from the message that it ended with; nothing if it is a
    /// consequence of another rank's.
    pub fn cause_of(&self, message: String) -> Option<Cause> {
        let failed = self
            .failed_call
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let call = failed.as_ref();
        let kind = match call.filter(|call| message.contains(&call.to_string())) {
            Some(CommError::PeerFailed { .. }) => return None,
            Some(CommError::Mismatch { .. }) => CauseKind::Disagreement,
            Some(CommError::Deadline { .. } | CommError::PeerFinished { .. }) => CauseKind::Waited,
            Some(CommError::Engine { .. }) => CauseKind::Transport,
            Some(CommError::InvalidCall { .. }) | None => CauseKind::Own,
        };
        Some(Cause { kind, message })
    }
}

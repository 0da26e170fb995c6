//! The handle of a call in flight.

use std::fmt;

use crate::buffer::Buffer;
use crate::error::CommError;

/// The handle of a call in flight.
///
/// Handles may be waited on in any order, from any thread. Dropping one discards the result and does not
/// cancel the call: the other ranks still receive this rank's input.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct Pending(PendingState);

enum PendingState {
    Ready(Buffer),
    Deferred(Box<dyn FnOnce() -> Result<Buffer, CommError> + Send>),
}

impl Pending {
    /// A handle whose [`wait`](Self::wait) calls the closure. An engine blocks in it, with a deadline; a
    /// wrapper waits on the inner handle in it.
    pub fn new(wait: impl FnOnce() -> Result<Buffer, CommError> + Send + 'static) -> Self {
        Self(PendingState::Deferred(Box::new(wait)))
    }

    /// A handle of a completed call.
    pub fn ready(buffer: Buffer) -> Self {
        Self(PendingState::Ready(buffer))
    }

    /// Blocks until the call completes and returns its result.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn wait(self) -> Result<Buffer, CommError> {
        match self.0 {
            PendingState::Ready(buffer) => Ok(buffer),
            PendingState::Deferred(wait) => wait(),
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            PendingState::Ready(_) => "Pending(ready)",
            PendingState::Deferred(_) => "Pending(deferred)",
        })
    }
}

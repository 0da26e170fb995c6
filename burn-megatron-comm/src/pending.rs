//! The handle of an operation in flight.

use std::fmt;

use crate::buffer::Buffer;
use crate::error::CommError;

/// A handle of a collective or a message in flight.
///
/// Handles may be waited on in any order and from any thread. Dropping a handle discards the result but does not cancel
/// the operation: the other ranks still receive the input of this rank.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct Pending(PendingState);

enum PendingState {
    Ready(Buffer),
    Deferred(Box<dyn FnOnce() -> Result<Buffer, CommError> + Send>),
}

impl Pending {
    /// Creates a handle from a closure, which [`wait`](Self::wait) calls. In an engine, the closure blocks with a
    /// timeout. In a wrapper, it waits for the inner handle.
    pub fn new(wait: impl FnOnce() -> Result<Buffer, CommError> + Send + 'static) -> Self {
        Self(PendingState::Deferred(Box::new(wait)))
    }

    /// Creates a handle of an operation that is already complete.
    pub fn ready(buffer: Buffer) -> Self {
        Self(PendingState::Ready(buffer))
    }

    /// Blocks until the operation is complete and returns its result.
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

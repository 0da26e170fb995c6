//! The handle of a call in flight.

use std::fmt;

use super::buffer::Buffer;
use super::error::CommError;

/// A call that was started and whose result is still to be fetched.
///
/// Handles may be waited on in any order, from any thread. Dropping one gives up the result, not the
/// call: this rank's contribution stays with the others.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct Pending(State);

enum State {
    Ready(Buffer),
    Deferred(Box<dyn FnOnce() -> Result<Buffer, CommError> + Send>),
}

impl Pending {
    /// A handle whose wait runs `wait`. An engine blocks in it, with its deadline; a wrapper (a fault
    /// injector, a recorder) calls the inner handle's [`wait`](Self::wait) in it.
    pub fn new(wait: impl FnOnce() -> Result<Buffer, CommError> + Send + 'static) -> Self {
        Self(State::Deferred(Box::new(wait)))
    }

    /// A handle whose result is there already.
    pub fn ready(buffer: Buffer) -> Self {
        Self(State::Ready(buffer))
    }

    /// Blocks until the result is there.
    ///
    /// # Errors
    /// Whatever kept the call from completing: see [`CommError`].
    pub fn wait(self) -> Result<Buffer, CommError> {
        match self.0 {
            State::Ready(buffer) => Ok(buffer),
            State::Deferred(wait) => wait(),
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Ready(_) => "Pending(ready)",
            State::Deferred(_) => "Pending(deferred)",
        })
    }
}

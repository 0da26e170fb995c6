//! A communicator whose calls pass a closure.

use std::fmt;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::Call;
use crate::communicator::{Communicator, Group};
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;

type OnCall = dyn Fn(&dyn Communicator, Call, Buffer) -> Result<Pending, CommError> + Send + Sync;

/// A communicator that passes each call to a closure together with the inner communicator, which counts, records, delays
/// or changes the call and starts it. The communicators that it is split into do the same.
pub struct Intercept {
    inner: Arc<dyn Communicator>,
    on_call: Arc<OnCall>,
}

impl Intercept {
    /// Passes the calls on `inner` to `on_call`.
    pub fn over(
        inner: Arc<dyn Communicator>,
        on_call: impl Fn(&dyn Communicator, Call, Buffer) -> Result<Pending, CommError>
        + Send
        + Sync
        + 'static,
    ) -> Arc<dyn Communicator> {
        let on_call: Arc<OnCall> = Arc::new(on_call);
        Arc::new(Self { inner, on_call })
    }
}

impl Communicator for Intercept {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        (self.on_call)(&*self.inner, call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let (inner, on_call) = (self.inner.split(name, groups)?, self.on_call.clone());
        Ok(Arc::new(Self { inner, on_call }))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }

    fn begin_step(&self, step: u64) {
        self.inner.begin_step(step);
    }
}

impl fmt::Debug for Intercept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Intercept({:?})", self.inner)
    }
}

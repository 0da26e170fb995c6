//! A communicator that passes its calls to a closure.

use std::fmt;
use std::sync::Arc;

use burn_megatron_comm::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};

type OnCall = dyn Fn(&dyn Communicator, Call, Buffer) -> Result<Pending, CommError> + Send + Sync;

/// A communicator that passes each call to a closure, together with the inner communicator. The closure can count,
/// record, delay or change the call, and then starts it on the inner communicator. Communicators that are split from
/// this communicator use the same closure.
pub struct Intercept {
    inner: Arc<dyn Communicator>,
    on_call: Arc<OnCall>,
}

impl Intercept {
    /// Wraps the communicator `inner` and passes its calls to the closure `on_call`.
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use burn_megatron_comm::{ReduceOp, World};

    #[test]
    fn a_wrapper_sees_every_call() {
        let results = World::threads(2).unwrap().run(|rank| {
            let calls = Arc::<Mutex<Vec<&str>>>::default();
            let seen = Arc::clone(&calls);
            let world = Intercept::over(rank.communicator(), move |inner, call, input| {
                let (name, seen) = (call.name(), Arc::clone(&seen));
                let pending = inner.start(call, input)?;
                Ok(Pending::new(move || {
                    seen.lock().unwrap().push(name);
                    pending.wait()
                }))
            });
            let pair = world.split("pair", &[vec![1, 0]])?;
            pair.all_reduce(vec![1f32].into(), ReduceOp::Sum)?;
            world.barrier()?;
            let calls = calls.lock().unwrap().clone();
            Ok::<_, CommError>(calls)
        });
        assert_eq!(results.unwrap(), vec![vec!["all_reduce", "barrier"]; 2]);
    }
}

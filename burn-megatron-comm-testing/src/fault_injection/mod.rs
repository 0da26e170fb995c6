//! Fault injection: a wrapper around a communicator that makes selected calls fail. A call is selected by its rank,
//! step and number.
//!
//! ```
//! # use std::sync::Arc;
//! # use burn_megatron_comm::{ReduceOp, World};
//! use burn_megatron_comm_testing::fault_injection::{FaultPlan, inject};
//!
//! let error = World::threads(2)?.run(|rank| {
//!     let plan = FaultPlan::new(vec!["error@rank=1,call=2".parse().unwrap()]);
//!     let world = inject(rank.communicator(), Arc::new(plan));
//!     (0..5).try_for_each(|call| world.all_reduce(vec![call as f32].into(), ReduceOp::Sum).map(drop))
//! });
//! assert!(error.unwrap_err().to_string().contains("rank 1, call 2: all_reduce(sum) of 1 f32"));
//! # Ok::<(), burn_megatron_comm::WorldError>(())
//! ```

mod bit_flip;
mod fault;
mod plan;
mod signals;
#[cfg(test)]
mod tests;

use std::hint::spin_loop;
use std::sync::Arc;
use std::thread::sleep;

pub use bit_flip::{BitFlip, FlipTarget};
use burn_megatron_comm::{
    Buffer, BufferPool, Call, CommError, Communicator, Group, Pending, ReduceOp,
};
pub use fault::{Fault, FaultError, FaultKind};
use plan::CallPosition;
pub use plan::FaultPlan;

/// A communicator that injects the faults of a [`FaultPlan`] into its calls.
#[derive(Debug)]
pub struct FaultInjector {
    inner: Arc<dyn Communicator>,
    plan: Arc<FaultPlan>,
}

/// Wraps a communicator so that the faults of `plan` are injected into its calls. Communicators that are split from it
/// are wrapped too. All communicators of one rank share its plan, which counts their calls.
pub fn inject(inner: Arc<dyn Communicator>, plan: Arc<FaultPlan>) -> Arc<dyn Communicator> {
    Arc::new(FaultInjector { inner, plan })
}

impl FaultInjector {
    /// Starts a call that has already been counted.
    fn start_at(
        &self,
        position: CallPosition,
        call: Call,
        input: Buffer,
    ) -> Result<Pending, CommError> {
        let (mut call, mut input) = (call, input);
        let mut flipped_results = vec![];
        for fault in self.plan.take_due(self.group().world_rank(), position) {
            let site = FaultSite::new(fault, position, self.group(), &call, &input);
            tracing::warn!("{site}");
            match fault.kind {
                FaultKind::Delay(time) => sleep(time),
                FaultKind::Drop => return Ok(self.never_started(site)),
                FaultKind::Shape => {
                    (call, input) = with_extra_element(call, input, self.size(), &site)?
                }
                FaultKind::WrongCall => (call, input) = other_call(call, input),
                FaultKind::Nan if input.set_nan(0) => {}
                FaultKind::Nan => {
                    let reason = "the input has no float; choose a call whose input has one";
                    return Err(site.error(reason));
                }
                FaultKind::BitFlip(flip) => match &call {
                    Call::Send { .. } if flip.apply_to(&mut input) => {}
                    Call::Send { .. } | Call::Barrier => return Err(site.empty()),
                    _ => flipped_results.push((flip, site)),
                },
                FaultKind::Error => return Err(site.error("the call failed on purpose")),
                FaultKind::Panic => panic!("{site}"),
                FaultKind::Spin => loop {
                    spin_loop();
                },
                FaultKind::Abort => std::process::abort(),
                // This fault never triggers at a call.
                FaultKind::NeverStarts => {}
                FaultKind::Kill
                | FaultKind::Segfault
                | FaultKind::Stop
                | FaultKind::Terminate
                | FaultKind::Interrupt => {
                    signals::raise(fault.kind).map_err(|reason| site.error(&reason))?;
                }
            }
        }
        let pending = self.inner.start(call, input)?;
        if flipped_results.is_empty() {
            return Ok(pending);
        }
        Ok(Pending::new(move || {
            let mut result = pending.wait()?;
            for (flip, site) in flipped_results {
                if !flip.apply_to(&mut result) {
                    return Err(site.empty());
                }
            }
            Ok(result)
        }))
    }

    fn never_started(&self, site: FaultSite) -> Pending {
        let wait = self.plan.drop_wait();
        Pending::new(move || {
            sleep(wait);
            let seconds = wait.as_secs_f64();
            Err(site.error(&format!(
                "never started; its wait ended after {seconds:.1} s"
            )))
        })
    }
}

impl Communicator for FaultInjector {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        call.check(self.group(), &input)?;
        self.start_at(self.plan.count(1), call, input)
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(self.group(), input)?;
        }
        let first = self.plan.count(calls.len() as u64);
        let own = self.group().world_rank();
        let positions = (0..calls.len() as u64).map(|number| first.after(number));
        if !positions
            .clone()
            .any(|position| self.plan.has(own, position))
        {
            return self.inner.start_all(calls);
        }
        let started = positions.zip(calls);
        started
            .map(|(position, (call, input))| self.start_at(position, call, input))
            .collect()
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let part = self.inner.split(name, groups)?;
        Ok(inject(part, Arc::clone(&self.plan)))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }

    fn begin_step(&self, step: u64) {
        self.plan.begin_step(step);
        self.inner.begin_step(step);
    }
}

/// A description of the fault and its call, for errors and log messages.
struct FaultSite(String);

impl FaultSite {
    fn new(
        fault: &Fault,
        position: CallPosition,
        group: &Group,
        call: &Call,
        input: &Buffer,
    ) -> Self {
        let call = call.describe(group, input);
        let rank = group.world_rank();
        Self(format!(
            "{fault} triggers on rank {rank}, {position}: {call} over {group}"
        ))
    }

    /// Creates the error for a fault that must change an element of a call without elements.
    fn empty(&self) -> CommError {
        self.error("it has no elements; choose a call that has some")
    }

    fn error(&self, message: &str) -> CommError {
        CommError::engine("fault injection", format!("{self}: {message}"))
    }
}

impl std::fmt::Display for FaultSite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds elements to a call: one element per chunk for a reduce_scatter, one element per rank for an all_to_all, and one
/// element for any other call.
fn with_extra_element(
    call: Call,
    input: Buffer,
    size: usize,
    site: &FaultSite,
) -> Result<(Call, Buffer), CommError> {
    let (mut call, mut input) = (call, input);
    let more = match &mut call {
        Call::Barrier => {
            return Err(site.error("a barrier has no elements; choose a call that has some"));
        }
        Call::Receive { len, .. } => {
            *len = len.saturating_add(1);
            0
        }
        Call::AllToAll { send, receive } => {
            send.iter_mut().for_each(|count| *count += 1);
            // An engine checks locally that a rank's count to itself matches, so both counts change. The other ranks
            // detect the mismatch.
            receive.iter_mut().for_each(|count| *count += 1);
            size
        }
        Call::ReduceScatter(_) => size,
        Call::AllReduce(_) | Call::AllGather | Call::Broadcast { .. } | Call::Send { .. } => 1,
    };
    let zeros = Buffer::zeros(input.dtype(), more);
    let extended = input.extend(&zeros, 0..more);
    extended.map_err(|error| site.error(&error.to_string()))?;
    Ok((call, input))
}

/// Replaces the operation of a call by another operation on the same elements: an all_gather instead of an all_reduce,
/// and an all_reduce instead of any other operation.
fn other_call(call: Call, input: Buffer) -> (Call, Buffer) {
    match call {
        Call::AllReduce(_) => (Call::AllGather, input),
        _ => (Call::AllReduce(ReduceOp::Sum), input),
    }
}

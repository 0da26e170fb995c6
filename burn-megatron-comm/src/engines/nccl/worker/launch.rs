//! The launch of calls.

use std::collections::{HashMap, HashSet};
use std::mem;

use super::super::call::NcclCall;
use super::super::communicator::{CallQueue, NcclCommunicator};
use super::super::driver::{RecordedEvent, Stream};
use super::super::library::{Comm, Progress};
use super::registered::WindowsInUse;
use super::{Arc, COLLECTIVES, InFlightCall, Instant, NcclWorker, WorkItem, distinct};

/// The communicator and the stream of a call. If the result must be copied after the call, `copy_back` contains the
/// destination address, the source address and the number of bytes.
#[derive(Clone, Copy)]
pub(super) struct LaunchTarget {
    pub comm: Comm,
    pub stream: Stream,
    pub copy_back: Option<(u64, u64, usize)>,
}

/// A call that has been passed to NCCL.
pub(super) type LaunchedCall = (NcclCall, LaunchTarget);

impl NcclWorker {
    /// Launches calls that are ready, beginning with the first call of every queue.
    pub(super) fn launch_ready_calls(&mut self) {
        if let Some(failure) = self.shared.first_error() {
            for work in mem::take(&mut self.waiting) {
                work.refuse(&failure);
            }
            return;
        }
        let mut busy = self.busy();
        for work in mem::take(&mut self.waiting) {
            let queues = work.queues();
            let blocked =
                queues.iter().any(|queue| busy.contains(queue)) || !self.may_start_group();
            let ready = if blocked {
                Ok(false)
            } else {
                self.ready(&work)
            };
            busy.extend(queues);
            match ready {
                Ok(true) => {
                    self.last_progress = Instant::now();
                    self.launch(work);
                }
                Ok(false) => self.waiting.push_back(work),
                Err(reason) => self.fail(work, &reason),
            }
        }
    }

    /// Returns the queues in which the last launch or split is still in progress.
    fn busy(&self) -> HashSet<CallQueue> {
        let calls = self.launching.iter().flatten();
        let mut busy: HashSet<CallQueue> = calls.map(|(call, _)| call.queue).collect();
        if self.is_splitting() {
            busy.extend(COLLECTIVES);
        }
        busy
    }

    pub(super) fn is_splitting(&self) -> bool {
        let mut communicators = self.communicators.values();
        communicators.any(NcclCommunicator::is_splitting) || !self.empty_splits.is_empty()
    }

    /// Returns whether this thread may start another NCCL group. Older versions allow only one NCCL group in progress
    /// per thread.
    fn may_start_group(&self) -> bool {
        let in_progress = !self.launching.is_empty() || self.is_splitting();
        !in_progress || self.shared.library.has_concurrent_groups()
    }

    /// Returns whether all resources of the work item are ready. Starts to create missing resources.
    ///
    /// # Errors
    /// The reason why the work item cannot become ready.
    fn ready(&mut self, work: &WorkItem) -> Result<bool, String> {
        let calls = match work {
            WorkItem::Split(split) => return self.communicator_ready(split.parent),
            WorkItem::Calls(calls) => calls,
        };
        let mut ready = true;
        for call in calls {
            ready &= self.communicator_ready(call.key)?;
            ready &= call.memory_known()?;
        }
        Ok(ready && self.windows_ready(calls))
    }

    fn launch(&mut self, work: WorkItem) {
        let mut calls = match work {
            WorkItem::Split(split) => return self.split(split),
            WorkItem::Calls(calls) => calls,
        };
        match self.enqueue(&mut calls) {
            Ok(targets) => self
                .launching
                .push(calls.into_iter().zip(targets).collect()),
            Err(reason) => self.fail_launched(calls.into_iter(), &reason),
        }
    }

    /// Enqueues calls as one NCCL group. NCCL may still be launching the calls when this method returns.
    fn enqueue(&mut self, calls: &mut [NcclCall]) -> Result<Vec<LaunchTarget>, String> {
        let shared = self.shared.clone();
        let library = &shared.library;
        let mut targets = Vec::with_capacity(calls.len());
        let mut addresses = Vec::with_capacity(calls.len());
        let mut in_use = WindowsInUse::default();
        for call in calls.iter_mut() {
            let found = self.communicators.get(&call.key);
            let Some((communicator, comm)) = found.and_then(|one| Some((one, one.comm()?))) else {
                return Err(format!("there is no communicator {}", call.key.store_key()));
            };
            let stream = communicator.stream;
            let own = call.prepare(stream, &mut self.staging)?;
            let (used, copy_back) = self.through_window(call, own, communicator, &mut in_use)?;
            self.register_allocations(call, own, comm)?;
            addresses.push(used);
            targets.push(LaunchTarget {
                comm,
                stream,
                copy_back,
            });
        }
        library.group_start()?;
        let mut enqueued = Ok(());
        for ((call, addresses), target) in calls.iter().zip(addresses).zip(&targets) {
            let (plan, comm, stream) = (&call.plan, target.comm, target.stream);
            for step in &plan.steps {
                // SAFETY: the memory has the lengths of the plan, and is kept until the stream has executed the
                // operation.
                let step = || unsafe { library.run(*step, plan, addresses, comm, stream) };
                enqueued = enqueued.and_then(|()| step());
            }
        }
        let ended = library.group_end();
        enqueued.and(ended).map(|_| targets)
    }

    /// Checks which calls NCCL has put on their streams, and moves these calls to the calls in flight.
    pub(super) fn poll_launches(&mut self) {
        for launched in mem::take(&mut self.launching) {
            match self.all_launched(&launched) {
                Ok(false) => self.launching.push(launched),
                Ok(true) => {
                    self.last_progress = Instant::now();
                    self.track_in_flight(launched);
                }
                Err(reason) => {
                    self.fail_launched(launched.into_iter().map(|(call, _)| call), &reason)
                }
            }
        }
    }

    fn all_launched(&self, launched: &[LaunchedCall]) -> Result<bool, String> {
        let mut all_done = true;
        for comm in distinct(launched.iter().map(|(_, target)| target.comm)) {
            all_done &= self.shared.library.poll(comm)? == Progress::Done;
        }
        Ok(all_done)
    }

    fn track_in_flight(&mut self, launched: Vec<LaunchedCall>) {
        let events = match self.record_events(&launched) {
            Ok(events) => events,
            Err(reason) => {
                return self.fail_launched(launched.into_iter().map(|(call, _)| call), &reason);
            }
        };
        for (call, target) in launched {
            let done = events[&target.stream].clone();
            call.launched(&done);
            self.in_flight.push_back(InFlightCall {
                call,
                comm: target.comm,
                done,
                failed: false,
            });
        }
    }

    /// Enqueues the copies from windows to tensors, and records an event on every stream.
    fn record_events(
        &self,
        launched: &[LaunchedCall],
    ) -> Result<HashMap<Stream, Arc<RecordedEvent>>, String> {
        let driver = &self.shared.driver;
        for (_, target) in launched {
            if let Some((to, from, bytes)) = target.copy_back {
                // SAFETY: as for the copy into registered memory.
                unsafe { driver.copy_on_device(to, from, bytes, target.stream) }?;
                self.shared.copies.add(bytes);
            }
        }
        let streams = distinct(launched.iter().map(|(_, target)| target.stream)).into_iter();
        let record = |stream| Ok((stream, RecordedEvent::record(stream, driver)?));
        streams.map(record).collect()
    }
}

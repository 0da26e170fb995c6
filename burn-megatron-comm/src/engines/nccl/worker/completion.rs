//! The completion of calls that the device has executed.

use std::collections::HashSet;
use std::mem;

use super::super::call::NcclCall;
use super::super::error;
use super::{
    ABORT_DRAIN_TIMEOUT, ERROR_CHECK_INTERVAL, InFlightCall, Instant, NcclWorker, WorkItem,
    distinct,
};

impl NcclWorker {
    /// Completes the calls that the device has executed, in the order of their queues.
    pub(super) fn complete_calls(&mut self) {
        let over = |at: Instant| at.elapsed() > ABORT_DRAIN_TIMEOUT;
        let leak = self.aborted_at.is_some_and(over);
        let mut behind = HashSet::new();
        for mut entry in mem::take(&mut self.in_flight) {
            if behind.contains(&entry.call.queue) && !leak {
                self.in_flight.push_back(entry);
                continue;
            }
            match entry.done.is_complete() {
                Ok(true) => {
                    self.last_progress = Instant::now();
                    self.finish(entry);
                }
                _ if leak => entry.call.leak(),
                Ok(false) => {
                    behind.insert(entry.call.queue);
                    self.in_flight.push_back(entry);
                }
                Err(reason) => {
                    self.fail_in_flight(&mut entry, &reason);
                    entry.call.leak();
                }
            }
        }
    }

    fn finish(&mut self, entry: InFlightCall) {
        // The error of the call was reported, or the worker has aborted.
        if entry.failed || self.aborted_at.is_some() {
            entry.call.discard(&mut self.staging);
        } else if let Err(error) = entry.call.finish(&mut self.staging, &self.shared.pool) {
            self.shared.fail(&error);
        }
    }

    /// Polls the communicators for asynchronous errors.
    pub(super) fn check_async_errors(&mut self) {
        if self.errors_checked_at.elapsed() < ERROR_CHECK_INTERVAL {
            return;
        }
        self.errors_checked_at = Instant::now();
        for comm in distinct(self.in_flight.iter().map(|entry| entry.comm)) {
            let Err(reason) = self.shared.library.poll(comm) else {
                continue;
            };
            let mut in_flight = mem::take(&mut self.in_flight);
            let hit = in_flight.iter_mut().filter(|entry| entry.comm == comm);
            for entry in hit {
                self.fail_in_flight(entry, &reason);
            }
            self.in_flight = in_flight;
        }
    }

    pub(super) fn fail(&self, work: WorkItem, reason: &str) {
        match work {
            WorkItem::Split(split) => {
                let error = error(reason.into());
                self.shared.fail(&error);
                split.reply.fulfil(Err(error));
            }
            WorkItem::Calls(calls) => {
                for call in calls {
                    self.shared.fail(&call.fail(reason));
                }
            }
        }
    }

    pub(super) fn fail_launched(&self, launched: impl Iterator<Item = NcclCall>, reason: &str) {
        for call in launched {
            self.shared.fail(&call.fail(reason));
            call.leak();
        }
    }

    fn fail_in_flight(&self, entry: &mut InFlightCall, reason: &str) {
        if !mem::replace(&mut entry.failed, true) {
            self.shared.fail(&entry.call.fail(reason));
        }
    }
}

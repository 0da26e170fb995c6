//! The closing of the engine, which finalizes and destroys the communicators.

use std::mem;
use std::sync::mpsc::SyncSender;

use super::super::communicator::{CommKey, CommState, NcclCommunicator};
use super::super::library::Progress;
use super::{Instant, NcclWorker};

/// A request to close the engine that is in progress.
pub(super) struct CloseRequest {
    until: Instant,
    reply: SyncSender<Result<(), String>>,
    finalizing: bool,
}

impl CloseRequest {
    pub fn new(until: Instant, reply: SyncSender<Result<(), String>>) -> Self {
        Self {
            until,
            reply,
            finalizing: false,
        }
    }
}

impl NcclWorker {
    pub(super) fn continue_close(&mut self) {
        let Some(mut request) = self.closing.take() else {
            return;
        };
        let ended = match self.try_close(&mut request.finalizing) {
            Ok(true) => Ok(()),
            Ok(false) if Instant::now() < request.until => {
                self.closing = Some(request);
                return;
            }
            Ok(false) => Err(self.timeout_reason(request.finalizing)),
            Err(reason) => Err(reason),
        };
        // The remaining communicators are aborted.
        self.abort();
        // The caller may have stopped waiting.
        let _ = request.reply.send(ended);
    }

    /// Returns whether all calls are complete and all communicators are closed.
    fn try_close(&mut self, finalizing: &mut bool) -> Result<bool, String> {
        if self.aborted_at.is_some() {
            return Err("it was aborted before".into());
        }
        if self.calls_in_flight() > 0 {
            return Ok(false);
        }
        if !*finalizing {
            self.finalize()?;
            *finalizing = true;
        }
        self.finalized()
    }

    fn calls_in_flight(&self) -> usize {
        let launching: usize = self.launching.iter().map(Vec::len).sum();
        self.waiting.len() + launching + self.in_flight.len() + self.empty_splits.len()
    }

    fn timeout_reason(&self, finalizing: bool) -> String {
        if finalizing {
            "its communicators are not finalized within the deadline".into()
        } else {
            format!(
                "{} calls are not complete within the deadline",
                self.calls_in_flight()
            )
        }
    }

    /// Releases registered memory and starts to finalize every communicator. A communicator is aborted if other ranks
    /// of the communicator have never issued a call on it.
    fn finalize(&mut self) -> Result<(), String> {
        let shared = &self.shared;
        // No call waits for these communicators anymore.
        self.communicators.retain(|key, unused| {
            let is_opening = matches!(unused.state, CommState::Opening);
            if is_opening && matches!(key, CommKey::Message { .. }) {
                shared.driver.destroy_stream(unused.stream);
            }
            !is_opening
        });
        let mut ready = vec![];
        for communicator in self.communicators.values_mut() {
            let Some(comm) = communicator.comm() else {
                continue;
            };
            for window in communicator.windows.drain(..) {
                window.release(comm, &shared.library)?;
            }
            communicator.allocations.release(comm, &shared.library)?;
            ready.push(comm);
        }
        shared.comms.abort_all_but(&ready, &shared.library);
        shared.library.finalize(&ready)
    }

    /// Returns whether every communicator has been finalized. If so, destroys the communicators and their streams.
    fn finalized(&mut self) -> Result<bool, String> {
        let (library, driver) = (&self.shared.library, &self.shared.driver);
        let comms = self
            .communicators
            .values()
            .filter_map(NcclCommunicator::comm);
        for comm in comms.clone() {
            if library.poll(comm)? == Progress::Running {
                return Ok(false);
            }
        }
        for comm in comms {
            if self.shared.comms.remove(comm) {
                library.destroy(comm)?;
            }
        }
        for communicator in mem::take(&mut self.communicators).into_values() {
            if communicator.stream != self.collective_stream
                && communicator.stream != self.high_priority_stream
            {
                driver.destroy_stream(communicator.stream);
            }
        }
        if self.high_priority_stream != self.collective_stream {
            driver.destroy_stream(self.high_priority_stream);
        }
        driver.destroy_stream(self.collective_stream);
        self.staging.clear();
        driver.destroy_stream(self.copy_stream);
        Ok(true)
    }
}

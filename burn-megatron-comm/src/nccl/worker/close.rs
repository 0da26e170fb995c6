//! How communicators end in good order.

use std::mem;
use std::sync::mpsc::SyncSender;

use super::super::lane::State;
use super::super::library::Progress;
use super::{Instant, Worker};

/// A close that is under way.
pub(super) struct Closing {
    until: Instant,
    told: SyncSender<Result<(), String>>,
    finalizing: bool,
}

impl Closing {
    pub fn new(until: Instant, told: SyncSender<Result<(), String>>) -> Self {
        Self {
            until,
            told,
            finalizing: false,
        }
    }
}

impl Worker {
    pub(super) fn close_if_asked(&mut self) {
        let Some(mut closing) = self.closing.take() else {
            return;
        };
        let ended = match self.close_further(&mut closing.finalizing) {
            Ok(true) => Ok(()),
            Ok(false) if Instant::now() < closing.until => {
                self.closing = Some(closing);
                return;
            }
            Ok(false) => Err(self.stuck(closing.finalizing)),
            Err(reason) => Err(reason),
        };
        // What is left over is aborted.
        self.give_up();
        // Whoever asked may have gone.
        let _ = closing.told.send(ended);
    }

    /// Whether all has come to its end.
    fn close_further(&mut self, finalizing: &mut bool) -> Result<bool, String> {
        if self.given_up_at.is_some() {
            return Err("it was aborted before".into());
        }
        if self.under_way() > 0 {
            return Ok(false);
        }
        if !*finalizing {
            self.finalize()?;
            *finalizing = true;
        }
        self.finalized()
    }

    fn under_way(&self) -> usize {
        let launching: usize = self.launching.iter().map(Vec::len).sum();
        self.waiting.len() + launching + self.flying.len() + self.leaving.len()
    }

    fn stuck(&self, finalizing: bool) -> String {
        match finalizing {
            true => "its communicators have not ended within the deadline".into(),
            false => format!(
                "{} calls had not ended within the deadline",
                self.under_way()
            ),
        }
    }

    /// Begins the end of every communicator, so that no rank waits for another's order of them: first what
    /// is registered with it.
    fn finalize(&mut self) -> Result<(), String> {
        let shared = &self.shared;
        for lane in self.lanes.values_mut() {
            match lane.state {
                State::Ready(comm) => {
                    for staging in lane.staging.drain(..) {
                        staging.release(comm, &shared.library)?;
                    }
                    shared.library.finalize(comm)?;
                }
                // Its other side never came.
                State::Init(comm) if shared.comms.remove(comm) => {
                    shared.library.abort(comm)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether every communicator has come to its end; they are gone then, and their streams.
    fn finalized(&mut self) -> Result<bool, String> {
        let (library, driver) = (&self.shared.library, &self.shared.driver);
        let comms = self.lanes.values().filter_map(|lane| lane.comm());
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
        for lane in mem::take(&mut self.lanes).into_values() {
            if lane.stream != self.collectives {
                driver.close(lane.stream);
            }
        }
        driver.close(self.collectives);
        driver.close(self.copies);
        Ok(true)
    }
}

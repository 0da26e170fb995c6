//! How calls end.

use std::collections::HashSet;
use std::mem;

use super::super::error;
use super::launch::Placed;
use super::{Flight, Instant, MOURNING, ROUND, Work, Worker, distinct};

impl Worker {
    /// Ends calls that the device has passed, in the order of their queues.
    pub(super) fn land(&mut self) {
        let over = |at: Instant| at.elapsed() > MOURNING;
        let leak = self.given_up_at.is_some_and(over);
        let mut behind = HashSet::new();
        for mut flight in mem::take(&mut self.flying) {
            if behind.contains(&flight.queue) && !leak {
                self.flying.push_back(flight);
                continue;
            }
            match flight.done.passed() {
                Ok(true) => {
                    self.moved_at = Instant::now();
                    self.finish(flight);
                }
                _ if leak => flight.item.leak(),
                Ok(false) => {
                    behind.insert(flight.queue);
                    self.flying.push_back(flight);
                }
                Err(reason) => {
                    self.fail_flight(&mut flight, &reason);
                    flight.item.leak();
                }
            }
        }
    }

    fn finish(&self, flight: Flight) {
        let (copies, driver) = (self.copies, &self.shared.driver);
        // Nobody waits for it any more, or it has been told of an error.
        if flight.failed || self.given_up_at.is_some() {
            flight.item.discard(copies, driver);
        } else if let Err(error) = flight.item.finish(copies, driver, &self.shared.pool) {
            self.shared.fail(&error);
        }
    }

    /// Asks for errors of what runs on the device.
    pub(super) fn ask_for_errors(&mut self) {
        if self.asked_at.elapsed() < ROUND {
            return;
        }
        self.asked_at = Instant::now();
        for comm in distinct(self.flying.iter().map(|flight| flight.comm)) {
            let Err(reason) = self.shared.library.poll(comm) else {
                continue;
            };
            let mut flying = mem::take(&mut self.flying);
            let hit = flying.iter_mut().filter(|flight| flight.comm == comm);
            for flight in hit {
                self.fail_flight(flight, &reason);
            }
            self.flying = flying;
        }
    }

    pub(super) fn fail(&self, work: Work, reason: &str) {
        match work {
            Work::Split(split) => {
                let error = error(reason.into());
                self.shared.fail(&error);
                split.told.fulfil(Err(error));
            }
            Work::Calls(items) => {
                for item in items {
                    self.shared.fail(&item.fail(reason));
                }
            }
        }
    }

    pub(super) fn fail_placed(&self, placed: Vec<Placed>, reason: &str) {
        for (item, _) in placed {
            self.shared.fail(&item.fail(reason));
            item.leak();
        }
    }

    fn fail_flight(&self, flight: &mut Flight, reason: &str) {
        if !mem::replace(&mut flight.failed, true) {
            self.shared.fail(&flight.item.fail(reason));
        }
    }
}

//! The strategy with Burn's `Learner`, compared with Burn's own on one device.

use std::cell::RefCell;
use std::env;

mod checkpoints;
mod equality;
mod examples;
mod failures;
mod model;
#[cfg(feature = "mpi")]
mod mpi_processes;
mod settings;

/// The variable with the step in which a process ends itself.
pub const ABORT_AT: &str = "BURN_MEGATRON_TEST_ABORT_AT";

thread_local! {
    static STEPS: RefCell<Steps> = const { RefCell::new(Steps(0)) };
}

/// The steps of a rank.
pub struct Steps(usize);

impl Steps {
    /// Counts a step, and aborts the process if it is the one of [`ABORT_AT`].
    pub fn count(&mut self) {
        self.0 += 1;
        if env::var(ABORT_AT).is_ok_and(|at| at == self.0.to_string()) {
            std::process::abort();
        }
    }
}

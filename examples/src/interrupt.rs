//! Ctrl-C ends the step in hand; a second one, or one before the first step, ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code after an interrupt, as shells have it for SIGINT.
pub const EXIT_CODE: u8 = 130;

/// Whether Ctrl-C was pressed.
#[derive(Clone, Default)]
pub struct Interrupt {
    pressed: Arc<AtomicBool>,
    /// Whether there are steps that can be ended.
    steps: Arc<AtomicBool>,
}

impl Interrupt {
    /// Listens from now on, to SIGINT and SIGTERM.
    pub fn listen() -> Result<Self, ctrlc::Error> {
        let interrupt = Self::default();
        let Self { pressed, steps } = interrupt.clone();
        ctrlc::set_handler(move || {
            if pressed.swap(true, Ordering::SeqCst) || !steps.load(Ordering::SeqCst) {
                std::process::exit(i32::from(EXIT_CODE));
            }
            eprintln!("\ninterrupted: ending this step (once more ends at once)");
        })?;
        Ok(interrupt)
    }

    /// From now on a step is in hand, which is to be ended first.
    pub fn steps_begin(&self) {
        self.steps.store(true, Ordering::SeqCst);
    }

    /// Whether to stop.
    pub fn pressed(&self) -> bool {
        self.pressed.load(Ordering::SeqCst)
    }
}

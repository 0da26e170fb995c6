//! Ctrl-C ends the step in hand; a second one ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code after an interrupt, as shells have it for SIGINT.
pub const EXIT_CODE: u8 = 130;

/// Whether Ctrl-C was pressed.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on, to SIGINT and SIGTERM.
    pub fn listen() -> Result<Self, ctrlc::Error> {
        let pressed = Arc::new(AtomicBool::new(false));
        let seen = pressed.clone();
        ctrlc::set_handler(move || {
            if seen.swap(true, Ordering::SeqCst) {
                std::process::exit(i32::from(EXIT_CODE));
            }
            eprintln!("\ninterrupted: ending this step (once more ends at once)");
        })?;
        Ok(Self(pressed))
    }

    /// Whether to stop.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

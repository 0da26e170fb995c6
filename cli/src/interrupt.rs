//! Stops a run after the current step on Ctrl-C. A second Ctrl-C, or a Ctrl-C before the first step, ends the process
//! at once. The process also ends if the ranks do not finish their step in time.

use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The exit code after an interrupt. Shells use it for SIGINT.
pub const EXIT_CODE: u8 = 130;

/// Handle that reports whether the run was interrupted.
#[derive(Clone)]
pub struct Interrupt(Arc<Mutex<InterruptState>>);

struct InterruptState {
    /// The minimum time that the ranks have to finish a step.
    grace: Duration,
    pressed: bool,
    /// The time at which a rank last finished a step. `None` before the first step begins.
    last_step_end: Option<Instant>,
    /// The duration of the longest step so far.
    longest_step: Duration,
}

/// Response to a signal.
#[derive(Debug, PartialEq, Eq)]
enum SignalResponse {
    /// Ends the process at once.
    Exit,
    /// Finishes the current step first.
    FinishStep,
}

impl Interrupt {
    /// Installs a handler for SIGINT and SIGTERM. After the first signal, the current step has `grace` to finish, or
    /// twice the longest step if that is longer. Saving afterwards has the same time.
    pub fn listen(grace: Duration) -> Result<Self, ctrlc::Error> {
        let interrupt = Self::new(grace);
        let own = interrupt.clone();
        ctrlc::set_handler(move || match own.press(Instant::now()) {
            SignalResponse::Exit => exit(),
            SignalResponse::FinishStep => {
                eprintln!("\ninterrupted: finishing this step (interrupt again to exit at once)");
                let own = own.clone();
                if thread::Builder::new()
                    .spawn(move || own.exit_on_timeout())
                    .is_err()
                {
                    // Without that thread, nothing would enforce the timeout.
                    exit();
                }
            }
        })?;
        Ok(interrupt)
    }

    /// Creates a handle that no signal reaches.
    pub fn new(grace: Duration) -> Self {
        Self(Arc::new(Mutex::new(InterruptState {
            grace,
            pressed: false,
            last_step_end: None,
            longest_step: Duration::ZERO,
        })))
    }

    /// Marks the beginning of the first step. From now on, a signal lets the current step finish.
    pub fn steps_begin(&self) {
        let mut state = self.0.lock();
        state.last_step_end = Some(Instant::now());
    }

    /// Returns whether to stop. Ranks call it between two steps.
    pub fn pressed(&self) -> bool {
        let mut state = self.0.lock();
        state.record_step_end(Instant::now());
        state.pressed
    }

    fn press(&self, now: Instant) -> SignalResponse {
        let state = &mut *self.0.lock();
        let first = !std::mem::replace(&mut state.pressed, true);
        match &mut state.last_step_end {
            Some(last_step_end) if first => {
                *last_step_end = now;
                SignalResponse::FinishStep
            }
            _ => SignalResponse::Exit,
        }
    }

    /// Ends the process if the ranks do not finish a step in time.
    fn exit_on_timeout(&self) -> ! {
        loop {
            let allowance = self.0.lock().allowance();
            match self.left(Instant::now()) {
                Some(left) => thread::sleep(left),
                None => {
                    eprintln!(
                        "interrupted: the ranks did not stop within {:.1} s (see --grace)",
                        allowance.as_secs_f64()
                    );
                    exit();
                }
            }
        }
    }

    /// Returns the time that the ranks still have, or `None` when the time is over.
    fn left(&self, now: Instant) -> Option<Duration> {
        let state = self.0.lock();
        let since = now.saturating_duration_since(state.last_step_end.unwrap_or(now));
        let left = state.allowance().checked_sub(since);
        left.filter(|left| !left.is_zero())
    }
}

impl InterruptState {
    fn allowance(&self) -> Duration {
        self.grace.max(self.longest_step.saturating_mul(2))
    }

    /// Records that a rank has finished a step.
    fn record_step_end(&mut self, now: Instant) {
        if let Some(last_step_end) = self.last_step_end.replace(now) {
            let step = now.saturating_duration_since(last_step_end);
            self.longest_step = self.longest_step.max(step);
        }
    }
}

fn exit() -> ! {
    process::exit(i32::from(EXIT_CODE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_asks_once_and_only_between_steps() {
        let seconds = Duration::from_secs;
        let interrupt = Interrupt::new(seconds(10));
        assert_eq!(
            interrupt.clone().press(Instant::now()),
            SignalResponse::Exit,
            "no steps"
        );
        let interrupt = Interrupt::new(seconds(10));
        interrupt.steps_begin();
        assert!(!interrupt.pressed());
        let now = Instant::now();
        assert_eq!(interrupt.press(now), SignalResponse::FinishStep);
        assert_eq!(interrupt.left(now + seconds(4)), Some(seconds(6)));
        assert_eq!(interrupt.left(now + seconds(10)), None);
        assert!(interrupt.pressed(), "which answers");
        assert_eq!(interrupt.press(now), SignalResponse::Exit);
    }

    #[test]
    fn slow_steps_have_more_time() {
        let seconds = Duration::from_secs;
        let interrupt = Interrupt::new(seconds(10));
        let now = Instant::now();
        let state = |now| interrupt.0.lock().record_step_end(now);
        interrupt.0.lock().last_step_end = Some(now);
        for end in [3, 33, 40] {
            state(now + seconds(end));
        }
        assert_eq!(
            interrupt.press(now + seconds(50)),
            SignalResponse::FinishStep
        );
        assert_eq!(interrupt.left(now + seconds(51)), Some(seconds(59)));
        // The step has ended, so the work after it has the full time again.
        state(now + seconds(60));
        assert_eq!(interrupt.left(now + seconds(61)), Some(seconds(59)));
    }
}

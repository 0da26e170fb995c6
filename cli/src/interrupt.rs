//! Ctrl-C ends the step in hand; a second one, or one before the first step, ends the process, and so does
//! the first where the ranks do not come to the end of their step.

use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The exit code after an interrupt, as shells have it for SIGINT.
pub const EXIT_CODE: u8 = 130;

/// Whether Ctrl-C was pressed.
#[derive(Clone)]
pub struct Interrupt(Arc<Mutex<State>>);

struct State {
    /// How long the ranks may take to answer, at the least.
    grace: Duration,
    pressed: bool,
    /// When the ranks last said that they are alive; nothing before there are steps that can be ended.
    answered: Option<Instant>,
    /// The longest step so far.
    longest: Duration,
}

/// What a signal leads to.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    /// The process ends at once.
    End,
    /// The step in hand is ended first.
    Ask,
}

impl Interrupt {
    /// Listens from now on, to SIGINT and SIGTERM. After the first, the step in hand has `grace` to end, or
    /// twice as long as the longest step where that is more; what follows the step has as long again.
    pub fn listen(grace: Duration) -> Result<Self, ctrlc::Error> {
        let interrupt = Self::new(grace);
        let own = interrupt.clone();
        ctrlc::set_handler(move || match own.press(Instant::now()) {
            Reply::End => end(),
            Reply::Ask => {
                eprintln!("\ninterrupted: ending this step (once more ends at once)");
                let own = own.clone();
                if thread::Builder::new()
                    .spawn(move || own.end_in_time())
                    .is_err()
                {
                    // Nobody would watch over the ranks.
                    end();
                }
            }
        })?;
        Ok(interrupt)
    }

    fn new(grace: Duration) -> Self {
        Self(Arc::new(Mutex::new(State {
            grace,
            pressed: false,
            answered: None,
            longest: Duration::ZERO,
        })))
    }

    /// From now on a step is in hand, which is to be ended first.
    pub fn steps_begin(&self) {
        let mut state = self.lock();
        state.answered = Some(Instant::now());
    }

    /// Whether to stop; asked by ranks between two steps.
    pub fn pressed(&self) -> bool {
        let mut state = self.lock();
        state.answer(Instant::now());
        state.pressed
    }

    fn press(&self, now: Instant) -> Reply {
        let state = &mut *self.lock();
        let first = !std::mem::replace(&mut state.pressed, true);
        match &mut state.answered {
            Some(answered) if first => {
                *answered = now;
                Reply::Ask
            }
            _ => Reply::End,
        }
    }

    /// Ends the process once the ranks have not answered for too long.
    fn end_in_time(&self) -> ! {
        loop {
            let patience = self.lock().patience();
            match self.left(Instant::now()) {
                Some(left) => thread::sleep(left),
                None => {
                    eprintln!(
                        "interrupted: the ranks have not ended within {:.1} s (--grace gives them \
                         longer)",
                        patience.as_secs_f64()
                    );
                    end();
                }
            }
        }
    }

    /// How long the ranks still have; nothing when it is over.
    fn left(&self, now: Instant) -> Option<Duration> {
        let state = self.lock();
        let since = now.saturating_duration_since(state.answered.unwrap_or(now));
        let left = state.patience().checked_sub(since);
        left.filter(|left| !left.is_zero())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn patience(&self) -> Duration {
        self.grace.max(self.longest.saturating_mul(2))
    }

    /// A rank has come to the end of a step.
    fn answer(&mut self, now: Instant) {
        if let Some(answered) = self.answered.replace(now) {
            let step = now.saturating_duration_since(answered);
            self.longest = self.longest.max(step);
        }
    }
}

fn end() -> ! {
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
            Reply::End,
            "no steps"
        );
        let interrupt = Interrupt::new(seconds(10));
        interrupt.steps_begin();
        assert!(!interrupt.pressed());
        let now = Instant::now();
        assert_eq!(interrupt.press(now), Reply::Ask);
        assert_eq!(interrupt.left(now + seconds(4)), Some(seconds(6)));
        assert_eq!(interrupt.left(now + seconds(10)), None);
        assert!(interrupt.pressed(), "which answers");
        assert_eq!(interrupt.press(now), Reply::End);
    }

    #[test]
    fn slow_steps_have_more_time() {
        let seconds = Duration::from_secs;
        let interrupt = Interrupt::new(seconds(10));
        let now = Instant::now();
        let state = |now| interrupt.lock().answer(now);
        interrupt.lock().answered = Some(now);
        for end in [3, 33, 40] {
            state(now + seconds(end));
        }
        assert_eq!(interrupt.press(now + seconds(50)), Reply::Ask);
        assert_eq!(interrupt.left(now + seconds(51)), Some(seconds(59)));
        // The step has ended; what follows it has as long again.
        state(now + seconds(60));
        assert_eq!(interrupt.left(now + seconds(61)), Some(seconds(59)));
    }
}

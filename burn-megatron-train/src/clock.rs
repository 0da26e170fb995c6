//! Measures the time of each step.

use std::time::Instant;

/// Measures the time of each step, between two consecutive readings.
///
/// A device may run a launched step before it answers the reading of the previous step. The previous reading then
/// includes both steps. If no other step was launched, the second step gets the mean time of all steps since the start.
pub(super) struct StepClock {
    start: Instant,
    last: Instant,
    steps: u32,
    /// Whether a step was launched since the last reading.
    launched: bool,
}

impl StepClock {
    pub fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            steps: 0,
            launched: false,
        }
    }

    /// Records that a step was launched.
    pub fn launch(&mut self) {
        self.launched = true;
    }

    /// Records that a step was read, and returns its time in seconds.
    pub fn lap(&mut self) -> f64 {
        let now = Instant::now();
        self.steps += 1;
        let time = if self.launched {
            now - self.last
        } else {
            (now - self.start) / self.steps
        };
        (self.last, self.launched) = (now, false);
        time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_step_that_was_done_before_it_was_read_takes_as_long_as_the_others() {
        let mut clock = StepClock::start();
        let seconds = [200, 100, 100, 0].map(|wait| {
            if wait > 0 {
                clock.launch();
            }
            let ago = Duration::from_millis(wait);
            clock.last -= ago;
            clock.start -= ago;
            clock.lap()
        });
        for (seconds, expected) in seconds.into_iter().zip([0.2, 0.1, 0.1, 0.1]) {
            assert!((seconds - expected).abs() < 0.05, "{seconds} {expected}");
        }
    }
}

//! Timing of work on a device.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn::tensor::ProfileOptions;

use crate::error::Error;

/// Work whose set-up is not timed. The outer function sets up, and the inner function runs.
pub type Work<'a> = Box<dyn Fn() -> Box<dyn FnOnce() + Send> + 'a>;

/// Number and duration of the timed runs.
#[derive(Clone, Copy, Debug)]
pub struct TimingConfig {
    /// The number of measured runs.
    pub samples: usize,
    /// The minimum duration of the warm-up, which has at least two runs. The warm-up compiles kernels, fills pools
    /// and raises clocks.
    pub warm_up: Duration,
}

/// Times several works, interleaved, so that other load on the machine affects all of them. Returns the seconds of
/// each run.
pub fn time_interleaved(
    device: &Device,
    timing: TimingConfig,
    works: &[&Work],
) -> Result<Vec<Vec<f64>>, Error> {
    for work in works {
        let start = Instant::now();
        let mut runs = 0;
        while runs < 2 || start.elapsed() < timing.warm_up {
            seconds(device, work)?;
            runs += 1;
        }
    }
    let mut times = vec![Vec::with_capacity(timing.samples); works.len()];
    for _ in 0..timing.samples {
        for (work, times) in works.iter().zip(&mut times) {
            times.push(seconds(device, work)?);
        }
    }
    Ok(times)
}

/// Times one run, with the device's own clock if it has one.
fn seconds(device: &Device, work: &Work) -> Result<f64, Error> {
    let run = work();
    device.sync()?;
    let options = ProfileOptions::default().flush();
    let ((), duration) = device.profile_with(options, run)?;
    let ticks = futures_lite::future::block_on(duration.resolve());
    let ticks = ticks.ok_or("the device measured no time")?;
    Ok(ticks.duration().as_secs_f64())
}

/// Returns the median of the times, or NaN for an empty slice.
pub fn median(times: &[f64]) -> f64 {
    if times.is_empty() {
        return f64::NAN;
    }
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn what_is_timed_runs_as_often_as_asked() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicUsize, Ordering};
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = || {
            let runs = runs.clone();
            Box::new(move || {
                runs.fetch_add(1, Ordering::Relaxed);
            }) as Box<dyn FnOnce() + Send>
        };
        let work: Work = Box::new(counted);
        let timing = TimingConfig {
            samples: 3,
            warm_up: Duration::ZERO,
        };
        let times = time_interleaved(&Device::flex(), timing, &[&work, &work]).unwrap();
        assert_eq!((times.len(), times[0].len()), (2, 3));
        assert_eq!(runs.load(Ordering::Relaxed), 2 * (2 + 3));
    }
}

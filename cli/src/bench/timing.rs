//! How long work takes on a device.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn::tensor::ProfileOptions;

use crate::recipe::Error;

/// Work that is set up outside of the time and runs inside of it.
pub type Work<'a> = Box<dyn Fn() -> Box<dyn FnOnce() + Send> + 'a>;

/// How often, and for how long, something is timed.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs that count.
    pub samples: usize,
    /// Runs go on before that until this time has passed, two at least: kernels are compiled, pools
    /// fill, clocks rise.
    pub warm_up: Duration,
}

/// Times contestants in turns, so that whatever else the machine does meets all of them, and
/// returns the seconds of each run.
pub fn take_turns(
    device: &Device,
    effort: Effort,
    contestants: &[&Work],
) -> Result<Vec<Vec<f64>>, Error> {
    for work in contestants {
        let start = Instant::now();
        let mut runs = 0;
        while runs < 2 || start.elapsed() < effort.warm_up {
            seconds(device, work)?;
            runs += 1;
        }
    }
    let mut times = vec![Vec::with_capacity(effort.samples); contestants.len()];
    for _ in 0..effort.samples {
        for (work, times) in contestants.iter().zip(&mut times) {
            times.push(seconds(device, work)?);
        }
    }
    Ok(times)
}

/// One run, on the device's own clock where it has one.
fn seconds(device: &Device, work: &Work) -> Result<f64, Error> {
    let run = work();
    device.sync()?;
    let options = ProfileOptions::default().flush();
    let ((), duration) = device.profile_with(options, run)?;
    let ticks = futures_lite::future::block_on(duration.resolve());
    let ticks = ticks.ok_or("the device measured no time")?;
    Ok(ticks.duration().as_secs_f64())
}

/// The median of some times.
pub fn median(times: &[f64]) -> f64 {
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
        let effort = Effort {
            samples: 3,
            warm_up: Duration::ZERO,
        };
        let times = take_turns(&Device::flex(), effort, &[&work, &work]).unwrap();
        assert_eq!((times.len(), times[0].len()), (2, 3));
        assert_eq!(runs.load(Ordering::Relaxed), 2 * (2 + 3));
    }
}

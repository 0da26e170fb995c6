//! Times training steps on random tokens, for `check-gpu` and the benchmarks.

mod models;
mod resident;

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::device_memory::driver_memory;
use burn_megatron::kernels::philox::Stream;
use burn_megatron_data::{DataError, Dataset, Sample, Samples, Sampling};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError};

use crate::error::Error;
use crate::estimate;
use crate::recipe::Recipe;

pub use models::NamedModel;

/// Sets the micro-batch size, the global batch size and the number of steps. Disables evaluation between steps.
pub fn set_steps(recipe: &mut Recipe, [micro, global]: [usize; 2], steps: usize) {
    let train = &mut recipe.train;
    (train.micro_batch_size, train.global_batch_size) = (micro, global);
    (train.steps, train.warmup_steps) = (steps, 0);
    train.evaluate_every = None;
}

/// Measurements of one model with one implementation of attention.
pub struct TimedSteps {
    /// The wall time of each measured step in seconds. The device is idle before the first step and after the last.
    pub seconds: Vec<f64>,
    /// The floating-point operations of the model per token, forward and backward.
    pub flops_per_token: f64,
    /// The implementations of the operations, as shown in the header of a run.
    pub kernels: String,
    /// The attention engine, or `unfused`.
    pub attention: String,
    /// The peak number of bytes in the memory pools of the device. Without pools, the peak resident memory of the
    /// process. `None` if it is not reported.
    pub peak_bytes: Option<u64>,
    /// The number of used bytes of the device after the steps, as reported by its driver. `None` if no driver reports
    /// it.
    pub driver_bytes: Option<u64>,
}

/// Trains the recipe's model on one rank, for `warm_up` steps without measurement and the remaining steps with
/// measurement.
pub fn run(recipe: &Recipe, device: &Device, warm_up: usize) -> Result<TimedSteps, Error> {
    // Pools do not shrink automatically, so their size after the run is the peak of the run.
    device.memory_cleanup();
    resident::reset_peak();
    run_in(recipe, &ParallelContext::single(), device, warm_up)
}

/// Runs [`run`] on one of several ranks. Collective: call on all ranks.
pub fn run_in(
    recipe: &Recipe,
    groups: &ParallelContext,
    device: &Device,
    warm_up: usize,
) -> Result<TimedSteps, Error> {
    let builder = estimate::builder(recipe, groups, device)?;
    let builder = builder.with_recompute(&recipe.memory.recompute())?;
    let config = recipe.train_config();
    let mut trainer = recipe.model.trainer(builder, &config)?;
    let mut timer = StepTimer {
        device,
        warm_up,
        last: config.steps,
        started: Instant::now(),
        seconds: vec![],
        flops_per_token: 0.0,
    };
    let data = RandomTokens {
        vocabulary: recipe.model.vocabulary(),
        length: recipe.sequence_length(),
        seed: config.seed,
    };
    let outcome = trainer.fit(&data, &mut timer)?;
    check_measured(timer.seconds.len(), outcome.steps, [warm_up, config.steps])?;
    let kernels = trainer.kernels();
    let engines = kernels.attention_engines().iter();
    let engines: Vec<_> = engines.map(|engine| engine.name()).collect();
    let pools = device.memory_pool_usage();
    Ok(TimedSteps {
        seconds: timer.seconds,
        flops_per_token: timer.flops_per_token,
        kernels: kernels.to_string(),
        attention: if engines.is_empty() {
            "unfused".into()
        } else {
            engines.join(" and ")
        },
        peak_bytes: pools
            .map(|usage| usage.bytes_reserved)
            .or_else(resident::peak_bytes),
        driver_bytes: driver_memory(device).map(|memory| memory.used),
    })
}

/// Checks that all steps after the warm-up were measured. A benchmark never requests a stop. If a run stops, it has
/// read a wrong value from the device.
fn check_measured(measured: usize, ran: usize, [warm_up, all]: [usize; 2]) -> Result<(), Error> {
    if measured == all - warm_up {
        return Ok(());
    }
    Err(format!(
        "the run stopped after step {ran} of {all} with {measured} of {} measured steps, although nothing requested a stop: \
         the device returns wrong values",
        all - warm_up
    )
    .into())
}

/// Timer for the time between the ends of steps.
struct StepTimer<'a> {
    device: &'a Device,
    warm_up: usize,
    /// The number of the last step.
    last: usize,
    started: Instant,
    seconds: Vec<f64>,
    flops_per_token: f64,
}

impl Observer for StepTimer<'_> {
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        // Other steps are queued without synchronization, as in a normal run.
        if metrics.step == self.warm_up || metrics.step == self.last {
            self.device.sync()?;
        }
        let now = Instant::now();
        if metrics.step > self.warm_up {
            if metrics.skipped {
                let step = metrics.step;
                return Err(format!(
                    "step {step} was skipped, so its time is not the time of a full step: use --precision bf16, or \
                     more --warm-up steps"
                )
                .into());
            }
            self.seconds.push((now - self.started).as_secs_f64());
        }
        self.started = now;
        self.flops_per_token = timing.flops_per_second / timing.tokens_per_second;
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Dataset of random tokens, without held-out samples.
#[derive(Clone)]
pub struct RandomTokens {
    /// The exclusive upper bound of the tokens.
    pub vocabulary: usize,
    /// The number of tokens per sample.
    pub length: usize,
    /// The seed for all samples.
    pub seed: u64,
}

impl Samples for RandomTokens {
    fn seq(&self) -> usize {
        self.length
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut tokens = Vec::with_capacity(self.length + 1);
        Stream::new(self.seed, number).words(0, self.length + 1, |_, word| {
            tokens.push(((u64::from(word) * self.vocabulary as u64) >> 32) as i32);
        });
        Ok(Sample {
            targets: tokens[1..].to_vec(),
            tokens: tokens[..self.length].to_vec(),
            documents: vec![],
            padding: 0,
        })
    }
}

impl Dataset for RandomTokens {
    fn describe(&self) -> String {
        "random tokens".into()
    }

    fn fingerprint(&self) -> u64 {
        self.seed
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn training(&self, _: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(self.clone()))
    }

    fn held_out(&self, _: usize, _: usize) -> Result<Vec<Sample>, DataError> {
        Ok(vec![])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_stops_before_its_last_step_is_an_error() {
        assert!(check_measured(5, 8, [3, 8]).is_ok());
        let error = check_measured(0, 1, [3, 8]).unwrap_err().to_string();
        let expected = "the run stopped after step 1 of 8 with 0 of 5 measured steps, ";
        assert!(error.starts_with(expected), "{error}");
    }
}

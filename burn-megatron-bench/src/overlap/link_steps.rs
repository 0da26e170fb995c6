//! Steps over a simulated link, on the clock of the machine or on one that products and transfers advance.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_megatron::comm::testing::{Link, Transfer};
use burn_megatron::comm::{ParallelContext, Rank, ReduceOp};
use burn_megatron::nn::MatmulClock;

use super::super::args::OverlapArgs;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;

/// Floating-point operations per second on a virtual clock.
const COUNTED_FLOPS: f64 = 1e9;

/// The activity of a rank in a step.
pub struct LinkStep {
    pub seconds: f64,
    pub transfers: Vec<Transfer>,
}

impl LinkStep {
    /// The sum over the transfers, in seconds.
    pub fn sum(&self, of: impl Fn(&Transfer) -> Duration) -> f64 {
        let times = self.transfers.iter().map(of);
        times.sum::<Duration>().as_secs_f64()
    }

    /// In which the link was in use.
    pub fn link(&self) -> f64 {
        self.sum(Transfer::duration)
    }

    pub fn bytes(&self) -> f64 {
        let sizes = self.transfers.iter().map(|transfer| transfer.bytes as f64);
        sizes.sum()
    }

    pub fn calls(&self) -> f64 {
        self.transfers.len() as f64
    }
}

/// The settings for running and timing steps.
#[derive(Clone, Copy)]
pub struct LinkSteps<'a> {
    pub args: &'a OverlapArgs,
    pub ranks: usize,
    /// Whether the clock is a virtual one.
    pub counted: bool,
}

impl LinkSteps<'_> {
    /// The link of a rank.
    pub fn link(&self, latency: Duration, bytes_per_second: f64) -> Result<Arc<Link>, Error> {
        Ok(if self.counted {
            Link::with_virtual_clock(latency, bytes_per_second)?
        } else {
            Link::new(latency, bytes_per_second)?
        })
    }

    /// The measured steps, after those to warm up. Collective: call on all ranks.
    pub fn run(
        &self,
        groups: &ParallelContext,
        link: &Arc<Link>,
        mut step: impl FnMut() -> Result<(), Error>,
    ) -> Result<Vec<LinkStep>, Error> {
        let mut all = || -> Result<Vec<LinkStep>, Error> {
            let timed = |_| {
                groups.world().barrier()?;
                link.take_transfers();
                let (start, began) = (link.now(), Instant::now());
                step()?;
                let time = if self.counted {
                    link.now() - start
                } else {
                    began.elapsed()
                };
                Ok(LinkStep {
                    seconds: time.as_secs_f64(),
                    transfers: link.take_transfers(),
                })
            };
            (0..self.args.warm_up + self.args.steps)
                .map(timed)
                .collect()
        };
        let mut steps = if self.counted {
            let clock = MatmulClock {
                link: link.clone(),
                flops_per_second: COUNTED_FLOPS,
            };
            tracing::subscriber::with_default(clock, all)?
        } else {
            all()?
        };
        Ok(steps.split_off(self.args.warm_up))
    }

    pub fn latency(&self) -> Duration {
        Duration::from_micros(self.args.latency_us)
    }

    /// The bytes per second of a link on which the transfers of such steps, which were run without one, take the share of
    /// their time. Collective: call on all ranks.
    pub fn bandwidth(&self, rank: &Rank, steps: &[LinkStep]) -> Result<f64, Error> {
        let mean = |of: fn(&LinkStep) -> f64| self.mean(rank, steps, of);
        let (calls, seconds) = (mean(LinkStep::calls)?, mean(|step| step.seconds)?);
        let latencies = calls * self.latency().as_secs_f64();
        let wanted = self.args.share * seconds;
        if wanted > latencies {
            Ok(mean(LinkStep::bytes)? / (wanted - latencies))
        } else {
            Err(format!(
                "--share {} of a step of {seconds:.4} s is {wanted:.4} s for its transfers, but the latencies of its {calls} \
                 calls take {latencies:.4} s; use a larger --share or a lower --latency-us",
                self.args.share,
            )
            .into())
        }
    }

    /// The mean over the ranks of the median over the steps. Collective: call on all ranks.
    pub fn mean(
        &self,
        rank: &Rank,
        steps: &[LinkStep],
        of: impl Fn(&LinkStep) -> f64,
    ) -> Result<f64, Error> {
        let own = median(&steps.iter().map(of).collect::<Vec<_>>());
        let sum = rank.communicator().all_reduce_scalar(own, ReduceOp::Sum)?;
        Ok(sum / self.ranks as f64)
    }
}

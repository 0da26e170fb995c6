//! Runs ranks as threads that communicate over simulated links. Times are measured with the clock of the machine, or
//! with a virtual clock, which advances only by matrix multiplications and transfers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_megatron::comm::{ParallelContext, Rank, ReduceOp, World};
use burn_megatron_cli::internal::{Error, median};
use burn_megatron_comm_testing::{Link, MatmulClock, Transfer};

use crate::args::StepFlags;

/// Floating-point operations per second on a virtual clock.
const COUNTED_FLOPS: f64 = 1e9;

/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// The bandwidth inside a node divided by the bandwidth between nodes.
pub const INSIDE_A_NODE: f64 = 8.0;

/// Runs work on ranks that are threads, with one compute thread each. Returns the results in the order of the ranks.
pub fn on_threads<T: Send>(
    ranks: usize,
    work: impl Fn(&Rank) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let world = World::threads(ranks)?;
    let world = world.deadline(DEADLINE).compute_threads(1);
    Ok(world.run(|rank| work(&rank))?)
}

/// Latency and bandwidth of the link of each rank.
#[derive(Clone, Copy, Debug)]
pub struct LinkSpeed {
    pub latency: Duration,
    pub bytes_per_second: f64,
}

impl LinkSpeed {
    /// A link that takes no time.
    pub const INFINITE: Self = Self {
        latency: Duration::ZERO,
        bytes_per_second: f64::INFINITY,
    };

    /// Creates the link. If `ranks_per_node` is set, `self` describes the link between nodes.
    pub fn link(self, ranks_per_node: Option<usize>) -> Result<Arc<Link>, Error> {
        let Self {
            latency,
            bytes_per_second,
        } = self;
        Ok(match ranks_per_node {
            None => Link::new(latency, bytes_per_second)?,
            Some(ranks) => {
                let inside = INSIDE_A_NODE * bytes_per_second;
                Link::with_nodes(latency, bytes_per_second, ranks, inside)?
            }
        })
    }
}

/// The communication of a step, and the time of the step without a simulated link.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    pub seconds: f64,
    pub calls: f64,
    pub bytes: f64,
}

impl Traffic {
    /// Returns the latency and bandwidth with which the transfers take the given share of the time of the step.
    pub fn link(&self, share: f64, latency: Duration) -> Result<LinkSpeed, Error> {
        let Self {
            seconds,
            calls,
            bytes,
        } = *self;
        if bytes == 0.0 {
            return Ok(LinkSpeed::INFINITE);
        }
        let latencies = calls * latency.as_secs_f64();
        let wanted = share * seconds;
        if wanted > latencies {
            return Ok(LinkSpeed {
                latency,
                bytes_per_second: bytes / (wanted - latencies),
            });
        }
        Err(format!(
            "--share {share} of {seconds:.4} s is {wanted:.4} s for the transfers of a step, but the latencies of its {calls} \
             calls alone take {latencies:.4} s; use a larger --share or a lower --latency-us"
        )
        .into())
    }
}

/// The activity of a rank in a step.
pub struct LinkStep {
    pub seconds: f64,
    pub transfers: Vec<Transfer>,
}

impl LinkStep {
    /// Returns the sum over the transfers, in seconds.
    pub fn sum(&self, of: impl Fn(&Transfer) -> Duration) -> f64 {
        let times = self.transfers.iter().map(of);
        times.sum::<Duration>().as_secs_f64()
    }

    /// Returns the time for which the link was busy, in seconds.
    pub fn link(&self) -> f64 {
        self.sum(Transfer::duration)
    }

    /// Returns the time for which the rank waited for its transfers, in seconds.
    pub fn waited(&self) -> f64 {
        self.sum(|transfer| transfer.waited)
    }

    /// Returns the number of bytes that were sent.
    pub fn bytes(&self) -> f64 {
        let sizes = self.transfers.iter().map(|transfer| transfer.bytes as f64);
        sizes.sum()
    }

    /// Returns the number of transfers.
    pub fn calls(&self) -> f64 {
        self.transfers.len() as f64
    }

    /// Returns the number of bytes that were sent to other nodes.
    pub fn bytes_between_nodes(&self) -> f64 {
        let sizes = self.transfers.iter();
        sizes.map(|transfer| transfer.between as f64).sum()
    }
}

/// The number of steps, and the clock that times them.
#[derive(Clone, Copy)]
pub struct Rounds {
    pub warm_up: usize,
    pub steps: usize,
    /// Whether the clock is virtual.
    pub counted: bool,
}

impl From<&StepFlags> for Rounds {
    /// Creates rounds that are timed with the clock of the machine.
    fn from(flags: &StepFlags) -> Self {
        Self {
            warm_up: flags.warm_up,
            steps: flags.steps,
            counted: false,
        }
    }
}

impl Rounds {
    /// Creates the link of a rank.
    pub fn link(self, speed: LinkSpeed) -> Result<Arc<Link>, Error> {
        let LinkSpeed {
            latency,
            bytes_per_second,
        } = speed;
        match self.counted {
            true => Ok(Link::with_virtual_clock(latency, bytes_per_second)?),
            false => speed.link(None),
        }
    }

    /// Runs the warm-up and the measured steps, and returns the measured steps. Collective: call on all ranks.
    pub fn run(
        self,
        groups: &ParallelContext,
        link: &Arc<Link>,
        mut step: impl FnMut() -> Result<(), Error>,
    ) -> Result<Vec<LinkStep>, Error> {
        let mut all = || {
            let steps = 0..self.warm_up + self.steps;
            let timed = steps.map(|_| self.time(groups, link, &mut step));
            timed.collect::<Result<Vec<_>, _>>()
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
        Ok(steps.split_off(self.warm_up))
    }

    /// Times one step. Collective: call on all ranks.
    pub fn time(
        self,
        groups: &ParallelContext,
        link: &Link,
        step: &mut impl FnMut() -> Result<(), Error>,
    ) -> Result<LinkStep, Error> {
        groups.world().barrier()?;
        link.take_transfers();
        let (start, began) = (link.now(), Instant::now());
        step()?;
        let time = match self.counted {
            true => link.now() - start,
            false => began.elapsed(),
        };
        Ok(LinkStep {
            seconds: time.as_secs_f64(),
            transfers: link.take_transfers(),
        })
    }
}

/// Returns the mean over the ranks of the median over the steps. Collective: call on all ranks.
pub fn mean(rank: &Rank, steps: &[LinkStep], of: impl Fn(&LinkStep) -> f64) -> Result<f64, Error> {
    let own = median(&steps.iter().map(of).collect::<Vec<_>>());
    let average = ReduceOp::Average;
    Ok(rank.communicator().all_reduce_scalar(own, average)?)
}

/// Returns the median over the steps of the time of the slowest rank. Collective: call on all ranks.
pub fn slowest(rank: &Rank, steps: &[LinkStep]) -> Result<f64, Error> {
    let of_rank = |step: &LinkStep| {
        let slowest = rank.communicator();
        slowest.all_reduce_scalar(step.seconds, ReduceOp::Max)
    };
    let steps = steps.iter().map(of_rank).collect::<Result<Vec<_>, _>>()?;
    Ok(median(&steps))
}

/// Returns the communication of a step, as means over the ranks. Collective: call on all ranks.
pub fn traffic(rank: &Rank, steps: &[LinkStep]) -> Result<Traffic, Error> {
    Ok(Traffic {
        seconds: mean(rank, steps, |step| step.seconds)?,
        calls: mean(rank, steps, LinkStep::calls)?,
        bytes: mean(rank, steps, LinkStep::bytes)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_a_step_gives_the_bandwidth() {
        let step = Traffic {
            seconds: 2.0,
            calls: 10.0,
            bytes: 50e6,
        };
        // The transfers take 1 s, and half of this time is latency.
        let link = step.link(0.5, Duration::from_millis(50)).unwrap();
        assert_eq!(link.bytes_per_second, 100e6);
        let error = step.link(0.1, Duration::from_millis(100)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("10 calls alone take 1.0000 s"), "{error}");
    }
}

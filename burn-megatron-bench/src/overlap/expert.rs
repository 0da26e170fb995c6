//! Trains blocks with experts over a simulated slow link. Measures the share of the expert-parallel communication that
//! overlaps with the computation of another micro-batch.

use std::fmt;
use std::thread::available_parallelism;

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::mesh::{Axis, AxisSet, Grid, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_cli::internal::{Error, RandomTokens};
use burn_megatron_comm_testing::SimulatedNetwork;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};

use super::args::OverlapArgs;
use crate::layers::{COLUMNS, LEGEND, LayersRow};
use crate::links::{LinkSpeed, LinkStep, Rounds, on_threads};
use crate::report::Report;

const SEED: u64 = 1;

/// Trains with and without overlap on each number of expert ranks, and prints a table.
pub fn run(args: &OverlapArgs) -> Result<(), Error> {
    let about = format!(
        "{} blocks of {} features, whose experts take as long as the matrix multiplications of attention; {} \
         micro-batches of {} samples of {} tokens per rank, in f32; {} steps after {} warm-up steps; 1 compute thread \
         per rank; on the simulated link, the exchanges of a step take {} of the step time without the link",
        args.layers,
        args.hidden,
        args.micro_batches,
        args.micro_batch_size,
        args.context,
        args.steps.steps,
        args.steps.warm_up,
        args.share
    );
    let mut report = Report::begin(&about, COLUMNS, (), &args.steps.json);
    for expert in &args.expert_parallel {
        for row in ExpertBenchmark::new(args, *expert)?.run()? {
            report.add(row)?;
        }
    }
    report.finish(&format!(
        "{LEGEND}. With M micro-batches, at most 1 - 1 / 2M of the transfer time is hidden, because nothing can hide \
         the exchanges of the first forward"
    ))
}

/// The training on a number of ranks.
struct ExpertBenchmark<'a> {
    args: &'a OverlapArgs,
    expert: usize,
}

/// Whether overlap is on.
#[derive(Clone, Copy)]
struct Overlap(bool);

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "overlap on" } else { "overlap off" })
    }
}

/// Returns the time for which a rank waited for its own link, in seconds. The time for which it waited for other ranks
/// is not included.
fn blocked(step: &LinkStep) -> f64 {
    step.sum(|transfer| {
        let begin = transfer.begin_wait.unwrap_or(transfer.done);
        transfer.done.saturating_sub(begin).min(transfer.waited)
    })
}

impl<'a> ExpertBenchmark<'a> {
    /// Checks the sizes.
    fn new(args: &'a OverlapArgs, expert: usize) -> Result<Self, Error> {
        if expert < 2 {
            return Err(format!("invalid --expert-parallel {expert}: expected at least 2").into());
        }
        let bench = Self { args, expert };
        let layout = bench.layout(true);
        bench.model().check_layout(&layout)?;
        bench.train_config().check(&layout, args.context)?;
        Ok(bench)
    }

    /// Returns the model. Attention multiplies each token with `4 hidden^2` weights, and its two experts multiply it
    /// with `6 hidden width` weights.
    fn model(&self) -> TransformerConfig {
        let hidden = self.args.hidden;
        TransformerConfig {
            layers: self.args.layers,
            hidden,
            context: self.args.context,
            heads: if hidden.is_multiple_of(128) {
                hidden / 64
            } else {
                2
            },
            groups: None,
            vocabulary: 64,
            dropout: 0.0,
            tied: true,
            moe: Some(MoeConfig {
                experts: 2 * self.expert,
                experts_per_token: 2,
                expert_width: Some(2 * hidden / 3),
                ..MoeConfig::default()
            }),
            ..TransformerConfig::mixtral()
        }
    }

    fn layout(&self, overlap: bool) -> ParallelConfig {
        ParallelConfig::new()
            .with_data(self.expert)
            .with_expert(self.expert)
            .with_overlap_moe_expert_parallel_comm(overlap)
    }

    fn train_config(&self) -> TrainConfig {
        let samples = self.args.micro_batch_size * self.args.micro_batches;
        TrainConfig {
            steps: self.args.steps.warm_up + self.args.steps.steps,
            warmup_steps: 0,
            // With this learning rate, the router selects the experts as evenly as at the start.
            learning_rate: 1e-9,
            min_learning_rate: 0.0,
            micro_batch_size: self.args.micro_batch_size,
            global_batch_size: samples * self.expert,
            ..TrainConfig::default()
        }
    }

    /// Returns the rows without and with overlap.
    fn run(&self) -> Result<Vec<LayersRow>, Error> {
        let cores = available_parallelism().map_or(1, usize::from);
        let counted = self.args.counted || self.expert > cores;
        let run = self.args.layers(self.expert, counted, blocked);
        let mut by_rank = on_threads(self.expert, |rank| {
            let cases = [Overlap(false), Overlap(true)];
            run.rows(rank, &cases, |overlap, speed| {
                self.steps(rank, overlap.0, run.rounds, speed)
            })
        })?;
        Ok(by_rank.swap_remove(0))
    }

    fn steps(
        &self,
        rank: &Rank,
        overlap: bool,
        rounds: Rounds,
        speed: LinkSpeed,
    ) -> Result<Vec<LinkStep>, Error> {
        let link = rounds.link(speed)?;
        let groups = ParallelContext::new(&self.layout(overlap), rank)?;
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        // Only the layers use the simulated link. Gradients are reduced without it.
        let experts = SimulatedNetwork::over(groups.group(Grid::Expert, axes)?, &link);
        let of_layers = groups.clone().with_group(Grid::Expert, axes, experts);
        let device = Device::flex();
        let builder = ModelBuilder::with(&of_layers, &device, SEED, DType::F32);
        let model = self.model().init_with(builder)?;
        let mut trainer = Trainer::new(model, &groups, &device, &self.train_config())?;
        let samples = RandomTokens {
            vocabulary: self.model().vocabulary,
            length: self.args.context,
            seed: SEED,
        };
        rounds.run(&groups, &link, || {
            trainer.step(&samples, &mut NoopObserver)?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    #[test]
    fn flags_that_do_not_fit_are_refused() {
        for flags in [
            "--expert-parallel 2 --tensor-parallel 2",
            "--expert-parallel 2 --zero-stages 1",
            "--micro-batches 4",
        ] {
            assert!(parse_text::<OverlapArgs>(flags).is_err(), "{flags}");
        }
        let refused = |flags| {
            let args = parse_text::<OverlapArgs>(flags).unwrap();
            let error = ExpertBenchmark::new(&args, args.expert_parallel[0]).err();
            error.unwrap().to_string()
        };
        assert!(refused("--expert-parallel 1").contains("expected at least 2"));
    }

    /// With the virtual clock, the load of the machine has no effect. Only the first of eight forwards has no
    /// computation to overlap with. The last backward overlaps with its own weight gradients. If the communication
    /// takes as long as all matrix multiplications, it is hidden only if it also overlaps with weight gradients. The
    /// latency of sending the numbers of tokens is also hidden.
    #[test]
    fn another_micro_batch_hides_most_of_the_exchanges() {
        for (expert, share, latency, least) in [
            (2, 0.5, 0, 0.9),
            (4, 0.5, 0, 0.9),
            (4, 0.5, 150, 0.91),
            (2, 1.0, 0, 0.75),
        ] {
            let flags = "--layers 3 --hidden 48 --context 32 --micro-batch-size 1 --steps 1 --warm-up 0 --counted";
            let flags = format!(
                "{flags} --expert-parallel {expert} --share {share} --latency-us {latency}"
            );
            let args = parse_text::<OverlapArgs>(&flags).unwrap();
            let rows = ExpertBenchmark::new(&args, expert).unwrap().run().unwrap();
            let [plain, overlapped] = &rows[..] else {
                panic!("{rows:?}")
            };
            assert!(plain.hidden < 0.05, "{plain:?}");
            assert!(overlapped.hidden >= least, "{overlapped:?}");
            assert!(overlapped.hidden <= 1.0 - 1.0 / 16.0, "{overlapped:?}");
            assert!(
                overlapped.seconds_over_link < plain.seconds_over_link,
                "{overlapped:?}"
            );
            assert_eq!(
                (overlapped.bytes, overlapped.calls),
                (plain.bytes, plain.calls)
            );
        }
    }
}

//! Blocks with experts over a slow link: how much of their exchanges travels while another micro-batch is computed.

use std::fmt::{self, Display};
use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Duration;

use burn::tensor::{DType, Device};
use burn_megatron::comm::testing::SimulatedNetwork;
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::mesh::{Axis, AxisSet, Grid, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use serde::Serialize;

use super::super::args::OverlapArgs;
use super::link_steps::{LinkStep, LinkSteps};
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::RandomTokens;
use burn_megatron_cli::internal::{Columns, wrapped};

const SEED: u64 = 1;
/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// A line of the table: means over the ranks of the medians over the steps, times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct ExpertRow {
    expert: usize,
    overlap: bool,
    /// Whether the times are those of a virtual clock.
    counted: bool,
    /// Bytes that a rank sends in a step.
    bytes: f64,
    calls: f64,
    step_seconds: f64,
    transfer_seconds: f64,
    /// In which a rank waited for its own link.
    blocked_seconds: f64,
    /// In which it waited for others beside that.
    late_seconds: f64,
    /// 1 - blocked / transfers, at least 0.
    hidden: f64,
}

const COLUMNS: Columns<10> = Columns {
    widths: [-6, -7, -7, 6, 9, 7, 7, 9, 7, 6],
    optional: &[3],
};

impl Display for ExpertRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clock = if self.counted { "counted" } else { "real" };
        let overlap = if self.overlap { "on" } else { "off" };
        f.write_str(&COLUMNS.line([
            self.expert.to_string(),
            overlap.into(),
            clock.into(),
            format!("{:.0}", self.calls),
            format!("{:.2}", self.bytes / 1e6),
            format!("{:.3}", self.step_seconds),
            format!("{:.3}", self.transfer_seconds),
            format!("{:.3}", self.blocked_seconds),
            format!("{:.3}", self.late_seconds),
            format!("{:.0} %", 100.0 * self.hidden),
        ]))
    }
}

/// Trains with and without overlap on each number of expert ranks, and prints a table.
pub fn run(args: &OverlapArgs) -> Result<ExitCode, Error> {
    let about = format!(
        "{} blocks of {} features with experts that take as long as the products of attention, {} micro-batches of {} samples \
         of {} tokens on each rank, f32: {} steps after {}; 1 compute thread per rank; a link on which the exchanges of a step \
         take {} of its time without a link",
        args.layers,
        args.hidden,
        args.micro_batches,
        args.micro_batch_size,
        args.context,
        args.steps,
        args.warm_up,
        args.share
    );
    println!("{}\n\n{}", wrapped(&about), header());
    let mut rows = vec![];
    for expert in &args.expert_parallel {
        for row in ExpertBenchmark::new(args, *expert)?.run()? {
            println!("{row}");
            rows.push(row);
        }
    }
    let legend = "step, link: seconds of a step, and of its exchanges; blocked: in which a rank waited for its own link; late: \
                  and for other ranks; hidden: 1 - blocked / link, of M micro-batches at most 1 - 1 / 2M, as the first forward \
                  has nothing beside it. A counted clock advances by products and transfers only";
    println!("\n{}", wrapped(legend));
    if let Some(path) = &args.json {
        super::write(path, &serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn header() -> String {
    COLUMNS.line([
        "expert", "overlap", "clock", "calls", "MB sent", "step", "link", "blocked", "late",
        "hidden",
    ])
}

/// The training on a number of ranks.
struct ExpertBenchmark<'a> {
    args: &'a OverlapArgs,
    expert: usize,
    counted: bool,
}

/// In which a rank waited for its own link; beside that it waits for the others.
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
        let cores = available_parallelism().map_or(1, usize::from);
        let bench = Self {
            args,
            expert,
            counted: args.counted || expert > cores,
        };
        let layout = bench.layout(true);
        bench.model().check_layout(&layout)?;
        bench.train_config().check(&layout, args.context)?;
        Ok(bench)
    }

    /// Attention multiplies a token by `4 hidden^2` weights, two experts by `6 hidden width`.
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
            steps: self.args.warm_up + self.args.steps,
            warmup_steps: 0,
            // The choices stay as even as they are at the start.
            learning_rate: 1e-9,
            min_learning_rate: 0.0,
            micro_batch_size: self.args.micro_batch_size,
            global_batch_size: samples * self.expert,
            ..TrainConfig::default()
        }
    }

    /// The rows without and with overlap.
    fn run(&self) -> Result<Vec<ExpertRow>, Error> {
        let world = World::threads(self.expert)?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        let rows = world.run(|rank| self.on_rank(&rank))?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    /// The rows, which are the same on each rank.
    fn on_rank(&self, rank: &Rank) -> Result<Vec<ExpertRow>, Error> {
        let steps = self.steps(rank, false, Duration::ZERO, f64::INFINITY)?;
        let bytes_per_second = self.runs().bandwidth(rank, &steps)?;
        let row = |overlap| {
            let steps = self.steps(rank, overlap, self.runs().latency(), bytes_per_second)?;
            self.row(rank, overlap, &steps)
        };
        [false, true].into_iter().map(row).collect()
    }

    fn runs(&self) -> LinkSteps<'a> {
        LinkSteps {
            args: self.args,
            ranks: self.expert,
            counted: self.counted,
        }
    }

    fn steps(
        &self,
        rank: &Rank,
        overlap: bool,
        latency: Duration,
        bytes_per_second: f64,
    ) -> Result<Vec<LinkStep>, Error> {
        let link = self.runs().link(latency, bytes_per_second)?;
        let groups = ParallelContext::new(&self.layout(overlap), rank)?;
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        // Of the layers alone: gradients are reduced without a link.
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
        self.runs().run(&groups, &link, || {
            trainer.step(&samples, &mut NoopObserver)?;
            Ok(())
        })
    }

    fn row(&self, rank: &Rank, overlap: bool, steps: &[LinkStep]) -> Result<ExpertRow, Error> {
        let mean = |of: fn(&LinkStep) -> f64| self.runs().mean(rank, steps, of);
        Ok(ExpertRow {
            expert: self.expert,
            overlap,
            counted: self.counted,
            bytes: mean(LinkStep::bytes)?,
            calls: mean(LinkStep::calls)?,
            step_seconds: mean(|step| step.seconds)?,
            transfer_seconds: mean(LinkStep::link)?,
            blocked_seconds: mean(blocked)?,
            late_seconds: mean(|step| step.sum(|transfer| transfer.waited) - blocked(step))?,
            hidden: mean(|step| match step.link() {
                0.0 => 1.0,
                link => (1.0 - blocked(step) / link).max(0.0),
            })?,
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

    /// On the counted clock no machine is too busy. Only the first of eight forwards has nothing beside it; the last backward
    /// has its own weight gradients. Exchanges that take as long as all products are hidden only if weight gradients are
    /// computed under them. A latency of counts is hidden too.
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
            assert!(plain.hidden < 0.05, "{plain}");
            assert!(overlapped.hidden >= least, "{overlapped}");
            assert!(overlapped.hidden <= 1.0 - 1.0 / 16.0, "{overlapped}");
            assert!(overlapped.step_seconds < plain.step_seconds, "{overlapped}");
            assert_eq!(
                (overlapped.bytes, overlapped.calls),
                (plain.bytes, plain.calls)
            );
        }
    }
}

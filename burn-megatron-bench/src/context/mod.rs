//! `burn-megatron-bench context`: a layer of attention whose sequence is shared by several ranks.

mod document_rows;
mod documents;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::testing::SimulatedNetwork;
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::kernels::attention::Heads;
use burn_megatron::mesh::{Axis, ContextExchange, Grid, ParallelConfig};
use burn_megatron::nn::context::{ExchangeProblem, SequenceShard};
use burn_megatron::nn::{
    AttentionContext, ModelBuilder, ParallelAttention, ParallelAttentionConfig,
};
use burn_megatron_cli::internal::{Error, at_least_one};
use clap::Args;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::args::{StepFlags, above_zero};
use crate::links::{LinkSpeed, LinkStep, Rounds, Traffic, mean, on_threads, slowest};
use crate::report::{Column, Report, write};
use crate::svg::{Timeline, svg};
use crate::timeline::{EventKind, RankTimeline, Recorder};

const EXCHANGES: [ContextExchange; 3] = [
    ContextExchange::Ring,
    ContextExchange::AllGather,
    ContextExchange::AllToAll,
];

/// Flags of `context`.
#[derive(Args)]
pub struct ContextArgs {
    /// Tokens of the sequence.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub tokens: usize,
    /// Heads of the queries.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub heads: usize,
    /// Groups of keys and values.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub groups: usize,
    /// Features of a head.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub width: usize,
    /// Numbers of ranks that share the sequence, compared with one.
    #[arg(
        long,
        visible_alias = "cp",
        value_delimiter = ',',
        value_name = "N,..",
        default_value = "2,4"
    )]
    pub ranks: Vec<usize>,
    /// Train on documents of these lengths instead, in rows of --tokens that all ranks share, and on groups of ranks by
    /// their length (--hybrid-context-parallel of pretrain); without lengths on a long tail of 64 documents.
    #[arg(
        long,
        num_args = 0..,
        value_delimiter = ',',
        value_name = "N,..",
        conflicts_with = "svg"
    )]
    pub documents: Option<Vec<usize>>,
    /// Time of the transfers over the simulated link, as a fraction of the time of the layer without a link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// The number of steps, and the file.
    #[command(flatten)]
    pub steps: StepFlags,
    /// Write a plot of one step over the link, of each exchange, to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

impl ContextArgs {
    fn rounds(&self) -> Rounds {
        Rounds {
            warm_up: self.steps.warm_up,
            steps: self.steps.steps,
            counted: false,
        }
    }
}

/// The settings in the JSON file.
#[derive(Serialize)]
struct Settings {
    tokens: usize,
    heads: usize,
    groups: usize,
    width: usize,
    share: f64,
    seconds_on_one_rank: f64,
}

/// One exchange on a number of ranks.
#[derive(Serialize)]
struct ContextRow {
    ranks: usize,
    exchange: ContextExchange,
    /// Of a forward and a backward.
    seconds: f64,
    /// The time on one rank over this one.
    speed_up: f64,
    /// By a rank in a forward and a backward.
    bytes_sent: f64,
    seconds_over_link: f64,
    hidden: f64,
}

const COLUMNS: &[Column<ContextRow>] = &[
    Column::new("ranks", 5, |row| row.ranks.to_string()),
    Column::new("exchange", -12, |row| row.exchange.to_string()),
    Column::new("seconds", 9, |row| format!("{:.3}", row.seconds)),
    Column::new("one / many", 11, |row| format!("{:.2}", row.speed_up)),
    Column::new("sent", 10, |row| {
        HumanBytes(row.bytes_sent as u64).to_string()
    }),
    Column::new("over a link", 12, |row| {
        format!("{:.3}", row.seconds_over_link)
    }),
    Column::new("hidden", 7, |row| format!("{:.0} %", 100.0 * row.hidden)),
];

/// Times the layer on one rank and on several, without and over a link.
pub fn run(args: &ContextArgs) -> Result<(), Error> {
    if let Some(lengths) = &args.documents {
        return documents::run(args, lengths);
    }
    let bench = Benchmark(args);
    let one = ParallelConfig::new().with_data(1);
    let one = bench.time(&one, LinkSpeed::INFINITE)?.seconds;
    let settings = Settings {
        tokens: args.tokens,
        heads: args.heads,
        groups: args.groups,
        width: args.width,
        share: args.share,
        seconds_on_one_rank: one,
    };
    let mut report = Report::begin(&bench.describe(), COLUMNS, settings, &args.steps.json);
    let mut drawn = vec![];
    for ranks in &args.ranks {
        for exchange in EXCHANGES {
            let (row, timeline) = bench.row(one, *ranks, exchange)?;
            let hidden = 100.0 * row.hidden;
            drawn.push((
                format!("{exchange}, {ranks} ranks: {hidden:.0} % hidden"),
                timeline,
            ));
            report.add(row)?;
        }
    }
    if let Some(path) = &args.svg {
        let title = format!(
            "A layer of attention on {} tokens, forward and backward, over a link on which sending takes {} of it",
            args.tokens, args.share
        );
        let lines = drawn.iter().map(|(title, of)| Timeline {
            title: title.clone(),
            events: &of.events,
            step: of.steps[of.steps.len() - 1],
        });
        write(path, svg(&title, &lines.collect::<Vec<_>>()).as_bytes())?;
    }
    report.finish(&format!(
        "one / many: the time on one rank over that on these; sent: bytes of a rank; over a link: one on which sending \
         takes {} of the time of the layer; hidden: 1 - blocked / link, the part of the transfers for which no rank waits",
        args.share
    ))
}

/// The times of a layout.
struct Timed {
    /// The median over the steps of the slowest rank.
    seconds: f64,
    /// The part of the transfers in which the ranks computed.
    hidden: f64,
    timeline: RankTimeline,
}

struct Benchmark<'a>(&'a ContextArgs);

impl Benchmark<'_> {
    fn describe(&self) -> String {
        let ContextArgs {
            tokens,
            heads,
            groups,
            width,
            steps,
            ..
        } = self.0;
        format!(
            "causal attention of {tokens} tokens, {heads} heads, {groups} groups, width {width}, with its projections; \
             forward and backward in f32, a zigzag; ranks as threads with one compute thread each; medians of {} steps",
            steps.steps
        )
    }

    /// The figures, and the timeline of rank 0 over the link.
    fn row(
        &self,
        one: f64,
        ranks: usize,
        exchange: ContextExchange,
    ) -> Result<(ContextRow, RankTimeline), Error> {
        let layout = ParallelConfig::new()
            .with_data(1)
            .with_context(ranks)
            .with_context_exchange(exchange);
        let problem = ExchangeProblem::of_layout(&layout, self.heads(), self.0.tokens, 4);
        problem.check(exchange)?;
        let cost = problem.cost(exchange);
        let bytes_sent = cost.forward + cost.backward;
        let Timed { seconds, .. } = self.time(&layout, LinkSpeed::INFINITE)?;
        let traffic = Traffic {
            seconds,
            calls: 0.0,
            bytes: bytes_sent,
        };
        let link = traffic.link(self.0.share, LinkSpeed::INFINITE.latency)?;
        let over_link = self.time(&layout, link)?;
        let row = ContextRow {
            ranks,
            exchange,
            seconds,
            speed_up: one / seconds,
            bytes_sent,
            seconds_over_link: over_link.seconds,
            hidden: over_link.hidden,
        };
        Ok((row, over_link.timeline))
    }

    fn heads(&self) -> Heads {
        Heads {
            heads: self.0.heads,
            groups: self.0.groups,
            width: self.0.width,
        }
    }

    fn time(&self, layout: &ParallelConfig, speed: LinkSpeed) -> Result<Timed, Error> {
        let mut ranks = on_threads(layout.context, |rank| self.time_rank(rank, layout, speed))?;
        Ok(ranks.swap_remove(0))
    }

    fn time_rank(
        &self,
        rank: &Rank,
        layout: &ParallelConfig,
        speed: LinkSpeed,
    ) -> Result<Timed, Error> {
        let groups = ParallelContext::new(layout, rank)?;
        let mut recorder = Recorder::new(Instant::now());
        let link = speed.link(None)?;
        let context = SimulatedNetwork::over(groups.context().clone(), &link);
        let groups = groups.with_group(Grid::Dense, Axis::Context, context);
        let device = Device::flex().autodiff();
        let hidden = self.0.heads * self.0.width;
        let heads = self.heads();
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
        let layer = ParallelAttentionConfig::new(hidden, heads.heads, heads.groups, heads.width)
            .with_sequence(self.0.tokens)
            .init(&builder)?;
        let place = (groups.context().rank(), layout.context);
        let split = layout.context_split;
        let shard = SequenceShard::new([1, self.0.tokens], None, split, place)?;
        let steps = self.0.rounds().run(&groups, &link, || {
            recorder.step(|recorder| {
                recorder.start();
                let loss = forward(&layer, &shard, hidden, &device);
                recorder.end(EventKind::Compute, "forward");
                let _gradients = loss.backward();
                recorder.end(EventKind::Compute, "backward");
            });
            Ok(())
        })?;
        Ok(Timed {
            seconds: slowest(rank, &steps)?,
            hidden: mean(rank, &steps, LinkStep::hidden)?,
            timeline: recorder.finish(
                steps.into_iter().flat_map(|step| step.transfers).collect(),
                link.epoch(),
            ),
        })
    }
}

/// The sum of the output.
fn forward(
    layer: &ParallelAttention,
    shard: &Arc<SequenceShard>,
    hidden: usize,
    device: &Device,
) -> Tensor<1> {
    let [batch, tokens] = shard.local_shape();
    let x = Tensor::<3>::ones([batch, tokens, hidden], device).require_grad();
    let context = match shard.ranks() {
        1 => AttentionContext::Rows,
        _ => AttentionContext::Sharded(shard),
    };
    layer.forward_with_context(x, None, context).sum()
}

//! The `burn-megatron-bench context` benchmark: an attention layer with context parallelism, which splits the sequence
//! over several ranks.

mod document_rows;
mod documents;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::mesh::{Axis, ContextExchange, Grid, ParallelConfig};
use burn_megatron::nn::context::SequenceShard;
use burn_megatron::nn::{
    AttentionContext, ModelBuilder, ParallelAttention, ParallelAttentionConfig,
};
use burn_megatron_cli::internal::{Error, at_least_one};
use burn_megatron_comm_testing::SimulatedNetwork;
use clap::Args;
use parking_lot::Mutex;

use crate::args::{StepFlags, above_zero};
use crate::layers::{COLUMNS, LEGEND, LayersRow, LayersRun};
use crate::links::{LinkSpeed, LinkStep, Rounds, on_threads};
use crate::report::{Report, percent, write};
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
    /// Number of tokens in the sequence.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub tokens: usize,
    /// Number of query heads.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub heads: usize,
    /// Number of key-value groups (grouped-query attention).
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub groups: usize,
    /// Width of an attention head.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub width: usize,
    /// Numbers of ranks over which the sequence is split. Each number is compared with one rank.
    #[arg(
        long,
        visible_alias = "cp",
        value_delimiter = ',',
        value_name = "N,..",
        default_value = "2,4"
    )]
    pub ranks: Vec<usize>,
    /// Train a small model on documents of these lengths instead. The documents are packed into sequences of --tokens,
    /// which are split over all ranks. For comparison, each document is also split over a number of ranks that depends
    /// on its length (--hybrid-context-parallel of pretrain). Without lengths: 64 documents with a long-tailed
    /// distribution of lengths.
    #[arg(
        long,
        num_args = 0..,
        value_delimiter = ',',
        value_name = "N,..",
        conflicts_with = "svg"
    )]
    pub documents: Option<Vec<usize>>,
    /// Time of the transfers over the simulated link, as a fraction of the time that the layer needs without a
    /// simulated link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// Flags for the number of steps and the JSON file.
    #[command(flatten)]
    pub steps: StepFlags,
    /// Write a plot of one step over the simulated link to this file, for each exchange method.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// Measures the time of the layer on one rank and on several ranks, without a simulated link and over a simulated link.
pub fn run(args: &ContextArgs) -> Result<(), Error> {
    if let Some(lengths) = &args.documents {
        return documents::run(args, lengths);
    }
    let bench = Benchmark {
        args,
        drawn: Mutex::default(),
    };
    let mut report = Report::begin(&bench.describe(), COLUMNS, (), &args.steps.json);
    let mut one = None;
    for ranks in [1].iter().chain(&args.ranks) {
        for row in bench.rows(*ranks)? {
            let one = *one.get_or_insert(row.seconds);
            report.add(LayersRow {
                speed: one / row.seconds,
                ..row
            })?;
        }
    }
    if let Some(path) = &args.svg {
        let title = format!(
            "A layer of attention on {} tokens, forward and backward, over a link on which sending takes {} of the \
             time of the layer",
            args.tokens, args.share
        );
        let drawn = bench.drawn.lock();
        let rows = report.results.rows.iter().filter(|row| row.ranks > 1);
        let lines = rows.zip(drawn.iter()).map(|(row, of)| Timeline {
            title: format!(
                "{}, {} ranks: {} hidden",
                row.case,
                row.ranks,
                percent(row.hidden)
            ),
            events: &of.events,
            step: of.steps[of.steps.len() - 1],
        });
        write(path, svg(&title, &lines.collect::<Vec<_>>())?.as_bytes())?;
    }
    report.finish(&format!(
        "{LEGEND}. On the simulated link, sending takes {} of the time of the layer with the first exchange",
        args.share
    ))
}

struct Benchmark<'a> {
    args: &'a ContextArgs,
    /// The timelines of rank 0 over the simulated link.
    drawn: Mutex<Vec<RankTimeline>>,
}

impl Benchmark<'_> {
    fn describe(&self) -> String {
        let ContextArgs {
            tokens,
            heads,
            groups,
            width,
            steps,
            ..
        } = self.args;
        format!(
            "causal attention of {tokens} tokens, {heads} heads, {groups} groups, width {width}, with its projections; \
             forward and backward in f32, a zigzag; ranks as threads with one compute thread each; medians of {} steps",
            steps.steps
        )
    }

    /// Returns a row of the table for each exchange method, or a single row for one rank.
    fn rows(&self, ranks: usize) -> Result<Vec<LayersRow>, Error> {
        let run = LayersRun {
            ranks,
            rounds: Rounds::from(&self.args.steps),
            share: self.args.share,
            latency: Duration::ZERO,
            blocked: LinkStep::waited,
        };
        let exchanges = if ranks == 1 { 1 } else { EXCHANGES.len() };
        let mut by_rank = on_threads(ranks, |rank| {
            run.rows(rank, &EXCHANGES[..exchanges], |exchange, speed| {
                let layout = ParallelConfig::new()
                    .with_data(1)
                    .with_context(ranks)
                    .with_context_exchange(*exchange);
                self.steps(rank, &layout, run.rounds, speed)
            })
        })?;
        Ok(by_rank.swap_remove(0))
    }

    fn steps(
        &self,
        rank: &Rank,
        layout: &ParallelConfig,
        rounds: Rounds,
        speed: LinkSpeed,
    ) -> Result<Vec<LinkStep>, Error> {
        let groups = ParallelContext::new(layout, rank)?;
        let mut recorder = Recorder::new(Instant::now());
        let link = speed.link(None)?;
        let context = SimulatedNetwork::over(groups.context().clone(), &link);
        let groups = groups.with_group(Grid::Dense, Axis::Context, context);
        let device = Device::flex().autodiff();
        let ContextArgs {
            tokens,
            heads,
            groups: kv_groups,
            width,
            ..
        } = *self.args;
        let hidden = heads * width;
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
        let layer = ParallelAttentionConfig::new(hidden, heads, kv_groups, width)
            .with_sequence(tokens)
            .init(&builder)?;
        let place = (groups.context().rank(), layout.context);
        let shard = SequenceShard::new([1, tokens], None, layout.context_split, place)?;
        let steps = rounds.run(&groups, &link, || {
            recorder.step(|recorder| {
                recorder.start();
                let loss = forward(&layer, &shard, hidden, &device);
                recorder.end(EventKind::Compute, "forward");
                let _gradients = loss.backward();
                recorder.end(EventKind::Compute, "backward");
            });
            Ok(())
        })?;
        if rank.rank() == 0 && speed.bytes_per_second.is_finite() {
            let transfers = steps.iter().flat_map(|step| step.transfers.clone());
            let timeline = recorder.finish(transfers.collect(), link.epoch());
            self.drawn.lock().push(timeline);
        }
        Ok(steps)
    }
}

/// Runs the layer and returns the sum of its output.
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

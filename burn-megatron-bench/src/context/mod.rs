//! `burn-megatron-bench context`: a layer of attention whose sequence is shared by several ranks.

mod document_rows;
mod documents;

use std::fmt;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::testing::{Link, SimulatedNetwork, hidden_share};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::kernels::attention::Heads;
use burn_megatron::mesh::{Axis, ContextExchange, Grid, ParallelConfig};
use burn_megatron::nn::context::{ExchangeProblem, SequenceShard};
use burn_megatron::nn::{
    AttentionContext, ModelBuilder, ParallelAttention, ParallelAttentionConfig,
};
use indicatif::HumanBytes;
use serde::Serialize;

use super::args::ContextArgs;
use super::overlap::case::{RankTimeline, record};
use super::overlap::svg::{Timeline, svg};
use super::overlap::trace::{EventKind, TimelineEvent};
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::wrapped;

/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// Times the layer on one rank and on several, without and over a link.
pub fn run(args: &ContextArgs) -> Result<ExitCode, Error> {
    if let Some(lengths) = &args.documents {
        return documents::run(args, lengths);
    }
    let bench = Benchmark(args);
    let about = wrapped(&bench.describe());
    println!("{about}\n\n{}", ContextRow::header());
    let one = bench
        .time(&ParallelConfig::new().with_data(1), None)?
        .seconds;
    let (mut rows, mut drawn) = (vec![], vec![]);
    for ranks in &args.ranks {
        for exchange in &args.exchanges {
            let (row, timeline) = bench.row(one, *ranks, *exchange)?;
            println!("{row}");
            let title = format!(
                "{exchange}, {ranks} ranks: {:.0} % hidden",
                100.0 * row.hidden
            );
            rows.push(row);
            drawn.push((title, timeline));
        }
    }
    let legend = format!(
        "one / many: the time on one rank over that on these; sent: bytes of a rank; over a link: one on which sending \
         takes {} of the time of the layer; hidden: 1 - blocked / link, the part of the transfers for which no rank waits",
        args.share
    );
    println!("\n{}", wrapped(&legend));
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
        fs::write(path, svg(&title, &lines.collect::<Vec<_>>()))?;
    }
    if let Some(path) = &args.json {
        let report = ContextReport {
            tokens: args.tokens,
            heads: args.heads,
            groups: args.groups,
            width: args.width,
            share: args.share,
            seconds_on_one_rank: one,
            rows,
        };
        fs::write(path, serde_json::to_string_pretty(&report)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The results as JSON.
#[derive(Serialize)]
struct ContextReport {
    tokens: usize,
    heads: usize,
    groups: usize,
    width: usize,
    share: f64,
    seconds_on_one_rank: f64,
    rows: Vec<ContextRow>,
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

impl ContextRow {
    fn header() -> String {
        format!(
            "{:>5}  {:<12} {:>9} {:>11} {:>9} {:>12} {:>7}",
            "ranks", "exchange", "seconds", "one / many", "sent", "over a link", "hidden"
        )
    }
}

impl fmt::Display for ContextRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ranks,
            seconds,
            speed_up,
            seconds_over_link,
            ..
        } = self;
        let exchange = self.exchange.name();
        let sent = HumanBytes(self.bytes_sent as u64).to_string();
        let hidden = format!("{:.0} %", 100.0 * self.hidden);
        write!(
            f,
            "{ranks:>5}  {exchange:<12} {seconds:>9.3} {speed_up:>11.2} {sent:>9} {seconds_over_link:>12.3} {hidden:>7}"
        )
    }
}

/// A link on which the layer's transfers take some time.
#[derive(Clone, Copy)]
struct LinkSettings {
    bytes_per_second: f64,
}

/// The times of a layout.
struct Timed {
    /// The median over the steps of the slowest rank.
    seconds: f64,
    /// The part of the transfers in which the ranks computed; 0 without a link.
    hidden: f64,
    /// Of rank 0.
    timeline: RankTimeline,
}

/// The times of a rank.
struct RankTimes {
    seconds: Vec<f64>,
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
             forward and backward in f32, a zigzag; ranks as threads with one compute thread each; medians of {steps} steps"
        )
    }

    /// The figures, and the timeline over the link.
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
        let Timed { seconds, .. } = self.time(&layout, None)?;
        let link = LinkSettings {
            bytes_per_second: bytes_sent / (self.0.share * seconds),
        };
        let over_link = self.time(&layout, Some(link))?;
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

    fn time(&self, layout: &ParallelConfig, link: Option<LinkSettings>) -> Result<Timed, Error> {
        let world = World::threads(layout.context)?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        let mut ranks = world.run(|rank| self.time_rank(&rank, layout, link))?;
        let steps = (0..self.0.steps).map(|step| {
            let of_rank = ranks.iter().map(|rank| rank.seconds[step]);
            of_rank.fold(0.0, f64::max)
        });
        let seconds = median(&steps.collect::<Vec<_>>());
        let hidden = ranks.iter().map(|rank| rank.hidden).sum::<f64>();
        Ok(Timed {
            seconds,
            hidden: hidden / ranks.len() as f64,
            timeline: ranks.swap_remove(0).timeline,
        })
    }

    /// The times of each step, and the part of the transfers that was hidden.
    fn time_rank(
        &self,
        rank: &Rank,
        layout: &ParallelConfig,
        link: Option<LinkSettings>,
    ) -> Result<RankTimes, Error> {
        let groups = ParallelContext::new(layout, rank)?;
        // That of the link's times, too.
        let origin = Instant::now();
        let link = link.map(|link| Link::new(Duration::ZERO, link.bytes_per_second));
        let link = link.transpose()?;
        let groups = match &link {
            Some(link) => {
                let context = SimulatedNetwork::over(groups.context().clone(), link);
                groups.with_group(Grid::Dense, Axis::Context, context)
            }
            None => groups,
        };
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
        let (mut seconds, mut events, mut steps) = (vec![], vec![], vec![]);
        for step in 0..self.0.warm_up + self.0.steps {
            groups.world().barrier()?;
            if step == self.0.warm_up
                && let Some(link) = &link
            {
                link.take_transfers();
            }
            let now = || origin.elapsed().as_secs_f64();
            let start = now();
            let loss = forward(&layer, &shard, hidden, &device);
            let middle = now();
            let _gradients = loss.backward();
            let end = now();
            for (name, start, end) in [("forward", start, middle), ("backward", middle, end)] {
                events.push(TimelineEvent {
                    kind: EventKind::Compute,
                    name: name.into(),
                    step,
                    start,
                    end,
                });
            }
            steps.push((start, end));
            seconds.push(end - start);
        }
        let transfers = link.map_or(vec![], |link| link.take_transfers());
        Ok(RankTimes {
            seconds: seconds.split_off(self.0.warm_up),
            hidden: if transfers.is_empty() {
                0.0
            } else {
                hidden_share(&transfers)
            },
            timeline: record(events, steps, transfers, Duration::ZERO),
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

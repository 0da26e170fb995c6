//! The `burn-megatron-bench context --documents` benchmark: context parallelism for documents of very different
//! lengths. Either packed samples of several documents are split over all ranks, or each document is split over a group
//! of ranks that depends on its length.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, Rank, ReduceOp};
use burn_megatron::mesh::{Axis, ContextExchange, ContextSplit, Grid, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_cli::internal::Error;
use burn_megatron_comm_testing::{Link, SimulatedNetwork, Transfer};
use burn_megatron_data::Batch;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use serde::Serialize;

use super::ContextArgs;
use super::document_rows::{DocumentRows, VOCABULARY, long_tail};
use crate::links::{LinkSpeed, Rounds, Traffic, on_threads, slowest};
use crate::report::{Column, Report, fixed};

const LAYERS: usize = 1;
/// The MLP is small relative to attention, because the layouts differ only in attention.
const MLP_WIDTH: usize = 64;

/// The tolerated relative difference of the losses of two layouts. f32 sums have a different order in each layout.
const TOLERANCE: f64 = 1e-3;

/// Trains a small Llama on the documents in each layout, without a simulated link and over a simulated link.
pub fn run(args: &ContextArgs, lengths: &[usize]) -> Result<(), Error> {
    let lengths = match lengths {
        [] => long_tail(args.tokens),
        _ => lengths.to_vec(),
    };
    let rows = DocumentRows::new(&lengths, args.tokens)?;
    let bench = DocumentsBenchmark { args, rows };
    let about = bench.describe(&lengths);
    let mut report = Report::begin(&about, COLUMNS, (), &args.steps.json);
    for ranks in &args.ranks {
        for row in bench.rows(*ranks)? {
            report.add(row)?;
        }
    }
    report.finish(&format!(
        "minimum and maximum over the ranks in a step: GFLOP of attention (from the pairs of query and key that a rank \
         computes), tokens (padding included), MB sent by attention. over a link: with a simulated link, on which the \
         transfers of the first row take {} of its time; speed: the time of the first row divided by the time of this \
         row, without and over a link",
        args.share
    ))
}

/// The assignment of documents to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DocumentLayout {
    /// Each row is split over all ranks with a zigzag split.
    Rows,
    /// Each document is split over all ranks with a zigzag split.
    PerDocument,
    /// Each document is split over a group of ranks that depends on its length.
    Hybrid,
}

impl DocumentLayout {
    const ALL: [Self; 3] = [Self::Rows, Self::PerDocument, Self::Hybrid];

    fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows, zigzag",
            Self::PerDocument => "rows, per document",
            Self::Hybrid => "groups by length",
        }
    }

    /// Returns the parallel layout. In the hybrid layout, each rank processes at most its share of a row per
    /// micro-batch.
    fn config(self, ranks: usize, tokens: usize) -> ParallelConfig {
        let one = ParallelConfig::new().with_context_exchange(ContextExchange::Ring);
        let shared = one.clone().with_data(1).with_context(ranks);
        match self {
            Self::Rows => shared,
            Self::PerDocument => shared.with_context_split(ContextSplit::ZigzagPerDocument),
            Self::Hybrid => {
                let room = tokens.div_ceil(ranks);
                one.with_data(ranks).with_hybrid_context_parallel(room)
            }
        }
    }
}

/// The minimum and the maximum over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Extent {
    least: f64,
    most: f64,
}

impl Extent {
    /// Computes the extent over all ranks. Collective: call on all ranks.
    fn of(rank: &Rank, value: f64) -> Result<Self, Error> {
        let ranks = rank.communicator();
        Ok(Self {
            least: ranks.all_reduce_scalar(value, ReduceOp::Min)?,
            most: ranks.all_reduce_scalar(value, ReduceOp::Max)?,
        })
    }

    fn times(self, factor: f64) -> Self {
        Self {
            least: factor * self.least,
            most: factor * self.most,
        }
    }

    fn text(self, unit: f64, digits: usize) -> String {
        let [least, most] = [self.least, self.most].map(|of| format!("{:.digits$}", of / unit));
        if least == most {
            most
        } else {
            format!("{least} to {most}")
        }
    }
}

/// A row of the table: a layout with the measurements of a step.
#[derive(Clone, Debug, Serialize)]
struct DocumentsRow {
    ranks: usize,
    layout: DocumentLayout,
    micro_batches: usize,
    /// The FLOPs of attention on a rank.
    attention_flops: Extent,
    /// The number of tokens on a rank, including padding.
    tokens: Extent,
    /// The number of bytes that attention sends from a rank.
    bytes_sent: Extent,
    loss: f64,
    /// The time of the slowest rank, in seconds.
    seconds: f64,
    seconds_over_link: f64,
    /// The time of the first layout divided by the time of this layout.
    speed: f64,
    speed_over_link: f64,
}

const COLUMNS: &[Column<DocumentsRow>] = &[
    Column::new("ranks", 5, |row| row.ranks.to_string()),
    Column::new("documents in", -18, |row| row.layout.name().into()),
    Column::optional(1, "batches", 7, |row| row.micro_batches.to_string()),
    Column::new("GFLOP", 14, |row| row.attention_flops.text(1e9, 2)),
    Column::new("tokens", 14, |row| row.tokens.text(1.0, 0)),
    Column::new("MB sent", 14, |row| row.bytes_sent.text(1e6, 1)),
    Column::new("seconds", 8, |row| fixed(row.seconds, 3)),
    Column::new("speed", 6, |row| fixed(row.speed, 2)),
    Column::new("over a link", 11, |row| fixed(row.seconds_over_link, 3)),
    Column::new("speed", 6, |row| fixed(row.speed_over_link, 2)),
];

/// The measurements of a step in one layout.
struct LayoutFigures {
    micro_batches: usize,
    tokens: Extent,
    /// The number of query-key pairs.
    pairs: Extent,
    bytes_sent: Extent,
    /// The loss of the last step.
    loss: f64,
    /// The time of the slowest rank, in seconds.
    seconds: f64,
}

struct DocumentsBenchmark<'a> {
    args: &'a ContextArgs,
    rows: DocumentRows,
}

impl DocumentsBenchmark<'_> {
    fn describe(&self, lengths: &[usize]) -> String {
        let (shortest, longest) = (lengths.iter().min(), lengths.iter().max());
        let ContextArgs {
            tokens,
            heads,
            groups,
            width,
            steps,
            ..
        } = self.args;
        format!(
            "{} documents of {} to {} tokens, {} in all, in {} rows of {tokens}: steps of a Llama with {LAYERS} layer, \
             {heads} heads, {groups} groups, width {width}, an MLP of width {MLP_WIDTH}, in f32, with a ring; ranks as \
             threads with one compute thread each, at most {tokens} / ranks tokens per rank in a micro-batch, padding \
             excluded; medians of {} steps, with the layouts interleaved",
            lengths.len(),
            shortest.unwrap_or(&0),
            longest.unwrap_or(&0),
            lengths.iter().sum::<usize>(),
            self.rows.lengths.len(),
            steps.steps,
        )
    }

    fn model(&self) -> TransformerConfig {
        let ContextArgs {
            tokens,
            heads,
            groups,
            width,
            ..
        } = *self.args;
        // Leaves room for the padding of a document in a separate row.
        let most = self.args.ranks.iter().max().copied().unwrap_or(1);
        TransformerConfig {
            vocabulary: VOCABULARY,
            context: tokens.next_multiple_of(4 * most),
            hidden: heads * width,
            layers: LAYERS,
            heads,
            groups: Some(groups),
            mlp_width: Some(MLP_WIDTH),
            ..TransformerConfig::llama()
        }
    }

    fn train_config(&self) -> TrainConfig {
        TrainConfig {
            // The steps of one run. The runs without a link and over a link have separate trainers.
            steps: self.args.steps.warm_up + self.args.steps.steps,
            micro_batch_size: 1,
            global_batch_size: self.rows.lengths.len(),
            sequence_length: Some(self.args.tokens),
            warmup_steps: 0,
            ..TrainConfig::default()
        }
    }

    /// Returns the rows of all layouts on `ranks` ranks, in the order of [`DocumentLayout::ALL`].
    fn rows(&self, ranks: usize) -> Result<Vec<DocumentsRow>, Error> {
        if ranks < 2 {
            return Err(format!("invalid --ranks {ranks}: expected at least 2").into());
        }
        for layout in DocumentLayout::ALL {
            let config = layout.config(ranks, self.args.tokens);
            self.model().check_layout(&config)?;
            self.train_config().check(&config, self.model().context)?;
        }
        let alone = self.time(ranks, LinkSpeed::INFINITE)?;
        let first = &alone[0];
        let traffic = Traffic {
            seconds: first.seconds,
            calls: 0.0,
            bytes: first.bytes_sent.most,
        };
        let link = traffic.link(self.args.share, LinkSpeed::INFINITE.latency)?;
        let over_link = self.time(ranks, link)?;
        let flops_per_pair = (12 * LAYERS * self.args.heads * self.args.width) as f64;
        let figures = alone.iter().zip(&over_link);
        let row = |(layout, (alone, linked)): (_, (&LayoutFigures, &LayoutFigures))| DocumentsRow {
            ranks,
            layout,
            micro_batches: alone.micro_batches,
            // Attention has two matrix multiplications in the forward, and four in the backward.
            attention_flops: alone.pairs.times(flops_per_pair),
            tokens: alone.tokens,
            bytes_sent: alone.bytes_sent,
            loss: alone.loss,
            seconds: alone.seconds,
            seconds_over_link: linked.seconds,
            speed: first.seconds / alone.seconds,
            speed_over_link: over_link[0].seconds / linked.seconds,
        };
        let rows: Vec<_> = DocumentLayout::ALL
            .into_iter()
            .zip(figures)
            .map(row)
            .collect();
        check_losses(&rows)?;
        Ok(rows)
    }

    /// Returns the measurements of each layout.
    fn time(&self, ranks: usize, speed: LinkSpeed) -> Result<Vec<LayoutFigures>, Error> {
        let mut by_rank = on_threads(ranks, |rank| self.time_rank(rank, ranks, speed))?;
        Ok(by_rank.swap_remove(0))
    }

    fn time_rank(
        &self,
        rank: &Rank,
        ranks: usize,
        speed: LinkSpeed,
    ) -> Result<Vec<LayoutFigures>, Error> {
        let mut runs = vec![];
        for layout in DocumentLayout::ALL {
            let link = speed.link(None)?;
            let config = layout.config(ranks, self.args.tokens);
            let groups = over_link(ParallelContext::new(&config, rank)?, &link)?;
            let trainer = self.trainer(&groups)?;
            let batches = trainer.next_batches(&self.rows)?;
            runs.push((groups, link, trainer, batches, 0.0, vec![]));
        }
        let rounds = Rounds::from(&self.args.steps);
        for _ in 0..rounds.warm_up + rounds.steps {
            for (groups, link, trainer, _, loss, steps) in &mut runs {
                let mut step = || {
                    *loss = trainer.step(&self.rows, &mut NoopObserver)?.loss;
                    Ok(())
                };
                steps.push(rounds.time(groups, link, &mut step)?);
            }
        }
        let figures = runs.into_iter().map(|(_, _, _, batches, loss, steps)| {
            let pairs = batches.iter().map(pairs).sum::<u64>();
            let tokens = batches.iter().map(|batch| batch.tokens().len());
            let steps = &steps[rounds.warm_up..];
            let sent = steps
                .last()
                .map_or(0.0, |step| bytes_of_attention(&step.transfers));
            Ok(LayoutFigures {
                micro_batches: batches.len(),
                tokens: Extent::of(rank, tokens.sum::<usize>() as f64)?,
                pairs: Extent::of(rank, pairs as f64)?,
                bytes_sent: Extent::of(rank, sent)?,
                loss,
                seconds: slowest(rank, steps)?,
            })
        });
        figures.collect()
    }

    fn trainer(&self, groups: &ParallelContext) -> Result<Trainer<Transformer>, Error> {
        let device = Device::flex();
        let builder = ModelBuilder::with(groups, &device, 1, DType::F32);
        let model = self.model().init_with(builder)?;
        Ok(Trainer::new(model, groups, &device, &self.train_config())?)
    }
}

/// Returns the process groups, in which the groups that exchange keys, values and gradients use the simulated link.
fn over_link(groups: ParallelContext, link: &Arc<Link>) -> Result<ParallelContext, Error> {
    let context = SimulatedNetwork::over(groups.context().clone(), link);
    let groups = groups.with_group(Grid::Dense, Axis::Context, context);
    let axes = Grid::Dense.data_axes();
    let all = groups.group(Grid::Dense, axes)?;
    // With one data-parallel rank, this is the group of the context axis.
    if Arc::ptr_eq(&all, groups.context()) {
        return Ok(groups);
    }
    let all = SimulatedNetwork::over(all, link);
    Ok(groups.with_group(Grid::Dense, axes, all))
}

/// Returns the number of query-key pairs on a rank.
fn pairs(batch: &Batch) -> u64 {
    batch.shard.as_ref().map_or(0, |shard| shard.pairs(None))
}

/// Returns the number of bytes that a rank sent, without the all-reduces of gradients and scalars.
fn bytes_of_attention(transfers: &[Transfer]) -> f64 {
    let own = transfers.iter().filter(|of| of.op != "all_reduce");
    own.map(|of| of.bytes as f64).sum()
}

/// Checks that all layouts train with the same loss, within [`TOLERANCE`].
fn check_losses(rows: &[DocumentsRow]) -> Result<(), Error> {
    let expected = rows[0].loss;
    for row in rows {
        let apart = (row.loss - expected).abs() / expected;
        if apart.is_nan() || apart >= TOLERANCE {
            return Err(format!(
                "the losses differ: {} has {}, and {} has {expected}; expected a relative difference below {TOLERANCE}",
                row.layout.name(),
                row.loss,
                rows[0].layout.name()
            )
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    /// The document with the length of a row is on both ranks. All other documents are on one rank.
    #[test]
    fn short_documents_on_groups_by_length_send_nothing() {
        let text = "--tokens 64 --heads 2 --groups 1 --width 8 --ranks 2 --steps 1 --warm-up 0 --documents";
        let args: ContextArgs = parse_text(text).unwrap();
        let lengths = long_tail(64);
        assert_eq!(lengths.len(), 64);
        let rows = DocumentRows::new(&lengths, 64).unwrap();
        assert_eq!(rows.lengths.len(), 4);
        let bench = DocumentsBenchmark { args: &args, rows };
        let [plain, per_document, hybrid] = &bench.rows(2).unwrap()[..] else {
            panic!("three layouts");
        };
        // Keys and values with 8 features of one group are sent in the forward and again in the backward, and so are
        // their gradients. Half of the tokens of each row of 64 tokens are on a rank.
        let of_rows = |rows: usize| (rows * 64 / 2 * 2 * 8 * 3 * 4 * LAYERS) as f64;
        let sent = |row: &DocumentsRow| (row.bytes_sent.least, row.bytes_sent.most);
        assert_eq!(sent(plain), (of_rows(4), of_rows(4)));
        // Only the document of 64 tokens is sent.
        assert_eq!(sent(hybrid), (of_rows(1), of_rows(1)));
        let all = |row: &DocumentsRow| row.tokens.least + row.tokens.most;
        assert_eq!(all(hybrid), all(plain));
        // Documents of one and two tokens are padded to four tokens.
        assert!(per_document.tokens.most > plain.tokens.most);
        let pairs: usize = lengths.iter().map(|length| length * (length + 1) / 2).sum();
        let flops = (12 * LAYERS * 16 * pairs) as f64;
        for row in [plain, hybrid] {
            let Extent { least, most } = row.attention_flops;
            assert_eq!(least + most, flops);
        }
    }
}

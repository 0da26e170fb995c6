//! `burn-megatron-bench context --documents`: documents of very different lengths, in rows that all ranks share and on groups
//! of ranks by their length.

use std::fmt;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device};
use burn_megatron::comm::testing::{Link, SimulatedNetwork, Transfer};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::mesh::{Axis, ContextExchange, ContextSplit, Grid, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_data::Batch;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use serde::Serialize;

use super::super::args::ContextArgs;
use super::DEADLINE;
use super::document_rows::{DocumentRows, VOCABULARY, long_tail};
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::{Columns, wrapped};

const LAYERS: usize = 1;
/// Little beside attention, which is what differs.
const MLP_WIDTH: usize = 64;

/// The most by which the losses of two layouts may differ: sums in f32, in another order.
const TOLERANCE: f64 = 1e-3;

/// Trains a small Llama on the documents in each layout, without and over a link.
pub fn run(args: &ContextArgs, lengths: &[usize]) -> Result<ExitCode, Error> {
    let lengths = match lengths {
        [] => long_tail(args.tokens),
        _ => lengths.to_vec(),
    };
    let rows = DocumentRows::new(&lengths, args.tokens)?;
    let bench = DocumentsBenchmark { args, rows };
    println!("{}\n\n{}", wrapped(&bench.describe(&lengths)), header());
    let mut rows = vec![];
    for ranks in &args.ranks {
        for row in bench.rows(*ranks)? {
            println!("{row}");
            rows.push(row);
        }
    }
    let legend = format!(
        "of each rank in a step, the least and the most: GFLOP of attention, by the pairs of query and key that a rank computes; \
         tokens, padding included; MB sent by attention. over a link: one on which those of the first row take {} of its time; \
         speed: the time of the first row over this one, without and over a link",
        args.share
    );
    println!("\n{}", wrapped(&legend));
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The method by which the ranks share the documents.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DocumentLayout {
    /// Each row is split as a zigzag over all ranks.
    Rows,
    /// Each document is.
    PerDocument,
    /// By their lengths.
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

    /// With as much room on a rank as its part of a row takes.
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

/// The least and the most of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Extent {
    least: f64,
    most: f64,
}

impl Extent {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        Self {
            least: values.clone().fold(f64::INFINITY, f64::min),
            most: values.fold(0.0, f64::max),
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

/// A layout with its figures, those of a step.
#[derive(Clone, Debug, Serialize)]
struct DocumentsRow {
    ranks: usize,
    layout: DocumentLayout,
    micro_batches: usize,
    /// Of a rank.
    attention_flops: Extent,
    /// Of a rank, with padding.
    tokens: Extent,
    /// By attention of a rank.
    bytes_sent: Extent,
    loss: f64,
    /// The seconds of the slowest rank.
    seconds: f64,
    seconds_over_link: f64,
    /// The time of the first layout over this one.
    speed: f64,
    speed_over_link: f64,
}

const COLUMNS: Columns<10> = Columns {
    widths: [5, -18, 7, 14, 14, 14, 8, 6, 11, 6],
    optional: &[2],
};

fn header() -> String {
    COLUMNS.line([
        "ranks",
        "documents in",
        "batches",
        "GFLOP",
        "tokens",
        "MB sent",
        "seconds",
        "speed",
        "over a link",
        "speed",
    ])
}

impl fmt::Display for DocumentsRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&COLUMNS.line([
            self.ranks.to_string(),
            self.layout.name().into(),
            self.micro_batches.to_string(),
            self.attention_flops.text(1e9, 2),
            self.tokens.text(1.0, 0),
            self.bytes_sent.text(1e6, 1),
            format!("{:.3}", self.seconds),
            format!("{:.2}", self.speed),
            format!("{:.3}", self.seconds_over_link),
            format!("{:.2}", self.speed_over_link),
        ]))
    }
}

/// The figures of a rank in a layout.
#[derive(Clone, Default)]
struct RankFigures {
    micro_batches: usize,
    tokens: f64,
    pairs: f64,
    bytes_sent: f64,
    /// The loss of the last step.
    loss: f64,
    /// The seconds of the measured steps.
    seconds: Vec<f64>,
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
            "{} documents of {} to {} tokens, {} in all, in {} rows of {tokens}: steps of a Llama of {LAYERS} layer, {heads} \
             heads, {groups} groups, width {width}, an MLP of width {MLP_WIDTH}, in f32, with a ring; ranks as threads with one compute thread each, at most \
             {tokens} / ranks tokens of a rank in a micro-batch but for padding; medians of {steps} steps, in which the layouts \
             take turns",
            lengths.len(),
            shortest.unwrap_or(&0),
            longest.unwrap_or(&0),
            lengths.iter().sum::<usize>(),
            self.rows.lengths.len(),
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
        // Room for the padding of documents in rows of one.
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
            // Both without and over a link.
            steps: self.args.warm_up + self.args.steps,
            micro_batch_size: 1,
            global_batch_size: self.rows.lengths.len(),
            sequence_length: Some(self.args.tokens),
            warmup_steps: 0,
            ..TrainConfig::default()
        }
    }

    /// The layouts on a number of ranks, in the order of [`DocumentLayout::ALL`].
    fn rows(&self, ranks: usize) -> Result<Vec<DocumentsRow>, Error> {
        if ranks < 2 {
            return Err(format!("invalid --ranks {ranks}: expected at least 2").into());
        }
        for layout in DocumentLayout::ALL {
            let config = layout.config(ranks, self.args.tokens);
            self.model().check_layout(&config)?;
            self.train_config().check(&config, self.model().context)?;
        }
        let alone = self.time(ranks, f64::INFINITY)?;
        let first = &alone[0];
        let sent = Extent::of(first.iter().map(|rank| rank.bytes_sent)).most;
        let over_link = self.time(ranks, sent / (self.args.share * seconds(first)))?;
        let flops_per_pair = (12 * LAYERS * self.args.heads * self.args.width) as f64;
        let rows: Vec<_> = DocumentLayout::ALL
            .into_iter()
            .zip(alone.iter().zip(&over_link))
            .map(|(layout, (figures, linked))| DocumentsRow {
                ranks,
                layout,
                micro_batches: figures[0].micro_batches,
                // Two products in the forward, and four in the backward.
                attention_flops: Extent::of(figures.iter().map(|of| of.pairs * flops_per_pair)),
                tokens: Extent::of(figures.iter().map(|of| of.tokens)),
                bytes_sent: Extent::of(figures.iter().map(|of| of.bytes_sent)),
                loss: figures[0].loss,
                seconds: seconds(figures),
                seconds_over_link: seconds(linked),
                speed: seconds(first) / seconds(figures),
                speed_over_link: seconds(&over_link[0]) / seconds(linked),
            })
            .collect();
        let expected = rows[0].loss;
        for row in &rows {
            let apart = (row.loss - expected).abs() / expected;
            if apart.is_nan() || apart >= TOLERANCE {
                return Err(format!(
                    "{} trains with a loss of {}, and {} with one of {expected}: expected the same within {TOLERANCE}",
                    row.layout.name(),
                    row.loss,
                    rows[0].layout.name()
                )
                .into());
            }
        }
        Ok(rows)
    }

    /// By layout, the figures of each rank.
    fn time(&self, ranks: usize, bytes_per_second: f64) -> Result<Vec<Vec<RankFigures>>, Error> {
        let world = World::threads(ranks)?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        let by_rank = world.run(|rank| self.time_rank(&rank, ranks, bytes_per_second))?;
        let layouts = 0..DocumentLayout::ALL.len();
        let of_layout = |at: usize| by_rank.iter().map(|rank| rank[at].clone()).collect();
        Ok(layouts.map(of_layout).collect())
    }

    /// By layout.
    fn time_rank(
        &self,
        rank: &Rank,
        ranks: usize,
        bytes_per_second: f64,
    ) -> Result<Vec<RankFigures>, Error> {
        let mut runs = vec![];
        for layout in DocumentLayout::ALL {
            let link = Link::new(Duration::ZERO, bytes_per_second)?;
            let config = layout.config(ranks, self.args.tokens);
            let groups = over_link(ParallelContext::new(&config, rank)?, &link)?;
            let trainer = self.trainer(&groups)?;
            let batches = trainer.next_batches(&self.rows)?;
            let pairs = batches.iter().map(pairs).sum::<u64>();
            let tokens = batches.iter().map(|batch| batch.tokens().len());
            let figures = RankFigures {
                micro_batches: batches.len(),
                tokens: tokens.sum::<usize>() as f64,
                pairs: pairs as f64,
                ..RankFigures::default()
            };
            runs.push((trainer, link, figures));
        }
        for step in 0..self.args.warm_up + self.args.steps {
            for (trainer, link, figures) in &mut runs {
                rank.communicator().barrier()?;
                link.take_transfers();
                let start = Instant::now();
                figures.loss = trainer.step(&self.rows, &mut NoopObserver)?.loss;
                if step >= self.args.warm_up {
                    figures.seconds.push(start.elapsed().as_secs_f64());
                }
                figures.bytes_sent = bytes_of_attention(&link.take_transfers());
            }
        }
        Ok(runs.into_iter().map(|(_, _, figures)| figures).collect())
    }

    fn trainer(&self, groups: &ParallelContext) -> Result<Trainer<Transformer>, Error> {
        let device = Device::flex();
        let builder = ModelBuilder::with(groups, &device, 1, DType::F32);
        let model = self.model().init_with(builder)?;
        Ok(Trainer::new(model, groups, &device, &self.train_config())?)
    }
}

/// The groups in which keys, values and gradients travel, over a link.
fn over_link(groups: ParallelContext, link: &Arc<Link>) -> Result<ParallelContext, Error> {
    let context = SimulatedNetwork::over(groups.context().clone(), link);
    let groups = groups.with_group(Grid::Dense, Axis::Context, context);
    let axes = Grid::Dense.data_axes();
    let all = groups.group(Grid::Dense, axes)?;
    // With one data rank it is the group of the context axis.
    if Arc::ptr_eq(&all, groups.context()) {
        return Ok(groups);
    }
    let all = SimulatedNetwork::over(all, link);
    Ok(groups.with_group(Grid::Dense, axes, all))
}

/// The pairs of query and key of a rank.
fn pairs(batch: &Batch) -> u64 {
    batch.shard.as_ref().map_or(0, |shard| shard.pairs(None))
}

/// Returns the bytes that a rank sent, without the sums of gradients and of scalars.
fn bytes_of_attention(transfers: &[Transfer]) -> f64 {
    let own = transfers.iter().filter(|of| of.op != "all_reduce");
    own.map(|of| of.bytes as f64).sum()
}

/// The median over the steps of the slowest rank.
fn seconds(ranks: &[RankFigures]) -> f64 {
    let steps = 0..ranks[0].seconds.len();
    let slowest = steps.map(|step| {
        let of_rank = ranks.iter().map(|rank| rank.seconds[step]);
        of_rank.fold(0.0, f64::max)
    });
    median(&slowest.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    /// The one that is as long as a row is on both ranks, all others on one.
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
        // Keys and values of 8 features of one group, forward, again in the backward, and their gradients, of rows of 64 tokens,
        // half of them on a rank.
        let of_rows = |rows: usize| (rows * 64 / 2 * 2 * 8 * 3 * 4 * LAYERS) as f64;
        let sent = |row: &DocumentsRow| (row.bytes_sent.least, row.bytes_sent.most);
        assert_eq!(sent(plain), (of_rows(4), of_rows(4)));
        // The document of 64 tokens alone.
        assert_eq!(sent(hybrid), (of_rows(1), of_rows(1)));
        let all = |row: &DocumentsRow| row.tokens.least + row.tokens.most;
        assert_eq!(all(hybrid), all(plain));
        // Documents of one and two tokens are padded to four.
        assert!(per_document.tokens.most > plain.tokens.most);
        let pairs: usize = lengths.iter().map(|length| length * (length + 1) / 2).sum();
        let flops = (12 * LAYERS * 16 * pairs) as f64;
        for row in [plain, hybrid] {
            let Extent { least, most } = row.attention_flops;
            assert_eq!(least + most, flops);
        }
    }
}

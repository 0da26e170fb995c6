//! Compares attention over the ranks of a context group with attention on one rank, in f64.

mod blocks;
mod peer;
mod volume;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron_kernels::attention::Window;
use burn_megatron_kernels::rope::{Positions, RopeConfig, RopeTable, Scaling};

use super::shard::QueryPart;
use super::*;
use crate::comm::{ParallelContext, Rank, World};
use crate::mesh::{ContextSplit, ParallelConfig};
use crate::nn::{
    AttentionContext, BatchPosition, PackedSequences, ParallelAttention, ParallelAttentionConfig,
};

type Run<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn doubles<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    let x = if x.is_autodiff() { x.inner() } else { x };
    x.into_data()
        .convert_dtype(DType::F64)
        .try_into_vec()
        .unwrap()
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance * scale,
            "{what}: element {i} is {found}, expected {expected}"
        );
    }
}

#[test]
fn documents_and_windows_are_ranges_of_any_list_of_keys() {
    let documents = [0, 3, 3, 9, 16, 20, 32];
    for split in [
        ContextSplit::Zigzag,
        ContextSplit::Contiguous,
        ContextSplit::Striped,
    ] {
        for left in [None, Some(1), Some(5)] {
            let window = left.map(|left| Window { left, right: 0 });
            let mut pairs = 0;
            for rank in 0..4 {
                let shard =
                    SequenceShard::new([2, 16], Some(&documents), split, (rank, 4)).unwrap();
                let document = |token: usize| documents.partition_point(|s| *s as usize <= token);
                let sees = |query: usize, key: usize| {
                    key <= query
                        && document(key) == document(query)
                        && left.is_none_or(|left| query - key <= left)
                };
                for keys in [0..1, 1..2, 2..4, 0..4] {
                    let list = shard.of_members(&keys);
                    let members = (rank..rank + 1, keys);
                    let all = QueryPart::All;
                    let ranges = shard.ranges(members, all, window, &Device::flex());
                    for (query, range) in shard.tokens().iter().zip(ranges.ranges()) {
                        let seen: Vec<_> = list[range.clone()].to_vec();
                        let expected = list.iter().filter(|key| sees(*query, **key));
                        assert_eq!(seen, expected.copied().collect::<Vec<_>>());
                        pairs += if list.len() == 32 { seen.len() } else { 0 };
                    }
                }
                let own = shard.tokens().iter();
                let own = own.map(|query| (0..32).filter(|key| sees(*query, *key)).count() as u64);
                assert_eq!(shard.pairs(window), own.sum::<u64>());
            }
            assert!(pairs > 0);
        }
    }
}

/// An attention layer and its test settings.
#[derive(Clone)]
struct LayerCase {
    heads: usize,
    groups: usize,
    window: Option<usize>,
    dropout: f64,
    documents: Option<Vec<i32>>,
}

const BATCH: usize = 2;
const SEQ: usize = 16;
const HIDDEN: usize = 16;

/// The output and the gradients of the input, token by token, and the gradients of the parameters.
struct LayerResult {
    out: Vec<f64>,
    dx: Vec<f64>,
    parameters: Vec<Vec<f64>>,
}

impl LayerCase {
    fn new(heads: usize, groups: usize) -> Self {
        Self {
            heads,
            groups,
            window: None,
            dropout: 0.0,
            documents: None,
        }
    }

    fn layer(&self, groups: &ParallelContext) -> Run<(ParallelAttention, ModelBuilder)> {
        let device = Device::flex().autodiff();
        let builder = ModelBuilder::with(groups, &device, 7, DType::F64);
        let config = ParallelAttentionConfig::new(HIDDEN, self.heads, self.groups, 4);
        let config = config
            .with_window(self.window)
            .with_dropout(self.dropout)
            .with_init(crate::nn::Init::Normal(0.4));
        let layer = config.init(&builder.child("attention"))?;
        Ok((layer, builder))
    }

    fn input(&self) -> [Vec<f64>; 2] {
        let wave = |phase: f64| {
            let value = |i: usize| (0.37 * i as f64 + phase).sin() + 0.5 * (1.7 * i as f64).cos();
            (0..BATCH * SEQ * HIDDEN).map(value).collect()
        };
        [wave(0.1), wave(0.9)]
    }

    /// Runs the layer on one rank, with the tokens of a shard if a shard is given.
    fn run(
        &self,
        groups: &ParallelContext,
        shard: Option<&Arc<SequenceShard>>,
    ) -> Run<LayerResult> {
        let (layer, builder) = self.layer(groups)?;
        let device = Device::flex().autodiff();
        let part = |values: Vec<f64>| {
            let rows: Vec<&[f64]> = values.chunks(HIDDEN).collect();
            let rows = match shard {
                Some(shard) => shard.part(&rows),
                None => rows,
            };
            let shape = [BATCH, rows.len() / BATCH, HIDDEN];
            let data = TensorData::new(rows.concat(), shape);
            Tensor::<3>::from_data(data, (&device, DType::F64))
        };
        let [x, weights] = self.input().map(part);
        let x = x.require_grad();
        builder.position().set_batch(BatchPosition {
            step: 2,
            first_sample: 5,
            shard: shard.cloned(),
        });
        let packed = self
            .documents
            .as_ref()
            .map(|documents| PackedSequences::new(documents, [BATCH, SEQ], &device).unwrap());
        let context = match (shard, &packed) {
            (Some(shard), _) => AttentionContext::Sharded(shard),
            (None, Some(packed)) => AttentionContext::Packed(packed),
            (None, None) => AttentionContext::Rows,
        };
        let y = layer.forward_with_context(x.clone(), None, context);
        let gradients = (y.clone() * weights).sum().backward();
        let of = |weight: Tensor<2>| doubles(weight.grad(&gradients).unwrap());
        Ok(LayerResult {
            out: doubles(y),
            dx: doubles(x.grad(&gradients).unwrap()),
            parameters: vec![of(layer.qkv.weight.val()), of(layer.output.weight.val())],
        })
    }

    /// Returns the joined results of the ranks of a layout. Each group of `ranks` ranks has a complete batch.
    fn run_groups(&self, layout: &ParallelConfig, ranks: usize) -> Run<Vec<LayerResult>> {
        let run = |rank: Rank| {
            let groups = ParallelContext::new(layout, &rank)?;
            let shard = SequenceShard::new(
                [BATCH, SEQ],
                self.documents.as_deref(),
                layout.context_split,
                (rank.rank() % ranks, ranks),
            )?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((
                self.run(&groups, Some(&shard))?,
                shard,
            ))
        };
        let parts = World::threads(layout.data_parallel_size())?.run(run)?;
        Ok(parts.chunks(ranks).map(LayerResult::joined).collect())
    }

    fn check(&self, layout: &ParallelConfig, what: &str) {
        self.check_groups(layout, layout.context, what);
    }

    fn check_groups(&self, layout: &ParallelConfig, ranks: usize, what: &str) {
        let one = self.run(&ParallelContext::single(), None).unwrap();
        let groups = self
            .run_groups(layout, ranks)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        for all in groups {
            assert_close(&all.out, &one.out, 1e-12, &format!("{what}: output"));
            assert_close(&all.dx, &one.dx, 1e-12, &format!("{what}: input gradient"));
            for (found, expected) in all.parameters.iter().zip(&one.parameters) {
                let what = format!("{what}: parameter gradient");
                assert_close(found, expected, 1e-12, &what);
            }
        }
    }
}

impl LayerResult {
    /// Joins the results of the ranks of a group to the result of a complete batch.
    fn joined(parts: &[(Self, Arc<SequenceShard>)]) -> Self {
        let mut all = Self {
            out: vec![f64::NAN; BATCH * SEQ * HIDDEN],
            dx: vec![f64::NAN; BATCH * SEQ * HIDDEN],
            parameters: parts[0].0.parameters.clone(),
        };
        for (part, shard) in parts {
            for (local, token) in shard.tokens().iter().enumerate() {
                let (from, to) = (local * HIDDEN, token * HIDDEN);
                all.out[to..to + HIDDEN].copy_from_slice(&part.out[from..from + HIDDEN]);
                all.dx[to..to + HIDDEN].copy_from_slice(&part.dx[from..from + HIDDEN]);
            }
        }
        for (part, _) in &parts[1..] {
            for (sum, part) in all.parameters.iter_mut().zip(&part.parameters) {
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
        }
        all
    }
}

fn layouts(ranks: usize) -> Vec<ParallelConfig> {
    let base = ParallelConfig::new().with_context(ranks).with_data(1);
    let mut exchanges = vec![
        base.clone().with_context_exchange(ContextExchange::Ring),
        base.clone()
            .with_context_exchange(ContextExchange::AllGather),
        base.clone()
            .with_context_exchange(ContextExchange::AllToAll),
    ];
    if ranks == 4 {
        exchanges.push(base.with_context_inner(2));
    }
    let splits = [
        ContextSplit::Zigzag,
        ContextSplit::Contiguous,
        ContextSplit::Striped,
    ];
    let with =
        |layout: &ParallelConfig| splits.map(|split| layout.clone().with_context_split(split));
    exchanges.iter().flat_map(with).collect()
}

fn name(layout: &ParallelConfig) -> String {
    let exchange = layout.context_exchange.unwrap();
    format!(
        "context {} by {exchange}, {}",
        layout.context, layout.context_split
    )
}

#[test]
fn every_exchange_and_split_equals_one_rank() {
    for ranks in [2, 4] {
        for layout in layouts(ranks) {
            for groups in [1, 2, 4] {
                let what = format!("{}, {groups} groups", name(&layout));
                LayerCase::new(4, groups).check(&layout, &what);
            }
        }
    }
}

/// Runs the same layer with groups of every size of a context group.
#[test]
fn hybrid_groups_equal_one_rank() {
    for exchange in [ContextExchange::Ring, ContextExchange::AllGather] {
        let layout = ParallelConfig::new()
            .with_context(2)
            .with_data(2)
            .with_hybrid_context_parallel(SEQ)
            .with_context_exchange(exchange);
        for ranks in [1, 2, 4] {
            let case = LayerCase {
                window: Some(5),
                documents: Some(vec![0, 1, 6, 16, 16, 29, 32]),
                ..LayerCase::new(4, 2)
            };
            let what = format!("groups of {ranks} ranks by {exchange}");
            case.check_groups(&layout, ranks, &what);
        }
    }
}

#[test]
fn windows_and_documents_equal_one_rank() {
    for layout in layouts(4) {
        for window in [1, 3, 11, 40] {
            let case = LayerCase {
                window: Some(window),
                ..LayerCase::new(4, 2)
            };
            case.check(&layout, &format!("{}, window {window}", name(&layout)));
        }
        let case = LayerCase {
            documents: Some(vec![0, 1, 6, 16, 16, 29, 32]),
            ..LayerCase::new(4, 1)
        };
        case.check(&layout, &format!("{}, documents", name(&layout)));
    }
}

#[test]
fn dropout_of_probabilities_equals_one_rank() {
    for layout in layouts(4) {
        let case = LayerCase {
            dropout: 0.3,
            ..LayerCase::new(4, 2)
        };
        let is_ring = matches!(
            layout.context_exchange,
            Some(ContextExchange::Ring | ContextExchange::Hierarchical)
        );
        if is_ring {
            let error = case.run_groups(&layout, 4).err().unwrap().to_string();
            assert!(error.contains("requires fused attention"), "{error}");
        } else {
            case.check(&layout, &format!("{}, dropout", name(&layout)));
        }
    }
}

#[test]
fn heads_that_cannot_be_split_are_refused() {
    let layout = ParallelConfig::new()
        .with_context(4)
        .with_data(1)
        .with_context_exchange(ContextExchange::AllToAll);
    let error = LayerCase::new(6, 2).run_groups(&layout, 4).err().unwrap();
    assert!(
        error.to_string().contains(
            "attention: context_exchange = all-to-all: an all-to-all of 4 ranks cannot split 6 heads and 2 groups"
        ),
        "{error}"
    );
}

/// Padding may be longer than the maximum sequence length, which is the number of learned positions.
#[test]
fn padding_has_no_positions() {
    let is_real = (0..12).map(|token| token < 4).collect();
    let real = crate::nn::RealTokens::new(is_real, 1);
    let positions = |rank| {
        let (documents, split) = ([0, 4, 12], ContextSplit::ZigzagPerDocument);
        let tokens = (None, real.clone());
        let shard = SequenceShard::of_tokens([1, 12], Some(&documents), tokens, split, (rank, 2));
        shard.unwrap().position_numbers(0..6)
    };
    assert_eq!(positions(0), [0, 3, 0, 0, 0, 0]);
    assert_eq!(positions(1), [1, 2, 0, 0, 0, 0]);
}

/// Only the real tokens of complete documents count, on each rank and in packed rows.
#[test]
fn documents_choose_their_rows_of_a_table_of_long_rope() {
    let device = Device::flex();
    let config = RopeConfig {
        width: 2,
        max_positions: 10,
        base: 100.0,
        scaling: Scaling::LongRope {
            short_factor: vec![1.0],
            long_factor: vec![2.0],
            original: 3,
            attention_factor: 1.0,
        },
    };
    let table = RopeTable::new(&config, &device, DType::F32).unwrap();
    // Three real tokens and padding, four real tokens, and padding.
    let documents = [0, 4, 8, 12];
    let is_real = (0..12).map(|token| ![3, 8, 9, 10, 11].contains(&token));
    let real = crate::nn::RealTokens::new(is_real.collect(), 1);
    let numbers = |context: AttentionContext<'_>| match context.positions(&table, 12, &device) {
        Positions::From(row) => vec![row as i64],
        Positions::Each(rows) => rows.into_data().iter().collect::<Vec<i64>>(),
    };
    let packed = PackedSequences::with_padding(&documents, real.clone(), [1, 12], &device);
    let packed = packed.unwrap();
    let of_packed = numbers(AttentionContext::Packed(&packed));
    assert_eq!(of_packed[..8], [10, 11, 12, 13, 0, 1, 2, 3]);
    let of_rank = |rank| {
        let tokens = (None, real.clone());
        let split = ContextSplit::ZigzagPerDocument;
        let shard = SequenceShard::of_tokens([1, 12], Some(&documents), tokens, split, (rank, 2));
        numbers(AttentionContext::Sharded(&shard.unwrap()))
    };
    assert_eq!(of_rank(0)[..4], [10, 10, 0, 3]);
    assert_eq!(of_rank(1)[..4], [11, 12, 1, 2]);
    assert_eq!(numbers(AttentionContext::Rows), [0]);
}

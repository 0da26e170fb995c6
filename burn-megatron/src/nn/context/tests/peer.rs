//! Compares with results of PyTorch on one process, which `tests/fixtures/context/make.py` has written.

use std::fs;

use burn_megatron_kernels::attention::{
    AttentionOptions, KeyRanges, Portable, flash_attention_packed_with,
};
use safetensors::SafeTensors;

use super::*;
use crate::nn::score_options::ScoreOptions;

const HEADS: Heads = Heads {
    heads: 4,
    groups: 2,
    width: 4,
};
const DOCUMENTS: [i32; 4] = [0, 16, 23, 32];

/// Returns the values of a tensor of the fixture, by token.
fn fixture(name: &str) -> Vec<f64> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/context");
    let file = fs::read(format!("{folder}/sdpa.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let (values, _) = file.tensor(name).unwrap().data().as_chunks();
    values
        .iter()
        .map(|bytes| f64::from_le_bytes(*bytes))
        .collect()
}

/// Returns this rank's rows of `[batch, seq, ..]`.
fn part(name: &str, shard: Option<&SequenceShard>) -> Tensor<3> {
    let values = fixture(name);
    let width = values.len() / (BATCH * SEQ);
    let rows: Vec<&[f64]> = values.chunks(width).collect();
    let rows = shard.map_or(rows.clone(), |shard| shard.part(&rows));
    let data = TensorData::new(rows.concat(), [BATCH, rows.len() / BATCH, width]);
    Tensor::from_data(data, (&Device::flex().autodiff(), DType::F64))
}

fn check(shard: Option<&SequenceShard>, attend: impl FnOnce(Tensor<3>) -> Tensor<3>) {
    let qkv = part("qkv", shard).require_grad();
    let out = attend(qkv.clone());
    let gradients = (out.clone() * part("weights", shard)).sum().backward();
    let dqkv = qkv.grad(&gradients).unwrap();
    assert_close(&doubles(out), &doubles(part("out", shard)), 1e-12, "out");
    assert_close(&doubles(dqkv), &doubles(part("dqkv", shard)), 1e-12, "dqkv");
}

#[test]
fn one_rank_computes_what_pytorch_computes() {
    let ends = DOCUMENTS[1..].iter().map(|end| *end as usize);
    let ranges = KeyRanges::of_documents(&ends.collect::<Vec<_>>(), &Device::flex()).unwrap();
    let options = AttentionOptions {
        causal: true,
        ranges: Some(ranges),
        ..AttentionOptions::default()
    };
    check(None, |qkv| {
        let [_, _, features] = qkv.dims();
        let qkv = qkv.reshape([1, BATCH * SEQ, features]);
        let out = flash_attention_packed_with(Arc::new(Portable), qkv, HEADS, None, &options);
        out.reshape([BATCH, SEQ, 16])
    });
}

#[test]
fn four_ranks_compute_what_pytorch_computes() {
    for layout in layouts(4) {
        let run = |rank: Rank| {
            let groups = ParallelContext::new(&layout, &rank)?;
            let builder = ModelBuilder::with(&groups, &Device::flex(), 0, DType::F64);
            let context = ContextAttention::new(&builder, HEADS, SEQ, true)?;
            let context = context.into_iter().next().expect("there are several ranks");
            let split = layout.context_split;
            let shape = [BATCH, SEQ];
            let shard = SequenceShard::new(shape, Some(&DOCUMENTS), split, (rank.rank(), 4))?;
            check(Some(&shard), |qkv| {
                let scores = ScoreOptions::default();
                context.attend(Arc::new(Portable), (qkv, None), HEADS, scores, &shard)
            });
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        };
        let ran = World::threads(4).unwrap().run(run);
        ran.unwrap_or_else(|error| panic!("{}: {error}", name(&layout)));
    }
}

//! Compares latent attention with an unfused computation of each head, and generation with a KV cache with attention to
//! the complete sequence.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Tensor};
use insta::assert_snapshot;

use super::references::{backward, gradient};
use super::{assert_close, autodiff, filled, leaf, values, wave};
use crate::comm::ParallelContext;
use crate::nn::*;

const BATCH: usize = 2;
const SEQ: usize = 6;
const HIDDEN: usize = 6;
const HEADS: usize = 3;
const KV_RANK: usize = 5;
const NOPE: usize = 3;
const ROPE: usize = 4;
const VALUE: usize = 2;
const BASE: f64 = 50.0;
const SCALE: f64 = 0.7;

fn config(q_rank: Option<usize>) -> MultiLatentAttentionConfig {
    MultiLatentAttentionConfig::new(HIDDEN, HEADS, KV_RANK, NOPE, ROPE, VALUE)
        .with_q_rank(q_rank)
        .with_scale(Some(SCALE))
}

fn layer(q_rank: Option<usize>) -> MultiLatentAttention {
    let builder = ModelBuilder::with(&ParallelContext::single(), &autodiff(), 3, DType::F64);
    let layer = config(q_rank).init(&builder).unwrap();
    let model = builder.finish(layer).unwrap();
    filled(model.module, &model.table, AxisRank { index: 0, size: 1 })
}

/// Returns `x / sqrt(mean of x^2 + 1e-6) * weight`.
fn normalised(x: Tensor<3>, norm: &Norm) -> Tensor<3> {
    let mean = x.clone().powi_scalar(2).mean_dim(2);
    x / mean.add_scalar(1e-6).sqrt() * norm.weight.val().unsqueeze()
}

/// Multiplies pairs of neighbouring features, as complex numbers, by `exp(i position frequency)`.
fn turned(x: Tensor<3>) -> Tensor<3> {
    let feature = |i: usize| x.clone().narrow(2, i, 1);
    let of_positions = |pair: usize, f: fn(f64) -> f64| -> Tensor<3> {
        let angle = |p: usize| f(p as f64 * BASE.powf(-2.0 * pair as f64 / ROPE as f64));
        let values: Vec<f64> = (0..SEQ).map(angle).collect();
        Tensor::<1>::from_data(values.as_slice(), (&x.device(), DType::F64)).reshape([1, SEQ, 1])
    };
    let pairs = (0..ROPE / 2).flat_map(|pair| {
        let (cosine, sine) = (of_positions(pair, f64::cos), of_positions(pair, f64::sin));
        let (a, b) = (feature(2 * pair), feature(2 * pair + 1));
        [
            a.clone() * cosine.clone() - b.clone() * sine.clone(),
            a * sine + b * cosine,
        ]
    });
    Tensor::cat(pairs.collect(), 2)
}

/// Computes attention head by head, with operations that Burn records.
fn reference(layer: &MultiLatentAttention, x: Tensor<3>) -> Tensor<3> {
    let project = |x: Tensor<3>, weight: Tensor<2>| x.matmul(weight.unsqueeze());
    let down = project(x.clone(), layer.down.weight.val());
    let q_rank = down.dims()[2] - KV_RANK - ROPE;
    let q = match (&layer.query, &layer.query_up, &layer.query_norm) {
        (Some(query), None, None) => project(x, query.weight.val()),
        (None, Some(up), Some(norm)) => {
            let latent = normalised(down.clone().narrow(2, 0, q_rank), norm);
            project(latent, up.weight.val())
        }
        _ => panic!("queries have a latent or none"),
    };
    let latent = normalised(down.clone().narrow(2, q_rank, KV_RANK), &layer.kv_norm);
    let kv = project(latent, layer.kv_up.weight.val());
    let shared = turned(down.narrow(2, q_rank + KV_RANK, ROPE));
    let future = Tensor::<3, Bool>::tril_mask([1, SEQ, SEQ], 0, &q.device());
    let heads = (0..HEADS).map(|head| {
        let q = q.clone().narrow(2, head * (NOPE + ROPE), NOPE + ROPE);
        let q = Tensor::cat(
            vec![
                q.clone().narrow(2, 0, NOPE),
                turned(q.narrow(2, NOPE, ROPE)),
            ],
            2,
        );
        let kv = kv.clone().narrow(2, head * (NOPE + VALUE), NOPE + VALUE);
        let k = Tensor::cat(vec![kv.clone().narrow(2, 0, NOPE), shared.clone()], 2);
        let scores = q.matmul(k.swap_dims(1, 2)).mul_scalar(SCALE);
        let scores = scores.mask_fill(future.clone().expand([BATCH, SEQ, SEQ]), -1e300);
        softmax(scores, 2).matmul(kv.narrow(2, NOPE, VALUE))
    });
    let heads = Tensor::cat(heads.collect(), 2);
    project(heads, layer.output.weight.val())
}

fn all(layer: &MultiLatentAttention, y: Tensor<3>, x: &Tensor<3>) -> Vec<Vec<f64>> {
    let gradients = backward(&y);
    let mut all = vec![values(y.inner()), gradient(x, &gradients)];
    all.extend(super::case::elements(layer, Some(&gradients)));
    all
}

#[test]
fn latent_attention_is_its_unfused_composition() {
    for (q_rank, parameters) in [(None, 5), (Some(7), 6)] {
        let layer = layer(q_rank);
        let rotary = super::rotary(SEQ, ROPE, BASE, DType::F64);
        let x = leaf(wave([BATCH, SEQ, HIDDEN], 0.5).mul_scalar(0.3));
        let ours = layer.forward(x.clone(), &rotary, AttentionContext::Rows);
        let ours = all(&layer, ours, &x);
        let theirs = all(&layer, reference(&layer, x.clone()), &x);
        assert_eq!(ours.len(), 2 + parameters, "output, input and parameters");
        for (found, expected) in ours.iter().zip(&theirs) {
            assert_close(&format!("q_rank {q_rank:?}"), found, expected);
        }
    }
}

/// Attention to latents equals attention to the keys and values of each head.
#[test]
fn a_cache_of_latents_is_the_whole_sequence() {
    for q_rank in [None, Some(7)] {
        let device = Device::flex();
        let builder = ModelBuilder::with(&ParallelContext::single(), &device, 3, DType::F64);
        let config = config(q_rank).with_init(Init::Normal(0.5));
        let layer = config.init(&builder).unwrap();
        let rotary = super::rotary(SEQ, ROPE, BASE, DType::F64);
        let x = wave([BATCH, SEQ, HIDDEN], 0.5).mul_scalar(0.3);
        let whole = layer.forward(x.clone(), &rotary, AttentionContext::Rows);
        let mut cache = KvCache::new(1, SEQ);
        for (first, count) in [(0, 2), (2, 3), (5, 1)] {
            let new = x.clone().narrow(1, first, count);
            let new = new.reshape([1, BATCH * count, HIDDEN]);
            super::read(&mut cache, BATCH, count);
            let context = AttentionContext::Cached(cache.layer(0));
            let found = layer.forward(new, &rotary, context);
            (0..BATCH).for_each(|row| cache.set_len(row, first + count));
            let found = found.reshape([BATCH, count, HIDDEN]);
            let expected = whole.clone().narrow(1, first, count);
            assert_close("new tokens", &values(found), &values(expected));
        }
        assert_eq!(cache.bytes(), 8 * BATCH * SEQ * (KV_RANK + ROPE));
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let refused = |config: MultiLatentAttentionConfig, ranks| {
        let build = |groups: ParallelContext| {
            let builder = ModelBuilder::new(&groups, &Device::flex()).child("mla");
            config.init(&builder).unwrap_err().to_string()
        };
        super::over(ranks, build).remove(0)
    };
    let error = refused(config(Some(0)), 1);
    assert_snapshot!(error, @"mla: invalid q_rank = 0: expected at least 1");
    let odd = MultiLatentAttentionConfig {
        rope_width: 3,
        ..config(None)
    };
    let expected = "mla: invalid rope_width = 3: expected an even number, because pairs of features are rotated";
    assert_eq!(refused(odd, 1), expected);
    let error = refused(config(None), 2);
    assert_snapshot!(error, @"heads 3 cannot be split over tensor = 2: expected tensor = 1, 3");
}

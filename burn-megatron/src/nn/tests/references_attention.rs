//! Compares attention with an unfused computation of each head: softmax(Q K^T / sqrt(width), causal) V.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Tensor};

use super::references::{backward, gradient};
use super::{assert_close, autodiff, filled, leaf, values, wave};
use crate::comm::ParallelContext;
use crate::nn::*;

const BATCH: usize = 2;
const SEQ: usize = 5;
const HIDDEN: usize = 6;
const HEADS: usize = 4;
const WIDTH: usize = 4;

fn config(groups: usize, dropout: f64) -> ParallelAttentionConfig {
    ParallelAttentionConfig {
        hidden: HIDDEN,
        heads: HEADS,
        groups,
        head_width: WIDTH,
        bias: true,
        qkv_bias: true,
        qk_norm: None,
        window: None,
        sinks: false,
        scale: None,
        soft_cap: None,
        dropout,
        init: Init::Normal(0.5),
        output_init: Init::Normal(0.5),
        sequence: 64,
    }
}

/// Rotates one head with recorded operations, feature by feature.
fn turned(x: Tensor<3>, base: f64) -> Tensor<3> {
    let half = WIDTH / 2;
    let feature = |i: usize| x.clone().narrow(2, i, 1);
    let angles = |i: usize, f: fn(f64) -> f64| -> Tensor<3> {
        let angle = |p: usize| f(p as f64 * base.powf(-2.0 * i as f64 / WIDTH as f64));
        let values: Vec<f64> = (0..SEQ).map(angle).collect();
        Tensor::<1>::from_data(values.as_slice(), (&autodiff(), DType::F64)).reshape([1, SEQ, 1])
    };
    let rotated = |i: usize| {
        let (pair, sign) = if i < half {
            (i + half, -1.0)
        } else {
            (i - half, 1.0)
        };
        let index = i % half;
        feature(i) * angles(index, f64::cos)
            + feature(pair).mul_scalar(sign) * angles(index, f64::sin)
    };
    Tensor::cat((0..WIDTH).map(rotated).collect(), 2)
}

/// Computes attention head by head, with operations that Burn records.
fn reference(
    layer: &ParallelAttention,
    x: Tensor<3>,
    groups: usize,
    rotary_base: Option<f64>,
    dropped: Option<Tensor<4>>,
) -> Tensor<3> {
    let project = |x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>| {
        x.matmul(weight.unsqueeze()) + bias.unsqueeze()
    };
    let bias = |layer: &Option<burn::module::Param<Tensor<1>>>| layer.as_ref().unwrap().val();
    let qkv = project(x, layer.qkv.weight.val(), bias(&layer.qkv.bias));
    let head = |i: usize| qkv.clone().narrow(2, i * WIDTH, WIDTH);
    let turn = |x: Tensor<3>| rotary_base.map_or(x.clone(), |base| turned(x, base));
    let future = Tensor::<3, Bool>::tril_mask([1, SEQ, SEQ], 0, &autodiff());
    let outputs = (0..HEADS).map(|h| {
        let group = h / (HEADS / groups);
        let (q, k) = (turn(head(h)), turn(head(HEADS + group)));
        let v = head(HEADS + groups + group);
        let scores = q
            .matmul(k.swap_dims(1, 2))
            .div_scalar((WIDTH as f64).sqrt());
        let scores = scores.mask_fill(future.clone().expand([BATCH, SEQ, SEQ]), -1e300);
        let mut p = softmax(scores, 2);
        if let Some(dropped) = &dropped {
            let mask = dropped.clone().narrow(1, h, 1).reshape([BATCH, SEQ, SEQ]);
            p = p * Tensor::from_inner(mask);
        }
        p.matmul(v)
    });
    let joined = Tensor::cat(outputs.collect(), 2);
    project(joined, layer.output.weight.val(), bias(&layer.output.bias))
}

fn all(layer: &ParallelAttention, y: Tensor<3>, x: &Tensor<3>) -> Vec<Vec<f64>> {
    let gradients = backward(&y);
    let mut all = vec![values(y.inner()), gradient(x, &gradients)];
    all.extend(super::case::elements(layer, Some(&gradients)));
    all
}

#[test]
fn attention_is_its_unfused_composition() {
    for (groups, rotary_base, dropout) in [
        (4, None, 0.0),
        (2, Some(100.0), 0.0),
        (1, Some(10_000.0), 0.0),
        (1, None, 0.4),
        (2, Some(100.0), 0.4),
    ] {
        let builder = ModelBuilder::with(&ParallelContext::single(), &autodiff(), 3, DType::F64);
        let layer = config(groups, dropout).init(&builder).unwrap();
        let model = builder.clone().finish(layer).unwrap();
        let place = AxisRank { index: 0, size: 1 };
        let layer = filled(model.module, &model.table, place);
        let table = |base| super::rotary(SEQ, WIDTH, base, DType::F64);
        let rotary = rotary_base.map(table);
        let dropped = Dropout::new(dropout, &builder.child("dropout")).unwrap();
        let ones = Tensor::<4>::ones([BATCH, HEADS, SEQ, SEQ], (&autodiff(), DType::F64));
        let dropped =
            (dropout > 0.0).then(|| dropped.forward(ones, ActivationLayout::Whole).inner());

        let x = leaf(wave([BATCH, SEQ, HIDDEN], 0.5).mul_scalar(0.3));
        let ours = all(&layer, layer.forward(x.clone(), rotary.as_ref()), &x);
        let theirs = all(
            &layer,
            reference(&layer, x.clone(), groups, rotary_base, dropped),
            &x,
        );
        let what = format!("{groups} groups, rotary {rotary_base:?}, dropout {dropout}");
        assert_eq!(ours.len(), 6, "output, input and four parameters");
        for (found, expected) in ours.iter().zip(&theirs) {
            assert_close(&what, found, expected);
        }
    }
}

/// A token attends to no later token.
#[test]
fn attention_is_causal() {
    let builder = ModelBuilder::with(&ParallelContext::single(), &autodiff(), 3, DType::F64);
    let layer = config(2, 0.0).init(&builder).unwrap();
    let x = leaf(wave([BATCH, SEQ, HIDDEN], 0.5));
    let y = layer.forward(x.clone(), None).narrow(1, 2, 1);
    let gradients = y.sum().backward();
    let per_token: Tensor<3> = x.grad(&gradients).unwrap().abs().sum_dim(2);
    for (i, size) in values(per_token).into_iter().enumerate() {
        assert_eq!(size > 0.0, i % SEQ <= 2, "token {}: {size}", i % SEQ);
    }
}

/// Recomputation uses the same dropout mask and gives the same gradients.
#[test]
fn gradient_checkpointing_changes_nothing() {
    let run = |device: Device| {
        let builder = ModelBuilder::with(&ParallelContext::single(), &device, 3, DType::F64);
        let layer = config(2, 0.4).init(&builder).unwrap();
        let mlp = ParallelMlpConfig {
            hidden: HIDDEN,
            width: 8,
            activation: Activation::SwiGlu,
            bias: true,
            init: Init::Normal(0.5),
            output_init: Init::Normal(0.5),
        };
        let mlp = mlp.init(&builder.child("mlp")).unwrap();
        let values_of_x = wave([BATCH, SEQ, HIDDEN], 0.5).into_data();
        let x = Tensor::<3>::from_data(values_of_x, (&device, DType::F64)).require_grad();
        let y = mlp.forward(layer.forward(x.clone(), None));
        let gradients = y.clone().powi_scalar(2).sum().backward();
        let mut all = vec![values(y.inner()), gradient(&x, &gradients)];
        all.extend(super::case::elements(&layer, Some(&gradients)));
        all
    };
    assert_eq!(run(autodiff()), run(autodiff().gradient_checkpointing()));
}

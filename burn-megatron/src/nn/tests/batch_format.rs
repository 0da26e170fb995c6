//! Tests that attention to packed documents equals attention to each document separately, and that attention with a KV
//! cache equals attention to complete rows.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::rope::{RopeConfig, RopeTable, Scaling};
use insta::assert_snapshot;

use super::references::{backward, gradient};
use super::{assert_close, autodiff, filled, leaf, over, read, rotary, values, wave};
use crate::comm::ParallelContext;
use crate::data_parallel::DistributedDataParallel;
use crate::kernel_selection::{KernelChoice, KernelChoices};
use crate::nn::*;

const HIDDEN: usize = 6;
const WIDTH: usize = 4;
const SEQ: usize = 7;

#[derive(Clone, Copy, Debug)]
struct Form {
    groups: usize,
    rotary: bool,
    window: Option<usize>,
    norms: bool,
    choice: KernelChoice,
}

/// Returns all variants of attention whose masks differ.
fn forms() -> Vec<Form> {
    let mut forms = vec![];
    for choice in [KernelChoice::Auto, KernelChoice::Unfused] {
        for window in [None, Some(2), Some(3)] {
            for (groups, rotary, norms) in [(4, false, false), (2, true, true)] {
                forms.push(Form {
                    groups,
                    rotary,
                    window,
                    norms,
                    choice,
                });
            }
        }
    }
    forms
}

impl Form {
    fn layer(&self, groups: &ParallelContext, device: &Device) -> ParallelAttention {
        let builder = ModelBuilder::with(groups, device, 3, DType::F64);
        let builder = builder
            .with_kernels(&KernelChoices::all(self.choice))
            .unwrap();
        let config = ParallelAttentionConfig {
            hidden: HIDDEN,
            heads: 4,
            groups: self.groups,
            head_width: WIDTH,
            bias: true,
            qkv_bias: true,
            qk_norm: self.norms.then(|| QkNormConfig::new(QkNorm::Heads, 1e-5)),
            window: self.window,
            sinks: false,
            scale: None,
            soft_cap: None,
            dropout: 0.0,
            init: Init::Normal(0.5),
            output_init: Init::Normal(0.5),
            sequence: 64,
        };
        let layer = config.init(&builder).unwrap();
        let model = builder.finish(layer).unwrap();
        filled(model.module, &model.table, groups.place())
    }

    fn table(&self, positions: usize) -> Option<RopeTable> {
        self.rotary
            .then(|| rotary(positions, WIDTH, 100.0, DType::F64))
    }
}

/// Returns the layer for generation.
fn plain(layer: ParallelAttention) -> ParallelAttention {
    struct Plain;
    impl ModuleMapper for Plain {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            Param::from_tensor(param.val().inner())
        }
    }
    layer.map(&mut Plain)
}

/// Returns the output, and the gradients of the input and of each parameter.
fn all(layer: &ParallelAttention, y: Tensor<3>, x: &Tensor<3>) -> Vec<Vec<f64>> {
    let gradients = backward(&y);
    let mut all = vec![values(y.inner()), gradient(x, &gradients)];
    all.extend(super::case::elements(layer, Some(&gradients)));
    all
}

#[test]
fn documents_in_rows_are_documents_alone() {
    let starts = [0, 3, 7, 8, 8, 12, 14];
    for form in forms() {
        let layer = form.layer(&ParallelContext::single(), &autodiff());
        let table = form.table(SEQ);
        let x = || leaf(wave([2, SEQ, HIDDEN], 0.5).mul_scalar(0.3));
        let packed = PackedSequences::new(&starts, [2, SEQ], &autodiff()).unwrap();
        let sees =
            |sight, x: &Tensor<3>| layer.forward_with_context(x.clone(), table.as_ref(), sight);
        let ours = x();
        let ours = all(
            &layer,
            sees(AttentionContext::Packed(&packed), &ours),
            &ours,
        );
        let theirs = x();
        let documents = starts.windows(2).filter(|pair| pair[0] < pair[1]);
        let alone = documents.map(|pair| {
            let (begin, len) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
            let row = theirs.clone().narrow(0, begin / SEQ, 1);
            sees(AttentionContext::Rows, &row.narrow(1, begin % SEQ, len))
        });
        let joined = Tensor::cat(alone.collect(), 1).reshape([2, SEQ, HIDDEN]);
        let theirs = all(&layer, joined, &theirs);
        assert_eq!(ours.len(), if form.norms { 8 } else { 6 });
        for (found, expected) in ours.iter().zip(&theirs) {
            assert_close(&format!("{form:?}"), found, expected);
        }
        // The document boundaries must affect the result.
        let rows = values(sees(AttentionContext::Rows, &x()).inner());
        assert_ne!(rows, ours[0]);
    }
}

#[test]
fn documents_can_be_read_again() {
    for form in forms() {
        let run = |again: bool| {
            let layer = form.layer(&ParallelContext::single(), &autodiff());
            let model = ParallelModule::replicated(layer);
            let packed = PackedSequences::new(&[0, 2, 7, 11, 14], [2, SEQ], &autodiff()).unwrap();
            let groups = ParallelContext::single();
            let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
            let x = leaf(wave([2, SEQ, HIDDEN], 0.5));
            let loss = ddp.forward(&autodiff(), |layer| {
                let (layer, table) = (layer.clone(), form.table(SEQ));
                let body = move |x| {
                    layer.forward_with_context(x, table.as_ref(), AttentionContext::Packed(&packed))
                };
                let y = if again {
                    recompute(x.clone(), body)
                } else {
                    body(x.clone())
                };
                y.powi_scalar(2).sum()
            });
            let mut all = vec![values(loss.clone().inner())];
            let leaves = ddp.backward(loss);
            all.push(gradient(&x, &leaves));
            let gradients = ddp.reduce(14).unwrap();
            all.extend(ddp.full_gradients(&gradients).into_iter().map(values));
            all
        };
        assert_eq!(run(false), run(true), "{form:?}");
    }
}

#[test]
fn tokens_after_others_are_the_ends_of_whole_rows() {
    let pieces = [3, 1, 1, 2];
    for ranks in [1, 2] {
        for form in forms() {
            over(ranks, |groups| {
                let layer = plain(form.layer(&groups, &autodiff()));
                let table = form.table(SEQ);
                let x = wave([2, SEQ, HIDDEN], 0.5).mul_scalar(0.3);
                let whole = layer.forward(x.clone(), table.as_ref());
                let mut cache = KvCache::new(1, SEQ);
                for len in pieces {
                    let first = cache.len(0);
                    let piece = x.clone().narrow(1, first, len);
                    let piece = piece.reshape([1, 2 * len, HIDDEN]);
                    read(&mut cache, 2, len);
                    let sight = AttentionContext::Cached(cache.layer(0));
                    let y = layer.forward_with_context(piece, table.as_ref(), sight);
                    let expected = whole.clone().narrow(1, first, len);
                    assert_close(&format!("{form:?}"), &values(y), &values(expected));
                    (0..2).for_each(|row| cache.set_len(row, first + len));
                }
                assert_eq!(cache.len(1), SEQ);
            });
        }
    }
}

/// New tokens overwrite dropped tokens, and the cache grows when it is full.
#[test]
fn a_cache_grows_and_takes_back() {
    let form = forms()[1];
    let layer = plain(form.layer(&ParallelContext::single(), &autodiff()));
    let (seq, table) = (600, form.table(600));
    let x = wave([1, seq, HIDDEN], 0.5).mul_scalar(0.3);
    let whole = layer.forward(x.clone(), table.as_ref());
    let mut cache = KvCache::new(1, seq);
    for (from, to) in [
        (0, 250),
        (250, 257),
        (257, 513),
        (100, 300),
        (300, 301),
        (301, 600),
    ] {
        cache.set_len(0, from);
        read(&mut cache, 1, to - from);
        let piece = x.clone().narrow(1, from, to - from);
        let sight = AttentionContext::Cached(cache.layer(0));
        let y = layer.forward_with_context(piece, table.as_ref(), sight);
        let expected = whole.clone().narrow(1, from, to - from);
        assert_close(&format!("{from} to {to}"), &values(y), &values(expected));
    }
    // The cache holds keys and values of two key-value heads in f64, and allocates memory for at most `capacity`
    // tokens.
    assert_eq!(cache.bytes(), 2 * seq * 2 * WIDTH * 8);
}

#[test]
#[should_panic(expected = "a cache with a capacity of 4 tokens holds 3: 2 more do not fit")]
fn a_full_cache_is_named() {
    let layer = plain(forms()[0].layer(&ParallelContext::single(), &autodiff()));
    let mut cache = KvCache::new(1, 4);
    cache.set_len(0, 3);
    read(&mut cache, 1, 2);
    layer.forward_with_context(
        wave([1, 2, HIDDEN], 0.5),
        None,
        AttentionContext::Cached(cache.layer(0)),
    );
}

/// If a LongRoPE text outgrows the original context, its keys change, including the cached keys.
#[test]
#[should_panic(
    expected = "the keys of the 3 tokens in the cache change after 2 more: expected KvCache::begin before"
)]
fn a_text_that_changes_its_keys_must_begin_again() {
    let layer = plain(forms()[1].layer(&ParallelContext::single(), &autodiff()));
    let config = RopeConfig {
        width: WIDTH,
        max_positions: SEQ,
        base: 100.0,
        scaling: Scaling::LongRope {
            short_factor: vec![1.0; WIDTH / 2],
            long_factor: vec![2.0; WIDTH / 2],
            original: 4,
            attention_factor: 1.0,
        },
    };
    let table = RopeTable::new(&config, &Device::flex(), DType::F64).unwrap();
    let mut cache = KvCache::new(1, SEQ);
    for count in [3, 2] {
        read(&mut cache, 1, count);
        let sight = AttentionContext::Cached(cache.layer(0));
        let x = wave([1, count, HIDDEN], 0.5);
        layer.forward_with_context(x, Some(&table), sight);
        cache.set_len(0, count);
    }
}

#[test]
fn documents_that_do_not_fit_are_named() {
    let error = |starts: &[i32]| {
        let packed = PackedSequences::new(starts, [2, 5], &Device::flex());
        packed.unwrap_err().to_string()
    };
    assert_snapshot!(
        error(&[0, 5, 9]),
        @"invalid document boundaries [0, 9] for 2 rows of 5 tokens: expected boundaries from 0 to 10"
    );
    assert!(error(&[]).starts_with("invalid document boundaries []"));
    assert!(error(&[1, 5, 10]).starts_with("invalid document boundaries [1, 10]"));
    assert_snapshot!(
        error(&[0, 4, 7, 10]),
        @"invalid document from 4 to 7: it crosses the end of a row of 5 tokens"
    );
    assert_snapshot!(
        error(&[0, 4, 3, 5, 10]),
        @"invalid document from 4 to 3: expected increasing boundaries"
    );
    let empty: &[i32] = &[0, 0, 5, 5, 10];
    let packed = PackedSequences::new(empty, [2, 5], &Device::flex()).unwrap();
    let positions: Vec<i64> = packed.positions().clone().into_data().iter().collect();
    assert_eq!(positions, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
}

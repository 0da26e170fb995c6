//! Tests that padding is sent to no expert and does not count in any statistic.

use super::capacity::kept_of;
use super::choice::assigned_of;
use super::losses::{loss, reference_of};
use super::*;
use crate::nn::tests::leaf;
use crate::nn::{BatchFormat, KvCache, SequencePart};

/// The number of real tokens of each sample. With two tensor ranks, the second rank has only padding in the last two
/// samples.
const LENGTHS: [usize; BATCH] = [6, 4, 3, 1];

const LAYOUTS: [Sizes; 4] = [ONE, [1, 2, 1, 1], [2, 2, 2, 1], [2, 2, 1, 2]];

/// Returns the indices of the real tokens.
fn real() -> Vec<usize> {
    let of_row = |row: usize| row * SEQ..row * SEQ + LENGTHS[row];
    (0..BATCH).flat_map(of_row).collect()
}

fn padded() -> Run {
    Run {
        lengths: Some(LENGTHS),
        ..Run::default()
    }
}

/// Returns the number of data ranks of a layout.
fn data(sizes: Sizes) -> usize {
    sizes[1..].iter().product::<usize>() / sizes[0]
}

#[test]
fn padding_has_no_expert_with_any_dispatcher() {
    let all = real();
    for dispatcher in DISPATCHERS {
        let config = config(router()).with_dispatcher(dispatcher);
        let dense = Dense::new(&config);
        let is_real = dense.mask_of(|token, _| all.contains(&token));
        let expected = dense.run_with(|x| {
            let weights = dense.router_weights(x.clone()) * is_real;
            (dense.mixture(x, weights), None)
        });
        for sizes in LAYOUTS {
            for replicated in [false, true] {
                let run = Run {
                    replicated,
                    ..padded()
                };
                let what = format!("{dispatcher:?} on {sizes:?}, replicated {replicated}");
                run.on(sizes, &config).assert_near(&expected, &what);
            }
        }
    }
}

#[test]
fn padding_counts_in_no_loss_and_no_load() {
    use RouterLossKind::*;
    let all = real();
    for kind in [Balance, SequenceBalance, GlobalBalance, ZLoss] {
        let config = config(router()).with_losses(vec![loss(kind, 0.3)]);
        for sizes in LAYOUTS {
            let dense = Dense::new(&config);
            let is_real = dense.mask_of(|token, _| all.contains(&token));
            let rows = BATCH / data(sizes);
            let of = |logits: &Tensor<2>| reference_of(LENGTHS, kind, logits, false, rows);
            let expected = dense.run_with(|x| {
                let weights = dense.router_weights(x.clone()) * is_real;
                let more = of(&dense.logits(x.clone())).mul_scalar(0.3);
                (dense.mixture(x, weights), Some(more))
            });
            for recompute in [false, true] {
                let run = Run {
                    loss_scale: Some(1.0),
                    recompute,
                    ..padded()
                };
                let mut found = run.on(sizes, &config);
                let what = format!("{kind:?} on {sizes:?}, recompute {recompute}");
                let logits = dense.logits(leaf(input().reshape([BATCH * SEQ, HIDDEN])));
                let mean = 0.3 * values(of(&logits))[0] / (BATCH * SEQ) as f64;
                assert_near(&format!("{what}: loss"), &found.losses, &[mean], 1e-12);
                let pairs = 2.0 * all.len() as f64;
                assert_eq!(found.load[..EXPERTS].iter().sum::<f64>(), pairs, "{what}");
                assert_eq!(found.load[EXPERTS], pairs, "{what}");
                found.losses.clear();
                found.assert_near(&expected, &what);
            }
        }
    }
}

#[test]
fn a_capacity_is_a_share_of_the_real_tokens() {
    let all = real();
    for pad in [false, true] {
        let capacity = Capacity {
            factor: 0.75,
            keep: KeepPolicy::LargestWeights,
            pad,
        };
        let config = config(router()).with_capacity(Some(capacity));
        for sizes in LAYOUTS {
            let dense = Dense::new(&config);
            let x = Tensor::from_inner(input().reshape([BATCH * SEQ, HIDDEN]));
            let weights = values(dense.router_weights(x));
            let kept = kept_of(&all, &weights, (sizes, 1), &capacity);
            assert!(kept.len() < 2 * all.len(), "some are dropped");
            let mask = dense.mask_of(|token, expert| kept.contains(&(token, expert)));
            let expected = dense.run_with(|x| {
                let weights = dense.router_weights(x.clone()) * mask;
                (dense.mixture(x, weights), None)
            });
            let what = format!("pad {pad} on {sizes:?}");
            padded().on(sizes, &config).assert_near(&expected, &what);
        }
    }
}

#[test]
fn sinkhorn_assigns_real_tokens_alone() {
    let config = config(
        router()
            .with_choice(RouterChoice::Sinkhorn)
            .with_score(ScoreFunction::PreSoftmax),
    );
    let dense = Dense::new(&config);
    for sizes in LAYOUTS {
        let choices = assigned_of(&dense, BATCH / data(sizes), LENGTHS);
        let expected = dense.run(Some(&choices));
        let found = padded().on(sizes, &config);
        found.assert_near(&expected, &format!("{sizes:?}"));
    }
}

#[test]
fn a_micro_batch_of_padding_alone_has_losses_of_zero() {
    use RouterLossKind::*;
    let kinds = [Balance, SequenceBalance, GlobalBalance, ZLoss].map(|kind| loss(kind, 0.3));
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let config = config(router()).with_losses(kinds.to_vec());
    let moe = config.init(&builder.child("moe")).unwrap();
    let x = Tensor::<3>::from_inner(input()).require_grad();
    let step = RouterStep::new(1.0.into());
    let of_batch = step.of_micro_batch(0);
    let real = RealTokens::new(vec![false; BATCH * SEQ], BATCH);
    let with = MoeForward {
        tokens: Some(RoutedTokens::new(
            [BATCH, SEQ],
            TokenPositions::InRows,
            real,
        )),
        step: Some(&of_batch),
        ..MoeForward::default()
    };
    let y = moe.forward_with(x.clone(), with);
    let gradients = y.clone().sum().backward();
    assert_eq!(values(y.inner()), vec![0.0; BATCH * SEQ * HIDDEN]);
    let gradient = x.grad(&gradients).map(values).unwrap_or_default();
    assert!(gradient.iter().all(|x| *x == 0.0), "{gradient:?}");
    for (key, sum) in step.losses() {
        assert_eq!(values(sum), [0.0], "{key:?}");
    }
    let RankLoad { tokens, pairs } = step.loads().into_values().next().unwrap();
    assert_eq!(
        (values(tokens.float().cast(DType::F64)), pairs),
        (vec![0.0; EXPERTS], 0)
    );
}

#[test]
fn uneven_prompts_on_tensor_ranks_have_the_experts_of_one_rank() {
    // Seven tokens on two ranks are padded to eight. The padding does not use the capacity of an expert.
    let capacity = Capacity {
        factor: 1.0,
        keep: KeepPolicy::First,
        pad: false,
    };
    let config = config(router()).with_capacity(Some(capacity));
    let rank = |rank: crate::comm::Rank| {
        let layout = ParallelConfig::new().with_tensor(2);
        let ctx = ParallelContext::from_world(&layout, rank.communicator())?;
        let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, DType::F64);
        let moe = config.init(&builder.child("moe"))?;
        let x: Tensor<3> = wave([1, 7, HIDDEN], 0.5);
        let own = moe.router.place().index;
        let part = match own {
            0 => x.clone().narrow(1, 0, 4),
            _ => Tensor::cat(
                vec![
                    x.narrow(1, 4, 3),
                    Tensor::zeros([1, 1, HIDDEN], (&Device::flex(), DType::F64)),
                ],
                1,
            ),
        };
        let tokens = RoutedTokens::rows([1, 7]);
        let routed = moe.router.forward(part.clone(), None, &tokens);
        let count = moe.router.own(&tokens, &part).count;
        Ok::<_, AnyError>((read(routed.indices), count))
    };
    let [(_, first), (second, count)] = &World::threads(2).unwrap().run(rank).unwrap()[..] else {
        panic!("two ranks");
    };
    assert_eq!([*first, *count], [4, 3]);
    assert_eq!(second[6..], [-1, -1]);
    assert!(second[..6].iter().all(|expert| *expert >= 0));
}

#[test]
fn new_tokens_of_texts_have_positions_and_padding() {
    let mut cache = KvCache::new(1, 8);
    let part = |sequence, count| SequencePart { sequence, count };
    cache.read(&[part(0, 3)], 3);
    cache.set_len(0, 3);
    cache.read(&[part(0, 2), part(1, 1)], 4);
    let tokens = Tensor::<2, Int>::zeros([1, 4], &Device::flex());
    let routed = BatchFormat::Cached(&mut cache).routed(&tokens.into());
    let one = AxisRank { index: 0, size: 1 };
    assert_eq!(routed.positions([1, 4], one), [3, 4, 0, 0]);
    let own = routed.part([1, 4], one, 1, &Device::flex());
    assert_eq!(own.is_real(), Some(&[true, true, true, false][..]));
}

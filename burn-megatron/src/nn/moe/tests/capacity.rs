//! Compares dropped tokens with a dense loop that drops tokens separately for the same shards of tokens.

use super::*;
use crate::nn::moe::routed_tokens::RankTokens;

/// Returns the rank that holds a token in a layout.
fn shard(token: usize, sizes: Sizes, context: usize) -> usize {
    let [tensor, expert, expert_tensor, data] = sizes;
    let parts = tensor * context;
    let data = expert * expert_tensor * data / parts;
    let (row, column) = (token / SEQ, token % SEQ);
    row / (BATCH / data) * parts + column / (SEQ / parts)
}

/// Returns the kept pairs of token and expert, given the weights `[tokens, experts]`.
fn kept(weights: &[f64], sizes: Sizes, context: usize, capacity: &Capacity) -> Vec<(usize, usize)> {
    let all: Vec<_> = (0..BATCH * SEQ).collect();
    kept_of(&all, weights, (sizes, context), capacity)
}

/// Returns the kept pairs of some of the tokens. The other tokens are padding.
pub fn kept_of(
    real: &[usize],
    weights: &[f64],
    (sizes, context): (Sizes, usize),
    capacity: &Capacity,
) -> Vec<(usize, usize)> {
    let ranks = sizes[1..].iter().product::<usize>();
    let mut kept = vec![];
    for rank in 0..ranks {
        let own = real.iter().copied();
        let own: Vec<_> = own
            .filter(|token| shard(*token, sizes, context) == rank)
            .collect();
        let most = capacity.factor * own.len() as f64 * 2.0 / EXPERTS as f64;
        for expert in 0..EXPERTS {
            let weight = |token: &usize| weights[token * EXPERTS + expert];
            let chosen = own.iter().copied();
            let mut chosen: Vec<_> = chosen.filter(|token| weight(token) > 0.0).collect();
            if capacity.keep == KeepPolicy::LargestWeights {
                chosen.sort_by(|a, b| weight(b).partial_cmp(&weight(a)).unwrap());
            }
            let most = most.ceil() as usize;
            kept.extend(chosen.into_iter().take(most).map(|token| (token, expert)));
        }
    }
    kept
}

fn check_capacity(capacity: Capacity, sizes: Sizes, context: usize) -> usize {
    let config = config(router())
        .with_bias(true)
        .with_capacity(Some(capacity));
    let dense = Dense::new(&config);
    let weights =
        values(dense.router_weights(Tensor::from_inner(input().reshape([BATCH * SEQ, HIDDEN]))));
    let kept = kept(&weights, sizes, context, &capacity);
    let mask = dense.mask_of(|token, expert| kept.contains(&(token, expert)));
    let expected = dense.run_with(|x| {
        let weights = dense.router_weights(x.clone()) * mask;
        (dense.mixture(x, weights), None)
    });
    let run = Run {
        context: Some(context),
        ..Run::default()
    };
    let what = format!("{capacity:?} on {sizes:?}, context {context}");
    run.on(sizes, &config).assert_near(&expected, &what);
    2 * BATCH * SEQ - kept.len()
}

#[test]
fn an_expert_drops_what_a_rank_sends_above_its_capacity() {
    let layouts = [
        (ONE, 1),
        ([1, 2, 1, 1], 1),
        ([2, 2, 2, 1], 1),
        ([1, 2, 1, 1], 2),
        ([1, 2, 1, 2], 2),
        ([2, 2, 1, 3], 3),
    ];
    for (sizes, context) in layouts {
        for keep in [KeepPolicy::LargestWeights, KeepPolicy::First] {
            for pad in [false, true] {
                let dropped =
                    |factor| check_capacity(Capacity { factor, keep, pad }, sizes, context);
                assert!(
                    20 * dropped(0.75) >= 2 * BATCH * SEQ,
                    "at least 5 % dropped"
                );
                // An expert keeps one token per rank, or all tokens.
                assert!(dropped(0.01) >= BATCH * SEQ);
                assert_eq!(dropped(2.0), 0);
            }
        }
    }
}

#[test]
fn padding_needs_the_all_to_all() {
    let capacity = Capacity {
        factor: 1.0,
        keep: KeepPolicy::First,
        pad: true,
    };
    let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let refused = |config: MoeMlpConfig| config.init(&builder).unwrap_err().to_string();
    let gather = config(router()).with_dispatcher(DispatcherKind::AllGather);
    assert!(refused(gather.with_capacity(Some(capacity))).contains("expected the all-to-all"));
    let factor = f64::NAN;
    let invalid = config(router()).with_capacity(Some(Capacity { factor, ..capacity }));
    assert!(refused(invalid).contains("invalid capacity.factor = NaN"));
    // Each token chooses two of four experts.
    for factor in [2.01, 1e7, 1e300] {
        let config = config(router()).with_capacity(Some(Capacity { factor, ..capacity }));
        let message = format!(
            "invalid capacity.factor = {factor} with capacity.pad = true: expected at most experts / experts_per_token = \
             4 / 2 = 2"
        );
        assert!(refused(config).contains(&message), "{message}");
    }
}

#[test]
fn padded_rows_are_as_many_for_every_expert() {
    let capacity = Capacity {
        factor: 1.5,
        keep: KeepPolicy::First,
        pad: true,
    };
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let moe = config(router()).init(&builder).unwrap();
    let own = RankTokens::all([BATCH, SEQ], 1);
    let routing = capacity.apply(moe.router.forward(input(), None, &whole()), &own);
    assert_eq!(routing.rows_per_expert, Some(BATCH * SEQ * 3 / EXPERTS));
    // An expert has each token at most once.
    let huge = Capacity {
        factor: 1e300,
        ..capacity
    };
    assert_eq!(huge.of(BATCH * SEQ, 2, EXPERTS), BATCH * SEQ);
}

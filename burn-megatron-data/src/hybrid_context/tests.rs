//! Checks properties of plans for random sample lengths.

use proptest::prelude::*;

use super::*;

const TOKENS: usize = 2048;

fn config(ranks: usize) -> HybridContextConfig {
    HybridContextConfig {
        ranks,
        max_seqlen_per_dp_cp_rank: TOKENS,
        multiple: 1,
        // A layer of 4096 features.
        flops: SampleFlops {
            per_token: 2.4e9,
            per_pair: 9.8e4,
        },
    }
}

/// Checks that each sample is in one slot, that groups are aligned powers of two with room for their samples, and that
/// every rank is in one group of each micro-batch.
fn check(config: &HybridContextConfig, lengths: &[usize], plan: &HybridContextPlan) {
    let mut times = vec![0; lengths.len()];
    for micro_batch in 0..plan.micro_batches() {
        let mut next = 0;
        for slot in plan.slots(micro_batch) {
            let size = slot.ranks.len();
            assert_eq!(slot.ranks.start, next, "ranks in order, without gaps");
            assert!(
                size.is_power_of_two() && next.is_multiple_of(size),
                "{slot:?}"
            );
            assert!(!slot.samples.is_empty() || size == 1, "{slot:?}");
            let tokens = slot.samples.iter().map(|at| padded(lengths[*at], size));
            let tokens = tokens.sum::<usize>();
            assert!(
                tokens <= size * config.max_seqlen_per_dp_cp_rank,
                "{slot:?}"
            );
            slot.samples.iter().for_each(|at| times[*at] += 1);
            next = slot.ranks.end;
        }
        assert_eq!(next, config.ranks);
    }
    assert!(times.iter().all(|times| *times == 1), "{times:?}");
    for rank in 0..config.ranks {
        assert_eq!(plan.of_rank(rank).count(), plan.micro_batches());
        // The groups of a rank never become larger. A rank that waits for a group has therefore already been in all
        // larger groups that contain it.
        let sizes: Vec<_> = plan.of_rank(rank).map(|slot| slot.ranks.len()).collect();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
    }
}

fn ranks() -> impl Strategy<Value = usize> {
    (2..=6u32).prop_map(|power| 1 << power)
}

/// Generates sample lengths with a lognormal distribution, with at least 64 tokens per rank.
fn lognormal() -> impl Strategy<Value = (usize, Vec<usize>)> {
    // The sum of twelve uniformly distributed numbers is approximately normally distributed.
    let normal = prop::array::uniform12(0.0..1.0f64).prop_map(|x| x.iter().sum::<f64>() - 6.0);
    let normals = prop::collection::vec(normal, 1..200);
    (ranks(), normals).prop_map(|(ranks, normals)| {
        let length = |z: f64| ((256 * ranks) as f64 * (1.2 * z).exp()) as usize;
        let lengths = normals.into_iter().map(length);
        let lengths = lengths.map(|length| length.clamp(64 * ranks, TOKENS * ranks));
        (ranks, lengths.collect())
    })
}

proptest! {
    #[test]
    fn lognormal_lengths_are_balanced((ranks, lengths) in lognormal()) {
        let plan = config(ranks).plan(&lengths).unwrap();
        check(&config(ranks), &lengths, &plan);
        prop_assert!(plan.imbalance() <= 0.1, "{}", plan.imbalance());
        prop_assert_eq!(config(ranks).plan(&lengths).unwrap(), plan);
    }

    #[test]
    fn any_lengths_have_a_plan(
        ranks in ranks(),
        multiple in 1..5usize,
        lengths in prop::collection::vec(prop_oneof![1..64usize, 1..4 * TOKENS], 0..100),
    ) {
        let config = HybridContextConfig {
            multiple,
            max_seqlen_per_dp_cp_rank: TOKENS.next_multiple_of(12),
            ..config(ranks)
        };
        let plan = config.plan(&lengths).unwrap();
        check(&config, &lengths, &plan);
    }

    #[test]
    fn equal_lengths_are_balanced(ranks in ranks(), count in 1..300usize, each in 64..=TOKENS) {
        let lengths = vec![each * ranks; count];
        let plan = config(ranks).plan(&lengths).unwrap();
        check(&config(ranks), &lengths, &plan);
        prop_assert!(plan.imbalance() <= 0.1, "{}", plan.imbalance());
    }

    #[test]
    fn one_long_sample_is_on_all_ranks(
        ranks in ranks(),
        short in prop::collection::vec(256..512usize, 0..20),
    ) {
        let mut lengths = short;
        lengths.push(ranks * TOKENS);
        let plan = config(ranks).plan(&lengths).unwrap();
        check(&config(ranks), &lengths, &plan);
        let long = lengths.len() - 1;
        let slots = plan.slots(0);
        prop_assert_eq!((slots[0].ranks.clone(), &slots[0].samples), (0..ranks, &vec![long]));
        prop_assert!(plan.imbalance() <= 0.1, "{}", plan.imbalance());
    }
}

#[test]
fn short_samples_stay_on_one_rank() {
    // Each of the four ranks has the same number of samples of each length. The number of micro-batches is the minimum
    // for these tokens.
    let lengths: Vec<_> = (0..32).map(|at| 512 + 256 * (at / 16)).collect();
    let plan = config(4).plan(&lengths).unwrap();
    check(&config(4), &lengths, &plan);
    let slots = (0..plan.micro_batches()).flat_map(|micro_batch| plan.slots(micro_batch));
    assert!(slots.clone().all(|slot| slot.ranks.len() == 1));
    assert_eq!(plan.imbalance(), 0.0);
    let tokens: usize = lengths.iter().sum();
    assert_eq!(plan.micro_batches(), tokens.div_ceil(4 * TOKENS).max(3));
}

#[test]
fn no_samples_need_no_micro_batch() {
    let plan = config(8).plan(&[]).unwrap();
    assert_eq!((plan.micro_batches(), plan.imbalance()), (0, 0.0));
    // A sample that cannot be split leaves the other ranks idle.
    let plan = config(8).plan(&[1]).unwrap();
    check(&config(8), &[1], &plan);
    assert_eq!((plan.micro_batches(), plan.imbalance()), (1, 1.0));
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let error = |config: HybridContextConfig, lengths: &[usize]| {
        config.plan(lengths).unwrap_err().to_string()
    };
    insta::assert_snapshot!(
        error(config(4), &[5, 9001]),
        @"sample 1 has 9001 tokens, and 4 ranks of context x data hold 8192 with max_seqlen_per_dp_cp_rank = 2048: use \
          shorter samples, max_seqlen_per_dp_cp_rank = 2252 or more, or 8 ranks"
    );
    assert!(config(8).plan(&[5, 9001]).is_ok());
    let longer = HybridContextConfig {
        max_seqlen_per_dp_cp_rank: 2252,
        ..config(4)
    };
    assert!(longer.plan(&[5, 9001]).is_ok());
    assert!(error(config(6), &[5]).ends_with("expected a power of two, such as 4 or 8"));
    assert!(error(config(0), &[5]).ends_with("expected a power of two, such as 1"));
    let odd = HybridContextConfig {
        max_seqlen_per_dp_cp_rank: 100,
        multiple: 3,
        ..config(4)
    };
    assert!(error(odd, &[5]).ends_with("expected a multiple of 6, such as 96"));
    assert!(error(config(4), &[3, 0]).starts_with("sample 1 has no tokens"));
    let free = SampleFlops {
        per_token: 0.0,
        per_pair: f64::NAN,
    };
    let free = HybridContextConfig {
        flops: free,
        ..config(4)
    };
    assert!(matches!(free.plan(&[5]), Err(HybridContextError::Flops(_))));
}

//! Tests that `verify` finds faults of context parallelism in a small model.

use burn_megatron_verify::faults::context::{ContextFault, ContextSubject};
use burn_megatron_verify::{Comparison, VerifyOptions, verify};

/// Asserts that the model passes without the fault, and that it fails with the fault in all columns of results.
#[track_caller]
fn assert_fails(fault: ContextFault) -> Comparison {
    assert_fails_in("cp2-ring-dp1", fault)
}

#[track_caller]
fn assert_fails_in(layout: &str, fault: ContextFault) -> Comparison {
    let options = VerifyOptions::default();
    let run = |fault| {
        let layout = layout.parse().unwrap();
        verify(&ContextSubject(fault), &[layout], &options).unwrap()
    };
    let sound = run(None);
    assert!(sound.passes(), "without the fault:\n{sound}");
    let report = run(Some(fault));
    let comparison = report.rows()[0].1.clone();
    let results = [
        "loss",
        "parameter grad",
        "last grad",
        "grad norm",
        "final weights",
    ];
    assert_eq!(comparison.failing(options.tolerance), results, "{report}");
    comparison
}

#[test]
fn results_that_are_merged_without_rescaling() {
    assert_fails(ContextFault::MergedWithoutRescaling);
}

/// The first forward pass is correct.
#[test]
fn gradients_of_keys_and_values_that_stop_one_rank_short() {
    let found = assert_fails(ContextFault::GradientsOneHopShort);
    assert!(found.loss.relative < 1e-2, "{}", found.loss.relative);
}

#[test]
fn positions_of_the_part() {
    assert_fails(ContextFault::LocalPositions);
}

#[test]
fn a_loss_that_is_averaged_per_rank() {
    assert_fails(ContextFault::LossPerRank);
}

#[test]
fn targets_that_are_shifted_after_the_cut() {
    assert_fails(ContextFault::TargetsOfThePart);
}

/// Two ranks share a document, and each of them attends as if it had the whole document.
#[test]
fn a_group_of_another_size_than_that_of_the_document() {
    assert_fails_in("hybrid8-dp2-mb1", ContextFault::GroupOfOne);
}

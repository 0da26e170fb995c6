//! Tests that `verify` finds injected faults of a model in the expected columns.

use burn_megatron::nn::fp8::Fp8Recipe;
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::faults::decoder::{Fault, FaultySubject};
use burn_megatron_verify::{Comparison, VerifyOptions, VerifyReport, verify};

/// All columns except initial weights and replicas. A wrong forward or backward pass affects these columns.
const RESULTS: [&str; 5] = [
    "loss",
    "parameter grad",
    "last grad",
    "grad norm",
    "final weights",
];

/// Asserts that the model passes without `fault`, and fails with it in exactly these columns. The fault must also
/// fail with FP8. Delayed scaling does not depend on the micro-batches. With it, the same columns must fail if every
/// value has the same code as on one rank.
#[track_caller]
fn assert_fails(fault: Fault, layout: &str, columns: &[&str]) -> Comparison {
    for recipe in ["delayed", "current", "blockwise", "mxfp8"] {
        let fp8 = Some(recipe.parse().unwrap());
        let report = run(fault, layout, fp8);
        let (_, found) = &report.rows()[0];
        let bound = report.bounds().next().unwrap();
        if recipe == "delayed" && bound == VerifyOptions::default().tolerance {
            assert_eq!(found.failing(bound), columns, "{recipe}\n{report}");
        }
    }
    let report = run(fault, layout, None);
    let comparison = report.rows()[0].1.clone();
    let failing = comparison.failing(VerifyOptions::default().tolerance);
    assert_eq!(failing, columns, "{fault:?}\n{report}");
    comparison
}

/// Returns the report of a model with the fault. Asserts that the model passes without it.
#[track_caller]
fn run(fault: Fault, layout: &str, fp8: Option<Fp8Recipe>) -> VerifyReport {
    let options = VerifyOptions {
        // Faults of replicas are compared with the same micro-batches on one rank.
        same_micro_batches: fp8.is_some_and(|recipe| recipe.name() != "delayed"),
        ..VerifyOptions::default()
    };
    let run = |fault| {
        let layout = layout.parse().unwrap();
        let subject = FaultySubject {
            fault,
            fp8,
            ..FaultySubject::default()
        };
        verify(&subject, &[layout], &options).unwrap()
    };
    let sound = run(None);
    assert!(sound.passes(), "without the fault, {fp8:?}:\n{sound}");
    let report = run(Some(fault));
    println!("{fault:?}, {fp8:?}\n{report}\n");
    assert!(!report.passes(), "{fault:?}, {fp8:?}\n{report}");
    assert!(report.to_string().contains("FAIL"), "{report}");
    report
}

#[track_caller]
fn assert_fails_with_replicas(fault: Fault, layout: &str, columns: &[&str]) -> Comparison {
    assert_fails(fault, layout, &[columns, &["replicas"]].concat())
}

/// The gradient below the layer is a partial sum that differs between ranks.
#[test]
fn a_missing_sum_in_the_backward_of_one_layer() {
    let found = assert_fails_with_replicas(Fault::NoBackwardSum, "tp2-dp1", &RESULTS);
    let below = [
        "mlp_norm.bias",
        "mlp_norm.weight",
        "norm.weight",
        "positions.weight",
    ];
    assert_eq!(found.unequal_replicas, below);
    // The first forward pass is correct.
    assert!(found.loss.relative < 1e-2);
    // Replicated parameters below the layer are summed over the sequence shards.
    assert_fails(Fault::NoBackwardSum, "tp2-sp-dp1", &RESULTS);
}

#[test]
fn a_missing_sum_in_the_forward_of_one_layer() {
    // Replicas agree, since the loss and the gradients that reach them are sums over the ranks.
    assert_fails(Fault::NoForwardSum, "tp2-dp1", &RESULTS);
    assert_fails(Fault::NoForwardSum, "tp2-sp-dp1", &RESULTS);
}

/// The first forward pass is correct. Only the gradient of the embedding is wrong.
#[test]
fn a_sum_of_a_complete_gradient() {
    let found = assert_fails(Fault::SummedTwice, "tp2-dp1", &RESULTS);
    assert_eq!(found.gradients.path.as_deref(), Some("embedding.weight"));
    assert!(
        (found.gradients.relative - 1.0).abs() < 1e-9,
        "twice as large"
    );
}

/// The bias is 0 at the start, so the first loss and its other gradients are correct.
#[test]
fn a_bias_that_every_rank_adds() {
    let columns = [
        "loss",
        "parameter grad",
        "last grad",
        "grad norm",
        "final weights",
    ];
    let found = assert_fails(Fault::BiasBeforeSum, "tp2-dp1", &columns);
    assert_eq!(found.gradients.path.as_deref(), Some("down.bias"));
    assert!(
        (found.gradients.relative - 1.0).abs() < 1e-9,
        "twice as large"
    );
}

#[test]
fn a_norm_whose_gradient_is_not_summed_under_sequence_parallelism() {
    let columns = [
        "loss",
        "parameter grad",
        "last grad",
        "grad norm",
        "final weights",
    ];
    let found = assert_fails_with_replicas(Fault::NormNotSummed, "tp2-sp-dp1", &columns);
    assert_eq!(found.gradients.path.as_deref(), Some("norm.weight"));
    assert_eq!(found.unequal_replicas, ["norm.weight"]);
}

/// Four ranks share two groups of keys and values.
#[test]
fn shared_keys_and_values_whose_gradients_are_not_summed() {
    let columns = [
        "loss",
        "parameter grad",
        "last grad",
        "grad norm",
        "final weights",
    ];
    let found = assert_fails_with_replicas(Fault::SharedNotSummed, "tp4-dp1", &columns);
    assert_eq!(
        found.gradients.path.as_deref(),
        Some("attention.qkv.weight")
    );
    assert_eq!(found.unequal_replicas, ["attention.qkv.weight"]);
}

/// The gradients are correct. Their norm is too large and clips them too much, which affects later steps.
#[test]
fn a_parameter_that_the_norm_counts_twice() {
    let columns = ["loss", "last grad", "grad norm", "final weights"];
    let found = assert_fails_with_replicas(Fault::CountedTwice, "tp2-dp1", &columns);
    assert_eq!(found.unequal_replicas, ["norm.weight"]);
}

#[test]
fn a_norm_that_each_rank_takes_of_its_own_part() {
    let columns = ["loss", "last grad", "grad norm", "final weights"];
    let found = assert_fails_with_replicas(Fault::LocalNorm, "tp2-dp1", &columns);
    let expected = [
        "down.bias",
        "mlp_norm.bias",
        "mlp_norm.weight",
        "norm.weight",
        "positions.weight",
    ];
    assert_eq!(
        found.unequal_replicas, expected,
        "each rank clips by another factor"
    );
}

/// Affects every split parameter, and no other parameter.
#[test]
fn one_seed_for_all_parts() {
    let columns = [&["initial weights"], &RESULTS[..]].concat();
    let found = assert_fails_with_replicas(Fault::OneSeed, "tp2-dp1", &columns);
    let split = [
        "attention.output.weight",
        "attention.qkv.weight",
        "down.weight",
        "embedding.weight",
        "output.weight",
        "up.weight",
    ];
    assert_eq!(found.unequal_weights, split);
    // Padding is no longer at its place.
    assert_eq!(
        found.unequal_replicas,
        ["embedding.weight", "output.weight"]
    );
}

#[test]
fn a_dropout_mask_of_its_own_on_each_rank() {
    let found = assert_fails_with_replicas(Fault::MaskPerRank, "tp2-dp1", &RESULTS);
    let replicated = ["mlp_norm.weight", "norm.weight", "positions.weight"];
    for path in replicated {
        assert!(
            found.unequal_replicas.iter().any(|other| other == path),
            "{path}"
        );
    }
}

#[test]
fn one_dropout_mask_for_all_parts_of_the_sequence() {
    assert_fails(Fault::MaskOfFirstPart, "tp2-sp-dp1", &RESULTS);
}

#[test]
fn the_same_positions_for_all_parts_of_the_sequence() {
    let found = assert_fails_with_replicas(Fault::PositionsOfFirstPart, "tp2-sp-dp1", &RESULTS);
    assert_eq!(found.unequal_replicas, ["positions.weight"]);
}

/// All other columns are correct, since the data-parallel wrapper broadcasts the weights of the first rank.
#[test]
fn a_rank_that_starts_from_other_weights() {
    let columns = ["initial weights"];
    assert_fails_with_replicas(Fault::OwnWeights, "tp1-dp2", &columns);
}

#[test]
fn gradients_that_are_not_summed_over_the_data_axis() {
    let columns = [
        "loss",
        "parameter grad",
        "last grad",
        "grad norm",
        "final weights",
    ];
    assert_fails_with_replicas(Fault::NoDataSum, "tp1-dp2", &columns);
}

#[test]
fn ranks_that_read_the_same_samples() {
    assert_fails(Fault::SameSamples, "tp1-dp2", &RESULTS);
}

#[test]
fn a_mean_of_means() {
    assert_fails(Fault::MeanOfMeans, "tp1-dp2", &RESULTS);
}

/// One rank computes all samples at once.
#[test]
fn micro_batches_that_are_divided_by_their_own_tokens() {
    for (fault, least, most) in [
        (Fault::MeanOfMicroBatches, 1e-3, 1.0),
        // Four micro-batches.
        (Fault::SumOfMicroBatches, 2.0, 4.0),
    ] {
        let report = run(fault, "tp1-dp1-mb1", None);
        let found = &report.rows()[0].1;
        assert_eq!(found.failing(VerifyOptions::default().tolerance), RESULTS);
        assert!((least..most).contains(&found.loss.relative), "{report}");
    }
}

#[test]
fn smoothing_over_the_part_of_the_vocabulary_that_a_rank_has() {
    let found = assert_fails_with_replicas(Fault::LocalSmoothing, "tp2-dp1", &RESULTS);
    assert!(!found.unequal_replicas.is_empty());
}

/// The difference is far below the tolerance, but replicas are no longer bit-equal.
#[test]
fn ranks_of_the_data_axis_that_drift_apart() {
    let found = assert_fails_with_replicas(Fault::Drift, "tp1-dp2", &[]);
    assert!(found.final_weights.relative > 0.0);
}

/// The layout causes an error, not a failing row.
#[test]
fn a_layout_that_cannot_be_run() {
    let subject = FaultySubject::default();
    for (layout, message) in [
        (
            "tp3-dp1",
            "heads 4 cannot be split over tensor = 3: expected tensor = 1, 2, 4",
        ),
        (
            "tp1-dp3",
            "samples 4 cannot be split over data = 3: expected data = 1, 2, 4",
        ),
        (
            "tp1-dp1-mb3",
            "4 samples over data = 1 are 4 per rank, not a multiple of the micro-batch size 3: expected 1, 2, 4",
        ),
    ] {
        let run = verify(
            &subject,
            &[layout.parse().unwrap()],
            &VerifyOptions::default(),
        );
        let error = run.unwrap_err().to_string();
        assert!(error.starts_with(&format!("layout {layout}: ")), "{error}");
        assert!(error.contains(message), "{error}");
    }
}

/// Tests chunked exchanges of sequence parallelism. FP8 layers have no chunked exchanges.
#[test]
fn a_chunk_that_is_dropped_or_out_of_order() {
    for (fault, layout) in [
        (Fault::ChunkDropped, "tp2-sp-tpring-dp1"),
        (Fault::ChunksOutOfOrder, "tp2-sp-tpbulk2-dp1"),
    ] {
        let report = run(fault, layout, None);
        let found = report.rows()[0]
            .1
            .failing(VerifyOptions::default().tolerance);
        assert_eq!(found[..5], RESULTS, "{fault:?}\n{report}");
    }
}

/// Returns the columns that fail with a fault under a setting. The model must pass without the fault.
#[track_caller]
fn failing(subject: FaultySubject, layout: &str, options: &VerifyOptions) -> Vec<&'static str> {
    let run = |fault| {
        let subject = FaultySubject { fault, ..subject };
        verify(&subject, &[layout.parse().unwrap()], options).unwrap()
    };
    let sound = run(None);
    assert!(sound.passes(), "{layout}\n{sound}");
    let report = run(subject.fault);
    report.rows()[0].1.failing(options.tolerance)
}

/// One rank computes all samples at once.
#[test]
fn an_epilogue_that_replaces_the_gradient_of_a_bias() {
    let subject = FaultySubject {
        fault: Some(Fault::BiasGradientReplaced),
        epilogues: true,
        ..FaultySubject::default()
    };
    let options = VerifyOptions::default();
    for layout in ["tp1-dp1-mb1", "tp2-sp-dp1-mb2"] {
        assert_eq!(failing(subject, layout, &options), RESULTS, "{layout}");
    }
    // There is one micro-batch.
    assert!(failing(subject, "tp2-dp1", &options).is_empty());
}

/// The first step is correct.
#[test]
fn static_buffers_that_are_not_cleared() {
    let options = VerifyOptions {
        train: TrainConfig {
            cuda_graph: true,
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    let subject = FaultySubject {
        fault: Some(Fault::NotCleared),
        ..FaultySubject::default()
    };
    for layout in ["dp2-mb1", "dp2-mb1-z1"] {
        let columns = ["loss", "last grad", "grad norm", "final weights"];
        assert_eq!(failing(subject, layout, &options), columns, "{layout}");
    }
}

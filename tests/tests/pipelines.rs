//! Tests that every schedule computes the same results as one rank.

use burn_megatron::pipeline::schedule::{ScheduleConfig, ScheduleKind};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama, without_dropout};
use burn_megatron_verify::{Layout, VerifyOptions, observe_layout, verify};

/// Returns the subject with other numbers of layers and samples.
fn sized(subject: TransformerSubject, layers: usize, samples: usize) -> TransformerSubject {
    let config = TransformerConfig {
        layers,
        ..subject.config
    };
    TransformerSubject {
        config,
        samples,
        ..subject
    }
}

fn gpt(layers: usize, samples: usize) -> TransformerSubject {
    sized(small_gpt(), layers, samples)
}

fn untied_gpt(layers: usize, samples: usize) -> TransformerSubject {
    let mut subject = without_dropout(gpt(layers, samples));
    subject.config.tied = false;
    subject
}

fn llama(layers: usize, samples: usize) -> TransformerSubject {
    sized(small_llama(), layers, samples)
}

fn tied_llama(layers: usize, samples: usize) -> TransformerSubject {
    let mut subject = without_dropout(llama(layers, samples));
    subject.config.tied = true;
    subject
}

fn assert_passes(subject: &TransformerSubject, layouts: &[&str]) {
    assert_split_passes(subject, layouts, &LayerSplit::Even);
}

fn assert_split_passes(subject: &TransformerSubject, layouts: &[&str], split: &LayerSplit) {
    let mut layouts: Vec<Layout> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    for layout in &mut layouts {
        layout.parallel.split = split.clone();
    }
    let options = VerifyOptions {
        steps: 2,
        ..VerifyOptions::default()
    };
    let report = verify(subject, &layouts, &options).unwrap();
    println!("{report}");
    assert!(report.passes(), "\n{report}");
}

/// Returns every kind of schedule over `ranks` ranks, with micro-batches of one and of two samples.
fn every_kind(ranks: usize) -> Vec<String> {
    let kinds = ScheduleKind::ALL.into_iter().flat_map(|kind| {
        let kind = ScheduleConfig::new(kind, ranks, 1);
        [1, 2].map(|micro_batch| {
            let stages = kind.virtual_stages;
            format!("pp{ranks}-mb{micro_batch}/{}/v{stages}", kind.kind)
        })
    });
    let groups = format!("pp{ranks}-mb1/interleaved:{}/v2", 2 * ranks);
    kinds.chain([groups]).collect()
}

#[test]
fn two_ranks() {
    let layouts = every_kind(2);
    let layouts: Vec<&str> = layouts.iter().map(String::as_str).collect();
    assert_passes(&gpt(4, 4), &layouts);
    assert_passes(&untied_gpt(4, 4), &layouts);
    assert_passes(&llama(4, 4), &layouts);
    assert_passes(&tied_llama(4, 4), &layouts);
    assert_passes(&gpt(8, 4), &["pp2-mb1/interleaved/v4"]);
}

#[test]
fn four_ranks() {
    let layouts = every_kind(4);
    let layouts: Vec<&str> = layouts.iter().map(String::as_str).collect();
    assert_passes(&gpt(8, 8), &layouts);
    assert_passes(&llama(8, 8), &layouts);
}

#[test]
fn micro_batches_that_are_no_multiple_of_the_ranks() {
    assert_passes(
        &gpt(4, 3),
        &[
            "pp2-mb1/gpipe",
            "pp2-mb1/1f1b",
            "pp2-mb1/zb-h1",
            "pp2-mb1/interleaved:3/v2",
            "pp2-mb1/zb-v",
            "pp2-mb1/dualpipe-v",
        ],
    );
    assert_passes(
        &llama(8, 6),
        &[
            "pp4-mb1/gpipe",
            "pp4-mb1/1f1b",
            "pp4-mb1/zb-h1",
            "pp4-mb1/interleaved:6/v2",
            "pp4-mb1/zb-v",
            "pp4-mb1/dualpipe-v",
        ],
    );
}

#[test]
fn fewer_micro_batches_than_ranks() {
    assert_passes(
        &gpt(8, 2),
        &[
            "pp4-mb2/gpipe",
            "pp4-mb1/1f1b",
            "pp4-mb1/zb-h1",
            "pp4-mb1/zb-v",
            "pp4-mb2/dualpipe-v",
        ],
    );
}

#[test]
fn stages_that_are_not_even() {
    let ends = |first, last| LayerSplit::Ends { first, last };
    let layout = |text: &str| LayerSplit::Layout(text.into());
    let cases: [(LayerSplit, &[&str]); 4] = [
        (ends(Some(1), None), &["pp4-mb1/1f1b", "pp4-mb2/zb-h1"]),
        (ends(None, Some(1)), &["pp2-mb1/interleaved/v2"]),
        (ends(Some(2), Some(1)), &["tp2-sp-pp2-dp2-mb1/zb-v"]),
        // The first stage has only the embedding, and the last stage has only the loss.
        (layout("E|ttt|tttt|L"), &["pp4-mb1/1f1b", "pp2-mb1/zb-v"]),
    ];
    for (split, layouts) in cases {
        for subject in [gpt(7, 4), llama(7, 4)] {
            assert_split_passes(&subject, layouts, &split);
        }
    }
}

#[test]
fn with_tensor_sequence_and_data() {
    let layouts = [
        "tp2-pp2-mb1/1f1b",
        "tp2-sp-pp2-dp2-mb1/zb-h1",
        "pp2-dp2-mb1/gpipe",
        "tp2-sp-pp2-mb2/interleaved/v2",
        "tp2-pp2-dp2-mb1/zb-v",
        "tp2-sp-pp2-dp2-mb1/dualpipe-v",
    ];
    assert_passes(&gpt(4, 4), &layouts);
    assert_passes(&llama(4, 4), &layouts);
}

#[test]
fn four_ranks_with_tensor_sequence_and_data() {
    let layouts = [
        "tp2-sp-pp4-dp2-mb1/1f1b",
        "pp4-dp2-mb1/interleaved/v2",
        "tp2-sp-pp4-mb2/zb-v",
    ];
    assert_passes(&gpt(8, 8), &layouts);
}

/// Returns the bits of the weights after 20 steps.
fn trained(subject: &TransformerSubject, layout: &str) -> Vec<Vec<u64>> {
    let options = VerifyOptions {
        steps: 20,
        ..VerifyOptions::default()
    };
    let ranks = observe_layout(subject, &layout.parse().unwrap(), &options).unwrap();
    let mut parameters: Vec<(&String, &Vec<f64>)> = ranks
        .iter()
        .flat_map(|rank| rank.paths.iter().zip(&rank.final_weights))
        .collect();
    parameters.sort_by_key(|(path, _)| *path);
    let moved = ranks
        .iter()
        .any(|rank| rank.initial_weights != rank.final_weights);
    assert!(moved, "{layout} trained nothing");
    parameters
        .into_iter()
        .map(|(_, values)| values.iter().map(|x| x.to_bits()).collect())
        .collect()
}

fn assert_same_bits(subject: &TransformerSubject, layouts: &[&str]) {
    let first = trained(subject, layouts[0]);
    for layout in &layouts[1..] {
        assert!(
            trained(subject, layout) == first,
            "{layout} is not bit-identical to {}",
            layouts[0]
        );
    }
}

// With all of these schedules, each stage accumulates its gradients from the first micro-batch to the last. Layouts
// with other placements sum the gradient norm in a different order, and are not compared.

#[test]
fn one_stage_per_rank_gives_the_same_bits_under_every_schedule() {
    let kinds = ["pp2-mb1/gpipe", "pp2-mb1/1f1b", "pp2-mb1/zb-h1"];
    assert_same_bits(&untied_gpt(2, 4), &kinds);
    assert_same_bits(&tied_llama(2, 4), &kinds);
    let shared = [
        "tp2-sp-pp2-dp2-mb1/gpipe",
        "tp2-sp-pp2-dp2-mb1/1f1b",
        "tp2-sp-pp2-dp2-mb1/zb-h1",
    ];
    assert_same_bits(&gpt(2, 4), &shared);
}

#[test]
fn groups_of_any_size_give_the_same_bits() {
    for subject in [gpt(4, 8), llama(4, 8)] {
        let groups = ["pp2-dp2-mb1/interleaved/v2", "pp2-dp2-mb1/interleaved:4/v2"];
        assert_same_bits(&subject, &groups);
    }
}

#[test]
fn both_schedules_of_a_v_give_the_same_bits() {
    for subject in [gpt(4, 8), llama(4, 8)] {
        assert_same_bits(&subject, &["pp2-dp2-mb1/zb-v", "pp2-dp2-mb1/dualpipe-v"]);
    }
}

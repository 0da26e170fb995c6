//! Tests that every layout computes the same results as one rank.

use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::nn::QkNorm;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama, without_dropout};
use burn_megatron_verify::{Layout, VerifyOptions, verify};

fn assert_passes(subject: &TransformerSubject) {
    assert_pass(subject, &Layout::standard());
}

fn assert_pass(subject: &TransformerSubject, layouts: &[Layout]) {
    let report = verify(subject, layouts, &VerifyOptions::default()).unwrap();
    println!("{report}");
    assert!(report.passes(), "\n{report}");
}

#[test]
fn gpt_tied() {
    assert_passes(&small_gpt());
}

#[test]
fn gpt_untied() {
    let mut subject = without_dropout(small_gpt());
    subject.config.tied = false;
    subject.config.label_smoothing = 0.1;
    assert_passes(&subject);
}

#[test]
fn llama_untied_with_fewer_groups_than_ranks() {
    assert_passes(&small_llama());
}

#[test]
fn llama_tied_with_one_group() {
    let mut subject = without_dropout(small_llama());
    subject.config.tied = true;
    subject.config.groups = Some(1);
    assert_passes(&subject);
}

/// Features of Qwen 2 and 3 and Mistral: biases of queries, keys and values only, QK norms, and a window. With four
/// ranks, two ranks share the keys of each group.
#[test]
fn llama_with_normalised_heads_and_a_window() {
    let mut subject = small_llama();
    subject.config.qkv_bias = Some(true);
    subject.config.qk_norm = Some(QkNorm::Heads);
    subject.config.window = Some(3);
    assert_passes(&subject);
    subject.kernels = KernelChoices::all(KernelChoice::Unfused);
    assert_pass(&subject, &Layout::standard()[..2]);
}

/// Returns the subject with eight layers and samples, so that every pipeline and every group of ranks has some of
/// them.
fn deeper(mut subject: TransformerSubject) -> TransformerSubject {
    subject.config.layers = 8;
    subject.samples = 8;
    subject
}

#[test]
fn gpt_tied_sharded() {
    assert_pass(&deeper(without_dropout(small_gpt())), &Layout::sharded());
}

#[test]
fn llama_untied_sharded() {
    assert_pass(&deeper(small_llama()), &Layout::sharded());
}

/// Tests biases and dropout, and norms of heads, together with all other axes.
#[test]
fn exchanges_of_the_tensor_axis_in_chunks() {
    let mut llama = deeper(small_llama());
    llama.config.context = 16;
    assert_pass(&llama, &Layout::overlaps());
    let mut gpt = small_gpt();
    gpt.config.context = 16;
    let layouts = ["tp2-sp-tpring-dp1", "tp4-sp-tpbulk2-dp1"];
    let layouts = layouts.map(|text| text.parse().unwrap());
    assert_pass(&gpt, &layouts);
}

//! Every layout computes what one rank computes.

use burn_megatron::verify::{Layout, Options, verify};
use burn_megatron_models::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama};

fn assert_passes(subject: &TransformerSubject) {
    let report = verify(subject, &Layout::standard(), &Options::default()).unwrap();
    println!("{report}");
    assert!(report.passes(), "\n{report}");
}

#[test]
fn gpt_tied() {
    assert_passes(&small_gpt());
}

#[test]
fn gpt_untied() {
    let mut subject = small_gpt();
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
    let mut subject = small_llama();
    subject.config.tied = true;
    subject.config.groups = Some(1);
    assert_passes(&subject);
}

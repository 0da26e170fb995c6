//! Every schedule computes what one rank computes.

use burn_megatron::verify::{Layout, Options, verify};
use burn_megatron_models::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama};

fn assert_passes(subject: &TransformerSubject, layouts: &[&str]) {
    let layouts: Vec<Layout> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    let report = verify(subject, &layouts, &Options::default()).unwrap();
    println!("{report}");
    assert!(report.passes(), "\n{report}");
}

fn eight_layers(mut subject: TransformerSubject) -> TransformerSubject {
    subject.config.layers = 8;
    subject.samples = 8;
    subject
}

#[test]
fn two_ranks() {
    assert_passes(
        &eight_layers(small_gpt()),
        &[
            "pp2-mb1/gpipe",
            "pp2-mb1/1f1b",
            "pp2-mb1/zb-h1",
            "pp2-mb1/interleaved/v2",
        ],
    );
}

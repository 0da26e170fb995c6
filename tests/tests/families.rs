//! Tests the layers of OLMoE, gpt-oss and Gemma: every layout computes the same results as one rank.

use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gemma, small_gpt_oss, small_olmoe};
use burn_megatron_verify::{Layout, VerifyOptions, verify};

fn assert_passes(subject: &TransformerSubject, layouts: &[&str]) {
    let layouts: Vec<Layout> = layouts.iter().map(|name| name.parse().unwrap()).collect();
    let report = verify(subject, &layouts, &VerifyOptions::default()).unwrap();
    println!("{report}");
    assert!(report.passes(), "\n{report}");
}

fn packed(subject: &TransformerSubject) -> TransformerSubject {
    TransformerSubject {
        packed: true,
        ..subject.clone()
    }
}

fn unfused(subject: &TransformerSubject) -> TransformerSubject {
    TransformerSubject {
        kernels: KernelChoices::all(KernelChoice::Unfused),
        ..subject.clone()
    }
}

/// With four tensor ranks, two ranks share the keys of each group.
#[test]
fn olmoe() {
    let subject = small_olmoe();
    assert_passes(
        &subject,
        &[
            "tp2-dp1-mb2",
            "tp4-sp-dp1-mb2",
            "tp2-sp-ep2-etp1-dp2-mb1-z3",
            "ep2-pp2-dp2-mb1/1f1b",
            "tp2-sp-cp2-ring-dp1-mb2",
        ],
    );
    assert_passes(&packed(&subject), &["tp2-dp1-mb2"]);
    assert_passes(&unfused(&subject), &["tp2-dp1-mb2"]);
}

#[test]
fn gpt_oss() {
    let subject = small_gpt_oss();
    assert_passes(
        &subject,
        &[
            "tp2-dp1-mb2",
            "tp4-sp-dp1-mb2",
            "tp2-sp-ep2-etp1-dp2-mb1-z1",
            "ep2-etp2-dp4-mb1",
            "pp2-dp1-mb1/1f1b",
            "cp2-ring-dp1-mb2",
            "cp2-allgather-dp1-mb2",
            "tp2-sp-cp2-alltoall-dp1-mb2",
            "cp4-usp2-dp1-mb2",
        ],
    );
    assert_passes(&packed(&subject), &["tp2-dp1-mb2", "cp2-ring-dp1-mb2"]);
    assert_passes(
        &unfused(&subject),
        &[
            "tp2-dp1-mb2",
            "cp2-allgather-dp1-mb2",
            "cp2-alltoall-dp1-mb2",
        ],
    );
}

#[test]
fn gemma() {
    let subject = small_gemma();
    assert_passes(
        &subject,
        &[
            "tp2-dp1-mb2",
            "tp4-sp-dp1-mb2",
            "tp2-sp-dp2-mb1-z3",
            "pp2-dp1-mb1/1f1b",
            "cp2-allgather-dp1-mb2",
            "tp2-sp-cp2-alltoall-dp1-mb2",
        ],
    );
    assert_passes(&packed(&subject), &["tp2-dp1-mb2", "cp2-allgather-dp1-mb2"]);
    assert_passes(&unfused(&subject), &["tp2-sp-dp1-mb2"]);
}

//! Tests runs that are saved in one layout and loaded in another layout: bit-equal tensors, and the same next loss.

use std::path::PathBuf;

use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_tests::tolerance::{CLOSE, assert_near, assert_steps_near};

use super::run::{Case, Folder, assert_same};

/// Layouts with tensor, sequence, context, data and pipeline parallelism, every ZeRO stage, hybrid sharding, and
/// virtual stages.
const LAYOUTS: [&str; 11] = [
    "tp1-mb4",
    "tp4-mb4",
    "dp2-mb2-z1",
    "dp3-mb2-z3",
    "tp2-sp-dp2-mb2-z2",
    "dp4-mb1-z3-hsdp2",
    "pp4-mb2/1f1b",
    "pp2-mb2/interleaved/v2",
    "tp2-pp2-dp2-mb1-z1/1f1b",
    "pp2-mb2/zb-v",
    "tp2-sp-cp2-ring-dp2-mb2-z1",
];

fn every_pair(case: &Case, layouts: &[&str]) {
    let folder = Folder::new();
    let cases: Vec<_> = layouts.iter().map(|layout| case.layout(layout)).collect();
    let saved = |(number, case): (usize, &Case)| -> (PathBuf, f64) {
        let path = folder.join(&format!("from-{number}"));
        case.run(None, 3, Some(&path));
        let next = case.pass_on(&path, &folder.join(&format!("again-{number}")));
        (path, next)
    };
    let saved: Vec<_> = cases.iter().enumerate().map(saved).collect();
    for (from, (path, loss)) in saved.iter().enumerate() {
        for (to, case) in cases.iter().enumerate() {
            let name = format!("{} to {}", layouts[from], layouts[to]);
            let passed = folder.join(&format!("from-{from}-to-{to}"));
            let next = case.pass_on(path, &passed);
            assert_same(&name, path, &passed);
            assert_near(&name, next, *loss, CLOSE);
        }
    }
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn every_pair_of_layouts_of_a_llama_with_few_groups() {
    every_pair(&Case::llama("tp1"), &LAYOUTS);
}

#[test]
fn every_pair_of_layouts_of_a_tied_gpt_with_a_padded_vocabulary() {
    // The embedding is on one stage, on both ends, and sharded.
    let layouts: Vec<_> = LAYOUTS.into_iter().skip(1).step_by(2).collect();
    every_pair(&Case::gpt("tp1"), &layouts);
}

#[test]
fn every_pair_of_layouts_of_experts_with_biases() {
    let layouts = [
        "tp1-mb4",
        "tp1-ep4-dp4-mb1-z1",
        "tp2-sp-ep2-etp1-dp2-mb2-z3",
        "tp1-cp2-ep2-dp1-mb4",
        "tp1-ep2-pp2-dp2-mb2-z2/1f1b",
    ];
    every_pair(&Case::experts("tp1"), &layouts);
}

/// Every rank has the scales and histories of all experts.
#[test]
fn every_pair_of_layouts_of_experts_in_8_bits() {
    let mut case = Case::experts("tp1");
    case.fp8 = Fp8Config {
        recipe: "delayed".parse().ok(),
        ..Fp8Config::default()
    };
    let layouts = [
        "tp1-mb4",
        "tp1-ep2-dp4-mb1-z1",
        "tp2-sp-ep2-etp1-pp2-dp1-mb2/1f1b",
    ];
    every_pair(&case, &layouts);
}

/// One layer on the first stage and three layers on the second stage, and vice versa.
#[test]
fn uneven_stages() {
    let split = |first, last| LayerSplit::Ends { first, last };
    let layout = "pp2-dp2-mb2-z2/1f1b";
    for case in [Case::llama(layout), Case::gpt(layout)] {
        let folder = Folder::new();
        let [one, two] =
            [split(Some(1), None), split(None, Some(1))].map(|split| case.split(split));
        let [from, to] = ["from", "to"].map(|name| folder.join(name));
        one.run(None, 3, Some(&from));
        let a = one.pass_on(&from, &folder.join("same"));
        let b = two.pass_on(&from, &to);
        assert_same("uneven stages", &from, &to);
        assert_near("uneven stages", b, a, CLOSE);
    }
}

/// The next losses equal the losses of a run without a save.
#[test]
fn another_layout_goes_on_as_the_first_one_would() {
    let folder = Folder::new();
    let from = folder.join("from");
    for (one, layout) in [
        (Case::llama("tp1-mb4"), "tp2-pp2-dp2-mb1-z1/1f1b"),
        (Case::experts("tp1-mb4"), "tp2-sp-ep2-dp2-mb1-z1"),
    ] {
        let whole = one.run(None, 6, None);
        one.run(None, 3, Some(&from));
        let other = one.layout(layout).run(Some(&from), 6, None);
        assert_steps_near(layout, &whole[0].steps[3..], &other[0].steps);
        std::fs::remove_dir_all(&from).unwrap();
    }
}

//! Tests `verify` of models with FP8 layers.

use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel,
};
use burn_megatron::nn::fp8::{Fp8, Fp8Config};
use burn_megatron::nn::{BuildError, ParallelModule};
use burn_megatron_data::Samples;
use burn_megatron_models::Transformer;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama};
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{Layout, Subject, VerifyOptions, observe_layout, verify};

fn with(recipe: &str, subject: TransformerSubject) -> TransformerSubject {
    TransformerSubject {
        fp8: Fp8Config {
            recipe: Some(recipe.parse().unwrap()),
            ..Fp8Config::default()
        },
        ..subject
    }
}

fn layouts(names: &[&str]) -> Vec<Layout> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn options() -> VerifyOptions {
    VerifyOptions {
        same_micro_batches: true,
        steps: 3,
        ..VerifyOptions::default()
    }
}

const RECIPES: [&str; 4] = ["delayed", "current", "blockwise", "mxfp8"];

/// If every value has the same code as on one rank, only the order of sums in f64 differs.
#[test]
fn layouts_compute_what_one_rank_computes_in_8_bits() {
    let layouts = layouts(&[
        "dp2-mb1",
        "dp2-z3",
        "tp2-sp",
        "pp2-mb1/zb-h1",
        "tp2-sp-pp2-dp2-mb1-z1/1f1b",
    ]);
    for recipe in RECIPES {
        for subject in [small_gpt(), small_llama()] {
            let report = verify(&with(recipe, subject), &layouts, &options()).unwrap();
            assert!(report.passes(), "{recipe}\n{report}");
            let blocks = matches!(recipe, "blockwise" | "mxfp8");
            for ((layout, _), bound) in report.rows().iter().zip(report.bounds()) {
                let otherwise = blocks && layout.parallel.tensor > 1;
                assert_eq!(bound > 1e-10, otherwise, "{recipe} {layout}: {bound}");
            }
        }
    }
}

/// Tests the default layouts of the command with one seed, for a recipe with one scale per tensor and for a recipe
/// with one scale per block.
#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn the_default_layouts_pass_in_8_bits() {
    let layouts = [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat();
    let mut subject = small_llama();
    subject.config.layers = 8;
    subject.samples = 8;
    let options = VerifyOptions {
        steps: 2,
        ..options()
    };
    for recipe in ["delayed", "blockwise"] {
        let report = verify(&with(recipe, subject.clone()), &layouts, &options).unwrap();
        assert!(report.passes(), "{recipe}\n{report}");
    }
}

/// Ranks that replicate keys and values quantize their partial gradients, not the sum.
#[test]
fn more_ranks_than_groups_of_keys_are_within_the_type() {
    let subject = with("delayed", small_llama());
    let report = verify(&subject, &layouts(&["tp4-sp"]), &options()).unwrap();
    assert!(report.passes(), "{report}");
    let (_, comparison) = &report.rows()[0];
    assert!(!comparison.passes(1e-3), "it rounds otherwise:\n{report}");
    let text = report.to_string();
    let why = "4.3e-1 (FP8, ranks that replicate keys and values round their partial gradients: \
               2 sqrt(4 x 2^-8 + 2 x 2^-6))";
    assert!(text.contains(why), "{text}");
}

/// If scales depend on the micro-batch, the reference needs the same micro-batches.
#[test]
fn scales_of_a_micro_batch_differ_from_those_of_all_samples() {
    let at_once = VerifyOptions {
        same_micro_batches: false,
        ..options()
    };
    let subject = with("current", small_gpt());
    let report = verify(&subject, &layouts(&["dp2-mb1"]), &at_once).unwrap();
    assert!(!report.passes(), "{report}");
}

/// Records the FP8 layers of the ranks. Can skip the reduction over the data axis.
struct Seen {
    inner: TransformerSubject,
    layers: Mutex<Vec<Fp8>>,
    faulty: bool,
}

impl Seen {
    fn new(faulty: bool) -> Self {
        Self {
            inner: with("delayed", small_gpt()),
            layers: Mutex::default(),
            faulty,
        }
    }
}

impl Subject for Seen {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.inner.build(groups, device)
    }

    fn wrap(
        &self,
        model: ParallelModule<Transformer>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Transformer>, DataParallelError> {
        let mut groups = groups.clone();
        if self.faulty {
            let data = CorruptedComm::wrap(groups.data(), Corruption::Skip);
            groups = groups.with_data(data);
        }
        let ddp = DistributedDataParallel::with(model, &groups, config)?;
        self.layers.lock().unwrap().push(ddp.fp8().clone());
        Ok(ddp)
    }

    fn samples(&self) -> usize {
        self.inner.samples()
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        self.inner.data(groups)
    }
}

#[test]
fn a_skipped_reduction_is_reported() {
    let report = verify(&Seen::new(true), &layouts(&["dp2"]), &options()).unwrap();
    let (_, comparison) = &report.rows()[0];
    let failing = comparison.failing(options().tolerance);
    assert!(failing.contains(&"parameter grad"), "{failing:?}\n{report}");
}

/// Delayed scales come from earlier steps, so every step must end.
#[test]
fn delayed_scales_carry_over_from_step_to_step() {
    let subject = Seen::new(false);
    observe_layout(&subject, &"dp2-mb1".parse().unwrap(), &options()).unwrap();
    let ranks = subject.layers.into_inner().unwrap();
    assert_eq!(ranks.len(), 2);
    let states = ranks[0].states();
    assert!(!states.is_empty());
    assert_eq!(states, ranks[1].states());
    for (path, state) in states {
        for operand in [&state.input, &state.weight, &state.gradient] {
            let seen = operand.history.iter().filter(|amax| **amax != 0).count();
            assert_eq!(seen, 3, "{path}");
        }
    }
}

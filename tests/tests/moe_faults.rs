//! Tests that `verify` finds faults of models with experts.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{Axis, AxisSet, Grid};
use burn_megatron::model::RecomputePrefix;
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::nn::Losses;
use burn_megatron::nn::{BuildError, ParallelModule, ParameterEntry, recompute};
use burn_megatron_data::Samples;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{Comparison, ModelSubject, Subject, VerifyOptions, verify};

use super::moe_verify::{Case, case};

/// Returns the comparison of a model in the layout of a case, and the columns that fail.
fn compare(subject: &impl Subject, case: &Case) -> (Comparison, Vec<&'static str>) {
    let options = VerifyOptions::default();
    let report = verify(subject, &[case.layout()], &options).unwrap();
    let (_, comparison) = &report.rows()[0];
    println!("{report}");
    (comparison.clone(), comparison.failing(options.tolerance))
}

/// Asserts that gradients differ. The largest difference must be in a parameter whose path ends with `path`.
#[track_caller]
fn assert_found(subject: &impl Subject, case: &Case, path: &str) {
    let (comparison, failing) = compare(subject, case);
    assert!(failing.contains(&"parameter grad"), "{failing:?}");
    let worst = comparison.gradients.path.unwrap_or_default();
    assert!(worst.ends_with(path), "{worst}");
}

#[test]
fn gradients_that_are_summed_over_other_ranks() {
    let parallel = case(&[("expert", "2"), ("tensor", "2"), ("expert data", "2")]);
    let tampered = |change: fn(&mut ParameterEntry)| {
        Tampered::table(ModelSubject::new(parallel.config()), change)
    };
    assert_eq!(compare(&tampered(|_| ()), &parallel).1, [""; 0]);
    let more = tampered(|entry| {
        if entry.path.ends_with("experts.up") {
            entry.sum_over = entry.sum_over.with(Axis::Expert);
        }
    });
    assert_found(&more, &parallel, "experts.up");
    let fewer = tampered(|entry| {
        if entry.path.ends_with("router.gate") {
            entry.sum_over = entry.sum_over.without(Axis::Tensor);
        }
    });
    assert_found(&fewer, &parallel, "router.gate");
}

/// The gradients of experts must be means over the ranks of the experts, like the gradients of other parameters. Here
/// the final division is missing.
#[test]
fn gradients_of_experts_that_are_not_divided() {
    let parallel = case(&[("expert", "2"), ("expert data", "2")]);
    let undivided = Tampered::groups(ModelSubject::new(parallel.config()), |groups| {
        let replicas = groups.group(Grid::Expert, Axis::Data).unwrap();
        let undivided = CorruptedComm::wrap(&replicas, Corruption::Undivided);
        groups
            .clone()
            .with_group(Grid::Expert, Axis::Data, undivided)
    });
    let (comparison, failing) = compare(&undivided, &parallel);
    assert!(failing.contains(&"parameter grad"), "{failing:?}");
    assert!(!failing.contains(&"replicas"), "{failing:?}");
    let worst = comparison.gradients.path.unwrap_or_default();
    assert!(worst.contains(".experts."), "{worst}");
    assert!(
        (comparison.gradients.relative - 1.0).abs() < 1e-9,
        "twice as large"
    );
}

/// Returns the groups of the layers with a corruption in the group of expert ranks.
fn corrupted(groups: &ParallelContext, corruption: Corruption) -> ParallelContext {
    let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
    let experts = groups.group(Grid::Expert, axes).unwrap();
    let corrupted = CorruptedComm::wrap(&experts, corruption);
    groups.clone().with_group(Grid::Expert, axes, corrupted)
}

/// With the wrong rank, the received tokens do not match their routing. Experts without results have no gradients.
#[test]
fn a_dispatch_to_the_wrong_rank_and_a_combine_without_an_expert() {
    // Each of four ranks has one expert.
    let parallel = case(&[("expert", "4"), ("dispatcher", "flex")]);
    let subject = || ModelSubject::new(parallel.config());
    let sound = Tampered::layers(subject(), ParallelContext::clone);
    assert_eq!(compare(&sound, &parallel).1, [""; 0]);
    let misrouted = Tampered::layers(subject(), |groups| corrupted(groups, Corruption::Misrouted));
    let lost = Tampered::layers(subject(), |groups| {
        corrupted(groups, Corruption::LostResults)
    });
    for faulty in [misrouted, lost] {
        let failing = compare(&faulty, &parallel).1;
        for column in ["loss", "parameter grad", "final weights"] {
            assert!(failing.contains(&column), "{column}: {failing:?}");
        }
    }
}

/// Only with overlap, the exchanges of two micro-batches are in progress at the same time.
#[test]
fn micro_batches_that_are_confused_in_their_exchanges() {
    let model = case(&[("expert", "2")]).config();
    let faulty = Tampered::layers(ModelSubject::new(model), |groups| {
        corrupted(groups, Corruption::OtherMicroBatch)
    });
    let options = VerifyOptions::default();
    let layouts = ["ep2-dp2-mb1", "ep2-epoverlap-dp2-mb1"].map(|layout| layout.parse().unwrap());
    let report = verify(&faulty, &layouts, &options).unwrap();
    println!("{report}");
    let failing = |row: usize| report.rows()[row].1.failing(options.tolerance);
    assert_eq!(failing(0), [""; 0]);
    for column in ["loss", "parameter grad", "final weights"] {
        assert!(failing(1).contains(&column), "{column}: {:?}", failing(1));
    }
}

/// A transformer that is recomputed as a whole.
#[derive(Module, Debug)]
struct Recomputed {
    inner: Transformer,
    /// Whether the first pass is recorded too. It adds nothing to the output, but it adds the losses of the routers.
    #[module(skip)]
    records_first_pass: bool,
}

impl LanguageModel for Recomputed {
    type Cache = RecomputePrefix;

    fn hidden(&self, stage: usize, _: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let start = Tensor::<1>::zeros([1], &Device::flex().autodiff());
        let (inner, again) = (self.inner.clone(), tokens.clone());
        let y = recompute(start, move |_| inner.hidden(stage, None, again.clone()));
        if self.records_first_pass {
            y + self.inner.hidden(stage, None, tokens).mul_scalar(0.0)
        } else {
            y
        }
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.inner.losses_of(hidden, targets)
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.inner.logits_of(hidden)
    }

    fn context(&self) -> usize {
        self.inner.context()
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        self.inner.flops_per_token(seq)
    }
}

struct RecomputedSubject {
    inner: ModelSubject<TransformerConfig>,
    /// Set on several ranks.
    records_first_pass: bool,
}

impl Subject for RecomputedSubject {
    type Model = Recomputed;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Recomputed>, BuildError> {
        let ParallelModule {
            module,
            table,
            position,
            kernels,
            fp8,
            recompute,
            routers,
            lora,
            attention_logits,
        } = self.inner.build(groups, device)?;
        Ok(ParallelModule {
            module: Recomputed {
                inner: module,
                records_first_pass: self.records_first_pass && groups.world().size() > 1,
            },
            table,
            position,
            kernels,
            fp8,
            recompute,
            routers,
            lora,
            attention_logits,
        })
    }

    fn samples(&self) -> usize {
        self.inner.samples()
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        self.inner.data(groups)
    }

    fn depends_on_micro_batches(&self) -> bool {
        self.inner.depends_on_micro_batches()
    }
}

#[test]
fn losses_of_routers_that_both_passes_of_a_recomputation_attach() {
    let parallel = case(&[("expert", "2"), ("expert data", "2"), ("loss", "several")]);
    let subject = |records_first_pass| RecomputedSubject {
        inner: ModelSubject::new(parallel.config()),
        records_first_pass,
    };
    assert_eq!(compare(&subject(false), &parallel).1, [""; 0]);
    assert_found(&subject(true), &parallel, "router.gate");
    let plain = case(&[("expert", "2"), ("expert data", "2")]);
    let without_losses = RecomputedSubject {
        inner: ModelSubject::new(plain.config()),
        records_first_pass: true,
    };
    assert_eq!(compare(&without_losses, &plain).1, [""; 0]);
}

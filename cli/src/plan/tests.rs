use burn_megatron::nn::fp8::Fp8Recipe;
use burn_megatron_models::TransformerConfig;
use burn_megatron_plan::Candidate;
use burn_megatron_plan::search::Rejection;
use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions, verify};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;
use crate::family::config_of;
use crate::flags::parse_text;

fn args(flags: &str) -> PlanArgs {
    parse_text(flags).unwrap()
}

fn error(flags: &str) -> String {
    let args = args(flags);
    let found = run(&args, &Families::transformers(), "");
    found.map(drop).unwrap_err().to_string()
}

/// Checks that every displayed plan can be built: its recipe passes the checks of `pretrain`. The models have experts
/// or not, and the numbers of devices have few divisors.
#[test]
fn every_plan_is_a_valid_recipe() {
    let mut plans = 0;
    for (family, fix) in [
        ("gpt2", ""),
        ("llama", ""),
        ("mixtral", ""),
        ("mixtral", "--fix overlap_moe_expert_parallel_comm=true"),
    ] {
        for (devices, layers, batch, sequence) in [
            (1, 3, 4, 128),
            (4, 4, 8, 128),
            (6, 6, 12, 96),
            (8, 8, 16, 128),
            (12, 6, 24, 96),
            (16, 5, 32, 64),
        ] {
            let text = format!(
                "[model]\nfamily = '{family}'\nlayers = {layers}\n[train]\nsequence_length = {sequence}\n\
                 global_batch_size = {batch}\n[data_parallel]\nprecision = 'bf16'\n\
                 hierarchical_reduce = true\n[parallel]\nranks_per_node = 4"
            );
            let recipe = crate::recipe::parsed(&text).unwrap();
            let model = RecipeModel::new(recipe).unwrap();
            let flags = format!(
                "--model m --global-batch-size {batch} --devices {devices}xH100 --top 10 {fix}"
            );
            let hardware = Hardware::named("H100").unwrap();
            let report = planned(&args(&flags), &model, devices, &hardware).unwrap();
            assert!(!report.best.is_empty(), "{family} on {devices}");
            for plan in &report.best {
                let layout = &plan.candidate.layout;
                assert_eq!(layout.ranks_per_node, Some(4));
                let overlaps = layout.overlap_moe_expert_parallel_comm;
                assert_eq!(overlaps, !fix.is_empty() && layout.expert > 1);
                if let Err(error) = check(&model, plan) {
                    panic!("{family} on {devices}: {error}");
                }
            }
            plans += report.best.len();
            let rejected = report.counts.rejected.values();
            let rejected: u64 = rejected.map(|count| count.candidates).sum();
            let all = report.counts.candidates;
            assert_eq!(
                rejected + report.best.len() as u64,
                all,
                "{family} on {devices}"
            );
        }
    }
    assert!(plans > 100, "{plans}");
}

/// Returns the number of random toy models and devices: `PROPTEST_CASES`, or 6 by default.
fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(cases.and_then(|cases| cases.parse().ok()).unwrap_or(6))
}

proptest! {
    #![proptest_config(cases())]

    /// Checks that, in every planned layout of a random model and number of devices, a step equals the step of one
    /// rank.
    #[test]
    fn every_plan_is_verified(
        family in select(vec!["gpt2", "llama", "mixtral"]),
        devices in 1usize..=8,
        layers in 2usize..=4,
        (heads, groups) in select(vec![(4, 4), (4, 2), (8, 1), (6, 3)]),
        sequence in select(vec![16, 24, 32]),
        batch in select(vec![4, 6, 8]),
        place in any::<Index>(),
    ) {
        let experts = if family == "mixtral" { "moe = { experts = 4 }" } else { "" };
        let groups = if family == "gpt2" { String::new() } else { format!("groups = {groups}") };
        let text = format!(
            "[model]\nfamily = '{family}'\nlayers = {layers}\nheads = {heads}\n{groups}\nhidden = {}\n\
             context = {sequence}\n{experts}\n[train]\nglobal_batch_size = {batch}",
            4 * heads
        );
        let model = RecipeModel::new(crate::recipe::parsed(&text).unwrap()).unwrap();
        let flags = format!("--model m --global-batch-size {batch} --devices {devices}xH100 --precision f32");
        let hardware = Hardware::named("H100").unwrap();
        let report = planned(&args(&flags), &model, devices, &hardware).unwrap();
        prop_assume!(!report.best.is_empty());
        let Candidate { layout, micro_batch, .. } = &place.get(&report.best).candidate;
        let layout = Layout {
            parallel: layout.clone(),
            micro_batch: Some(*micro_batch),
        };
        let config = TransformerConfig {
            vocabulary: 23,
            ..config_of::<TransformerConfig>(&*model.recipe().model).unwrap().clone()
        };
        let subject = ModelSubject {
            samples: batch,
            ..ModelSubject::new(config)
        };
        let verified = verify(&subject, std::slice::from_ref(&layout), &VerifyOptions::default());
        let verified = verified.unwrap();
        prop_assert!(verified.passes(), "{text}\n{layout:?}\n{verified}");
    }
}

fn planned_with(model: &RecipeModel, devices: &str, flags: &str) -> SearchReport {
    let args = args(&format!(
        "--model m --global-batch-size 1 --devices {devices} {flags}"
    ));
    let (devices, hardware) = hardware(&args, model).unwrap();
    planned(&args, model, devices, &hardware).unwrap()
}

/// Checks that a search finds no better plan than a search over more candidates. Memory is short in this test: many
/// candidates fit by the formulas, but not by the model's own operations.
#[test]
fn a_narrowed_search_finds_nothing_better() {
    let llama = "family = 'llama'\nlayers = 6\nhidden = 256\nheads = 8\ncontext = 256";
    let mixtral = "family = 'mixtral'\nlayers = 4\nhidden = 128\nheads = 4\ncontext = 128";
    for (model, devices, batch, fixes) in [
        (
            llama,
            8,
            48,
            &[
                "data=8",
                "tensor=2",
                "pipeline=2",
                "micro_batch=3",
                "recompute=selective",
                "data=8,zero_stage=3",
                "context=2,zero_stage=2",
                "offload=0",
            ][..],
        ),
        (
            mixtral,
            4,
            16,
            &["expert=2", "data=4", "expert=4,recompute=full"],
        ),
    ] {
        let text = format!(
            "[model]\n{model}\n[train]\nglobal_batch_size = {batch}\n[data_parallel]\nprecision = 'bf16'"
        );
        let model = RecipeModel::new(crate::recipe::parsed(&text).unwrap()).unwrap();
        let devices = format!("{devices}xH100");
        let free = planned_with(&model, &devices, "");
        let needed = free.best[0].memory.total();
        let mut plans = 0;
        for share in [0.5, 0.9] {
            let limit = (share * needed as f64) as u64;
            let memory = format!("--top 1 --memory-limit {limit}");
            let whole = planned_with(&model, &devices, &memory);
            let seconds = |report: &SearchReport| {
                let best = report.best.first();
                best.map_or(f64::INFINITY, |plan| plan.step.seconds)
            };
            assert!(seconds(&whole) >= seconds(&free));
            for fix in fixes {
                let narrowed = planned_with(&model, &devices, &format!("{memory} --fix {fix}"));
                let [narrowed, whole] = [&narrowed, &whole].map(seconds);
                assert!(
                    whole <= narrowed,
                    "{fix}, {share}: {whole} s, and {narrowed} s"
                );
                plans += usize::from(narrowed.is_finite());
            }
        }
        assert!(plans > 0);
    }
}

/// The fastest layout of Llama 3 8B on 8 H100 shards with ZeRO-3 over all devices. With less sharding the layout fits
/// by the formulas, but the model's own operations need too much memory.
#[test]
fn the_best_layout_of_sizes_is_not_lost_with_a_faster_one_that_does_not_fit() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes/llama-3-8b.toml");
    let mut recipe = crate::recipe::read(&path);
    recipe.train.global_batch_size = 256;
    let model = RecipeModel::new(recipe).unwrap();
    let seconds = |fix: &str| {
        let report = planned_with(&model, "8xH100", &format!("--top 1 {fix}"));
        report.best[0].step.seconds
    };
    let (whole, of_data, sharded) = (
        seconds(""),
        seconds("--fix data=8"),
        seconds("--fix data=8,zero_stage=3"),
    );
    assert!(
        whole <= of_data && of_data <= sharded,
        "{whole}, {of_data}, {sharded}"
    );
}

/// Six cases of `cargo xtask plan-all`.
#[test]
fn published_models_are_planned() {
    for (recipe, devices, flags) in [
        ("llama-3-8b", "8xH100", ""),
        ("olmoe-1b-7b", "8xH100", ""),
        ("mixtral-8x7b", "64xH100", "--fix expert=8,tensor=1"),
        // No layout fits in this case.
        ("llama-3.1-405b", "8xH100", "--fix tensor=8"),
        // V-shaped stages, and rows of multi-token prediction.
        (
            "deepseek-v3",
            "256xB200",
            "--fix context=2,schedule=zb-v,tensor=1,expert=32,micro_batch=1",
        ),
        // Micro-batches with more rows than an operation supports.
        (
            "qwen3-235b-a22b",
            "256xB200",
            "--fix context=1,expert=128,micro_batch=128",
        ),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = path.join(format!("../examples/recipes/{recipe}.toml"));
        let mut read = crate::recipe::read(&path);
        if recipe.starts_with("qwen") {
            read.fp8.recipe = Some(Fp8Recipe::MxFp8);
        }
        let model = RecipeModel::new(read).unwrap();
        let report = planned_with(&model, devices, &format!("--top 1 {flags}"));
        let plan = report.best.first().or(report.nearest.as_ref());
        let limit = planned_limit(devices);
        let plan = plan.unwrap_or_else(|| panic!("{recipe}: {:?}", report.counts));
        assert_eq!(
            plan.memory.total() <= limit,
            !report.best.is_empty(),
            "{recipe}"
        );
        let rejected = report.counts.rejected.values();
        let rejected: u64 = rejected.map(|count| count.candidates).sum();
        let best = report.best.len() as u64;
        assert_eq!(rejected + best, report.counts.candidates, "{recipe}");
        let unplanned = report.counts.rejected.contains_key(&Rejection::Unplanned);
        assert_eq!(unplanned, recipe.starts_with("qwen"), "{recipe}");
    }
}

fn planned_limit(devices: &str) -> u64 {
    let (_, name) = args::devices(devices, None).unwrap();
    Hardware::named(name.unwrap()).unwrap().memory
}

/// If nothing fits, the nearest layout keeps the minimum: it shards and recomputes everything, and offloads the rest.
#[test]
fn the_nearest_layout_needs_the_least_memory() {
    let recipe = crate::recipe::parsed("[model]\nfamily = 'llama'").unwrap();
    let model = RecipeModel::new(recipe).unwrap();
    let args = args(
        "--model m --global-batch-size 8 --devices 4xH100 --memory-limit 1000 --precision f32",
    );
    let hardware = Hardware::named("H100").unwrap();
    let report = planned(&args, &model, 4, &hardware).unwrap();
    assert!(report.best.is_empty());
    let nearest = report.nearest.unwrap();
    let (layout, recompute) = (&nearest.candidate.layout, nearest.candidate.recompute);
    let candidate = &nearest.candidate;
    assert_eq!(
        (recompute.name(), candidate.offload),
        ("full-offloaded", 1.0),
        "{candidate}"
    );
    assert!(layout.data_parallel_size() == 1 || u8::from(layout.zero_stage) == 3);
    let halves = RecipeModel::new(
        crate::recipe::parsed("[data_parallel]\nprecision = 'bf16'\n[model]\nfamily = 'llama'")
            .unwrap(),
    );
    let kept = |model: &RecipeModel| {
        let profile = burn_megatron_plan::search::PlannedModel::profile(model, layout, 1).unwrap();
        profile.kinds[0].layer.saved_bytes()
    };
    assert_eq!(kept(&model), 2 * kept(&halves.unwrap()));
}

#[test]
fn a_wrong_flag_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    fs::write(&path, "[model]\nfamily = 'llama'").unwrap();
    let config = format!("--recipe {} ", path.display());
    let cpu = Hardware {
        host: None,
        name: "CPU".into(),
        ..Hardware::named("H100").unwrap()
    };
    let hardware = folder.path().join("cpu.toml");
    fs::write(&hardware, cpu.to_toml()).unwrap();
    let on_cpu = |fix: &str| format!("--devices 8 --hardware {} --fix {fix}", hardware.display());
    for (flags, says) in [
        (
            "--devices 8xH100 --global-batch-size 1099511627776",
            "invalid global_batch_size = 1099511627776: expected at most 16777216",
        ),
        (
            "--devices 8xH100 --set train.steps=0",
            "invalid steps = 0: expected more than 0",
        ),
        (
            "--devices 8xH100 --set model.layers=1099511627776",
            "layers = 1099511627776: expected at most",
        ),
        (
            &*on_cpu("offload=0.5"),
            "offload = 0.5 cannot be planned: CPU has no [host]",
        ),
        (
            &*on_cpu("recompute=full-offloaded"),
            "recompute = full-offloaded cannot be planned",
        ),
        (
            "--devices 8xH100 --own-layout",
            "--own-layout: the layout of the recipe has 1 ranks, and --devices 8: expected 1",
        ),
        (
            "--devices 1xH100 --own-layout --memory-limit 1MiB --precision f64",
            "H100 has no peak throughput for f64",
        ),
        (
            "--devices 8xH900",
            "invalid device \"H900\": expected H100, H200",
        ),
        (
            "--devices 8",
            "--devices \"8\" does not name the device: expected 8xH100, or --hardware FILE",
        ),
        (
            "--devices 8xH100 --hardware x",
            "expected --devices 8, not 8xH100",
        ),
        ("--devices 8 --hardware none.toml", "cannot read none.toml"),
        (
            "--devices 8xH100 --sequence-length 999",
            "invalid --sequence-length 999: expected 1 to 128",
        ),
        ("--devices 8xH100 --fix tensor=x", "invalid --fix tensor=x"),
        (
            "--devices 8xA100 --precision f64",
            "A100 has no peak throughput for f64",
        ),
    ] {
        let found = error(&format!("{config}{flags}"));
        assert!(found.contains(says), "{flags}: {found}");
    }
}

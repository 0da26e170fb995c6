use std::collections::BTreeMap;

use clap::{Args, Command, FromArgMatches};
use insta::assert_snapshot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toml::Table;

use super::condition::Condition;
use super::keys::get;
use super::*;
use crate::family::Families;

fn settings() -> Settings {
    Settings::of(&Families::transformers())
}

fn table(text: &str) -> Table {
    text.parse().unwrap()
}

/// Parses flags, with a flag for each setting of a tree.
fn parse(settings: &Settings, flags: &[&str]) -> Result<SettingFlags, clap::Error> {
    let command = settings.add_flags(Command::new("test").no_binary_name(true), "");
    SettingFlags::from_arg_matches(&command.try_get_matches_from(flags)?)
}

#[test]
fn every_setting_has_a_text() {
    let settings = settings();
    let without = settings.all().filter(|setting| {
        // Exceptions without help: units of the settings of one group, and the fields of `Layout(String)`.
        setting.is_value() && setting.help.is_empty() && setting.path != "base"
    });
    let without: Vec<_> = without.map(|setting| &setting.path).collect();
    assert!(without.is_empty(), "{without:?}");
}

#[test]
fn texts_have_no_links_of_the_documentation() {
    let settings = settings();
    let linked = settings.all().filter(|setting| {
        let names = setting
            .forms
            .names
            .iter()
            .filter_map(|name| name.help.as_ref());
        let mut texts = names.chain([&setting.help]);
        texts.any(|text| text.contains("](") || text.contains("[`"))
    });
    let linked: Vec<_> = linked.map(|setting| &setting.path).collect();
    assert!(linked.is_empty(), "{linked:?}");
}

#[test]
fn conditions_name_settings() {
    let settings = settings();
    let conditions = settings.all().flat_map(|setting| {
        let path = &setting.path;
        let keys = setting.conditions.iter().flat_map(Condition::keys);
        keys.map(move |key| (path, key))
    });
    let mut count = 0;
    for (path, key) in conditions {
        assert!(settings.find(key).is_some(), "{path}: {key}");
        count += 1;
    }
    assert!(count > 20, "{count}");
}

#[test]
fn short_flags_are_few_and_different() {
    let settings = settings();
    let mut aliases = BTreeMap::new();
    for setting in settings.all() {
        if let Some(alias) = &setting.alias {
            let other = aliases.insert(alias.clone(), setting.path.clone());
            assert_eq!(other, None, "{alias}");
        }
    }
    assert!(aliases.len() <= 30, "{aliases:?}");
}

#[cfg(feature = "tokenizers")]
#[test]
fn the_reference_page_is_that_of_the_structs() {
    use std::{env, fs};

    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/reference.md");
    let page = settings().reference();
    if env::var_os("BURN_MEGATRON_WRITE_REFERENCE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    let first = page
        .lines()
        .zip(written.lines())
        .find(|(now, old)| now != old);
    assert!(
        page == written,
        "docs/src/reference.md is not up to date: run this test with BURN_MEGATRON_WRITE_REFERENCE=1; {first:?}"
    );
}

#[test]
fn values_have_the_types_of_the_settings() {
    let settings = settings();
    let given = |flags: &[&str]| parse(&settings, flags).map(|flags| flags.table(&Table::new()));
    for (flags, wanted) in [
        (&["--parallel.tensor", "2"][..], "parallel.tensor = 2"),
        (&["--train.learning_rate", "1"], "train.learning_rate = 1.0"),
        (&["--train.cuda_graph"], "train.cuda_graph = true"),
        (&["--train.cuda_graph=false"], "train.cuda_graph = false"),
        (&["--train.qk_clip"], "train.qk_clip = {}"),
        (
            &[
                "--memory.recompute.modules",
                "norm,mlp",
                "--memory.recompute.modules=moe",
            ],
            "memory.recompute.modules = ['norm', 'mlp', 'moe']",
        ),
        (
            &["--memory.recompute.layers", "3"],
            "memory.recompute.layers = 3",
        ),
        (
            &["--memory.recompute.layers", "3,4"],
            "memory.recompute.layers = [3, 4]",
        ),
        (
            &["--train.schedule", "{wsd={decay_steps=3,tail='linear'}}"],
            "train.schedule = {wsd={decay_steps=3,tail='linear'}}",
        ),
        (&["--train.loss_scale", "none"], "train.loss_scale = 'none'"),
        (&["--train.loss_scale", "64"], "train.loss_scale = 64.0"),
        (
            &["--train.optimizer.name", "lion"],
            "train.optimizer.name = 'lion'",
        ),
        (&["--model.family", "qwen3"], "model.family = 'qwen3'"),
        (&["--model.qk_norm", "whole"], "model.qk_norm = 'whole'"),
        (
            &["--data_parallel.precision", "bfloat16"],
            "data_parallel.precision = 'bf16'",
        ),
        (
            &["--data_parallel.zero_stage", "2"],
            "data_parallel.zero_stage = 2",
        ),
        (
            &["--memory.offload.activations", "2KiB"],
            "memory.offload.activations = 2048",
        ),
        (
            &["--memory.offload.activations", "0"],
            "memory.offload.activations = 0",
        ),
        (
            &[
                "--train.batch_warmup",
                "{until_step=3,global_batch_size=4},{until_step=5,global_batch_size=6}",
            ],
            "train.batch_warmup = [{until_step=3,global_batch_size=4},{until_step=5,global_batch_size=6}]",
        ),
        (
            &["--nccl.groups.tensor.max_ctas", "8"],
            "nccl.groups.tensor.max_ctas = 8",
        ),
        (
            &["--parallel.split.ends.first", "1"],
            "parallel.split.ends.first = 1",
        ),
        (&["--fp8.recipe", "delayed"], "fp8.recipe = 'delayed'"),
        (
            &["--sample.prompt", "none of these"],
            "sample.prompt = 'none of these'",
        ),
        (&["--parallel.virtual_stages", "none"], ""),
        (&["--tp", "4", "--dp", "auto"], "parallel.tensor = 4"),
        (&["--fp8", "mxfp8"], "fp8.recipe = 'mxfp8'"),
    ] {
        assert_eq!(given(flags).unwrap(), table(wanted), "{flags:?}");
    }
    for (flags, says) in [
        (&["--parallel.tensr", "2"][..], "--parallel.tensor"),
        (&["--parallel.tensor", "x"], "expected an integer from 0"),
        (&["--train.skip_limit", "0"], "an integer from 1"),
        (&["--parallel.tensor", "none"], "expected an integer"),
        (
            &["--data_parallel.precision", "f8"],
            "expected f64, f32, bf16 or f16",
        ),
        (&["--memory.recompute.modules", "norms"], "core_attention"),
        (&["--train.cuda_graph", "yes"], "expected true or false"),
        (&["--parallel", "2"], "unexpected argument"),
    ] {
        let error = given(flags).unwrap_err().to_string();
        assert!(error.contains(says), "{flags:?}: {error}");
    }
    let unset = parse(&settings, &["--parallel.virtual_stages", "none"]).unwrap();
    assert_eq!(
        unset.unset().collect::<Vec<_>>(),
        ["parallel.virtual_stages"]
    );
}

#[test]
fn a_flag_drops_the_settings_that_it_deprives_of_their_meaning() {
    let settings = settings();
    for (recipe, flags, left) in [
        (
            "parallel = { pipeline = 4, virtual_stages = 2, schedule = 'interleaved', tensor = 2 }",
            "parallel.pipeline = 1",
            "parallel = { pipeline = 1, tensor = 2 }",
        ),
        (
            "parallel = { context = 4, context_exchange = 'hierarchical', context_inner = 2 }",
            "parallel.context_exchange = 'ring'",
            "parallel = { context = 4, context_exchange = 'ring' }",
        ),
        (
            "parallel = { sequence_parallel = true, tp_comm_overlap = 'bulk', tp_comm_overlap_num_splits = 4 }",
            "parallel = { sequence_parallel = false }",
            "parallel = { sequence_parallel = false }",
        ),
        (
            "memory.recompute = { granularity = 'full', layers = 3 }",
            "memory.recompute = { granularity = 'full' }",
            "memory.recompute = { granularity = 'full', layers = 3 }",
        ),
        (
            "memory.recompute = { granularity = 'full', layers = 3 }",
            "memory.recompute = { granularity = 'selective' }",
            "memory.recompute = { granularity = 'selective' }",
        ),
        (
            "data_parallel = { zero_stage = 2, hsdp = 2, keep_gathered = true }",
            "data_parallel = { zero_stage = 0, keep_gathered = true }",
            "data_parallel = { zero_stage = 0, keep_gathered = true }",
        ),
    ] {
        let (before, flags) = (table(recipe), table(flags));
        let mut after = before.clone();
        merge(Some(settings.root()), &mut after, &flags);
        let given = |path: &str| get(&flags, path).is_some();
        settings.drop_dependants(&before, &mut after, (&given, &given));
        assert_eq!(after, table(left), "{recipe}: {flags}");
    }
}

#[test]
fn a_similar_key_is_suggested() {
    let error = |text: &str| settings().check_keys(&table(text)).unwrap_err().to_string();
    assert_snapshot!(
        error("train.step = 3"),
        @"a recipe has no key train.step; did you mean train.steps?"
    );
    assert_snapshot!(
        error("model.hiden = 3"),
        @"a recipe has no key model.hiden; did you mean model.hidden?"
    );
    assert_snapshot!(error("nothing.like.it = 3"), @"a recipe has no key nothing");
    settings()
        .check_keys(&table("train.optimizer.beta2 = 3"))
        .unwrap();
}

#[test]
fn the_innermost_rule_for_resuming_applies() {
    let settings = settings();
    for (key, rule) in [
        ("parallel.tensor", ResumeRule::OrderOfSums),
        ("kernels.norm", ResumeRule::OrderOfSums),
        ("memory.recompute.granularity", ResumeRule::MayDiffer),
        ("data.chat.files", ResumeRule::MayDiffer),
        ("data.packing", ResumeRule::Fixed),
        ("model.family", ResumeRule::MayDiffer),
        ("model.hidden", ResumeRule::Never),
        ("train.micro_batch_size", ResumeRule::OrderOfSums),
        ("train.optimizer.beta2", ResumeRule::Fixed),
        ("lora.base_model", ResumeRule::MayDiffer),
        ("lora.rank", ResumeRule::Never),
        ("data_fingerprint", ResumeRule::Fixed),
    ] {
        assert_eq!(settings.resume_rule(key), rule, "{key}");
    }
}

/// Checks that a new setting needs only a field.
#[test]
fn a_new_field_has_a_flag_a_help_text_a_check_and_a_line_on_the_page() {
    /// Settings of a test.
    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Fixture {
        /// The table.
        spice: Spice,
    }
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Spice {
        /// The heat of the meal, see [`Fixture`].
        #[schemars(extend("flag" = "hot", "resume" = "may_differ"))]
        heat: usize,
        /// Whether the heat is measured.
        #[schemars(extend("needs" = "heat > 0", "experimental" = true))]
        measured: bool,
    }
    impl Default for Spice {
        fn default() -> Self {
            let (heat, measured) = (3, false);
            Self { heat, measured }
        }
    }

    let settings = Settings {
        root: Setting::of_schema("", &schema_of::<Fixture>()),
    };
    let flags = parse(&settings, &["--hot", "7"]).unwrap();
    assert_eq!(flags.table(&Table::new()), table("spice.heat = 7"));
    let mut command = settings.add_flags(Command::new("test"), "");
    let help = command.render_long_help().to_string();
    assert!(
        help.contains("The heat of the meal, see `Fixture`."),
        "{help}"
    );
    assert!(!help.contains("--spice.measured"), "{help}");
    assert!(parse(&settings, &["--spice.measured"]).is_ok());
    let error = settings.check_keys(&table("spice.heta = 3")).unwrap_err();
    assert!(error.to_string().ends_with("did you mean spice.heat?"));
    assert_eq!(settings.resume_rule("spice.heat"), ResumeRule::MayDiffer);
    let line = "- `spice.heat`: `N`, default `3`, short flag `--hot`. The heat of the meal, see `Fixture`. *A resumed run may";
    assert!(settings.reference().contains("Requires `spice.heat > 0`."));
    assert!(
        settings.reference().contains(line),
        "{}",
        settings.reference()
    );
    let mut recipe = table("spice = { heat = 0, measured = true }");
    let before = table("spice = { heat = 2, measured = true }");
    let given = |key: &str| key == "spice.heat";
    let dropped = settings.drop_dependants(&before, &mut recipe, (&given, &given));
    assert_eq!(
        dropped.iter().map(|of| &of.note[..]).collect::<Vec<_>>(),
        ["spice.measured of the recipe is dropped: it requires spice.heat > 0"]
    );
}

#[test]
fn the_flags_of_the_command_are_those_of_the_tree() {
    let mut command = SettingFlags::augment_args(Command::new("test"));
    command = settings().add_flags(command, "model.");
    let all = settings().add_flags(Command::new("test"), "");
    let names = |command: &Command| {
        let ids = command.get_arguments().map(|arg| arg.get_id().to_string());
        let mut ids: Vec<_> = ids.collect();
        ids.sort();
        ids
    };
    assert_eq!(names(&command), names(&all));
}

/// Checks the kinds of values of variants without a doc comment.
#[test]
fn names_come_from_every_form_of_an_enum() {
    let schema = json!({"properties": {"x": {"anyOf": [{"enum": ["a", 1]}, {"const": "b"}, {"type": "null"}]}}});
    let root = Setting::of_schema("", &schema);
    let forms = &root.key("x").unwrap().forms;
    assert_eq!(forms.describe(), "a|1|b|none");
}

#[test]
fn a_key_is_found_by_a_part_of_its_name() {
    let settings = settings();
    let found = |text: &str| settings.look_up(text).unwrap();
    for text in ["train.clip", "clip", "--train.clip"] {
        let clip = found(text);
        assert!(
            clip.starts_with("train.clip = NUMBER\n  meaning  The maximum"),
            "{clip}"
        );
        assert!(clip.contains("  flag     --train.clip\n"), "{clip}");
    }
    assert!(found("tp").contains("  flag     --parallel.tensor, --tp\n"));
    assert!(found("virtual-stages").contains("  requires parallel.pipeline > 1\n"));
    assert_eq!(
        found("keep_"),
        "checkpoint.keep_every\ncheckpoint.keep_last\ndata_parallel.keep_gathered\n"
    );
    assert_eq!(settings.look_up("no_such_key"), None);
}

#[test]
fn an_unknown_flag_names_the_settings_that_it_may_mean() {
    let settings = settings();
    let explained = |flag: &str| {
        let command = settings.add_flags(Command::new("test").no_binary_name(true), "");
        let error = command.try_get_matches_from([flag, "1"]).unwrap_err();
        let text = settings.explain_flag(&error);
        text.map(|text| text.replace(&format!("unexpected argument {flag}: pretrain sets "), ""))
    };
    for (flag, wanted) in [
        (
            "--tp-comm-overlap",
            Some("parallel.tp_comm_overlap with --parallel.tp_comm_overlap"),
        ),
        (
            "--recompute-granularity",
            Some("memory.recompute.granularity with --memory.recompute.granularity"),
        ),
        (
            "--batch-size",
            Some(
                "train.micro_batch_size with --micro-batch-size, or train.global_batch_size with --global-batch-size",
            ),
        ),
        (
            "--context",
            Some("model.context with --model.context, or parallel.context with --cp"),
        ),
        (
            "--bf16",
            Some("data_parallel.precision with --precision bf16"),
        ),
        (
            "--split",
            Some("parallel.split with --parallel.split, or data.split with --data.split"),
        ),
        ("--no-such-flag", None),
    ] {
        let found = explained(flag);
        let (mut found, mut wanted): (Vec<_>, Vec<_>) = (
            found
                .as_deref()
                .unwrap_or_default()
                .split(", or ")
                .collect(),
            wanted.unwrap_or_default().split(", or ").collect(),
        );
        found.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(found, wanted, "{flag}");
    }
}

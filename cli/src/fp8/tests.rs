//! Tests of settings from flags, and of flags that are refused.

use burn_megatron::nn::fp8::DelayedScaling;
use insta::assert_snapshot;

use burn_megatron::nn::fp8::Fp8Format;

use super::*;
use crate::family::Families;
use crate::flags::parse_text;
use crate::recipe::DEFAULT_RECIPE;

/// Returns the recipe of `pretrain` with these flags.
fn resolve(flags: &str) -> Result<Recipe, Error> {
    let families = Families::transformers();
    Ok(Recipe::resolve(&parse_text(flags)?, &families, DEFAULT_RECIPE)?.recipe)
}

/// Returns the error for these flags before anything starts.
fn refusal(flags: &str) -> String {
    match resolve(flags).and_then(|recipe| recipe.plan().map(drop)) {
        Ok(()) => panic!("{flags} were not refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn each_flag_takes_the_place_of_a_key() {
    let recipe = resolve(
        "--fp8 delayed --fp8.format e4m3 --fp8.first_last_bf16 1 --fp8.save_activations false --zero-stage 1 \
         --data_parallel.fp8_param_gather",
    )
    .unwrap();
    recipe.plan().unwrap();
    let config = &recipe.fp8;
    assert_eq!(
        config.recipe,
        Some(Fp8Recipe::Delayed(DelayedScaling::default()))
    );
    assert_eq!(
        (config.format, config.first_last_bf16),
        (Fp8Format::E4m3, 1)
    );
    assert!(!config.save_activations && recipe.data_parallel.fp8_param_gather);
    assert_eq!(resolve("").unwrap().fp8, Fp8Config::default());
    let text = toml::to_string(&recipe).unwrap();
    assert_eq!(crate::recipe::parsed(&text).unwrap(), recipe, "{text}");
}

#[test]
fn a_name_keeps_the_settings_that_the_recipe_has_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("recipe.toml");
    let text = "[fp8]\nrecipe = { delayed = { history = 16 } }\nfirst_last_bf16 = 1";
    std::fs::write(&file, text).unwrap();
    let apply = |name: &str| {
        let recipe = resolve(&format!("--recipe {} --fp8 {name}", file.display()));
        recipe.unwrap().fp8
    };
    let settings = DelayedScaling {
        history: 16,
        ..DelayedScaling::default()
    };
    let same = apply("delayed");
    assert_eq!(same.recipe, Some(Fp8Recipe::Delayed(settings)));
    let other = apply("mxfp8");
    assert_eq!(other.recipe, Some(Fp8Recipe::MxFp8));
    assert_eq!(other.first_last_bf16, 1);
    assert_eq!(apply("none"), Fp8Config::default());
}

#[test]
fn what_would_do_nothing_is_refused() {
    for (flags, name) in [
        ("--fp8.format e4m3", "fp8.format"),
        ("--fp8.first_last_bf16 1", "fp8.first_last_bf16"),
        (
            "--zero-stage 1 --data_parallel.fp8_param_gather",
            "fp8_param_gather",
        ),
    ] {
        let error = refusal(flags);
        let start = format!("{name} requires FP8 layers, but this run has none");
        assert!(error.starts_with(&start), "{error}");
    }
    for (flags, report, name) in [
        ("", true, "--fp8-report"),
        (
            "--fp8.save_activations false",
            false,
            "--fp8.save_activations",
        ),
    ] {
        let settings = parse_text(flags).unwrap();
        let checked = check_flags(&resolve(flags).unwrap(), report, &settings);
        let error = checked.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{name} requires FP8 layers")),
            "{error}"
        );
    }
    // Patterns alone also enable FP8 layers.
    let text = "[[fp8.layers]]\npattern = \"blocks.0.**\"\nrecipe = \"mxfp8\"";
    let recipe = crate::recipe::parsed(text).unwrap();
    assert!(is_on(&recipe.fp8) && check_flags(&recipe, true, &SettingFlags::default()).is_ok());
}

#[test]
fn some_block_must_be_left() {
    assert_snapshot!(
        refusal("--fp8 current --fp8.first_last_bf16 2"),
        @"invalid first_last_bf16 = 2 for 4 layers: expected at most 1, so that at least one block computes in FP8"
    );
    let error = resolve("--fp8 e4m3").unwrap_err().to_string();
    assert!(
        error.contains("expected delayed, current, blockwise, mxfp8"),
        "{error}"
    );
}

#[test]
fn the_header_says_what_is_multiplied_in_8_bits() {
    let recipe = resolve("--fp8 delayed --fp8.first_last_bf16 1").unwrap();
    assert_snapshot!(
        describe(&recipe.fp8, 4, "an engine"),
        @"delayed, E4M3, gradients E5M2; blocks 1 to 2, inputs saved in FP8; matmul: an engine"
    );
    let recipe = resolve("--fp8 mxfp8 --fp8.save_activations false").unwrap();
    assert_snapshot!(
        describe(&recipe.fp8, 4, "cuBLASLt"),
        @"mxfp8, E4M3; all blocks; matmul: cuBLASLt"
    );
}

//! Tests of recipes from flags, and of flags that are refused.

use burn_megatron::optim::LossScale;
use insta::assert_snapshot;

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
        "--dp 4 --global-batch-size 16 --zero-stage 1 --hsdp 2 --precision bf16 \
         --data_parallel.overlap_grad_reduce false --data_parallel.overlap_param_gather --data_parallel.bucket_size 5000 \
         --data_parallel.reduce_in_16_bits --data_parallel.gradient_limit 30 --train.loss_scale 512 --train.check_replicas_every 7 \
         --train.log_num_zeros_in_grad",
    )
    .unwrap();
    recipe.plan().unwrap();
    let config = &recipe.data_parallel;
    assert_eq!(config.zero_stage, ZeroStage::Optimizer);
    assert_eq!(config.precision, Precision::Bf16);
    assert_eq!((config.hsdp, config.bucket_size), (Some(2), Some(5000)));
    assert!(!config.overlap_grad_reduce && config.overlap_param_gather);
    assert!(config.reduce_in_16_bits && !config.keep_gathered);
    assert_eq!(config.gradient_limit, Some(30.0));
    let train = recipe.train_config();
    assert_eq!(train.loss_scale, Some(LossScale::Constant(512.0)));
    assert_eq!(train.check_replicas_every, Some(7));
    assert!(train.count_zeros);
    assert_eq!(train.data_parallel, recipe.data_parallel);
    assert!(
        resolve("--zero-stage 3 --data_parallel.keep_gathered")
            .unwrap()
            .data_parallel
            .keep_gathered
    );
}

#[test]
fn without_flags_nothing_changes() {
    let recipe = resolve("").unwrap();
    assert_eq!(recipe.data_parallel, Default::default());
    assert_eq!(
        (recipe.train.loss_scale, recipe.train.count_zeros),
        (None, false)
    );
}

#[test]
fn what_is_printed_is_read_as_the_same() {
    for flags in [
        "--zero-stage 3 --data_parallel.keep_gathered --precision f16",
        "--zero-stage 2 --precision bf16 --data_parallel.reduce_in_16_bits --train.loss_scale 1024.0",
        "--zero-stage 1 --data_parallel.overlap_param_gather --train.loss_scale none --train.check_replicas_every 5",
        "--precision f16 --train.loss_scale dynamic --data_parallel.gradient_limit 2.5",
    ] {
        let recipe = resolve(flags).unwrap();
        recipe.plan().unwrap();
        let text = toml::to_string(&recipe).unwrap();
        assert_eq!(crate::recipe::parsed(&text).unwrap(), recipe, "{text}");
        assert!(!text.contains("[train.data_parallel]"), "{text}");
    }
}

#[test]
fn the_table_is_at_the_top() {
    let recipe = crate::recipe::parsed("[data_parallel]\nzero_stage = 2").unwrap();
    assert_eq!(recipe.data_parallel.zero_stage, ZeroStage::Gradients);
    let misspelt = crate::recipe::parsed("[data_parallel]\nzero = 2").unwrap_err();
    assert!(
        misspelt.to_string().contains("unknown field `zero`"),
        "{misspelt}"
    );
    let elsewhere = crate::recipe::parsed("[train.data_parallel]\nzero_stage = 2");
    let elsewhere = elsewhere.unwrap_err().to_string();
    assert!(
        elsewhere.contains("unknown field `data_parallel`"),
        "{elsewhere}"
    );
    let stage = crate::recipe::parsed("[data_parallel]\nzero_stage = 4").unwrap_err();
    assert!(
        stage.to_string().contains("invalid ZeRO stage \"4\""),
        "{stage}"
    );
}

#[test]
fn a_group_that_cannot_be_is_refused_before_the_start() {
    let groups = "[[train.optimizer.groups]]\npattern = \"**.bias\"\n";
    let recipe = crate::recipe::parsed(groups).unwrap();
    assert_snapshot!(
        recipe.plan().err().unwrap(),
        @"the parameter group `**.bias` sets nothing: give weight_decay, learning_rate or both"
    );
    let recipe = crate::recipe::parsed(&format!("{groups}weight_decay = 1.0")).unwrap();
    recipe.plan().unwrap();
    let text = toml::to_string(&recipe).unwrap();
    assert_eq!(crate::recipe::parsed(&text).unwrap(), recipe, "{text}");
}

#[test]
fn what_would_do_nothing_is_refused_before_the_start() {
    assert_snapshot!(
        refusal("--dp 1 --zero-stage 1"),
        @"zero_stage = 1 requires data parallelism, but data = 1: set data (--dp) to 2 or more, or zero_stage to 0"
    );
    assert_snapshot!(
        refusal("--hsdp 2"),
        @"hsdp requires zero_stage = 1, 2 or 3, but zero_stage = 0; change the stage, or remove hsdp"
    );
    assert_snapshot!(
        refusal("--zero-stage 1 --hsdp 1 --data_parallel.overlap_param_gather"),
        @"overlap_param_gather requires sharding groups of 2 or more ranks, and hsdp = 1; set hsdp to 2 or more, or \
          remove overlap_param_gather"
    );
    assert_snapshot!(
        refusal("--tp 1 --pp 1 --zero-stage 1 --train.check_replicas_every 5"),
        @"check_replicas_every requires replicated weights, and this layout has none; remove it"
    );
    assert!(
        refusal("--data_parallel.keep_gathered")
            .starts_with("keep_gathered requires zero_stage = 3")
    );
    assert!(
        refusal("--zero-stage 1 --data_parallel.reduce_in_16_bits").contains("precision = f32")
    );
    assert!(
        refusal("--zero-stage 1 --precision f64 --data_parallel.reduce_in_16_bits")
            .contains("precision = f64")
    );
    assert!(
        refusal("--precision bf16 --data_parallel.reduce_in_16_bits")
            .contains("but zero_stage = 0")
    );
    let mut recipe = resolve("--kernels optimizer=unfused").unwrap();
    recipe.data_parallel.moments = Moments::Bf16;
    let error = recipe.plan().err().unwrap().to_string();
    assert!(
        error.starts_with("moments = \"bf16\" requires the fused AdamW"),
        "{error}"
    );
}

#[test]
fn what_compares_replicas_needs_some() {
    for flags in [
        "--tp 2 --pp 1 --zero-stage 3",
        "--tp 1 --pp 2 --zero-stage 3",
        "--tp 1 --pp 1 --zero-stage 3 --hsdp 1",
        "--tp 1 --pp 1",
    ] {
        let recipe = resolve(&format!("{flags} --train.check_replicas_every 5")).unwrap();
        recipe.plan().unwrap();
    }
}

#[test]
fn sizes_out_of_range_are_refused_before_the_start() {
    assert_snapshot!(
        refusal("--zero-stage 1 --hsdp 3"),
        @"invalid hsdp = 3: expected a divisor of the 2 ranks of the data axis (1, 2)"
    );
    let zero = "invalid bucket_size = 0: expected a number above 0";
    assert_eq!(refusal("--data_parallel.bucket_size 0"), zero);
    let limit = "invalid gradient_limit = 0: expected a number above 0";
    assert_eq!(refusal("--data_parallel.gradient_limit 0"), limit);
    assert!(refusal("--train.loss_scale 0").starts_with("invalid loss_scale: constant = 0 must"));
    let every = "invalid check_replicas_every = 0: expected more than 0";
    assert_eq!(refusal("--train.check_replicas_every 0"), every);
    let stage = refusal("--zero-stage 4");
    assert!(stage.contains("expected 0, 1, 2 or 3"), "{stage}");
    let precision = refusal("--precision fp8");
    assert!(
        precision.contains("expected f64, f32, bf16 or f16"),
        "{precision}"
    );
    assert_eq!(super::precision("fp16").unwrap(), Precision::F16);
    let scale = refusal("--train.loss_scale large");
    assert!(
        scale.contains("expected none, dynamic, a number or a table"),
        "{scale}"
    );
}

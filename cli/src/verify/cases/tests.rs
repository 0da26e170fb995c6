use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::Precision;
use burn_megatron::kernel_selection::KernelChoice;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::{ModelBuilder, QkNorm};

use super::*;
use crate::flags::parse_text;

fn args(flags: &str) -> VerifyArgs {
    parse_text(flags).unwrap()
}

/// Returns the case of a recipe with these flags.
fn of(recipe: &str, flags: &str) -> Result<VerifyCase, Error> {
    let recipe = crate::recipe::parsed(recipe).unwrap();
    let args = args(flags);
    let mut case = of_recipe("recipe.toml", recipe, &args)?;
    case.apply(&args)?;
    Ok(case)
}

#[track_caller]
fn assert_refused(recipe: &str, flags: &str, start: &str) {
    match of(recipe, flags) {
        Ok(_) => panic!("{recipe} is taken"),
        Err(error) => assert!(error.to_string().starts_with(start), "{error}"),
    }
}

const PIPELINE: &str = r#"
    [parallel]
    tensor = 2
    pipeline = 2
    data = 2
    sequence_parallel = true
    schedule = "interleaved"
    split = { ends = { first = 1, last = 1 } }

    [model]
    layers = 8
    context = 16

    [data_parallel]
    zero_stage = 1
    bucket_size = 3000
    overlap_grad_reduce = false
    overlap_param_gather = true
    gradient_limit = 1e6

    [kernels]
    norm = "unfused"

    [train]
    global_batch_size = 4
    micro_batch_size = 1
    sequence_length = 12
    seed = 5
    learning_rate = 0.002
    clip = 0.5
    optimizer = { beta2 = 0.9, groups = [{ pattern = "embedding.*", weight_decay = 0.0 }] }

    [data]
    packing = true
    files = ["corpus"]
"#;

#[test]
fn a_recipe_is_verified_as_it_runs() {
    let case = of(PIPELINE, "").unwrap();
    let names: Vec<_> = case.layouts.iter().map(Layout::to_string).collect();
    assert_eq!(names, ["tp2-sp-pp2-dp2-mb1-z1/interleaved"]);
    let (options, recipe) = (case.options(&args("")), &case.recipe);
    assert_eq!((recipe.train.seed, case.samples, case.packed), (5, 4, true));
    assert_eq!(recipe.train.sequence_length, Some(12));
    assert_eq!(case.layouts[0].parallel.split, recipe.parallel.split);
    assert_ne!(recipe.parallel.split, LayerSplit::Even);
    assert_eq!(recipe.kernels.norm, KernelChoice::Unfused);
    assert_eq!(options.train.optimizer, recipe.train.optimizer);
    assert_eq!(options.train.optimizer.groups().len(), 1);
    assert_eq!(
        (options.train.learning_rate, options.train.clip),
        (0.002, 0.5)
    );
    let sharing = &options.train.data_parallel;
    assert_eq!(sharing.bucket_size, Some(3000));
    assert!(sharing.overlap_param_gather && !sharing.overlap_grad_reduce);
    assert_eq!(sharing.gradient_limit, Some(1e6));
}

#[test]
fn flags_take_the_place_of_settings() {
    let flags = "--kernels norm=fused --global-batch-size 8 --seed 7 --layouts pp2-dp2-mb2-z2/interleaved,pp4-mb1";
    let case = of(PIPELINE, flags).unwrap();
    assert_eq!((case.recipe.train.seed, case.samples), (7, 8));
    assert_eq!(case.recipe.kernels.norm, KernelChoice::Fused);
    assert_eq!(case.layouts.len(), 2);
}

#[test]
fn what_cannot_be_honoured_is_named() {
    let pipeline = "[parallel]\npipeline = 2\n[model]\nlayers = 8\n";
    let defers = "[parallel]\npipeline = 2\ndefer_embedding_wgrad = 0\n";
    for (recipe, flags, start) in [
        (
            "[train]\nloss_scale = 64.0",
            "",
            "train.loss_scale is not supported by verify",
        ),
        (
            "[data_parallel]\nmoments = \"bf16\"",
            "",
            "data_parallel: moments = \"bf16\" rounds to 16 bits, which cannot be verified in f64",
        ),
        (
            "[parallel]\ndata = 2\n[data_parallel]\nprecision = \"bf16\"\nzero_stage = 1\nreduce_in_16_bits = true",
            "--precision f32",
            "data_parallel: reduce_in_16_bits rounds to 16 bits, which cannot be verified in f32",
        ),
        (
            defers,
            "--layouts dp2",
            "parallel.defer_embedding_wgrad requires a layout with a pipeline",
        ),
        (
            PIPELINE,
            "--layouts dp2-mb1-z1",
            "parallel.split requires a layout with a pipeline",
        ),
    ] {
        assert_refused(recipe, flags, start);
    }
    assert!(of(pipeline, "").is_ok());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.csv");
    let layout = ParallelConfig::new().with_pipeline(2);
    let schedule = burn_megatron::pipeline::schedule_of(&layout, 4).unwrap();
    std::fs::write(&file, schedule.to_csv()).unwrap();
    let recipe = format!("[parallel]\npipeline = 2\nschedule = {:?}\n", file);
    assert_refused(&recipe, "", "parallel.schedule = ");
}

/// Checks that each setting is valid in its layouts.
#[test]
fn every_setting_fits_its_layouts() {
    let named = |args: &VerifyArgs| cases(args, &Families::transformers(), "").unwrap();
    let plain = named(&args(""));
    assert_eq!(plain.len(), 10 + SETTINGS.len());
    let all = named(&args("--all"));
    let dense = 3 + SETTINGS.len() + 2 + IN_16_BITS.len() + 4;
    let with_experts = 3 + SETTINGS.len() + 1 + 1;
    // Combinations that are not supported:
    // - A ring does not support the two GPTs (attention dropout), Gemma (soft cap of the scores) and DeepSeek
    //   (gathers latents).
    // - Models without experts have no expert exchanges, and no gradient sums of experts.
    // - Hybrid context parallelism supports none of these models, nor the four other models with experts.
    // - Models with experts have no GELU epilogue and no CUDA graph. Three dense models have another activation.
    // - Three models normalize queries and keys, which rules out QK-Clip.
    let (without, with) = (5 * (dense - 4), 5 * (with_experts - 2));
    assert_eq!(all.len(), without + with - 3 - 4 - 8 - 3);
    for case in plain.iter().chain(&all) {
        for layout in &case.layouts {
            let mut sharing = case.options(&args("")).train.data_parallel;
            sharing.zero_stage = layout.parallel.zero_stage;
            sharing.hsdp = layout.parallel.hsdp;
            if case.computing == VerifyType::Bf16 {
                sharing.precision = burn_megatron::data_parallel::Precision::Bf16;
            }
            let fits = sharing.check(layout.parallel.data_size());
            assert!(fits.is_ok(), "{} {layout}: {fits:?}", case.name);
        }
    }
    assert_eq!(named(&args("--models llama --layouts dp2")).len(), 1);
}

/// Finds invalid cases early. Otherwise they would be errors in the middle of `verify --all`, which takes minutes.
#[test]
fn every_model_can_be_trained_with_its_settings() {
    let all = cases(&args("--all"), &Families::transformers(), "").unwrap();
    let usual = case("", Model::transformer(VerifyModel::Gpt.config()), 1, vec![]);
    let settings = all
        .iter()
        .filter(|case| case.recipe.train != usual.recipe.train && case.recipe.train.seed == 1);
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let mut count = 0;
    for case in settings {
        let config = TrainConfig {
            data_parallel: DataParallelConfig {
                precision: Precision::F64,
                ..DataParallelConfig::default()
            },
            // `verify` runs the micro-batches of a CUDA graph without the graph.
            cuda_graph: false,
            ..case.recipe.train.clone()
        };
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F64);
        let trainer = case.recipe.model.trainer(builder, &config).map(drop);
        assert!(trainer.is_ok(), "{}: {:?}", case.name, trainer.err());
        count += 1;
    }
    assert!(count > 30, "{count}");
}

/// Checks that every model feature occurs in one of the small models.
#[test]
fn the_small_models_have_every_feature() {
    let models = VerifyModel::ALL.map(VerifyModel::config);
    let some = |has: fn(&burn_megatron_models::TransformerConfig) -> bool| models.iter().any(has);
    assert!(some(|model| model.qk_norm.is_some()));
    assert!(some(|model| model
        .window
        .is_some_and(|window| window < model.context)));
    assert!(some(|model| model.qkv_bias == Some(true) && !model.bias));
    assert!(some(|model| model.z_loss > 0.0) && some(|model| model.label_smoothing > 0.0));
    assert!(some(|model| model.norm_zero_centered));
    assert_eq!(
        models
            .iter()
            .filter(|model| format!("{:?}", model.positions).contains("original"))
            .count(),
        4
    );
    assert!(some(|model| model.mla.is_some()));
    assert!(some(|model| model.qk_norm == Some(QkNorm::Whole)));
    assert!(some(|model| model.sinks) && some(|model| model.post_norms));
    assert!(some(|model| !model.layer_windows.is_empty()));
}

/// Checks that, without names, a command verifies its own families in the layouts that each family supports.
#[test]
fn a_registered_family_is_verified_where_it_can_run() {
    let mut families = Families::none();
    // With two heads, no layout with tensor 4 is supported.
    let small = burn_megatron_models::TransformerConfig {
        heads: 2,
        hidden: 8,
        ..VerifyModel::Llama.config()
    };
    families.add("mine", small);
    let found = cases(&args(""), &families, "").unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(
        (&found[0].name[..], found[0].recipe.model.family()),
        ("mine", "mine")
    );
    let tensor = found[0].layouts.iter().map(|layout| layout.parallel.tensor);
    assert_eq!(tensor.max(), Some(2));
    assert_eq!(
        cases(&args("--models mine --all"), &families, "")
            .unwrap()
            .len(),
        5
    );
    let error = cases(&args("--models gpt"), &families, "").err().unwrap();
    insta::assert_snapshot!(error, @"invalid model \"gpt\": expected mine");
    let named = cases(
        &args("--models gpt,mine --layouts dp2"),
        &{
            let mut all = Families::transformers();
            all.add("mine", VerifyModel::Gpt.config());
            all
        },
        "",
    );
    let named: Vec<_> = named.unwrap().into_iter().map(|case| case.name).collect();
    assert_eq!(named, ["Gpt", "mine"]);
}

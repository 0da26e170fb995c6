//! The cases of `verify`: models, layouts and settings.

mod settings;

use burn::tensor::DType;
use burn_megatron::data_parallel::{DataParallelConfig, Moments};
use burn_megatron::kernel_selection::EpilogueFusion;
use burn_megatron::mesh::ScheduleSource;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::Activation;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::optim::LossScale;
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::pipeline::stages_of;
use burn_megatron_models::hf::{HfFamily, ModelFamily};
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions};

use super::args::{VerifyArgs, VerifyType};
use super::models::{VerifyModel, usual};
use crate::error::Error;
use crate::family::{Families, Model};
use crate::fp8::{self, Fp8Choice};
use crate::recipe::Recipe;
use crate::recipe::merge::RecipeLayers;
use settings::{IN_16_BITS, SETTINGS, SettingCase, apply};

/// Case of `verify`: a model with the settings of a recipe, in some layouts. Each case is one table of the report.
#[derive(Clone)]
pub struct VerifyCase {
    pub name: String,
    pub recipe: Recipe,
    pub layouts: Vec<Layout>,
    pub computing: VerifyType,
    pub samples: usize,
    pub packed: bool,
}

/// The seeds for `--all`.
const SEEDS: [u64; 3] = [1, 2, 3];

/// Returns the cases for the flags.
pub fn cases(
    args: &VerifyArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<Vec<VerifyCase>, Error> {
    let mut cases = match &args.recipe {
        Some(path) => {
            let base = (families, default_recipe);
            let recipe = RecipeLayers::new(base, Some(path), &args.set)
                .read()?
                .recipe;
            vec![of_recipe(&path.display().to_string(), recipe, args)?]
        }
        None => {
            args.set.need("--recipe")?;
            of_models(args, families)?
        }
    };
    for case in &mut cases {
        case.apply(args)?;
    }
    Ok(cases)
}

/// Returns the cases for `--models`, without applying the other flags.
fn of_models(args: &VerifyArgs, families: &Families) -> Result<Vec<VerifyCase>, Error> {
    let usual = usual();
    let (transformers, models) = selected(&args.models, families)?;
    if args.all {
        let mut cases = all_transformers(&transformers)?;
        for model in &models {
            cases.extend(all_of_family(model, &usual)?);
        }
        return Ok(cases);
    }
    let seed = args.seed.unwrap_or(1);
    let mut cases = vec![];
    for model in &transformers {
        let layouts = match &args.layouts[..] {
            [] => model.layouts(),
            // Models that were not requested are skipped if they support none of the layouts.
            given if args.models.is_empty() => {
                let family = Model::transformer(model.config());
                match supported(&family, given) {
                    Ok(layouts) => layouts,
                    Err(_) => continue,
                }
            }
            given => given.to_vec(),
        };
        cases.push(small(*model, seed, &layouts));
    }
    for model in &models {
        let layouts = if args.layouts.is_empty() {
            supported(model, &usual)?
        } else {
            args.layouts.clone()
        };
        cases.push(case(model.family(), model.clone(), seed, layouts));
    }
    let is_usual = args.layouts.is_empty() && args.fp8.is_none() && args.precision.is_none();
    if is_usual {
        let settings = SETTINGS.iter();
        for setting in settings.filter(|(_, model, ..)| transformers.contains(model)) {
            cases.push(set(setting, setting.1, seed)?);
        }
    }
    let is_left_out = |layout: &&Layout| cases.iter().all(|case| !case.layouts.contains(layout));
    if let (Some(layout), Some(model)) =
        (args.layouts.iter().find(is_left_out), transformers.first())
    {
        let first = Model::transformer(model.config());
        supported(&first, std::slice::from_ref(layout))
            .map_err(|reason| format!("no model supports layout {layout}: {reason}"))?;
    }
    Ok(cases)
}

/// Returns the small transformers and the families of these names. Without names, returns the transformers if a
/// transformer family is registered, and all other registered families.
fn selected(
    names: &[String],
    families: &Families,
) -> Result<(Vec<VerifyModel>, Vec<Model>), Error> {
    let is_transformer = |family: &Model| ModelFamily::of_name(family.family()).is_some();
    let registered = families.models().iter();
    let small = if registered.clone().any(is_transformer) {
        &VerifyModel::ALL[..]
    } else {
        &[]
    };
    if names.is_empty() {
        let others = registered.filter(|family| !is_transformer(family));
        return Ok((small.to_vec(), others.cloned().collect()));
    }
    let (mut transformers, mut models) = (vec![], vec![]);
    for name in names {
        let family = families
            .models()
            .iter()
            .find(|model| model.family() == name);
        match (small.iter().find(|model| model.name() == name), family) {
            (Some(model), _) => transformers.push(*model),
            (None, Some(model)) => models.push(model.clone()),
            (None, None) => {
                let small = small.iter().map(|model| model.name());
                let known = small.chain(registered.clone().map(|model| model.family()));
                let known: Vec<_> = known.collect();
                return Err(
                    format!("invalid model {name:?}: expected {}", known.join(", ")).into(),
                );
            }
        }
    }
    Ok((transformers, models))
}

/// Returns the layouts that a model supports. Prints the number of unsupported layouts.
fn supported(model: &Model, layouts: &[Layout]) -> Result<Vec<Layout>, Error> {
    let (mut fitting, mut reason) = (vec![], None);
    for layout in layouts {
        let parallel = &layout.parallel;
        let fits = model.check_layout(parallel).map_err(Error::from);
        match fits.and_then(|()| Ok(stages_of(parallel, model.layers())?)) {
            Ok(_) => fitting.push(layout.clone()),
            Err(error) => reason = reason.or(Some(error)),
        }
    }
    match reason {
        Some(reason) if fitting.is_empty() => Err(reason),
        Some(reason) => {
            let (left_out, all) = (layouts.len() - fitting.len(), layouts.len());
            let family = model.family();
            eprintln!("{family}: {left_out} of {all} layouts are left out: {reason}");
            Ok(fitting)
        }
        None => Ok(fitting),
    }
}

/// Returns cases of every transformer with every seed, setting, type and FP8 scaling recipe. If values are rounded
/// differently from one rank, a router may choose other experts. Such cases therefore contain no models with experts.
fn all_transformers(models: &[VerifyModel]) -> Result<Vec<VerifyCase>, Error> {
    let mut cases = vec![];
    for model in models {
        let layouts = &model.layouts();
        let has_experts = model.config().moe.is_some();
        for seed in SEEDS {
            let mut case = small(*model, seed, layouts);
            case.name = format!("{}, seed {seed}", case.name);
            cases.push(case);
        }
        for setting in &SETTINGS {
            let case = set(setting, *model, 1)?;
            cases.extend((!case.layouts.is_empty()).then_some(case));
        }
        let types: &[_] = if has_experts {
            &[VerifyType::F32]
        } else {
            &[VerifyType::F32, VerifyType::Bf16]
        };
        for computing in types {
            let mut case = small(*model, 1, layouts);
            case.computing = *computing;
            cases.push(case);
        }
        for setting in IN_16_BITS.iter().filter(|_| !has_experts) {
            let mut case = set(setting, *model, 1)?;
            case.computing = VerifyType::Bf16;
            cases.push(case);
        }
        let recipes = ["delayed", "current", "blockwise", "mxfp8"];
        for recipe in &recipes[..if has_experts { 1 } else { 4 }] {
            let mut case = small(*model, 1, layouts);
            case.recipe.fp8.recipe = Some(recipe.parse()?);
            case.name = format!("{}, fp8 {recipe}", case.name);
            cases.push(case);
        }
    }
    Ok(cases)
}

/// Returns cases of a family with every seed and type.
fn all_of_family(model: &Model, layouts: &[Layout]) -> Result<Vec<VerifyCase>, Error> {
    let layouts = supported(model, layouts)?;
    let (seeds, types) = (SEEDS.into_iter(), [VerifyType::F32, VerifyType::Bf16]);
    let seeds = seeds.map(|seed| (seed, VerifyType::F64));
    let all = seeds.chain(types.map(|computing| (1, computing)));
    let case = |(seed, computing)| VerifyCase {
        computing,
        ..case(
            &format!("{}, seed {seed}", model.family()),
            model.clone(),
            seed,
            layouts.clone(),
        )
    };
    Ok(all.map(case).collect())
}

/// Returns a case of a small transformer.
fn small(model: VerifyModel, seed: u64, layouts: &[Layout]) -> VerifyCase {
    let name = format!("{model:?}");
    case(
        &name,
        Model::transformer(model.config()),
        seed,
        layouts.to_vec(),
    )
}

/// Returns a case of a model, with gradient clipping at every step.
fn case(name: &str, model: Model, seed: u64, layouts: Vec<Layout>) -> VerifyCase {
    let usual = VerifyOptions::default();
    VerifyCase {
        name: name.into(),
        recipe: Recipe {
            model,
            train: TrainConfig {
                seed,
                learning_rate: usual.train.learning_rate,
                clip: usual.train.clip,
                ..TrainConfig::default()
            },
            ..Recipe::default()
        },
        layouts,
        computing: VerifyType::F64,
        samples: 8,
        packed: false,
    }
}

/// Returns a case for a setting of a model, in the layouts of the setting that the model supports. The case has no
/// layouts if the model cannot have the setting.
fn set(setting: &SettingCase, model: VerifyModel, seed: u64) -> Result<VerifyCase, Error> {
    let (name, _, layouts, keys) = setting;
    let layouts: Result<Vec<Layout>, _> = layouts.iter().map(|name| name.parse()).collect();
    let (mut layouts, config) = (layouts?, model.config());
    layouts.retain(|layout| config.check_layout(&layout.parallel).is_ok());
    let mut case = small(model, seed, &layouts);
    case.name = format!("{}, {name}", case.name);
    case.recipe = apply(&case.recipe, keys)?;
    let Recipe { kernels, train, .. } = &case.recipe;
    let is_dense = config.moe.is_none() && config.mtp.is_none();
    let has_epilogues = is_dense && config.activation == Activation::GeluTanh;
    let can_have = (has_epilogues || kernels.epilogue_fusion == EpilogueFusion::Off)
        && (is_dense || !train.cuda_graph)
        && (config.qk_norm.is_none() || !train.limits_logits());
    if !can_have {
        case.layouts.clear();
    }
    Ok(case)
}

/// Returns a case for a recipe, in its own layout or in the layouts of the flags.
fn of_recipe(name: &str, recipe: Recipe, args: &VerifyArgs) -> Result<VerifyCase, Error> {
    let layouts = if args.layouts.is_empty() {
        vec![own_layout(&recipe)?]
    } else {
        args.layouts.clone()
    };
    Ok(VerifyCase {
        name: name.into(),
        samples: recipe.train.global_batch_size,
        packed: recipe.data.has_documents(),
        recipe,
        layouts,
        computing: VerifyType::F64,
    })
}

/// Returns the layout of a recipe.
fn own_layout(recipe: &Recipe) -> Result<Layout, Error> {
    recipe.plan()?;
    let parallel = &recipe.parallel;
    if let Some(ScheduleSource::File(schedule)) = &parallel.schedule {
        return Err(format!(
            "parallel.schedule = \"{schedule}\" is a CSV file, and verify supports named schedules only; give \
             --layouts with one, as in pp2-mb1/1f1b"
        )
        .into());
    }
    Ok(Layout {
        parallel: recipe.layout(),
        micro_batch: Some(recipe.train.micro_batch_size),
    })
}

impl VerifyCase {
    /// Applies the flags, and checks that all settings are supported.
    fn apply(&mut self, args: &VerifyArgs) -> Result<(), Error> {
        let recipe = &mut self.recipe;
        for choices in &args.kernels {
            recipe.kernels.set(choices)?;
        }
        recipe.kernels.check_measured()?;
        match args.fp8 {
            Some(Fp8Choice(None)) => recipe.fp8 = Fp8Config::default(),
            Some(Fp8Choice(new)) => recipe.fp8.recipe = new,
            None => {}
        }
        if !args.lora.is_empty() {
            let lora = LoraConfig {
                rank: 3,
                alpha: 6.0,
                target_modules: args.lora.clone(),
                init_lora_weights: false,
                ..LoraConfig::default()
            };
            recipe.model.adapted_layers(&lora)?;
            recipe.lora = Some(lora);
        }
        recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
        let own = &recipe.parallel;
        for layout in &mut self.layouts {
            let parallel = &mut layout.parallel;
            if parallel.pipeline > 1 {
                parallel.split = own.split.clone();
                parallel.defer_embedding_wgrad = own.defer_embedding_wgrad;
                parallel.receives_ahead = own.receives_ahead;
                parallel.fp8_transfers = own.fp8_transfers;
            }
        }
        self.samples = args.global_batch_size.unwrap_or(self.samples);
        self.packed |= args.packed;
        self.computing = args.precision.unwrap_or(self.computing);
        self.check()
    }

    fn check(&self) -> Result<(), Error> {
        let recipe = &self.recipe;
        fp8::check(recipe)?;
        if recipe
            .train
            .loss_scale
            .is_some_and(|scale| scale != LossScale::None)
        {
            return Err("train.loss_scale is not supported by verify; remove it".into());
        }
        let sharing = &recipe.data_parallel;
        for (name, given) in [
            ("reduce_in_16_bits", sharing.reduce_in_16_bits),
            ("moments = \"bf16\"", sharing.moments == Moments::Bf16),
        ] {
            if given && self.computing != VerifyType::Bf16 {
                return Err(format!(
                    "data_parallel: {name} rounds to 16 bits, which cannot be verified in {}; use --precision bf16",
                    self.computing.name(),
                )
                .into());
            }
        }
        let parallel = &recipe.parallel;
        let pipelines = self
            .layouts
            .iter()
            .any(|layout| layout.parallel.pipeline > 1);
        for (name, given) in [
            ("split", parallel.split != LayerSplit::Even),
            (
                "defer_embedding_wgrad",
                parallel.defer_embedding_wgrad.is_some(),
            ),
            ("receives_ahead", parallel.receives_ahead.is_some()),
            ("fp8_transfers", parallel.fp8_transfers),
        ] {
            if given && !pipelines {
                return Err(format!(
                    "parallel.{name} requires a layout with a pipeline: add one, such as pp2-mb1/1f1b, or remove {name}"
                )
                .into());
            }
        }
        Ok(())
    }

    /// Returns the settings of the subject, without its model.
    pub fn subject(&self) -> ModelSubject<()> {
        let (recipe, train) = (&self.recipe, &self.recipe.train);
        ModelSubject {
            config: (),
            seed: train.seed,
            samples: self.samples,
            kernels: recipe.kernels.clone(),
            packed: self.packed,
            fp8: recipe.fp8.clone(),
            lora: recipe.lora.clone(),
            sequence_length: train.sequence_length,
            dtype: self.computing.dtype(),
        }
    }

    /// Returns the options for `verify`.
    pub fn options(&self, args: &VerifyArgs) -> VerifyOptions {
        let usual = VerifyOptions::default();
        VerifyOptions {
            steps: usize::from(args.steps),
            tolerance: args.tolerance.unwrap_or(usual.tolerance),
            train: TrainConfig {
                data_parallel: DataParallelConfig {
                    // The layout sets `hsdp`.
                    hsdp: None,
                    ..self.recipe.sharing()
                },
                ..self.recipe.train.of_a_step()
            },
            same_micro_batches: fp8::is_on(&self.recipe.fp8),
            progress: |layout| eprintln!("  {layout}"),
        }
    }
}

impl VerifyType {
    fn dtype(self) -> DType {
        match self {
            Self::F64 => DType::F64,
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

#[cfg(test)]
mod tests;

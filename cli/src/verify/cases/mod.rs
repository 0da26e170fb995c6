//! The cases of `verify`: models, layouts and settings.

use burn::tensor::DType;
use burn_megatron::choice::{KernelChoice, KernelChoices};
use burn_megatron::data_parallel::{DataParallelConfig, Moments};
use burn_megatron::mesh::ScheduleSource;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{LossScale, ParameterGroup};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::train::TrainConfig;
use burn_megatron::verify::{Layout, VerifyOptions};
use burn_megatron_models::TransformerSubject;

use super::args::{VerifyArgs, VerifyModel, VerifyType};
use crate::error::Error;
use crate::fp8::{self, Fp8Choice};
use crate::recipe::Recipe;

/// A case: a model with the settings of a recipe, in some layouts. One table of the report.
#[derive(Clone)]
pub struct VerifyCase {
    pub name: String,
    pub recipe: Recipe,
    pub layouts: Vec<Layout>,
    pub computing: VerifyType,
    pub samples: usize,
    pub packed: bool,
}

/// A setting that must not change the result, with a model and layouts in which it has an effect.
type SettingCase = (
    &'static str,
    VerifyModel,
    &'static [&'static str],
    fn(&mut Recipe),
);

const SETTINGS: [SettingCase; 11] = [
    (
        "overlap_grad_reduce = false",
        VerifyModel::Gpt,
        &["tp2-dp2-mb2", "dp4-mb1-z2"],
        |recipe| recipe.data_parallel.overlap_grad_reduce = false,
    ),
    (
        "overlap_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "pp2-dp2-mb1-z1/1f1b"],
        |recipe| recipe.data_parallel.overlap_param_gather = true,
    ),
    (
        "keep_gathered",
        VerifyModel::GptUntied,
        &["dp4-mb1-z3", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| recipe.data_parallel.keep_gathered = true,
    ),
    (
        "bucket_size = 700",
        VerifyModel::LlamaTied,
        &["dp4-mb1", "tp2-dp2-mb2-z1", "dp4-mb1-z3"],
        |recipe| recipe.data_parallel.bucket_size = Some(700),
    ),
    ("pad_buckets", VerifyModel::Gpt, &["dp4-mb1-z1"], |recipe| {
        recipe.data_parallel.pad_buckets = true
    }),
    (
        "split by its ends",
        VerifyModel::LlamaTied,
        &["pp4-mb1/1f1b", "tp2-pp2-mb2/interleaved"],
        |recipe| {
            let (first, last) = (Some(1), Some(1));
            recipe.parallel.split = LayerSplit::Ends { first, last };
        },
    ),
    (
        "split by a layout",
        VerifyModel::Gpt,
        &["pp2-dp2-mb1/1f1b"],
        |recipe| recipe.parallel.split = LayerSplit::Layout("Et*5|t*3,L".into()),
    ),
    (
        "defer_embedding_wgrad = 2",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/gpipe"],
        |recipe| recipe.parallel.defer_embedding_wgrad = Some(2),
    ),
    (
        "kernels unfused",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1", "pp2-mb2/zb-h1", "dp4-mb1-z3"],
        |recipe| recipe.kernels = KernelChoices::all(KernelChoice::Unfused),
    ),
    (
        "unclipped, with parameter groups",
        VerifyModel::GptUntied,
        &["tp2-sp-dp2-mb1-z1", "pp2-mb2/1f1b"],
        |recipe| {
            recipe.train.clip = f64::INFINITY;
            let group = |pattern: &str, weight_decay, learning_rate| ParameterGroup {
                pattern: pattern.into(),
                weight_decay,
                learning_rate,
            };
            recipe.train.optimizer.groups = vec![
                group("embedding.*", Some(0.0), None),
                group("blocks.*.mlp.**", None, Some(0.5)),
            ];
        },
    ),
    (
        "fp8 delayed, fp8_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb1-z2"],
        |recipe| {
            recipe.fp8.recipe = "delayed".parse().ok();
            recipe.data_parallel.fp8_param_gather = true;
        },
    ),
];

/// Settings for 16-bit types, for `--all`.
const IN_16_BITS: [SettingCase; 1] = [(
    "reduce_in_16_bits, moments = bf16",
    VerifyModel::Llama,
    &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "dp4-mb1-z3"],
    |recipe| {
        recipe.data_parallel.reduce_in_16_bits = true;
        recipe.data_parallel.moments = Moments::Bf16;
    },
)];

/// The seeds of `--all`.
const SEEDS: [u64; 3] = [1, 2, 3];

/// The cases of the flags.
pub fn cases(args: &VerifyArgs) -> Result<Vec<VerifyCase>, Error> {
    if let Some(path) = &args.recipe {
        let recipe = Recipe::read(path)?;
        let case = of_recipe(&path.display().to_string(), recipe, args)?;
        return Ok(vec![case]);
    }
    let usual = [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat();
    let layouts = if args.layouts.is_empty() {
        usual.clone()
    } else {
        args.layouts.clone()
    };
    let models = || args.models.iter();
    let seed = args.seed.unwrap_or(1);
    let mut cases: Vec<_> = models()
        .map(|model| small(*model, seed, &layouts))
        .collect();
    for case in &mut cases {
        case.apply(args)?;
    }
    let is_usual = args.layouts.is_empty() && args.fp8.is_none() && args.precision.is_none();
    if is_usual && !args.all {
        let settings = SETTINGS.iter();
        let settings = settings.filter(|(_, model, ..)| args.models.contains(model));
        for setting in settings {
            let mut case = set(setting, setting.1, seed)?;
            case.apply(args)?;
            cases.push(case);
        }
    }
    if args.all {
        cases = all(&args.models, &usual)?;
        for case in &mut cases {
            case.apply(args)?;
        }
    }
    Ok(cases)
}

/// Every model with every seed, setting, type and 8-bit scaling recipe.
fn all(models: &[VerifyModel], layouts: &[Layout]) -> Result<Vec<VerifyCase>, Error> {
    let mut cases = vec![];
    for model in models {
        for seed in SEEDS {
            let mut case = small(*model, seed, layouts);
            case.name = format!("{}, seed {seed}", case.name);
            cases.push(case);
        }
        for setting in &SETTINGS {
            cases.push(set(setting, *model, 1)?);
        }
        for computing in [VerifyType::F32, VerifyType::Bf16] {
            let mut case = small(*model, 1, layouts);
            case.computing = computing;
            cases.push(case);
        }
        for setting in &IN_16_BITS {
            let mut case = set(setting, *model, 1)?;
            case.computing = VerifyType::Bf16;
            cases.push(case);
        }
        for recipe in ["delayed", "current", "blockwise", "mxfp8"] {
            let mut case = small(*model, 1, layouts);
            case.recipe.fp8.recipe = Some(recipe.parse()?);
            case.name = format!("{}, fp8 {recipe}", case.name);
            cases.push(case);
        }
    }
    Ok(cases)
}

/// A small model, with gradient clipping at every step.
fn small(model: VerifyModel, seed: u64, layouts: &[Layout]) -> VerifyCase {
    let usual = VerifyOptions::default();
    VerifyCase {
        name: format!("{model:?}"),
        recipe: Recipe {
            model: model.config(),
            train: TrainConfig {
                seed,
                learning_rate: usual.learning_rate,
                clip: usual.clip,
                ..TrainConfig::default()
            },
            ..Recipe::default()
        },
        layouts: layouts.to_vec(),
        computing: VerifyType::F64,
        samples: 8,
        packed: false,
    }
}

fn set(setting: &SettingCase, model: VerifyModel, seed: u64) -> Result<VerifyCase, Error> {
    let (name, _, layouts, change) = setting;
    let layouts: Result<Vec<Layout>, _> = layouts.iter().map(|name| name.parse()).collect();
    let mut case = small(model, seed, &layouts?);
    case.name = format!("{}, {name}", case.name);
    change(&mut case.recipe);
    Ok(case)
}

/// A recipe in its own layout, or in those of the flags.
fn of_recipe(name: &str, recipe: Recipe, args: &VerifyArgs) -> Result<VerifyCase, Error> {
    let layouts = if args.layouts.is_empty() {
        vec![own_layout(&recipe)?]
    } else {
        args.layouts.clone()
    };
    let mut case = VerifyCase {
        name: name.into(),
        samples: recipe.train.global_batch_size,
        packed: recipe.data.packing || recipe.data.reset_attention,
        recipe,
        layouts,
        computing: VerifyType::F64,
    };
    case.apply(args)?;
    Ok(case)
}

/// The layout of a recipe.
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
        match args.fp8 {
            Some(Fp8Choice(None)) => recipe.fp8 = Fp8Config::default(),
            Some(Fp8Choice(new)) => recipe.fp8.recipe = new,
            None => {}
        }
        recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
        let own = &recipe.parallel;
        for layout in &mut self.layouts {
            let parallel = &mut layout.parallel;
            if parallel.pipeline > 1 {
                parallel.split = own.split.clone();
                parallel.defer_embedding_wgrad = own.defer_embedding_wgrad;
            }
        }
        self.samples = args.samples.unwrap_or(self.samples);
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
        ] {
            if given && !pipelines {
                return Err(format!(
                    "parallel.{name} applies to pipelines, and no layout has one; add one, as in pp2-mb1/1f1b, or remove \
                     {name}"
                )
                .into());
            }
        }
        for layout in &self.layouts {
            let parallel = &layout.parallel;
            let fits = recipe
                .model
                .check(parallel.tensor, parallel.sequence_parallel);
            fits.map_err(|error| format!("layout {layout}: {error}"))?;
        }
        Ok(())
    }

    /// The model and its data.
    pub fn subject(&self) -> TransformerSubject {
        TransformerSubject {
            config: self.recipe.model.clone(),
            seed: self.recipe.train.seed,
            samples: self.samples,
            kernels: self.recipe.kernels,
            packed: self.packed,
            fp8: self.recipe.fp8.clone(),
            sequence_length: self.recipe.train.sequence_length,
            dtype: self.computing.dtype(),
        }
    }

    /// The options of `verify`.
    pub fn options(&self, args: &VerifyArgs) -> VerifyOptions {
        let Recipe {
            train,
            data_parallel,
            ..
        } = &self.recipe;
        let usual = VerifyOptions::default();
        VerifyOptions {
            steps: usize::from(args.steps),
            tolerance: args.tolerance.unwrap_or(usual.tolerance),
            learning_rate: train.learning_rate,
            optimizer: train.optimizer.clone(),
            clip: train.clip,
            data_parallel: DataParallelConfig {
                // Both are set by the layout.
                hsdp: None,
                ..data_parallel.clone()
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

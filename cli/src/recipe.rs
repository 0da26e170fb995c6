//! A recipe: everything that decides what a run computes.

use std::fs;
use std::path::Path;

use burn_megatron::bounded;
use burn_megatron::choice::Choices;
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::{Axis, Mesh, ParallelConfig, split_evenly};
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::pipeline::schedule::{ActionKind, Schedule, ScheduleConfig, generate, validate};
use burn_megatron::pipeline::split::{LayerSplit, StageLayout};
use burn_megatron::train::schedule::LrStyle;
use burn_megatron::train::{GenerateConfig, TrainConfig};
use burn_megatron_models::TransformerConfig;
use serde::{Deserialize, Serialize};

use crate::cli::PretrainArgs;
use crate::data::Data;
use crate::saving::CheckpointConfig;
use crate::way::Way;
use crate::{fp8, sharing};

/// The recipe that runs without flags.
const TINY: &str = include_str!("../../examples/recipes/tiny.toml");

/// The tables of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// The model.
    pub model: TransformerConfig,
    /// The ranks.
    pub parallel: Parallel,
    /// What the ranks of the data axis share, and in which type the model computes.
    pub data_parallel: DataParallelConfig,
    /// Which operations are fused kernels.
    pub kernels: Choices,
    /// Which layers multiply in 8 bits, and how.
    pub fp8: Fp8Config,
    /// The run, but for its [`DataParallelConfig`]: see [`Recipe::train_config`].
    pub train: TrainConfig,
    /// The text at its end.
    pub sample: GenerateConfig,
    /// What it is trained on.
    pub data: Data,
    /// When it saves.
    pub checkpoint: CheckpointConfig,
}

/// How ranks share the work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Ranks that share each layer.
    pub tensor: usize,
    /// Ranks that share the batch.
    pub data: usize,
    /// Whether the activations between the blocks are split along the sequence.
    pub sequence_parallel: bool,
    /// Ranks that share the layers.
    pub pipeline: usize,
    /// In which order they work: a kind of schedule, or a CSV file; `1f1b` where not given.
    pub schedule: Option<String>,
    /// Stages on each of them; as many as the schedule usually has where not given.
    pub virtual_stages: Option<usize>,
    /// How the layers are shared out over the stages.
    pub split: LayerSplit,
    /// How many weight gradients of the output layer the last stage puts off to its cool-down at
    /// once; 0 puts off all.
    pub defer_embedding_wgrad: Option<usize>,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            tensor: 1,
            data: 1,
            sequence_parallel: false,
            pipeline: 1,
            schedule: None,
            virtual_stages: None,
            split: LayerSplit::Even,
            defer_embedding_wgrad: None,
        }
    }
}

/// The largest recipe that is read.
const LARGEST_RECIPE: u64 = 1 << 20;

/// What a command fails with.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

impl Recipe {
    /// Reads a recipe; unknown keys are errors.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = bounded::read_text(path, LARGEST_RECIPE)
            .map_err(|error| format!("the recipe {} cannot be read: {error}", path.display()))?;
        toml::from_str(&text)
            .map_err(|error| format!("the recipe {} is not right: {error}", path.display()).into())
    }

    /// The recipe of the command line.
    pub fn resolve(args: &PretrainArgs) -> Result<Self, Error> {
        let way = Way::of(args)?;
        let first = way.recipe()?;
        let inherits = args.recipe.is_none() && first.is_some();
        let mut recipe = match (&args.recipe, &first) {
            (Some(path), _) => Self::read(path)?,
            (None, Some(first)) => first.clone(),
            (None, None) => toml::from_str(TINY)?,
        };
        if let Some(first) = first.filter(|_| way.is_own(args.run_dir.as_deref())) {
            if args.saving.no_save && first.checkpoint.save {
                return Err(
                    "--no-save would lose what the run goes on to learn, which has saved so far; leave it \
                     out, or go on in another folder (--run-dir)"
                        .into(),
                );
            }
            recipe.checkpoint = recipe.checkpoint.goes_on(&first.checkpoint);
        }
        let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
        set(&mut recipe.parallel.tensor, args.tensor_parallel);
        set(&mut recipe.parallel.data, args.data_parallel);
        if let Some(pipeline) = args.pipeline_parallel {
            recipe.parallel.pipeline = pipeline;
            if pipeline == 1 {
                // What the recipe says of its pipeline has no meaning any more.
                recipe.parallel.schedule = None;
                recipe.parallel.virtual_stages = None;
                recipe.parallel.split = LayerSplit::Even;
                recipe.parallel.defer_embedding_wgrad = None;
            }
        }
        if args.schedule.is_some() {
            recipe.parallel.schedule = args.schedule.clone();
            recipe.parallel.virtual_stages = None;
        }
        if args.defer_embedding_wgrad.is_some() {
            recipe.parallel.defer_embedding_wgrad = args.defer_embedding_wgrad;
        }
        if args.virtual_stages.is_some() {
            recipe.parallel.virtual_stages = args.virtual_stages;
        }
        set(&mut recipe.train.micro_batch_size, args.micro_batch_size);
        set(&mut recipe.train.global_batch_size, args.global_batch_size);
        if let Some(micro_batches) = args.micro_batches {
            let (batch, ranks) = (recipe.train.global_batch_size, recipe.parallel.data.max(1));
            recipe.train.micro_batch_size = micro_batch_size(batch, ranks, micro_batches)?;
        }
        if let Some(steps) = args.steps {
            // A shorter run has a shorter warm-up and a shorter decay, in the same proportion; one that goes
            // on with its own settings keeps them.
            let train = &mut recipe.train;
            let before = train.steps.max(1);
            let scaled = |part: usize| {
                if inherits {
                    return part;
                }
                usize::try_from(part as u128 * steps as u128 / before as u128).unwrap_or(usize::MAX)
            };
            train.warmup_steps = scaled(train.warmup_steps);
            if let LrStyle::Wsd { decay_steps, .. } = &mut train.schedule {
                *decay_steps = scaled(*decay_steps);
            }
            train.steps = steps;
        }
        if let Some(peak) = args.lr {
            let train = &mut recipe.train;
            train.min_learning_rate *= peak / train.learning_rate;
            train.learning_rate = peak;
        }
        recipe.parallel.sequence_parallel = args
            .sequence_parallel
            .unwrap_or(recipe.parallel.sequence_parallel);
        recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
        for choices in &args.kernels {
            recipe.kernels.set(choices)?;
        }
        args.sharing.apply(&mut recipe);
        args.fp8.apply(&mut recipe);
        args.saving.apply(&mut recipe);
        args.data.apply(&mut recipe.data);
        Ok(recipe)
    }

    /// The run, with what its ranks share.
    pub fn train_config(&self) -> TrainConfig {
        TrainConfig {
            data_parallel: self.data_parallel.clone(),
            ..self.train.clone()
        }
    }

    /// Lays the ranks out, and checks every size that can be checked before a model is built.
    pub fn plan(&self) -> Result<Plan, Error> {
        let Parallel {
            tensor,
            data,
            sequence_parallel,
            pipeline,
            ..
        } = self.parallel;
        let layout = ParallelConfig::new()
            .with_tensor(tensor)
            .with_data(data)
            .with_pipeline(pipeline);
        for (name, size) in [("tensor", tensor), ("data", data), ("pipeline", pipeline)] {
            if size == 0 {
                return Err(format!("{name} = 0 makes no ranks; 1 and more do").into());
            }
        }
        let ranks = tensor.saturating_mul(data).saturating_mul(pipeline);
        let mesh = Mesh::new(&layout, ranks)?;
        if sequence_parallel && tensor == 1 {
            return Err(
                "sequence parallelism splits the sequence over the ranks of the tensor \
                 axis, and tensor = 1 leaves it whole; set tensor (--tensor-parallel) to 2 or \
                 more, or turn it off"
                    .into(),
            );
        }
        self.model.check(tensor, sequence_parallel)?;
        self.train_config().check(data, self.model.context)?;
        sharing::check(self)?;
        self.checkpoint.check()?;
        fp8::check(self)?;
        self.data.check()?;
        if sequence_parallel {
            let length = self.train.sequence_length.unwrap_or(self.model.context);
            split_evenly("sequence length", length, Axis::Tensor, tensor)?;
        }
        let sample = self.sample.check();
        sample.map_err(|error| format!("[sample] {error}"))?;
        let schedule = self.schedule()?;
        let stages = match &schedule {
            Some(schedule) => self
                .parallel
                .split
                .stages(self.model.layers, schedule.stages())?,
            None => vec![],
        };
        Ok(Plan {
            layout,
            mesh,
            schedule,
            stages,
        })
    }

    /// The schedule of a pipeline of several ranks.
    fn schedule(&self) -> Result<Option<Schedule>, Error> {
        let parallel = &self.parallel;
        if parallel.pipeline == 1 {
            for (name, given) in [
                ("schedule", parallel.schedule.is_some()),
                ("virtual_stages", parallel.virtual_stages.is_some()),
                ("split", parallel.split != LayerSplit::Even),
                (
                    "defer_embedding_wgrad",
                    parallel.defer_embedding_wgrad.is_some(),
                ),
            ] {
                if given {
                    return Err(format!(
                        "{name} is about the stages of a pipeline, and pipeline = 1 has none; set \
                         pipeline (--pipeline-parallel) to 2 or more, or leave {name} out"
                    )
                    .into());
                }
            }
            return Ok(None);
        }
        let share = self.train.global_batch_size / parallel.data;
        let micro_batches = share / self.train.micro_batch_size;
        let name = parallel.schedule.as_deref().unwrap_or("1f1b");
        if !name.ends_with(".csv") {
            // Before a schedule is made: one for more stages than there are layers can be very long.
            let config = ScheduleConfig::new(name.parse()?, parallel.pipeline, micro_batches);
            let stages = parallel.virtual_stages.unwrap_or(config.virtual_stages);
            let stages = stages.saturating_mul(parallel.pipeline);
            parallel.split.stages(self.model.layers, stages)?;
        }
        let schedule = read_schedule(
            name,
            parallel.pipeline,
            parallel.virtual_stages,
            micro_batches,
        )?;
        let last = schedule
            .actions(schedule.rank_of(schedule.stages() - 1))
            .iter();
        let mut weights = last.filter(|action| action.kind == ActionKind::WeightGradient);
        if parallel.defer_embedding_wgrad.is_some()
            && weights.any(|a| a.stage + 1 == schedule.stages())
        {
            return Err(format!(
                "defer_embedding_wgrad puts off weight gradients that are computed with the \
                 backward, and the schedule {name} puts all of them off; leave it out"
            )
            .into());
        }
        Ok(Some(schedule))
    }
}

/// The samples of one of so many micro-batches.
fn micro_batch_size(batch: usize, ranks: usize, micro_batches: usize) -> Result<usize, Error> {
    let Some(multiple) = ranks.checked_mul(micro_batches).filter(|n| *n > 0) else {
        return Err(format!(
            "--micro-batches {micro_batches} cuts no batch; 1 to the {} samples of a rank do",
            (batch / ranks).max(1)
        )
        .into());
    };
    let share = batch / ranks;
    if share == 0 || !share.is_multiple_of(micro_batches) {
        return Err(format!(
            "the {share} samples of a rank cannot be shared by {micro_batches} micro-batches; set \
             --global-batch-size to a multiple of {multiple}"
        )
        .into());
    }
    Ok(share / micro_batches)
}

/// How a run is laid out.
pub struct Plan {
    /// The sizes of the axes.
    pub layout: ParallelConfig,
    /// The ranks.
    pub mesh: Mesh,
    /// In which order the ranks of a pipeline work.
    pub schedule: Option<Schedule>,
    /// What is in each stage of a pipeline.
    pub stages: Vec<StageLayout>,
}

/// The schedule of a kind, or of a CSV file.
pub fn read_schedule(
    name: &str,
    ranks: usize,
    virtual_stages: Option<usize>,
    micro_batches: usize,
) -> Result<Schedule, Error> {
    if !name.ends_with(".csv") {
        let config = ScheduleConfig::new(name.parse()?, ranks, micro_batches);
        let stages = virtual_stages.unwrap_or(config.virtual_stages);
        return Ok(generate(&config.with_virtual_stages(stages))?);
    }
    let text = fs::read_to_string(name)
        .map_err(|error| format!("the schedule {name} cannot be read: {error}"))?;
    let schedule = Schedule::from_csv(name, &text)?;
    validate(&schedule)?;
    let found = (schedule.ranks(), schedule.micro_batches());
    if found != (ranks, micro_batches) {
        return Err(format!(
            "the schedule {name} is for {} ranks and {} micro-batches, the run has {ranks} and \
             {micro_batches}",
            found.0, found.1,
        )
        .into());
    }
    if virtual_stages.is_some_and(|stages| stages * ranks != schedule.stages()) {
        let stages = schedule.stages();
        return Err(
            format!("the schedule {name} has {stages} stages; leave virtual_stages out").into(),
        );
    }
    Ok(schedule)
}

#[cfg(test)]
#[path = "recipe_extremes.rs"]
mod extremes;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_recipes_are_right() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes");
        let mut recipes = 0;
        for file in fs::read_dir(folder).unwrap() {
            let recipe = Recipe::read(&file.unwrap().path()).unwrap();
            recipe.plan().unwrap();
            assert_eq!(
                toml::from_str::<Recipe>(&toml::to_string(&recipe).unwrap()).unwrap(),
                recipe
            );
            recipes += 1;
        }
        assert!(recipes >= 2);
    }

    #[test]
    fn a_misspelt_key_is_named() {
        let error = toml::from_str::<Recipe>("[train]\nstep = 3")
            .unwrap_err()
            .to_string();
        assert!(error.contains("unknown field `step`"), "{error}");
        assert!(error.contains("`steps`"), "{error}");
    }

    #[test]
    fn micro_batches_that_cannot_be_are_refused_with_what_can() {
        let error = |batch, ranks, count| match micro_batch_size(batch, ranks, count) {
            Ok(size) => panic!("{size}"),
            Err(error) => error.to_string(),
        };
        assert_eq!(micro_batch_size(16, 2, 4).unwrap(), 2);
        let none = "--micro-batches 0 cuts no batch; 1 to the 8 samples of a rank do";
        assert_eq!(error(16, 2, 0), none);
        assert!(error(16, 2, usize::MAX).contains("1 to the 8 samples"));
        let share = "the 8 samples of a rank cannot be shared by 3 micro-batches; set \
                     --global-batch-size to a multiple of 6";
        assert_eq!(error(16, 2, 3), share);
        assert!(error(1, 2, 4).ends_with("a multiple of 8"));
    }

    #[test]
    fn a_setting_that_would_do_nothing_is_an_error() {
        let mut recipe = Recipe::default();
        recipe.parallel.sequence_parallel = true;
        assert!(
            recipe
                .plan()
                .err()
                .unwrap()
                .to_string()
                .contains("tensor = 1 leaves it whole")
        );
    }
}

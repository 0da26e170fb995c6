//! A recipe: everything that decides what a run computes.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::mesh::{Axis, Mesh, ParallelConfig, split_evenly};
use burn_megatron::train::schedule::LrStyle;
use burn_megatron::train::{GenerateConfig, TrainConfig};
use burn_megatron_models::TransformerConfig;
use serde::{Deserialize, Serialize};

use crate::cli::PretrainArgs;

/// The recipe that runs without flags.
const TINY: &str = include_str!("../recipes/tiny.toml");

/// The tables of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// The model.
    pub model: TransformerConfig,
    /// The ranks.
    pub parallel: Parallel,
    /// The run.
    pub train: TrainConfig,
    /// The text at its end.
    pub sample: GenerateConfig,
    /// What it is trained on.
    pub data: Data,
}

/// How ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Ranks that share each layer.
    pub tensor: usize,
    /// Ranks that share the batch.
    pub data: usize,
    /// Whether the activations between the blocks are split along the sequence.
    pub sequence_parallel: bool,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            tensor: 1,
            data: 1,
            sequence_parallel: false,
        }
    }
}

/// The text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// A file or a folder; the text of this repository where not given.
    pub path: Option<PathBuf>,
}

/// What a command fails with.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

impl Recipe {
    /// Reads a recipe; unknown keys are errors.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path)
            .map_err(|error| format!("the recipe {} cannot be read: {error}", path.display()))?;
        toml::from_str(&text)
            .map_err(|error| format!("the recipe {} is not right: {error}", path.display()).into())
    }

    /// The recipe of the command line.
    pub fn resolve(args: &PretrainArgs) -> Result<Self, Error> {
        let mut recipe = match &args.recipe {
            Some(path) => Self::read(path)?,
            None => toml::from_str(TINY)?,
        };
        let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
        set(&mut recipe.parallel.tensor, args.tensor_parallel);
        set(&mut recipe.parallel.data, args.data_parallel);
        set(&mut recipe.train.micro_batch_size, args.micro_batch_size);
        set(&mut recipe.train.global_batch_size, args.global_batch_size);
        if let Some(steps) = args.steps {
            // A shorter run has a shorter warm-up and a shorter decay, in the same proportion.
            let train = &mut recipe.train;
            let before = train.steps.max(1);
            let scaled = |part: usize| part * steps / before;
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
        recipe.data.path = args.data.clone().or(recipe.data.path);
        Ok(recipe)
    }

    /// Lays the ranks out, and checks every size that can be checked before a model is built.
    pub fn mesh(&self) -> Result<(ParallelConfig, Mesh), Error> {
        let Parallel {
            tensor,
            data,
            sequence_parallel,
        } = self.parallel;
        let config = ParallelConfig::new().with_tensor(tensor).with_data(data);
        for (name, size) in [("tensor", tensor), ("data", data)] {
            if size == 0 {
                return Err(format!("{name} = 0 makes no ranks; 1 and more do").into());
            }
        }
        let mesh = Mesh::new(&config, tensor.saturating_mul(data))?;
        if sequence_parallel && tensor == 1 {
            return Err(
                "sequence parallelism splits the sequence over the ranks of the tensor \
                 axis, and tensor = 1 leaves it whole; set tensor (--tensor-parallel) to 2 or \
                 more, or turn it off"
                    .into(),
            );
        }
        self.model.check(tensor, sequence_parallel)?;
        self.train.check(data, self.model.context)?;
        if sequence_parallel {
            let length = self.train.sequence_length.unwrap_or(self.model.context);
            split_evenly("sequence length", length, Axis::Tensor, tensor)?;
        }
        let temperature = self.sample.temperature;
        if self.sample.tokens > 0 && (temperature.is_nan() || temperature <= 0.0) {
            return Err(
                format!("sample.temperature = {temperature} draws no text; above 0 does").into(),
            );
        }
        Ok((config, mesh))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_recipes_are_right() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
        let mut recipes = 0;
        for file in fs::read_dir(folder).unwrap() {
            let recipe = Recipe::read(&file.unwrap().path()).unwrap();
            recipe.mesh().unwrap();
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
    fn a_setting_that_would_do_nothing_is_an_error() {
        let mut recipe = Recipe::default();
        recipe.parallel.sequence_parallel = true;
        assert!(
            recipe
                .mesh()
                .unwrap_err()
                .to_string()
                .contains("tensor = 1 leaves it whole")
        );
    }
}

//! The recipe, which contains all settings that determine the computation of a run.

pub mod checkpoint;
pub mod memory;
pub mod merge;

use std::path::Path;

use burn_megatron::comm::NcclConfig;
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::regular_file;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_train::TrainConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use toml::Table;

use crate::data::settings::DataConfig;
use crate::error::Error;
use crate::family::{Families, Model, WeightsError};

use checkpoint::CheckpointConfig;
use memory::MemoryConfig;

/// The default recipe. It is used without flags, and contains the default values for keys that other recipes do not
/// set.
pub const DEFAULT_RECIPE: &str = include_str!("../tiny.toml");

/// The source of the keys that a recipe does not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BaseRecipe {
    /// Keys that are not set are taken from the default recipe of the command, or from the recipe of the resumed run.
    #[default]
    Default,
    /// No keys are added, because the recipe is complete.
    None,
}

/// Source of the settings that `[model]` leaves out.
#[derive(Clone, Copy, Debug)]
pub enum ModelBase<'a> {
    /// The defaults of the family. Nested tables are filled in key by key.
    Family,
    /// The model at this path. Nested tables are filled in key by key.
    Weights(&'a Path),
    /// No source: `[model]` is complete. An optional key that a nested table leaves out is not set.
    Complete,
}

/// Recipe with its model.
pub type Recipe = RecipeOf<Model>;

/// Tables of a recipe. While it is parsed, `M` is the table `[model]`, whose family is not looked up yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[serde(bound(deserialize = "M: Default + Deserialize<'de>"))]
#[schemars(bound = "M: Default + Serialize + JsonSchema")]
pub struct RecipeOf<M> {
    /// The source of the keys that a recipe file does not set. Only recipe files have this key.
    #[serde(skip_serializing)]
    pub base: BaseRecipe,
    /// The model: its `family` and the settings of the family.
    pub model: M,
    /// The parallel layout. The sharding over the data axis is a part of `data_parallel`.
    #[serde(deserialize_with = "layout")]
    #[schemars(extend("resume" = "order_of_sums"))]
    pub parallel: ParallelConfig,
    /// The sharding of the training state over the data axis, and the compute dtype of the model.
    pub data_parallel: DataParallelConfig,
    /// The operations that use fused kernels, the attention engine, and the chunks of the loss.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub kernels: KernelChoices,
    /// The layers that compute in FP8, and their scaling recipe.
    pub fp8: Fp8Config,
    /// Low-rank adapters (LoRA). If this table is set, only the adapters are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// Settings that reduce the memory use.
    #[schemars(extend("resume" = "may_differ"))]
    pub memory: MemoryConfig,
    /// The settings of the NCCL communication engine. Other engines ignore them.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub nccl: NcclConfig,
    /// The training run, without its [`DataParallelConfig`]: see [`Recipe::train_config`].
    pub train: TrainConfig,
    /// The settings of the text that is generated at the end of the run.
    #[schemars(extend("resume" = "may_differ"))]
    pub sample: GenerateConfig,
    /// The training data.
    pub data: DataConfig,
    /// The checkpoint to load, and the checkpoints to save and keep.
    #[schemars(extend("resume" = "may_differ"))]
    pub checkpoint: CheckpointConfig,
}

impl<M: Default> Default for RecipeOf<M> {
    fn default() -> Self {
        Self {
            base: Default::default(),
            model: Default::default(),
            parallel: ParallelConfig::new().with_data(1),
            data_parallel: Default::default(),
            kernels: Default::default(),
            fp8: Default::default(),
            lora: None,
            memory: Default::default(),
            nccl: Default::default(),
            train: Default::default(),
            sample: Default::default(),
            data: Default::default(),
            checkpoint: Default::default(),
        }
    }
}

/// Deserializes the layout. A missing size of the data axis becomes 1.
fn layout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ParallelConfig, D::Error> {
    let layout = ParallelConfig::deserialize(deserializer)?;
    Ok(ParallelConfig {
        data: layout.data.or(Some(1)),
        ..layout
    })
}

/// Maximum size of a recipe, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// Reads the text of a recipe, which may be a stream.
///
/// # Errors
/// Returns an error if the file cannot be read or is not text.
pub fn read_text(path: &Path) -> Result<String, Error> {
    regular_file::read_text_stream(path, MAX_BYTES).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    format!("cannot read the recipe {}: {error}", path.display()).into()
}

/// Returns the error for an invalid recipe in a file.
pub fn invalid(path: &Path, error: &dyn std::fmt::Display) -> Error {
    format!("invalid recipe {}: {error}", path.display()).into()
}

/// Recipe in the form of a complete file, which can be read again without other layers.
#[derive(Serialize)]
pub struct CompleteRecipe<'a> {
    base: BaseRecipe,
    #[serde(flatten)]
    recipe: &'a Recipe,
}

impl RecipeOf<Table> {
    /// Parses the tables of a recipe, before the family of its model is looked up.
    ///
    /// # Errors
    /// Returns an error for unknown keys and values of the wrong type.
    pub fn tables(text: &str) -> Result<Self, Error> {
        Ok(toml::from_str(text)?)
    }

    /// Returns the recipe with its model in one of these families.
    ///
    /// # Errors
    /// Returns an error for an unknown family or setting, and if weights cannot be read.
    pub fn in_family(self, families: &Families, base: ModelBase<'_>) -> Result<Recipe, Error> {
        let model = match base {
            ModelBase::Weights(path) => families.model_with_weights(path, &self.model),
            ModelBase::Family => families.model_over_defaults(&self.model),
            ModelBase::Complete => families.model(self.model),
        };
        Ok(Recipe {
            base: BaseRecipe::default(),
            model: model.map_err(|error| match error.is::<WeightsError>() {
                true => error,
                false => format!("[model] {error}").into(),
            })?,
            parallel: self.parallel,
            data_parallel: self.data_parallel,
            kernels: self.kernels.clone(),
            fp8: self.fp8,
            lora: self.lora,
            memory: self.memory,
            nccl: self.nccl,
            train: self.train,
            sample: self.sample,
            data: self.data,
            checkpoint: self.checkpoint,
        })
    }
}

impl Recipe {
    /// Reads the recipe of a run folder. An earlier version may have written it.
    pub fn read_of_run(path: &Path, families: &Families) -> Result<Self, Error> {
        let text = regular_file::read_text(path, MAX_BYTES);
        let text = text.map_err(|error| unreadable(path, &error))?;
        if text.parse::<Table>().is_ok_and(|table| table.is_empty()) {
            let (path, run) = (path.display(), path.parent().unwrap_or(path).display());
            return Err(format!(
                "{path} has no settings: restore it, or remove it and resume in a new folder with --resume {run} --run-dir NEW"
            )
            .into());
        }
        // The file has all settings of the model. The initial weights may no longer exist.
        let recipe = RecipeOf::tables(&text)
            .and_then(|recipe| recipe.in_family(families, ModelBase::Complete));
        recipe.map_err(|error| invalid(path, &*error))
    }

    /// Parses a recipe in TOML without other layers. Missing settings have the defaults of the library, or the values
    /// of the weights that the recipe loads.
    ///
    /// # Errors
    /// Returns an error for unknown keys and values of the wrong type, and if weights cannot be read.
    pub fn parse(text: &str, families: &Families) -> Result<Self, Error> {
        let recipe = RecipeOf::tables(text)?;
        let load = recipe.checkpoint.load.clone();
        let base = load.as_deref().map(ModelBase::Weights);
        recipe.in_family(families, base.unwrap_or(ModelBase::Complete))
    }

    /// Returns the recipe in the form of a complete file.
    pub fn complete(&self) -> CompleteRecipe<'_> {
        CompleteRecipe {
            base: BaseRecipe::None,
            recipe: self,
        }
    }

    /// Converts a table to a recipe. The errors have no line numbers.
    #[cfg(test)]
    pub fn from_table(table: Table, families: &Families) -> Result<Self, Error> {
        let recipe: RecipeOf<Table> = table.try_into()?;
        recipe.in_family(families, ModelBase::Complete)
    }

    /// Returns the number of tokens of a sample.
    pub fn sequence_length(&self) -> usize {
        self.train.sequence_length.unwrap_or(self.model.context())
    }

    /// Returns the parallel layout with its sharding of the data axis.
    pub fn layout(&self) -> ParallelConfig {
        ParallelConfig {
            zero_stage: self.data_parallel.zero_stage,
            hsdp: self.data_parallel.hsdp,
            ..self.parallel.clone()
        }
    }

    /// Returns the settings of data parallelism, including the offload settings.
    pub fn sharing(&self) -> DataParallelConfig {
        DataParallelConfig {
            offload: self.memory.offload(),
            state_tensors: self.train.state_tensors(),
            freeze: self.train.freeze.clone(),
            static_buffers: self.train.cuda_graph,
            ..self.data_parallel.clone()
        }
    }

    /// Returns the training run with its [`DataParallelConfig`].
    pub fn train_config(&self) -> TrainConfig {
        TrainConfig {
            data_parallel: self.sharing(),
            ..self.train.clone()
        }
    }
}

/// Reads a recipe from a file on top of the default recipe.
#[cfg(test)]
pub fn read(path: &Path) -> Recipe {
    let families = Families::transformers();
    let set = Default::default();
    let base = (&families, DEFAULT_RECIPE);
    let layers = merge::RecipeLayers::new(base, Some(path), &set);
    layers.read().unwrap().recipe
}

/// Parses a recipe with the families of burn-megatron-models.
#[cfg(test)]
pub fn parsed(text: &str) -> Result<Recipe, Error> {
    Recipe::parse(text, &Families::transformers())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_shipped_recipes_are_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes");
        let mut recipes = 0;
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let recipe = read(&path);
            recipe.plan().unwrap();
            let complete = toml::to_string(&recipe.complete()).unwrap();
            assert!(complete.starts_with("base = \"none\"\n"), "{complete}");
            assert_eq!(parsed(&complete).unwrap(), recipe);
            recipes += 1;
        }
        assert!(recipes >= 2);
    }

    /// Checks that the layout is written with the same keys as in earlier versions.
    #[test]
    fn the_layout_is_written_as_before() {
        let keys = |recipe: &Recipe| {
            let recipe = serde_json::to_value(recipe).unwrap();
            let layout = recipe["parallel"].as_object().unwrap().clone();
            layout.keys().cloned().collect::<Vec<_>>()
        };
        let mut expected = [
            "tensor",
            "data",
            "sequence_parallel",
            "pipeline",
            "schedule",
            "virtual_stages",
            "split",
            "defer_embedding_wgrad",
        ];
        let mut found = keys(&Recipe::default());
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
        for text in ["", "[parallel]\ntensor = 2"] {
            assert_eq!(parsed(text).unwrap().parallel.data, Some(1), "{text}");
        }
    }

    #[test]
    fn the_layout_of_a_run_has_its_sharding() {
        let text = "[parallel]\ndata = 4\n[data_parallel]\nzero_stage = 2\nhsdp = 2";
        let layout = parsed(text).unwrap().layout();
        assert_eq!((u8::from(layout.zero_stage), layout.hsdp), (2, Some(2)));
    }

    #[test]
    fn a_misspelt_key_is_named() {
        let error = parsed("[train]\nstep = 3").unwrap_err().to_string();
        assert!(error.contains("unknown field `step`"), "{error}");
        assert!(error.contains("`steps`"), "{error}");
    }
}

//! The recipe: all settings that decide what a run computes.

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

/// The recipe that runs without flags, and whose values other recipes leave out.
pub const DEFAULT_RECIPE: &str = include_str!("../tiny.toml");

/// Where the keys that a recipe leaves out are taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BaseRecipe {
    /// The default recipe of the command, or the recipe of the resumed run.
    #[default]
    Default,
    /// The recipe is complete.
    None,
}

/// The source of the settings that `[model]` leaves out.
#[derive(Clone, Copy, Debug)]
pub enum ModelBase<'a> {
    /// From the defaults of the family, key by key in nested tables too.
    Family,
    /// From these weights, key by key in nested tables too.
    Weights(&'a Path),
    /// `[model]` is complete. A nested table is whole: an optional key that it leaves out is not set.
    Complete,
}

/// A recipe.
pub type Recipe = RecipeOf<Model>;

/// The tables of a recipe. While it is read, `M` is the table `[model]`, whose family is not looked up yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[serde(bound(deserialize = "M: Default + Deserialize<'de>"))]
#[schemars(bound = "M: Default + Serialize + JsonSchema")]
pub struct RecipeOf<M> {
    /// The source of the keys that a recipe file does not set. Only recipe files have this key.
    #[serde(skip_serializing)]
    pub base: BaseRecipe,
    /// The model: its `family`, and the settings of the family.
    pub model: M,
    /// The parallel layout, without its sharding of the data axis.
    #[serde(deserialize_with = "layout")]
    #[schemars(extend("resume" = "order_of_sums"))]
    pub parallel: ParallelConfig,
    /// The state that is sharded over the data axis, and the type that the model computes in.
    pub data_parallel: DataParallelConfig,
    /// Which operations use fused kernels, which engine attention uses, and the chunks of the loss.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub kernels: KernelChoices,
    /// Which layers multiply in 8 bits, and with which scaling recipe.
    pub fp8: Fp8Config,
    /// Low-rank adapters. Only the adapters are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// The settings that save memory.
    #[schemars(extend("resume" = "may_differ"))]
    pub memory: MemoryConfig,
    /// The engine NCCL; other engines have no such settings.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub nccl: NcclConfig,
    /// The training run, without its [`DataParallelConfig`]: see [`Recipe::train_config`].
    pub train: TrainConfig,
    /// The text that is generated at the end of the run.
    #[schemars(extend("resume" = "may_differ"))]
    pub sample: GenerateConfig,
    /// The training data.
    pub data: DataConfig,
    /// When checkpoints are saved.
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

/// Reads the layout, whose data axis has one rank where it has no size.
fn layout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ParallelConfig, D::Error> {
    let layout = ParallelConfig::deserialize(deserializer)?;
    Ok(ParallelConfig {
        data: layout.data.or(Some(1)),
        ..layout
    })
}

/// The largest recipe that is read, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// Reads the text of a recipe, which may be a stream.
///
/// # Errors
/// A file that cannot be read or is no text.
pub fn read_text(path: &Path) -> Result<String, Error> {
    regular_file::read_text_stream(path, MAX_BYTES).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    format!("cannot read the recipe {}: {error}", path.display()).into()
}

/// The error for a recipe in a file.
pub fn invalid(path: &Path, error: &dyn std::fmt::Display) -> Error {
    format!("invalid recipe {}: {error}", path.display()).into()
}

/// A recipe as the file that it is read from again, on its own.
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
    /// Unknown keys, and values of the wrong type.
    pub fn tables(text: &str) -> Result<Self, Error> {
        Ok(toml::from_str(text)?)
    }

    /// The recipe with its model in one of these families.
    ///
    /// # Errors
    /// An unknown family or setting, and weights that cannot be read.
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
    /// Reads the recipe of a run folder, which an earlier version may have written.
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
        // It has all settings of the model, whose initial weights need not be there any more.
        let recipe = RecipeOf::tables(&text)
            .and_then(|recipe| recipe.in_family(families, ModelBase::Complete));
        recipe.map_err(|error| invalid(path, &*error))
    }

    /// Parses a recipe in TOML on its own: what it leaves out has the defaults of the library.
    ///
    /// # Errors
    /// Unknown keys, and values of the wrong type.
    pub fn parse(text: &str, families: &Families) -> Result<Self, Error> {
        let recipe = RecipeOf::tables(text)?;
        let load = recipe.checkpoint.load.clone();
        let base = load.as_deref().map(ModelBase::Weights);
        recipe.in_family(families, base.unwrap_or(ModelBase::Complete))
    }

    /// The recipe as a file that can be read again on its own.
    pub fn complete(&self) -> CompleteRecipe<'_> {
        CompleteRecipe {
            base: BaseRecipe::None,
            recipe: self,
        }
    }

    /// The recipe of a table; its errors have no line numbers.
    #[cfg(test)]
    pub fn from_table(table: Table, families: &Families) -> Result<Self, Error> {
        let recipe: RecipeOf<Table> = table.try_into()?;
        recipe.in_family(families, ModelBase::Complete)
    }

    /// Returns the number of tokens of a sample.
    pub fn sequence_length(&self) -> usize {
        self.train.sequence_length.unwrap_or(self.model.context())
    }

    /// The parallel layout with its sharding of the data axis.
    pub fn layout(&self) -> ParallelConfig {
        ParallelConfig {
            zero_stage: self.data_parallel.zero_stage,
            hsdp: self.data_parallel.hsdp,
            ..self.parallel.clone()
        }
    }

    /// The settings of data parallelism, with what is offloaded.
    pub fn sharing(&self) -> DataParallelConfig {
        DataParallelConfig {
            offload: self.memory.offload(),
            state_tensors: self.train.state_tensors(),
            freeze: self.train.freeze.clone(),
            static_buffers: self.train.cuda_graph,
            ..self.data_parallel.clone()
        }
    }

    /// The training run with its [`DataParallelConfig`].
    pub fn train_config(&self) -> TrainConfig {
        TrainConfig {
            data_parallel: self.sharing(),
            ..self.train.clone()
        }
    }
}

/// A recipe in a file, over the default one.
#[cfg(test)]
pub fn read(path: &Path) -> Recipe {
    let families = Families::transformers();
    let set = Default::default();
    let base = (&families, DEFAULT_RECIPE);
    let layers = merge::RecipeLayers::new(base, Some(path), &set);
    layers.read().unwrap().recipe
}

/// A recipe of the families of burn-megatron-models.
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

    /// The keys that earlier versions wrote, and no others.
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

//! Merges the layers of a recipe. From the lowest to the highest, the layers are the default recipe (or the recipe of
//! the resumed run), the file, and the flags.

use std::path::{Path, PathBuf};

use burn_megatron_train::TrainConfig;
use toml::{Table, Value};

use crate::error::Error;
use crate::family::{FAMILY, Families, WeightsError};
use crate::origins::{Origin, Origins};
use crate::recipe::checkpoint::CheckpointConfig;
use crate::recipe::{ModelBase, Recipe, RecipeOf, invalid, read_text};
use crate::set::SetArgs;
use crate::settings::keys::{change, get, json_at, remove, set, table_of};
use crate::settings::{DroppedSetting, SettingFlags, Settings, merge, twice};
use crate::{lora, resume_check};

/// The recipe for runs that load weights. It replaces the layout and the training settings of the default recipe.
const LOAD_RECIPE: &str = include_str!("../load.toml");

/// The value of `base` in a complete recipe.
const NO_BASE: &str = "none";

/// Sources of the layers of a recipe.
#[derive(Clone, Copy)]
pub struct RecipeLayers<'a> {
    /// The registered families.
    pub families: &'a Families,
    /// The lowest layer, in TOML.
    pub default_recipe: &'a str,
    /// A recipe file, which overrides the default recipe key by key. Two tables are exceptions: its `[parallel]` is a
    /// complete layout, and its `[model]` with a `family` is a complete model.
    pub file: Option<&'a Path>,
    /// The keys of `--set`.
    pub set: &'a SetArgs,
    /// The path and the recipe of the run that is resumed. They replace the default recipe.
    pub resumed: Option<(&'a Path, &'a Recipe)>,
    /// Checkpoints are saved at least as often as these settings require.
    pub saving: Option<&'a CheckpointConfig>,
    /// A change by flags that each set several keys.
    pub edit: Option<&'a Edit<'a>>,
    /// The keys that flags set. They override the file.
    pub flags: Option<&'a SettingFlags>,
}

/// Change of the tables of a recipe.
type Edit<'a> = dyn Fn(&mut Table) -> Result<(), Error> + 'a;

/// Recipe with the source of each value.
pub struct LayeredRecipe {
    pub recipe: Recipe,
    pub origins: Origins,
    /// A line for each setting of a recipe file that the command line has dropped.
    pub dropped: Vec<String>,
}

impl<'a> RecipeLayers<'a> {
    /// Creates layers from the default recipe in TOML, a file and the keys of `--set`.
    pub fn new(
        (families, default_recipe): (&'a Families, &'a str),
        file: Option<&'a Path>,
        set: &'a SetArgs,
    ) -> Self {
        Self {
            families,
            default_recipe,
            file,
            set,
            resumed: None,
            saving: None,
            edit: None,
            flags: None,
        }
    }

    /// Reads and merges the layers.
    ///
    /// # Errors
    /// Returns an error if files or weights cannot be read, for unknown keys, and for values of the wrong type.
    pub fn read(&self) -> Result<LayeredRecipe, Error> {
        let file = self.file.map(file_table).transpose()?;
        let settings = Settings::of(self.families);
        let set = self.set.given(&settings)?;
        let none = SettingFlags::default();
        settings.check_conflicts(self.flags.unwrap_or(&none), &set)?;
        let read = |layers: &Self, set: &_| layers.layered(&settings, file.as_ref(), set);
        let layered = read(self, &set);
        layered.map_err(|error| {
            let is_of_set = !set.given().is_empty() && read(self, &none).is_ok();
            let without_flags = Self {
                flags: None,
                ..*self
            };
            let is_of_flags = self.flags.is_some() && read(&without_flags, &set).is_ok();
            match self.file {
                _ if error.is::<WeightsError>() => error,
                _ if is_of_set => format!("invalid --set: {}", one_line(&*error)).into(),
                _ if is_of_flags => one_line(&*error).into(),
                Some(path) => invalid(path, &one_line(&*error)),
                None => error,
            }
        })
    }

    fn layered(
        &self,
        settings: &Settings,
        file: Option<&Table>,
        set: &SettingFlags,
    ) -> Result<LayeredRecipe, Error> {
        let none = SettingFlags::default();
        let flags = self.flags.unwrap_or(&none);
        let alone = file.is_some_and(|file| file.get("base") == Some(&NO_BASE.into()));
        let base = match self.resumed {
            _ if alone => Recipe::parse("", self.families)?,
            Some((_, recipe)) => recipe.clone(),
            None => {
                let tables = RecipeOf::tables(self.default_recipe)?;
                tables.in_family(self.families, ModelBase::Family)?
            }
        };
        let resumed = self.resumed.filter(|_| !alone);
        let mut layers = Layers {
            settings,
            table: table_of(&base)?,
            origins: Origins::new(match resumed {
                Some((path, _)) => Origin::Resumed(path.into()),
                None => Origin::Default,
            }),
            resumed: resumed.is_some(),
            dropped: vec![],
        };
        let load = match self.resumed {
            // The recipe of a resumed run has all settings of the model.
            Some(_) => None,
            None => {
                let key = "checkpoint.load";
                let given = flags.text(key).or(set.text(key)).map(PathBuf::from);
                let given = given.or_else(|| file.and_then(loaded));
                given.or(base.checkpoint.load)
            }
        };
        if load.is_some() {
            layers.table.insert("model".into(), Table::new().into());
            if !alone {
                layers.overlay(&LOAD_RECIPE.parse()?, Origin::Default)?;
            }
        }
        if let (Some(file), Some(path)) = (file, self.file) {
            layers.overlay(file, Origin::File(path.into()))?;
        }
        if let Some(saving) = self.saving {
            layers.save_like(saving)?;
        }
        if let Some(edit) = self.edit {
            layers.edit(edit, set)?;
        }
        layers.overlay_command_line(flags, set)?;
        let base = match &load {
            Some(load) => ModelBase::Weights(load),
            None if alone || self.resumed.is_some() => ModelBase::Complete,
            None => ModelBase::Family,
        };
        let layered = layers.finish(self.families, base)?;
        check_unset(flags, "--", &layered.recipe)?;
        check_unset(set, "--set ", &layered.recipe)?;
        Ok(layered)
    }
}

/// Reads the tables of a file. The file is first checked on its own, so that errors contain the line number.
fn file_table(path: &Path) -> Result<Table, Error> {
    let text = read_text(path)?;
    let checked = RecipeOf::tables(&text);
    checked.map_err(|error| invalid(path, &*error))?;
    let mut table: Table = text.parse()?;
    // The name in earlier versions. The default recipe has the current name.
    if let Some(value) = remove(&mut table, "train.count_zeros") {
        set(&mut table, "train.log_num_zeros_in_grad", value);
    }
    Ok(table)
}

/// Checks that the settings that flags unset have no value. For example, a model family may set a value.
fn check_unset(flags: &SettingFlags, flag: &str, recipe: &Recipe) -> Result<(), Error> {
    let recipe = serde_json::to_value(recipe)?;
    let is_set = |key: &&str| json_at(&recipe, key).is_some_and(|value| !value.is_null());
    match flags.unset().find(is_set) {
        Some(key) => Err(format!(
            "invalid {flag}{key} none: the setting has a value by default, which a recipe can only replace"
        )
        .into()),
        None => Ok(()),
    }
}

/// Returns the path of the weights that a recipe loads.
fn loaded(recipe: &Table) -> Option<PathBuf> {
    Some(get(recipe, "checkpoint.load")?.as_str()?.into())
}

fn one_line(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    text.trim_end().replace('\n', " ")
}

/// Layers that are merged so far.
struct Layers<'a> {
    settings: &'a Settings,
    table: Table,
    origins: Origins,
    /// Whether the lowest layer is the recipe of the resumed run.
    resumed: bool,
    /// See [`LayeredRecipe::dropped`].
    dropped: Vec<String>,
}

impl Recipe {
    /// Returns this recipe of a transformer with changed values of some keys.
    ///
    /// # Errors
    /// Returns an error for unknown keys and values of the wrong type.
    pub fn with_keys(&self, keys: &Table) -> Result<Self, Error> {
        let families = Families::transformers();
        let settings = Settings::of_model(&self.model);
        settings.check_keys(keys)?;
        let mut layers = Layers {
            settings: &settings,
            table: table_of(self)?,
            origins: Origins::new(Origin::Default),
            resumed: false,
            dropped: vec![],
        };
        layers.overlay(keys, Origin::Set)?;
        Ok(layers.finish(&families, ModelBase::Complete)?.recipe)
    }
}

impl Layers<'_> {
    /// Adds a layer on top of the others.
    fn overlay(&mut self, layer: &Table, origin: Origin) -> Result<(), Error> {
        self.adapt_training(layer)?;
        let is_line = matches!(origin, Origin::Flag | Origin::Set);
        if layer.contains_key("parallel") && !is_line {
            self.table.insert("parallel".into(), Table::new().into());
        }
        self.drop_other_family(layer);
        self.drop_other_optimizer(layer);
        self.adapt_groups(layer);
        merge(Some(self.settings.root()), &mut self.table, layer);
        self.origins.record("", layer, &origin);
        Ok(())
    }

    /// Makes sure that checkpoints are saved at least as often as `saving` requires.
    fn save_like(&mut self, saving: &CheckpointConfig) -> Result<(), Error> {
        change(
            &mut self.table,
            "checkpoint",
            |own: &mut CheckpointConfig| {
                *own = own.continue_from(saving);
            },
        )
    }

    /// Changes the tables, and records the keys that flags have changed.
    ///
    /// # Errors
    /// Returns an error for a key that `--set` sets too.
    fn edit(&mut self, edit: &Edit<'_>, set: &SettingFlags) -> Result<(), Error> {
        let before = serde_json::to_value(&self.table)?;
        edit(&mut self.table)?;
        let after = serde_json::to_value(&self.table)?;
        // A table that the edit adds contains defaults, which `--set` may replace.
        let is_default = |key: &str| {
            let setting = self.settings.find(key);
            let default = setting.and_then(|setting| setting.default.as_ref());
            json_at(&before, key).is_none() && default.is_some() && default == json_at(&after, key)
        };
        for key in resume_check::differing(&before, &after) {
            if set.has(&key) && !is_default(&key) {
                return Err(twice(&key));
            }
            self.origins.derive(&key, Origin::Flag);
        }
        Ok(())
    }

    /// Adds the flags on top of the other layers, and the values of `--set` on top of the flags. Drops settings whose
    /// condition the flags break.
    fn overlay_command_line(
        &mut self,
        flags: &SettingFlags,
        set: &SettingFlags,
    ) -> Result<(), Error> {
        let before = self.table.clone();
        self.overlay_given(flags, &before, &Origin::Flag)?;
        let is_kept = |path: &str| flags.has(path) || set.has(path);
        let changed = |path: &str| flags.has(path);
        let settings = self.settings;
        let dropped = settings.drop_dependants(&before, &mut self.table, (&changed, &is_kept));
        for DroppedSetting {
            path,
            note,
            was_set,
        } in dropped
        {
            if was_set && self.origins.is_of_user(&path) {
                self.dropped.push(note);
            }
            self.origins.derive(&path, Origin::Flag);
        }
        self.overlay_given(set, &before, &Origin::Set)
    }

    fn overlay_given(
        &mut self,
        given: &SettingFlags,
        before: &Table,
        origin: &Origin,
    ) -> Result<(), Error> {
        for path in given.unset() {
            remove(&mut self.table, path);
            self.origins.derive(path, origin.clone());
        }
        self.overlay(&given.table(before), origin.clone())
    }

    /// Drops all settings of the model that were not given, if a layer names a family. The family's own defaults then
    /// apply.
    fn drop_other_family(&mut self, layer: &Table) {
        let named = layer.get("model").and_then(|model| model.get(FAMILY));
        let Some(Value::Table(model)) = self.table.get_mut("model") else {
            return;
        };
        if named.is_some() && !(self.resumed && model.get(FAMILY) == named) {
            model.retain(|key, _| self.origins.is_given(&format!("model.{key}")));
        }
    }

    /// Drops the settings of the optimizer if a layer names another optimizer, whose own defaults then apply.
    /// Settings of the command line and parameter groups are kept.
    fn drop_other_optimizer(&mut self, layer: &Table) {
        let optimizer = |table: &Table| get(table, "train.optimizer.name").cloned();
        let Some(named) =
            optimizer(layer).filter(|named| Some(named) != optimizer(&self.table).as_ref())
        else {
            return;
        };
        if let Some(Value::Table(train)) = self.table.get_mut("train")
            && let Some(Value::Table(before)) = train.get_mut("optimizer")
        {
            before.retain(|key, _| {
                let path = format!("train.optimizer.{key}");
                self.origins.is_of_command_line(&path)
                    || (key == "groups" && self.origins.is_given(&path))
            });
            before.insert("name".into(), named);
        }
    }

    /// Keeps one KV group per head if a layer changes the number of heads and the model has one group per head.
    fn adapt_groups(&mut self, layer: &Table) {
        let given = layer.get("model").and_then(Value::as_table);
        let heads = given.filter(|given| !given.contains_key("groups"));
        let heads = heads.and_then(|given| given.get("heads"));
        let Some(Value::Table(model)) = self.table.get_mut("model") else {
            return;
        };
        let is_own = self.resumed || self.origins.is_given("model.groups");
        let has_one_each =
            model.contains_key("groups") && model.get("groups") == model.get("heads");
        if let Some(heads) = heads.filter(|_| has_one_each && !is_own) {
            model.insert("groups".into(), heads.clone());
            self.origins
                .derive("model.groups", Origin::Adapted("heads"));
        }
    }

    /// Scales warm-up and decay with the steps of a layer, and the final learning rate with its peak, unless the
    /// layer sets them. A resumed run keeps its own warm-up and decay.
    fn adapt_training(&mut self, layer: &Table) -> Result<(), Error> {
        let Some(given) = layer.get("train").and_then(Value::as_table) else {
            return Ok(());
        };
        let Some(Value::Table(before)) = self.table.get("train") else {
            return Ok(());
        };
        let before = before.clone();
        let train: TrainConfig = before.clone().try_into()?;
        let mut adapted = train.clone();
        if let Some(count) = given.get("steps").and_then(Value::as_integer)
            && let Ok(count) = usize::try_from(count)
        {
            adapted = adapted.scaled(count);
        }
        let peak = given.get("learning_rate").and_then(number);
        if let Some(peak) = peak.filter(|_| train.learning_rate > 0.0) {
            adapted.min_learning_rate *= peak / train.learning_rate;
        }
        if given.get("schedule") == Some(&"constant".into()) {
            adapted.min_learning_rate = 0.0;
        }
        let mut after = table_of(&adapted)?;
        for (key, cause) in TrainConfig::FOLLOWING {
            let path = format!("train.{key}");
            let own = cause == "steps" && self.resumed && !self.origins.is_given(&path);
            if after.get(key) == before.get(key) || given.contains_key(key) || own {
                continue;
            }
            self.origins.derive(&path, Origin::Adapted(cause));
            let train = self.table.get_mut("train").and_then(Value::as_table_mut);
            if let Some(train) = train {
                match after.remove(key) {
                    Some(value) => train.insert(key.into(), value),
                    None => train.remove(key),
                };
            }
        }
        Ok(())
    }

    fn finish(mut self, families: &Families, base: ModelBase<'_>) -> Result<LayeredRecipe, Error> {
        if let ModelBase::Weights(load) = base {
            self.continue_adapters(families, load)?;
        }
        let tables: RecipeOf<Table> = self.table.try_into()?;
        let mut recipe = tables.in_family(families, base)?;
        if let ModelBase::Weights(load) = base {
            self.origins.record_weights("model", load);
            // The recipe for weights contains the maximum length to use.
            let length = &mut recipe.train.sequence_length;
            if !self.origins.is_given("train.sequence_length") {
                *length = length.map(|length| length.min(recipe.model.context()));
            }
        }
        Ok(LayeredRecipe {
            recipe,
            origins: self.origins,
            dropped: self.dropped,
        })
    }

    /// Takes keys that are missing in `[lora]` from the adapters at `load`, if it has adapters.
    fn continue_adapters(&mut self, families: &Families, load: &Path) -> Result<(), Error> {
        let Some(Value::Table(given)) = self.table.get_mut("lora") else {
            return Ok(());
        };
        if let Some(found) = families.adapters_at(load)? {
            let mut all = table_of(&found)?;
            all.remove(lora::BASE);
            merge(self.settings.find("lora"), &mut all, given);
            *given = all;
            self.origins.record_weights("lora", load);
        }
        Ok(())
    }
}

fn number(value: &Value) -> Option<f64> {
    let integer = || value.as_integer().map(|value| value as f64);
    value.as_float().or_else(integer)
}

#[cfg(test)]
#[path = "argument_tests.rs"]
mod argument_tests;

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;

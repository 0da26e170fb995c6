//! A recipe in layers, each of which overrides the one below: the default recipe or that of the run that is resumed, the
//! file, and the flags.

use std::path::{Path, PathBuf};

use burn_megatron_train::TrainConfig;
use serde::Serialize;
use toml::{Table, Value};

use crate::error::Error;
use crate::family::{FAMILY, Families, WeightsError};
use crate::origins::{Origin, Origins, dotted, twice};
use crate::recipe::{ModelBase, Recipe, RecipeOf, invalid, read_text};
use crate::set::SetArgs;
use crate::steps;

/// The recipe that replaces the layout and training run of the default recipe in a run that loads weights.
const LOAD_RECIPE: &str = include_str!("load.toml");

/// The value of `base` in a recipe that is complete.
const NO_BASE: &str = "none";

/// Where a recipe is read from.
#[derive(Clone, Copy)]
pub struct RecipeLayers<'a> {
    families: &'a Families,
    default_recipe: &'a str,
    file: Option<&'a Path>,
    set: &'a SetArgs,
    load: Option<&'a Path>,
    resumed: Option<(&'a Path, &'a Recipe)>,
    flags: Option<&'a Table>,
}

/// A recipe, and where each of its values is from.
pub struct LayeredRecipe {
    pub recipe: Recipe,
    pub origins: Origins,
}

impl<'a> RecipeLayers<'a> {
    /// The default recipe, in TOML, with the keys of `--set`.
    pub fn new(families: &'a Families, default_recipe: &'a str, set: &'a SetArgs) -> Self {
        Self {
            families,
            default_recipe,
            file: None,
            set,
            load: None,
            resumed: None,
            flags: None,
        }
    }

    /// With a file, which overrides the default recipe key by key, but for two tables: its `[parallel]` is a whole layout,
    /// and its `[model]` with a `family` is a whole model.
    pub fn with_file(self, file: Option<&'a Path>) -> Self {
        Self { file, ..self }
    }

    /// With the weights of `--load`, whose model is taken in the place of that of the default recipe.
    pub fn with_weights(self, load: Option<&'a Path>) -> Self {
        Self { load, ..self }
    }

    /// With the recipe of the run that is resumed, and its path, in the place of the default recipe.
    pub fn resuming(self, resumed: Option<(&'a Path, &'a Recipe)>) -> Self {
        Self { resumed, ..self }
    }

    /// With the keys that flags set, over those of the file.
    pub fn with_flags(self, flags: &'a Table) -> Self {
        let flags = Some(flags);
        Self { flags, ..self }
    }

    /// Reads the recipe.
    ///
    /// # Errors
    /// Files and weights that cannot be read, unknown keys, and values of the wrong type.
    pub fn read(&self) -> Result<LayeredRecipe, Error> {
        let file = self.file.map(file_table).transpose()?;
        let set = self.set.table()?;
        let read = self.layered(file.as_ref(), &set);
        read.map_err(|error| {
            let is_of_set = !set.is_empty() && self.layered(file.as_ref(), &Table::new()).is_ok();
            match self.file {
                _ if error.is::<WeightsError>() => error,
                _ if is_of_set => format!("invalid --set: {}", one_line(&*error)).into(),
                Some(path) => invalid(path, &one_line(&*error)),
                None => error,
            }
        })
    }

    fn layered(&self, file: Option<&Table>, set: &Table) -> Result<LayeredRecipe, Error> {
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
            table: table_of(&base)?,
            origins: Origins::new(match resumed {
                Some((path, _)) => Origin::Resumed(path.into()),
                None => Origin::Default,
            }),
            resumed: resumed.is_some(),
        };
        let load = match resumed {
            // It has all settings of the model.
            Some(_) => None,
            None => {
                let given = self.load.map(Path::to_path_buf);
                let given = given
                    .or_else(|| loaded(set))
                    .or_else(|| file.and_then(loaded));
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
        if let Some(flags) = self.flags {
            layers.overlay(flags, Origin::Flag)?;
            check_once(flags, set)?;
        }
        layers.overlay(set, Origin::Set)?;
        let base = match &load {
            Some(load) => ModelBase::Weights(load),
            None if alone || resumed.is_some() => ModelBase::Complete,
            None => ModelBase::Family,
        };
        layers.finish(self.families, base)
    }
}

/// The tables of a file, which is checked on its own, so that errors have the line.
fn file_table(path: &Path) -> Result<Table, Error> {
    let text = read_text(path)?;
    let checked = RecipeOf::tables(&text);
    checked.map_err(|error| invalid(path, &*error))?;
    Ok(text.parse()?)
}

/// Checks that no key of `[train]` has both a flag of its own and `--set`.
fn check_once(flags: &Table, set: &Table) -> Result<(), Error> {
    let [flags, set] = [flags, set].map(|table| table.get("train").and_then(Value::as_table));
    let (Some(flags), Some(set)) = (flags, set) else {
        return Ok(());
    };
    match flags.keys().find(|key| set.contains_key(*key)) {
        Some(key) => Err(twice(&format!("train.{key}"))),
        None => Ok(()),
    }
}

/// The weights that a recipe names.
fn loaded(recipe: &Table) -> Option<PathBuf> {
    let load = recipe.get("checkpoint")?.get("load")?.as_str()?;
    Some(load.into())
}

/// The tables of a complete recipe or a part of it.
pub fn table_of(value: &impl Serialize) -> Result<Table, Error> {
    Ok(toml::to_string(value)?.parse()?)
}

fn one_line(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    text.trim_end().replace('\n', " ")
}

/// The layers so far.
struct Layers {
    table: Table,
    origins: Origins,
    /// Whether the lowest is the recipe of the run that is resumed.
    resumed: bool,
}

impl Layers {
    /// Puts a layer over the others.
    fn overlay(&mut self, layer: &Table, origin: Origin) -> Result<(), Error> {
        self.adapt_training(layer)?;
        let is_line = matches!(origin, Origin::Flag | Origin::Set);
        if layer.contains_key("parallel") && !is_line {
            self.table.insert("parallel".into(), Table::new().into());
        }
        self.drop_other_family(layer);
        self.drop_other_optimizer(layer);
        self.adapt_groups(layer);
        merge(&mut self.table, layer);
        self.origins.record("", layer, &origin);
        Ok(())
    }

    /// Drops what was not given of the model, if a layer names a family: its own defaults apply.
    fn drop_other_family(&mut self, layer: &Table) {
        let named = layer.get("model").and_then(|model| model.get(FAMILY));
        let Some(Value::Table(model)) = self.table.get_mut("model") else {
            return;
        };
        if named.is_some() && !(self.resumed && model.get(FAMILY) == named) {
            model.retain(|key, _| self.origins.is_given(&format!("model.{key}")));
        }
    }

    /// Drops what was not given of the optimizer, if a layer names another: its own defaults apply.
    fn drop_other_optimizer(&mut self, layer: &Table) {
        let optimizer = |table: &Table| -> Option<Value> {
            Some(table.get("train")?.get("optimizer")?.get("name")?.clone())
        };
        let Some(named) =
            optimizer(layer).filter(|named| Some(named) != optimizer(&self.table).as_ref())
        else {
            return;
        };
        if let Some(Value::Table(train)) = self.table.get_mut("train")
            && let Some(Value::Table(before)) = train.get_mut("optimizer")
        {
            before.retain(|key, _| self.origins.is_given(&format!("train.optimizer.{key}")));
            before.insert("name".into(), named);
        }
    }

    /// Where there is a group of keys and values for each head, other heads have as many.
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

    /// Brings warm-up and decay into proportion with the steps of a layer, and the final learning rate with its peak, where
    /// the layer leaves them out. A resumed run keeps its own.
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
            adapted = steps::scaled(&adapted, count);
        }
        let peak = given.get("learning_rate").and_then(number);
        if let Some(peak) = peak.filter(|_| train.learning_rate > 0.0) {
            adapted.min_learning_rate *= peak / train.learning_rate;
        }
        if given.get("schedule") == Some(&"constant".into()) {
            adapted.min_learning_rate = 0.0;
        }
        let mut after = table_of(&adapted)?;
        for (key, cause) in steps::ADAPTED {
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
            // That of the recipe for weights is the longest that is wanted.
            let length = &mut recipe.train.sequence_length;
            if !self.origins.is_given("train.sequence_length") {
                *length = length.map(|length| length.min(recipe.model.context()));
            }
        }
        Ok(LayeredRecipe {
            recipe,
            origins: self.origins,
        })
    }
}

impl Layers {
    /// Takes the keys that `[lora]` leaves out from the adapters at `load`, if it has adapters.
    fn continue_adapters(&mut self, families: &Families, load: &Path) -> Result<(), Error> {
        let Some(Value::Table(given)) = self.table.get_mut("lora") else {
            return Ok(());
        };
        if let Some(found) = families.adapters_at(load)? {
            let mut all = table_of(&found)?;
            all.remove("base_model");
            merge(&mut all, given);
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

/// Keys whose value is one of several variants, each a table of its own.
const VARIANTS: [&str; 5] = [
    "fp8.recipe",
    "model.positions",
    "model.positions.rotary.scaling",
    "parallel.split",
    "train.schedule",
];

/// Merges tables key by key, but for another variant, which is replaced.
pub fn merge(into: &mut Table, from: &Table) {
    merge_at("", into, from);
}

/// The same for tables at the dotted key `path` of a recipe.
pub fn merge_at(path: &str, into: &mut Table, from: &Table) {
    for (key, value) in from {
        let path = dotted(path, key);
        match (into.get_mut(key), value) {
            (Some(Value::Table(into)), Value::Table(from))
                if into.keys().eq(from.keys()) || !VARIANTS.contains(&&path[..]) =>
            {
                merge_at(&path, into, from);
            }
            _ => {
                into.insert(key.clone(), value.clone());
            }
        }
    }
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;

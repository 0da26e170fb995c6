//! The settings of a recipe. Each setting is declared once, as a field of a config struct.
//!
//! `schemars` reads the structs into one tree. The flags, the check of keys, the rules for resuming a run and the
//! reference page are all generated from this tree. A field of a config struct may have these properties in
//! `#[schemars(extend("NAME" = "VALUE"))]`:
//!
//! | name | meaning |
//! |---|---|
//! | `flag` | a short alias: `"tp"` for `--parallel.tensor` |
//! | `resume` | whether a resumed run may change the setting: `"may_differ"`, `"order_of_sums"` (only if the run is not deterministic) or `"never"`; by default only if the user allows it |
//! | `needs` | the condition under which the setting has an effect, as in `"pipeline > 1"` or `"data > 1 or context > 1"` |
//! | `follows` | a setting whose change on the command line drops this setting, or the condition that keeps it |
//! | `experimental` | `true` for a setting that was not tested on a GPU: `--help` does not list its flag |
//! | `value` | the name of the value in the help; the value of `"BYTES"` is a size, such as `2GiB` |
//!
//! If a flag breaks the condition of `needs` or `follows`, the setting of the recipe is dropped.

mod condition;
mod conflict;
mod dependants;
mod flags;
mod hint;
pub mod keys;
#[cfg(test)]
mod reference;
mod schema;
mod setting;
#[cfg(test)]
mod tests;
mod value;

use std::sync::LazyLock;

use serde_json::Value as Json;
use toml::Table;

use crate::error::Error;
use crate::family::{FAMILY, Families, Model};
use crate::recipe::RecipeOf;

pub use conflict::twice;
pub use dependants::DroppedSetting;
pub use flags::{NcclFlags, SettingFlags};
pub use schema::schema_of;
pub use setting::{ResumeRule, Setting, merge};
pub use value::{Given, from_toml};

/// Settings of a recipe, as a tree. `[model]` contains the keys of the families.
#[derive(Clone, Debug)]
pub struct Settings {
    root: Setting,
}

/// The tree without the keys of model families.
static WITHOUT_MODEL: LazyLock<Setting> = LazyLock::new(|| {
    let mut root = Setting::of_schema("", &schema_of::<RecipeOf<Json>>());
    // These values come from the defaults of the root type, not of the table's type.
    if let Ok(defaults) = serde_json::to_value(RecipeOf::<Json>::default()) {
        root.set_defaults(&defaults);
    }
    root
});

impl Settings {
    /// Returns the settings without the keys of model families.
    pub fn without_model() -> Self {
        let root = WITHOUT_MODEL.clone();
        Self { root }
    }

    /// Returns the settings with the keys of all these families.
    pub fn of(families: &Families) -> Self {
        Self::of_models(families.models())
    }

    /// Returns the settings with the keys of the family of one model.
    pub fn of_model(model: &Model) -> Self {
        Self::of_models(std::slice::from_ref(model))
    }

    fn of_models(models: &[Model]) -> Self {
        let mut settings = Self::without_model();
        let mut read = vec![];
        if let Some(table) = settings.root.key_mut("model") {
            let names = models.iter().map(|model| model.family());
            table.add_names(FAMILY, names, ResumeRule::MayDiffer);
            for model in models {
                // Most families have the same type of configuration.
                let kind = model.as_any().type_id();
                if !read.contains(&kind) {
                    table.read(&model.schema());
                    read.push(kind);
                }
            }
        }
        settings
    }

    /// Returns all settings below the root, in the order of the tables.
    pub fn all(&self) -> impl Iterator<Item = &Setting> {
        self.root.descendants()
    }

    /// Returns the setting of a dotted key.
    pub fn find(&self, path: &str) -> Option<&Setting> {
        path.split('.')
            .try_fold(&self.root, |table, key| table.key(key))
    }

    /// Returns the rule for a key when a run is resumed: the rule of the key, or of the innermost table that has one.
    pub fn resume_rule(&self, path: &str) -> ResumeRule {
        let (mut rule, mut setting) = (ResumeRule::Fixed, Some(&self.root));
        for key in path.split('.') {
            setting = setting.and_then(|table| table.key(key));
            rule = setting.and_then(|setting| setting.resume).unwrap_or(rule);
        }
        rule
    }

    /// Returns the root table of all settings.
    pub fn root(&self) -> &Setting {
        &self.root
    }

    /// Checks that all keys of a table are keys of a recipe.
    ///
    /// # Errors
    /// Returns the first unknown key, with the most similar known key.
    pub fn check_keys(&self, table: &Table) -> Result<(), Error> {
        match self.root.unknown_key(table) {
            None => Ok(()),
            Some(path) => Err(self.unknown(&path).into()),
        }
    }

    /// Returns the message for an unknown key.
    fn unknown(&self, path: &str) -> String {
        let distance = |setting: &&Setting| strsim::damerau_levenshtein(&setting.path, path);
        let similar = self.all().min_by_key(distance);
        let similar = similar.filter(|similar| distance(similar) <= path.len() / 4 + 1);
        let hint = similar.map(|similar| format!("; did you mean {}?", similar.path));
        format!("a recipe has no key {path}{}", hint.unwrap_or_default())
    }
}

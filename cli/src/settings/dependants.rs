//! Drops settings of a recipe whose condition a flag breaks.

use serde_json::Value as Json;
use toml::{Table, Value};

use super::Settings;
use super::condition::Condition;
use super::keys::{get, remove};

/// Test for a dotted key.
type KeyTest<'a> = &'a dyn Fn(&str) -> bool;

/// Setting of a recipe whose condition the command line has broken.
#[derive(Debug, PartialEq)]
pub struct DroppedSetting {
    /// The dotted key.
    pub path: String,
    /// The setting that was dropped, and the reason.
    pub note: String,
    /// Whether its value differed from the default.
    pub was_set: bool,
}

impl Settings {
    /// Drops the settings of a recipe whose condition the `changed` keys have broken, except `kept` settings. Returns
    /// the dropped settings.
    pub fn drop_dependants(
        &self,
        before: &Table,
        recipe: &mut Table,
        (changed, kept): (KeyTest<'_>, KeyTest<'_>),
    ) -> Vec<DroppedSetting> {
        let mut dropped: Vec<DroppedSetting> = vec![];
        loop {
            let is_dropped = |path: &str| dropped.iter().any(|of| of.path == path);
            let is_broken = |condition: &&Condition| {
                let values = |key: &str| [before, &*recipe].map(|of| self.value(of, key));
                let is_touched = condition.keys().any(|key| changed(key) || is_dropped(key));
                is_touched && !condition.holds(values)
            };
            let broken = self.all().find_map(|setting| {
                let path = &setting.path;
                let condition = setting.conditions.iter().find(is_broken)?;
                let is_own = !kept(path) && get(recipe, path).is_some() && !is_dropped(path);
                is_own.then_some((path, condition))
            });
            let Some((path, condition)) = broken else {
                return dropped;
            };
            let (path, why) = match condition.is_needed {
                true => (path.clone(), format!("requires {condition}")),
                false => (path.clone(), format!("depends on {condition}")),
            };
            let note = format!("{path} of the recipe is dropped: it {why}");
            let default = self.find(&path).and_then(|it| it.default.clone());
            let was_set = self.value(recipe, &path) != default.unwrap_or(Json::Null);
            remove(recipe, &path);
            dropped.push(DroppedSetting {
                path,
                note,
                was_set,
            });
        }
    }

    /// Returns the value of a key in a recipe, or its default.
    fn value(&self, recipe: &Table, path: &str) -> Json {
        let given = get(recipe, path).and_then(|value: &Value| serde_json::to_value(value).ok());
        let default = || self.find(path).and_then(|setting| setting.default.clone());
        given.or_else(default).unwrap_or(Json::Null)
    }
}

//! The model families of a command line: their names, and the models that recipes and checkpoints configure.

mod adapters;
mod any_model;
mod hugging_face;
mod run;
mod saved;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use burn_megatron::model::ModelConfig;
use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::{HfFamily, ModelFamily};
use serde::{Serialize, Serializer};
use serde_json::Value;
use toml::Table;

use crate::error::Error;
use crate::settings::keys::table_of;
use crate::settings::{Setting, merge};

pub use adapters::Adapters;
use any_model::FamilyModel;
pub use any_model::{AnyModel, Outline, config_of};
pub use hugging_face::HfExchange;
pub use run::{AnyTrainer, RankMemory};
pub use saved::WeightsError;

/// The key of the family in the settings of a model.
pub const FAMILY: &str = "family";

/// Registered model families, each as a model with its default settings. A recipe without a family uses the first
/// family.
#[derive(Clone, Debug)]
pub struct Families(Vec<Model>);

/// Model of a registered family.
#[derive(Clone)]
pub struct Model(Arc<dyn AnyModel>);

impl Families {
    /// Returns an empty list of families.
    pub fn none() -> Self {
        Self(vec![])
    }

    /// Returns the families of burn-megatron-models.
    pub fn transformers() -> Self {
        let mut families = Self::none();
        for family in ModelFamily::ALL {
            families.add_hf(*family, family.defaults());
        }
        families
    }

    /// Adds a family, or replaces the family of the same name.
    pub fn add<C: ModelConfig>(&mut self, name: &'static str, defaults: C) {
        self.put(Model::new(name, defaults, None));
    }

    /// Adds a Hugging Face family by its `model_type`, or replaces the family of the same name.
    pub fn add_hf<F: HfFamily>(&mut self, family: F, defaults: F::Model) {
        self.put(Model::of_hf(family, defaults));
    }

    fn put(&mut self, model: Model) {
        self.0.retain(|other| other.family() != model.family());
        self.0.push(model);
    }

    /// Returns the families as models with their default settings.
    pub fn models(&self) -> &[Model] {
        &self.0
    }

    /// Returns the names of the families for an error.
    fn names(&self) -> String {
        let names: Vec<_> = self.0.iter().map(|family| family.family()).collect();
        names.join(", ")
    }

    /// Returns the family of this name, or the first family.
    fn find(&self, name: Option<&str>) -> Result<&Model, Error> {
        let found = match name {
            Some(name) => self.0.iter().find(|family| family.family() == name),
            None => self.0.first(),
        };
        found.ok_or_else(|| match name {
            Some(name) => format!("invalid family {name:?}: expected {}", self.names()).into(),
            None => "this command has no model family".into(),
        })
    }

    /// Returns the family that a recipe's `[model]` names, or the first family.
    fn family_of(&self, settings: &Table) -> Result<&Model, Error> {
        match settings.get(FAMILY) {
            None => self.find(None),
            Some(toml::Value::String(name)) => self.find(Some(name)),
            Some(other) => Err(format!("invalid family = {other}: expected a string").into()),
        }
    }

    /// Returns the model with the settings of a recipe's `[model]`. Missing settings have the defaults of the family.
    ///
    /// # Errors
    /// Returns an error for an unknown family or setting, and for a value of the wrong type.
    pub fn model(&self, mut settings: Table) -> Result<Model, Error> {
        let family = self.family_of(&settings)?;
        settings.remove(FAMILY);
        Ok(family.with_settings(settings)?)
    }

    /// Returns the model with the settings of a recipe's `[model]` on top of the defaults of its family. A nested
    /// table changes only the keys that it has.
    ///
    /// # Errors
    /// See [`model`](Self::model).
    pub fn model_over_defaults(&self, settings: &Table) -> Result<Model, Error> {
        self.family_of(settings)?.changed(settings)
    }

    /// Returns the model with the settings of a checkpoint.
    fn model_of_json(&self, settings: &Value) -> Result<Model, Error> {
        let Value::Object(mut settings) = settings.clone() else {
            return Err("the settings of the model are not a table".into());
        };
        let text = |name: Value| name.as_str().map_or_else(|| name.to_string(), String::from);
        let name = settings.remove(FAMILY).map(text);
        let family = self.find(name.as_deref())?;
        Ok(family.with_saved_settings(settings.into())?)
    }
}

impl Model {
    fn new<C: ModelConfig>(
        family: &'static str,
        config: C,
        hf: Option<Arc<dyn HfExchange>>,
    ) -> Self {
        Self(Arc::new(FamilyModel { family, config, hf }))
    }

    /// Creates a model of this configuration, without conversion from and to Hugging Face.
    pub(crate) fn of<C: ModelConfig>(family: &'static str, config: C) -> Self {
        Self::new(family, config, None)
    }

    /// Creates a model of a Hugging Face family.
    pub fn of_hf<F: HfFamily>(family: F, config: F::Model) -> Self {
        Self::new(family.name(), config, Some(Arc::new(family)))
    }

    /// Returns the configuration of a transformer, or `None` for another kind of model.
    pub fn as_transformer(&self) -> Option<&TransformerConfig> {
        let model = self.as_any().downcast_ref::<FamilyModel<_>>()?;
        Some(&model.config)
    }

    /// Returns this model with some of its settings changed. A nested table changes only the keys that it has.
    ///
    /// # Errors
    /// Returns an error for an unknown setting and for a value of the wrong type.
    fn changed(&self, settings: &Table) -> Result<Self, Error> {
        let mut all = table_of(self)?;
        let keys = Setting::of_schema("model", &self.schema());
        merge(Some(&keys), &mut all, settings);
        all.remove(FAMILY);
        Ok(self.with_settings(all)?)
    }

    /// Creates a transformer.
    pub fn transformer(config: TransformerConfig) -> Self {
        Self::of_hf(ModelFamily::Gpt2, config)
    }
}

/// Returns the default model of the first family of burn-megatron-models.
impl Default for Model {
    fn default() -> Self {
        Self::of_hf(ModelFamily::Gpt2, ModelFamily::Gpt2.defaults())
    }
}

impl Deref for Model {
    type Target = dyn AnyModel;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for Model {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(&**other)
    }
}

/// Serializes the settings, with the name of the family.
impl Serialize for Model {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        erased_serde::serialize(&*self.0, serializer)
    }
}

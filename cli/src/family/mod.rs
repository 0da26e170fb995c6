//! The model families of a command line: names, and the models that recipes and checkpoints configure in them.

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

/// The key of a model's family among its settings.
pub const FAMILY: &str = "family";

/// The registered model families, each as a model with its default settings. The first is that of a recipe that
/// names none.
#[derive(Clone, Debug)]
pub struct Families(Vec<Model>);

/// A model of a registered family.
#[derive(Clone)]
pub struct Model(Arc<dyn AnyModel>);

impl Families {
    /// No family.
    pub fn none() -> Self {
        Self(vec![])
    }

    /// The families of burn-megatron-models: GPT-2, Llama, Mistral, Qwen 2 and Qwen 3.
    pub fn transformers() -> Self {
        let mut families = Self::none();
        for family in ModelFamily::ALL {
            families.add_hf(*family, family.defaults());
        }
        families
    }

    /// Adds a family; it replaces one of the same name.
    pub fn add<C: ModelConfig>(&mut self, name: &'static str, defaults: C) {
        self.put(Model::new(name, defaults, None));
    }

    /// Adds a family of Hugging Face by its `model_type`; it replaces one of the same name.
    pub fn add_hf<F: HfFamily>(&mut self, family: F, defaults: F::Model) {
        self.put(Model::of_hf(family, defaults));
    }

    fn put(&mut self, model: Model) {
        self.0.retain(|other| other.family() != model.family());
        self.0.push(model);
    }

    /// Each family, as a model with its default settings.
    pub fn models(&self) -> &[Model] {
        &self.0
    }

    /// The names, for an error.
    fn names(&self) -> String {
        let names: Vec<_> = self.0.iter().map(|family| family.family()).collect();
        names.join(", ")
    }

    /// The family of this name, or the first.
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

    /// The family that a recipe's `[model]` names, or the first.
    fn family_of(&self, settings: &Table) -> Result<&Model, Error> {
        match settings.get(FAMILY) {
            None => self.find(None),
            Some(toml::Value::String(name)) => self.find(Some(name)),
            Some(other) => Err(format!("invalid family = {other}: expected a string").into()),
        }
    }

    /// The model with the settings of a recipe's `[model]`; those that it leaves out are the family's defaults.
    ///
    /// # Errors
    /// An unknown family or setting, and a value of the wrong type.
    pub fn model(&self, mut settings: Table) -> Result<Model, Error> {
        let family = self.family_of(&settings)?;
        settings.remove(FAMILY);
        Ok(family.with_settings(settings)?)
    }

    /// The model with the settings of a recipe's `[model]` over the defaults of its family. A table of settings changes only
    /// the keys that it has.
    ///
    /// # Errors
    /// See [`model`](Self::model).
    pub fn model_over_defaults(&self, settings: &Table) -> Result<Model, Error> {
        self.family_of(settings)?.changed(settings)
    }

    /// The model of the settings in a checkpoint.
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

    /// A model of this configuration, without an exchange with Hugging Face.
    pub(crate) fn of<C: ModelConfig>(family: &'static str, config: C) -> Self {
        Self::new(family, config, None)
    }

    /// A model of a family of Hugging Face.
    pub fn of_hf<F: HfFamily>(family: F, config: F::Model) -> Self {
        Self::new(family.name(), config, Some(Arc::new(family)))
    }

    /// The configuration of a transformer; `None` for another kind of model.
    pub fn as_transformer(&self) -> Option<&TransformerConfig> {
        let model = self.as_any().downcast_ref::<FamilyModel<_>>()?;
        Some(&model.config)
    }

    /// Returns this model with some of its settings changed. A table of settings changes only the keys that it has.
    ///
    /// # Errors
    /// An unknown setting, and a value of the wrong type.
    fn changed(&self, settings: &Table) -> Result<Self, Error> {
        let mut all = table_of(self)?;
        let keys = Setting::of_schema("model", &self.schema());
        merge(Some(&keys), &mut all, settings);
        all.remove(FAMILY);
        Ok(self.with_settings(all)?)
    }

    /// A transformer.
    pub fn transformer(config: TransformerConfig) -> Self {
        Self::of_hf(ModelFamily::Gpt2, config)
    }
}

/// The default of the first family of burn-megatron-models.
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

/// The settings, with the name of the family.
impl Serialize for Model {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        erased_serde::serialize(&*self.0, serializer)
    }
}

//! Models of any registered family.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::checkpoint::TensorSource;
use burn_megatron::data_parallel::{
    DataParallelConfig, Precision, ShardingEstimate, freeze_in_all_stages,
};
use burn_megatron::kernel_selection::{KernelChoiceError, KernelChoices, KernelSelection};
use burn_megatron::mesh::{ContextExchange, ParallelConfig};
use burn_megatron::model::{
    ConfigDifference, GenerationCache, LanguageModel, ModelConfig, check_context,
};
use burn_megatron::nn::lora::{LoraConfig, LoraLayers};
use burn_megatron::nn::{AttentionLayer, BuildError, ModelBuilder, ParallelModule, ParameterTable};
use burn_megatron::optim::groups::{unmatched, unmatched_error};
use burn_megatron::pipeline::split::StageLayout;
use burn_megatron_generate::GenerateError;
use burn_megatron_models::hf::peft::adapted_layers;
use burn_megatron_plan::memory::{MemoryReport, MemoryRequest, RankProfiles, plan_memory_with};
use burn_megatron_train::{TrainConfig, Trainer};
use burn_megatron_verify::{
    Layout, ModelSubject, VerifyError, VerifyOptions, VerifyReport, verify,
};
use serde::Serialize;
use serde_json::Value;
use toml::Table;

use super::run::{AnyGenerator, AnyTrainer, LoadedModel};
use super::{HfExchange, Model};
use crate::error::Error;
use crate::settings::schema_of;

/// Shapes of a rank's part of a model, without its values.
pub struct Outline {
    pub table: ParameterTable,
    pub kernels: KernelSelection,
    pub sharing: ShardingEstimate,
    pub flops_per_token: f64,
}

/// Model of a registered family. For most methods, see [`ModelConfig`].
pub trait AnyModel: Debug + Send + Sync + erased_serde::Serialize {
    fn family(&self) -> &'static str;
    fn layers(&self) -> usize;
    fn vocabulary(&self) -> usize;
    fn context(&self) -> usize;
    fn describe(&self) -> String;
    fn local_logits(&self, layout: &ParallelConfig) -> usize;
    fn table_bytes(&self) -> u128;
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError>;
    fn check_context(&self, layout: &ParallelConfig) -> Result<(), BuildError>;
    fn splits_sequences(&self, layout: &ParallelConfig) -> bool;
    fn context_exchange(
        &self,
        layout: &ParallelConfig,
    ) -> Result<Option<ContextExchange>, BuildError>;
    fn check_kernels(
        &self,
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<KernelSelection, KernelChoiceError>;

    /// Returns a model of the same family with these settings. Missing settings have their values in this model.
    fn with_settings(&self, settings: Table) -> Result<Model, toml::de::Error>;

    /// Returns a model of the same family with the complete settings of a checkpoint.
    fn with_saved_settings(&self, settings: Value) -> Result<Model, serde_json::Error>;

    /// Returns the settings in which another model differs, or `None` if it has another type of configuration.
    fn differences(&self, other: &dyn AnyModel) -> Option<Vec<ConfigDifference>>;

    /// Returns the JSON schema of the settings.
    fn schema(&self) -> Value;

    /// Returns whether both models have the same family and settings.
    fn equals(&self, other: &dyn AnyModel) -> bool;

    /// Returns the conversion from and to Hugging Face, if the family supports it.
    fn hf(&self) -> Option<&dyn HfExchange>;

    /// Builds a rank's part of the model without allocating its parameters, for sequences of `seq` tokens.
    fn outline(
        &self,
        builder: ModelBuilder,
        sharing: &DataParallelConfig,
        seq: usize,
    ) -> Result<Outline, Error>;

    /// Returns the layers that have adapters with these settings.
    fn adapted_layers(&self, lora: &LoraConfig) -> Result<LoraLayers, BuildError>;

    /// Checks that the model has the layers that the builder's recomputation settings name.
    fn check_recompute(&self, builder: ModelBuilder) -> Result<(), BuildError>;

    /// Checks that the model has the parameters and layers that the patterns of a training run name. With `drafts`,
    /// also checks that the model can draft generated text.
    ///
    /// # Errors
    /// Returns an error if a pattern matches nothing, or if the model cannot draft.
    fn check_names(
        &self,
        builder: ModelBuilder,
        train: &TrainConfig,
        drafts: bool,
    ) -> Result<(), Error>;

    /// Plans the memory of every pipeline rank, with the `profiles` of earlier plans.
    fn plan_memory(
        &self,
        request: &MemoryRequest<'_>,
        profiles: &RankProfiles,
    ) -> Result<MemoryReport, Error>;

    /// Creates a trainer for a rank's part of the model.
    fn trainer(
        &self,
        builder: ModelBuilder,
        config: &TrainConfig,
    ) -> Result<Box<dyn AnyTrainer>, Error>;

    /// Creates a generator for a rank's part of the model, with its weights.
    fn generator(
        &self,
        builder: ModelBuilder,
        precision: Precision,
        weights: &dyn TensorSource,
    ) -> Result<Box<dyn AnyGenerator>, Error>;

    /// Runs `verify` on this model.
    fn verify(
        &self,
        subject: ModelSubject<()>,
        layouts: &[Layout],
        options: &VerifyOptions,
    ) -> Result<VerifyReport, VerifyError>;

    fn as_any(&self) -> &dyn Any;
}

/// Configuration of a model, with the parts of its family's registration.
#[derive(Clone, Debug, Serialize)]
pub struct FamilyModel<C> {
    pub family: &'static str,
    #[serde(flatten)]
    pub config: C,
    #[serde(skip)]
    pub hf: Option<Arc<dyn HfExchange>>,
}

impl<C: ModelConfig> FamilyModel<C> {
    /// Builds the whole model without allocating its parameters.
    fn whole(&self, builder: ModelBuilder) -> Result<ParallelModule<C::Model>, BuildError> {
        let whole = StageLayout {
            embedding: true,
            layers: 0..self.config.layers(),
            loss: true,
        };
        self.config.init_stages(builder.outline(), &[(0, whole)])
    }
}

/// Returns the configuration of a model, if it has this type.
pub fn config_of<C: ModelConfig>(model: &dyn AnyModel) -> Option<&C> {
    let model = model.as_any().downcast_ref::<FamilyModel<C>>()?;
    Some(&model.config)
}

impl<C: ModelConfig> AnyModel for FamilyModel<C> {
    fn family(&self) -> &'static str {
        self.family
    }

    fn layers(&self) -> usize {
        self.config.layers()
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary()
    }

    fn context(&self) -> usize {
        self.config.context()
    }

    fn describe(&self) -> String {
        self.config.describe()
    }

    fn local_logits(&self, layout: &ParallelConfig) -> usize {
        self.config.local_logits(layout)
    }

    fn table_bytes(&self) -> u128 {
        self.config.table_bytes()
    }

    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        self.config.check_layout(layout)
    }

    fn check_context(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        check_context(&self.config, layout)
    }

    fn splits_sequences(&self, layout: &ParallelConfig) -> bool {
        self.config.splits_sequences(layout)
    }

    fn context_exchange(
        &self,
        layout: &ParallelConfig,
    ) -> Result<Option<ContextExchange>, BuildError> {
        self.config.context_exchange(layout)
    }

    fn check_kernels(
        &self,
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<KernelSelection, KernelChoiceError> {
        self.config.check_kernels(choices, device, dtype)
    }

    fn with_settings(&self, settings: Table) -> Result<Model, toml::de::Error> {
        let mut all = match Table::try_from(&self.config) {
            Ok(all) => all,
            Err(error) => return Err(serde::de::Error::custom(error)),
        };
        all.extend(settings);
        let config: C = all.try_into()?;
        Ok(Model::new(self.family, config, self.hf.clone()))
    }

    fn with_saved_settings(&self, settings: Value) -> Result<Model, serde_json::Error> {
        let config: C = serde_json::from_value(settings)?;
        Ok(Model::new(self.family, config, self.hf.clone()))
    }

    fn differences(&self, other: &dyn AnyModel) -> Option<Vec<ConfigDifference>> {
        let other = other.as_any().downcast_ref::<Self>()?;
        Some(self.config.differences(&other.config))
    }

    fn schema(&self) -> Value {
        schema_of::<C>()
    }

    fn equals(&self, other: &dyn AnyModel) -> bool {
        let other = other.as_any().downcast_ref::<Self>();
        other.is_some_and(|other| other.family == self.family && other.config == self.config)
    }

    fn hf(&self) -> Option<&dyn HfExchange> {
        self.hf.as_deref()
    }

    fn outline(
        &self,
        builder: ModelBuilder,
        sharing: &DataParallelConfig,
        seq: usize,
    ) -> Result<Outline, Error> {
        let groups = builder.groups().clone();
        let model = self.config.init_with(builder.outline())?;
        Ok(Outline {
            sharing: ShardingEstimate::of(&model, &groups, sharing)?,
            flops_per_token: model.module.flops_per_token(seq),
            table: model.table,
            kernels: model.kernels,
        })
    }

    fn adapted_layers(&self, lora: &LoraConfig) -> Result<LoraLayers, BuildError> {
        adapted_layers(&self.config, lora)
    }

    fn check_recompute(&self, builder: ModelBuilder) -> Result<(), BuildError> {
        Ok(self.whole(builder)?.recompute.check_whole_model()?)
    }

    fn check_names(
        &self,
        builder: ModelBuilder,
        train: &TrainConfig,
        drafts: bool,
    ) -> Result<(), Error> {
        let groups = builder.groups().clone();
        let mut model = self.whole(builder)?;
        model.fp8.check_layers(&groups)?;
        freeze_in_all_stages(&mut model.table, &train.freeze, &groups)?;
        let attention = AttentionLayer::of_all_stages(&model.attention_logits, &groups)?;
        train.check_attention(&attention, &model.table)?;
        let optimizer = train.optimizer.groups();
        let paths = || model.table.entries().iter().map(|entry| &entry.path[..]);
        if let Some(first) = unmatched(optimizer, paths())?.first() {
            return Err(unmatched_error(&optimizer[*first], paths()).into());
        }
        let cache = <C::Model as LanguageModel>::Cache::new(&model.module);
        match drafts && !cache.can_draft(&model.module) {
            true => Err(format!("[sample] {}", GenerateError::NoDrafts).into()),
            false => Ok(()),
        }
    }

    fn plan_memory(
        &self,
        request: &MemoryRequest<'_>,
        profiles: &RankProfiles,
    ) -> Result<MemoryReport, Error> {
        Ok(plan_memory_with(&self.config, request, profiles)?)
    }

    fn trainer(
        &self,
        builder: ModelBuilder,
        config: &TrainConfig,
    ) -> Result<Box<dyn AnyTrainer>, Error> {
        let (groups, device) = (builder.groups().clone(), builder.device().clone());
        let model = self.config.init_with(builder)?;
        Ok(Box::new(Trainer::new(model, &groups, &device, config)?))
    }

    fn generator(
        &self,
        builder: ModelBuilder,
        precision: Precision,
        weights: &dyn TensorSource,
    ) -> Result<Box<dyn AnyGenerator>, Error> {
        let loaded = LoadedModel::new(&self.config, builder, precision, weights)?;
        Ok(Box::new(loaded))
    }

    fn verify(
        &self,
        subject: ModelSubject<()>,
        layouts: &[Layout],
        options: &VerifyOptions,
    ) -> Result<VerifyReport, VerifyError> {
        verify(&subject.with_config(self.config.clone()), layouts, options)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

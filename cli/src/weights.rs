//! The weights that a run loads at its start.

use std::path::Path;
use std::sync::OnceLock;

use burn_megatron::checkpoint::TensorSource;
use burn_megatron::model::ConfigDifference;
use burn_megatron::nn::lora::LoraConfig;
use serde_json::Value;

use crate::error::Error;
use crate::family::{Adapters, Families, Model};
use crate::lora;
use crate::recipe::Recipe;
use crate::saving::{Lenient, SavingArgs};

/// Settings that determine which tensors exist. They may differ if missing or unexpected tensors are accepted.
const TENSOR_SETTINGS: [&str; 8] = [
    "layers",
    "bias",
    "qkv_bias",
    "output_bias",
    "qk_norm",
    "sinks",
    "post_norms",
    "tied",
];

/// The checkpoint or Hugging Face folder whose weights a run loads.
pub struct InitialWeights<'a> {
    recipe: &'a Recipe,
    saving: &'a SavingArgs,
    families: &'a Families,
    /// The weights of a run without a checkpoint.
    first: OnceLock<Box<dyn TensorSource>>,
    /// The weights of a run with a checkpoint.
    base: OnceLock<Box<dyn TensorSource>>,
}

impl<'a> InitialWeights<'a> {
    pub fn new(recipe: &'a Recipe, saving: &'a SavingArgs, families: &'a Families) -> Self {
        Self {
            recipe,
            saving,
            families,
            first: OnceLock::new(),
            base: OnceLock::new(),
        }
    }

    /// Returns the weights that the run loads before it loads its checkpoint (if it has a checkpoint). The first call
    /// opens the weights. Returns `None` if the run loads no weights.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`open`].
    pub fn open(&self, has_checkpoint: bool) -> Result<Option<&dyn TensorSource>, Error> {
        let Some(path) = lora::initial_weights(self.recipe, has_checkpoint) else {
            return Ok(None);
        };
        let opened = match has_checkpoint {
            true => &self.base,
            false => &self.first,
        };
        if opened.get().is_none() {
            let model = (&self.recipe.model, self.recipe.lora.as_ref());
            // Another rank may have opened the weights in the meantime.
            let _ = opened.set(open(path, model, self.saving, self.families)?);
        }
        Ok(opened.get().map(|opened| &**opened))
    }
}

/// Opens the checkpoint or Hugging Face folder with the initial weights of `model`. With `lora`, the adapters at
/// `path` are read separately. Without `lora`, they are merged into the weights of their model.
///
/// # Errors
///
/// Returns an error if a file cannot be read, or if the settings of `model` and `lora` differ from the weights.
pub fn open(
    path: &Path,
    (model, lora): (&Model, Option<&LoraConfig>),
    saving: &SavingArgs,
    families: &Families,
) -> Result<Box<dyn TensorSource>, Error> {
    let adapters = match lora {
        Some(_) => Adapters::Separate,
        None => Adapters::Merged,
    };
    let (found, source) = families.open_with(path, adapters)?;
    let all = saving.allows(Lenient::Settings);
    if let Some(lora) = lora.filter(|_| !all)
        && let Some(found) = families.adapters_at(path)?
    {
        check_scale(lora, &found, &source.name())?;
    }
    let tensors = saving.allows(Lenient::Missing) || saving.allows(Lenient::Unexpected);
    let Some(mut differing) = model.differences(&*found) else {
        let name = source.name();
        let (own, other) = (model.family(), found.family());
        return Err(
            format!("{name} is a model of the family {other:?}, and this run has {own:?}").into(),
        );
    };
    differing.retain(|difference| {
        let of_tensors = TENSOR_SETTINGS.contains(&&difference.setting[..]);
        let may_differ = all || (tensors && of_tensors);
        !may_differ
    });
    if differing.is_empty() {
        Ok(source)
    } else {
        Err(format!(
            "[model] differs from the model of {}: {}; use the same settings, or accept the difference with --lenient \
             settings",
            source.name(),
            listed(&differing),
        )
        .into())
    }
}

/// Checks that adapters are multiplied by the scale with which they were trained.
fn check_scale(own: &LoraConfig, found: &LoraConfig, name: &str) -> Result<(), Error> {
    if own.rank == found.rank && own.scale() == found.scale() {
        return Ok(());
    }
    let [own, other] = [own, found].map(|lora| {
        [
            ("rank", Value::from(lora.rank)),
            ("alpha", Value::from(lora.alpha)),
            ("rslora", Value::from(lora.rslora)),
        ]
    });
    let pairs = own.into_iter().zip(other);
    let differing = pairs.filter(|((_, own), (_, other))| own != other);
    let differing: Vec<_> = differing
        .map(|((key, own), (_, other))| format!("lora.{key} is {own}, not {other}"))
        .collect();
    Err(format!(
        "[lora] differs from the adapters of {name}: {}; use the same settings, or accept the difference with --lenient \
         settings",
        differing.join("; ")
    )
    .into())
}

fn listed(differing: &[ConfigDifference]) -> String {
    let shown = |value: &Value| match value {
        Value::Null => "unset".into(),
        value => value.to_string(),
    };
    let each = differing.iter().map(|difference| {
        let (own, other) = (shown(&difference.own), shown(&difference.other));
        format!("model.{} is {own}, not {other}", difference.setting)
    });
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron_models::TransformerConfig;
    use burn_megatron_models::hf::HfFolder;

    fn fixture() -> &'static Path {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../models/tests/fixtures/hf/llama2"
        );
        Path::new(path)
    }

    #[test]
    fn a_model_must_be_that_of_its_weights() {
        let model = HfFolder::open(fixture()).unwrap().config().model.clone();
        let with = |lenient: &[Lenient]| SavingArgs {
            lenient: lenient.to_vec(),
            ..SavingArgs::default()
        };
        let open = |model: &TransformerConfig, lenient: &[Lenient]| {
            let (model, families) = (Model::transformer(model.clone()), Families::transformers());
            let opened = super::open(fixture(), (&model, None), &with(lenient), &families);
            opened.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(open(&model, &[]), Ok(()));
        let deeper = TransformerConfig {
            layers: 3,
            ..model.clone()
        };
        let error = open(&deeper, &[]).unwrap_err();
        assert!(
            error.contains("llama2: model.layers is 3, not 2; use the same settings"),
            "{error}"
        );
        let narrow = TransformerConfig {
            norm_epsilon: 1e-5,
            layers: 3,
            window: Some(4),
            ..model
        };
        let error = open(&narrow, &[Lenient::Missing]).unwrap_err();
        let wanted = "model.norm_epsilon is 0.00001, not 1e-6; model.window is 4, not unset";
        assert!(
            error.contains(wanted) && !error.contains("layers"),
            "{error}"
        );
        assert_eq!(open(&deeper, &[Lenient::Missing]), Ok(()));
        assert_eq!(open(&deeper, &[Lenient::Unexpected]), Ok(()));
        assert_eq!(open(&narrow, &[Lenient::Settings]), Ok(()));
        assert!(open(&narrow, &[Lenient::Rounding]).is_err());
        let deeper = Model::transformer(deeper);
        let families = Families::transformers();
        let nowhere = super::open(
            Path::new("/nowhere/at/all"),
            (&deeper, None),
            &with(&[]),
            &families,
        );
        let error = nowhere.map(drop).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
    }
}

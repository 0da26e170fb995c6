//! The keys of a `config.json`: each is read, known to be irrelevant, or an error.

use serde_json::{Map, Value};

use crate::hf::{HfConfigError, HfFamily};

/// Keys that do not change what a model computes for given tokens and weights: names, generation, outputs,
/// other heads, memory.
const IGNORED_KEYS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "predict_special_tokens",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// The objects with the scaling of rotary positions, of `transformers` 5 and 4.
const ROPE: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// The largest size that is accepted; products of a few of them do not overflow.
const MAX_SIZE: u64 = 1 << 24;

/// The keys of a `config.json`, or of an object in it, that were not taken yet.
#[derive(Debug)]
pub struct ConfigKeys {
    map: Map<String, Value>,
    /// The prefix of a key in errors, such as `rope_scaling`.
    within: &'static str,
    /// The `model_type`.
    family: &'static str,
}

/// A value for an error, shortened if it is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The error for a `model_type` that is none of `known`, or for a missing one.
pub(in crate::hf) fn unknown_type(found: Option<&Value>, known: &[&str]) -> HfConfigError {
    HfConfigError::Family {
        found: shown(found.unwrap_or(&Value::Null)),
        expected: match known.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            _ => known.concat(),
        },
    }
}

impl ConfigKeys {
    /// The keys of a file, and its family.
    pub(super) fn new<F: HfFamily>(map: Map<String, Value>) -> Result<(Self, F), HfConfigError> {
        let mut keys = Self {
            map,
            within: "",
            family: "",
        };
        let found = keys.take("model_type");
        let name = found.as_ref().and_then(Value::as_str);
        let Some(family) = name.and_then(F::of_name) else {
            let known: Vec<_> = F::ALL.iter().map(|family| family.name()).collect();
            return Err(unknown_type(found.as_ref(), &known));
        };
        let names = family.names();
        keys.family = names.model_type;
        let own = Value::from(vec![names.architecture]);
        match keys.take("architectures") {
            Some(other) if other != own => {
                Err(keys.refused("architectures", &other, own.to_string()))
            }
            _ => {
                keys.fill(family.class_defaults());
                Ok((keys, family))
            }
        }
    }

    /// Adds defaults of keys that are missing, which `null` is not, by their own name or another.
    fn fill(&mut self, defaults: Map<String, Value>) {
        let has_base = ROPE.iter().any(|rope| {
            let rope = self.map.get(*rope);
            rope.is_some_and(|rope| rope.get("rope_theta").is_some())
        });
        for (key, value) in defaults {
            let others: &[&str] = match &key[..] {
                "num_experts" | "num_local_experts" => &["num_experts", "num_local_experts"],
                "num_experts_per_tok" => &["experts_per_token"],
                "rope_parameters" => &ROPE,
                _ => &[],
            };
            let is_there = others.iter().any(|other| self.map.contains_key(*other));
            let is_within = has_base && key == "rope_theta";
            if !is_there && !is_within {
                self.map.entry(key).or_insert(value);
            }
        }
    }

    /// Takes a nested object; `None` if it is missing. Its keys are to be [finished](Self::finish) as well.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for another type.
    pub fn object(&mut self, key: &'static str) -> Result<Option<Self>, HfConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self {
                map,
                within: key,
                family: self.family,
            })),
            Some(other) => Err(self.refused(key, &other, "an object or null")),
        }
    }

    /// Takes the value of a key; `null` counts as missing.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    /// Whether there is a value, including `null`, that was not taken.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Takes a size above 0.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for any other value.
    pub fn size(&mut self, key: &str) -> Result<Option<usize>, HfConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(Some(size as usize)),
            _ => Err(self.refused(key, &value, format!("a whole number from 1 to {MAX_SIZE}"))),
        }
    }

    /// Takes a whole number, which may be 0.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for any other value.
    pub fn count(&mut self, key: &str) -> Result<Option<usize>, HfConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(count @ 0..=MAX_SIZE) => Ok(Some(count as usize)),
            _ => Err(self.refused(key, &value, format!("a whole number up to {MAX_SIZE}"))),
        }
    }

    /// Takes a number of at least 0.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for any other value.
    pub fn number(&mut self, key: &str) -> Result<Option<f64>, HfConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_f64().filter(|x| x.is_finite() && *x >= 0.0) {
            Some(number) => Ok(Some(number)),
            None => Err(self.refused(key, &value, "a number of at least 0")),
        }
    }

    /// Takes a bool.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for another type.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>, HfConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_bool() {
            Some(flag) => Ok(Some(flag)),
            None => Err(self.refused(key, &value, "true or false")),
        }
    }

    /// Takes a string.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for another type.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, HfConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.refused(key, &other, "a string")),
        }
    }

    /// Takes the value of a required key.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Missing`], and the errors of `take`.
    pub fn needed<T>(
        &mut self,
        key: &str,
        take: impl FnOnce(&mut Self, &str) -> Result<Option<T>, HfConfigError>,
    ) -> Result<T, HfConfigError> {
        take(self, key)?.ok_or_else(|| self.missing(key))
    }

    /// Takes a key whose only supported values are this one and `null`.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] for any other value.
    pub fn only(&mut self, key: &str, fits: impl Into<Value>) -> Result<(), HfConfigError> {
        let fits = fits.into();
        let same = |value: &Value| match (value.as_f64(), fits.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => *value == fits,
        };
        match self.take(key) {
            Some(value) if !same(&value) => Err(self.refused(key, &value, fits.to_string())),
            _ => Ok(()),
        }
    }

    /// Takes how the weights are quantized, which the tensors tell: FP8 in blocks of 128 x 128, or MXFP4.
    fn quantization(&mut self) -> Result<(), HfConfigError> {
        let Some(mut keys) = self.object("quantization_config")? else {
            return Ok(());
        };
        // Of activations, and what is left as it is.
        for key in [
            "activation_scheme",
            "modules_to_not_convert",
            "ignored_layers",
        ] {
            keys.take(key);
        }
        match keys.needed("quant_method", Self::text)?.as_str() {
            "fp8" => {
                keys.only("fmt", "e4m3")?;
                keys.only("weight_block_size", vec![128, 128])?;
            }
            "mxfp4" => {}
            other => return Err(keys.refused("quant_method", &other.into(), "fp8 or mxfp4")),
        }
        keys.finish()
    }

    /// An error for a missing key.
    pub fn missing(&self, key: &str) -> HfConfigError {
        HfConfigError::Missing {
            family: self.family,
            key: self.path(key),
        }
    }

    /// An error for an unsupported value.
    pub fn refused(&self, key: &str, value: &Value, fits: impl Into<String>) -> HfConfigError {
        HfConfigError::Value {
            key: self.path(key),
            value: shown(value),
            fits: fits.into(),
        }
    }

    fn path(&self, key: &str) -> String {
        match self.within {
            "" => key.into(),
            within => format!("{within}.{key}"),
        }
    }

    /// Checks that no relevant key is left.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Unknown`] for the first that is.
    pub fn finish(mut self) -> Result<(), HfConfigError> {
        if self.within.is_empty() {
            self.quantization()?;
            for (key, off) in [
                ("add_cross_attention", Value::Bool(false)),
                ("cross_attention_hidden_size", Value::Null),
                ("is_encoder_decoder", Value::Bool(false)),
                ("pruned_heads", Value::Object(Map::new())),
                ("tie_encoder_decoder", Value::Bool(false)),
                ("use_mrope", Value::Bool(false)),
                // For these families it only causes a warning.
                ("is_decoder", Value::Bool(false)),
                ("attn_logit_softcapping", Value::Null),
                ("final_logit_softcapping", Value::Null),
            ] {
                self.only(key, off)?;
            }
        }
        let matters = |key: &str| !self.within.is_empty() || !IGNORED_KEYS.contains(&key);
        match self.map.iter().find(|(key, _)| matters(key)) {
            None => Ok(()),
            Some((key, value)) => Err(HfConfigError::Unknown {
                family: self.family,
                key: self.path(key),
                value: shown(value),
            }),
        }
    }
}

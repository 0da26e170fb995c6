//! Reads the keys of a `config.json` for a family.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::rc::Rc;

use serde_json::{Map, Value};

use super::meaning::{Meaning, meaning};
use crate::hf::family::ClassDefaults;
use crate::hf::{HfConfigError, HfFamily};

/// The key of the object that contains the RoPE scaling, in `transformers` 5 and in `transformers` 4.
const ROPE: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// The maximum of any size. It ensures that products of a few sizes do not overflow.
const MAX_SIZE: u64 = 1 << 24;

/// The keys of a `config.json`, or of a nested object, that were not read yet. Taking a key returns its value and
/// removes the key. A family takes all keys that it supports.
#[derive(Debug)]
pub struct ConfigKeys {
    map: Map<String, Value>,
    /// The prefix of a key in errors, such as `rope_scaling`.
    within: &'static str,
    /// The `model_type`.
    family: &'static str,
    /// The ignored keys of the file, shared with the nested objects.
    ignored: Rc<RefCell<Vec<String>>>,
}

#[cfg(test)]
thread_local! {
    /// The keys that were requested.
    pub(super) static ASKED: RefCell<std::collections::BTreeSet<String>> = RefCell::default();
}

/// Formats a value for an error, shortened if it is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Reads a number of at least 0.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| x.is_finite() && *x >= 0.0)
}

/// Returns the error for a `model_type` that is not in `known`, or for a missing `model_type`.
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
    /// Creates the keys of a file. Also returns the family of the file.
    pub(crate) fn new<F: HfFamily>(map: Map<String, Value>) -> Result<(Self, F), HfConfigError> {
        let mut keys = Self {
            map,
            within: "",
            family: "",
            ignored: Rc::default(),
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
                keys.fill(family.class_defaults())?;
                Ok((keys, family))
            }
        }
    }

    /// Adds the default values of the `transformers` class for missing keys. Rejects `null` where the class rejects it.
    fn fill(&mut self, defaults: ClassDefaults) -> Result<(), HfConfigError> {
        let is_null = |key: &String| self.is_null(key);
        if let Some(key) = defaults.not_null.iter().find(|key| is_null(key)) {
            let fits = match defaults.missing.get(key) {
                Some(value) => format!("a value; without the key it is {value}"),
                None => "a value".into(),
            };
            return Err(self.refused(key, &Value::Null, fits));
        }
        let has_base = ROPE.iter().any(|rope| {
            let rope = self.map.get(*rope);
            rope.is_some_and(|rope| rope.get("rope_theta").is_some())
        });
        for (key, value) in defaults.missing {
            if key == "rope_parameters" {
                self.fill_rope(value);
                continue;
            }
            let others: &[&str] = match &key[..] {
                "num_experts" | "num_local_experts" => &["num_experts", "num_local_experts"],
                "num_experts_per_tok" => &["experts_per_token"],
                _ => &[],
            };
            let is_there = others.iter().any(|other| self.map.contains_key(*other));
            let is_within = has_base && key == "rope_theta";
            if !is_there && !is_within {
                self.map.entry(key).or_insert(value);
            }
        }
        Ok(())
    }

    /// Adds the default RoPE scaling of the `transformers` class. It also replaces `null`, and an empty object under
    /// the old key.
    fn fill_rope(&mut self, scaling: Value) {
        let [new, old] = ROPE.map(|key| self.map.get(key));
        let is_empty = |old: &Value| old.as_object().is_none_or(Map::is_empty);
        if new.is_none_or(Value::is_null) && old.is_none_or(is_empty) {
            self.map.remove(ROPE[1]);
            self.map.insert(ROPE[0].into(), scaling);
        }
    }

    /// Takes the value of a key, which must be a nested object. Returns `None` if the key is missing. The caller must
    /// also call [`finish`](Self::finish) on the nested object.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value has another type.
    pub fn object(&mut self, key: &'static str) -> Result<Option<Self>, HfConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self {
                map,
                within: key,
                family: self.family,
                ignored: self.ignored.clone(),
            })),
            Some(other) => Err(self.refused(key, &other, "an object or null")),
        }
    }

    /// Takes the value of a key. Returns `None` if the key is missing or its value is `null`.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        #[cfg(test)]
        ASKED.with_borrow_mut(|asked| asked.insert(self.path(key)));
        self.map.remove(key).filter(|value| !value.is_null())
    }

    /// Returns whether a key exists and was not taken yet. Its value may be `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns whether a key exists with the value `null` and was not taken yet.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Checks that the value of a key is not `null`. The other methods treat `null` like a missing key. `fits`
    /// describes the supported values in the error message.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is `null`.
    pub fn not_null(&self, key: &str, fits: &str) -> Result<(), HfConfigError> {
        match self.is_null(key) {
            true => Err(self.refused(key, &Value::Null, fits)),
            false => Ok(()),
        }
    }

    /// Returns the remaining keys, for an error.
    pub(crate) fn rest(self) -> Value {
        Value::Object(self.map)
    }

    /// Returns whether all keys were taken.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Takes the value of a key and converts it with `read`. Returns an error if `read` rejects it.
    fn typed<T>(
        &mut self,
        key: &str,
        fits: impl Into<String>,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, HfConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let found = read(&value);
        found.map_or_else(
            || Err(self.refused(key, &value, fits)),
            |found| Ok(Some(found)),
        )
    }

    fn whole(
        &mut self,
        key: &str,
        range: RangeInclusive<u64>,
        fits: String,
    ) -> Result<Option<usize>, HfConfigError> {
        self.typed(key, fits, |value| {
            let number = value.as_u64().filter(|number| range.contains(number))?;
            Some(number as usize)
        })
    }

    /// Takes the value of a key, which must be an integer of at least 1. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
    pub fn size(&mut self, key: &str) -> Result<Option<usize>, HfConfigError> {
        let fits = format!("a whole number from 1 to {MAX_SIZE}");
        self.whole(key, 1..=MAX_SIZE, fits)
    }

    /// Takes the value of a key, which must be an integer of at least 0. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
    pub fn count(&mut self, key: &str) -> Result<Option<usize>, HfConfigError> {
        let fits = format!("a whole number up to {MAX_SIZE}");
        self.whole(key, 0..=MAX_SIZE, fits)
    }

    /// Takes the value of a key, which must be a number of at least 0. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
    pub fn number(&mut self, key: &str) -> Result<Option<f64>, HfConfigError> {
        self.typed(key, "a number of at least 0", number)
    }

    /// Takes the value of a key, which must be a list of numbers of at least 0. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
    pub fn numbers(&mut self, key: &str) -> Result<Option<Vec<f64>>, HfConfigError> {
        self.typed(key, "a list of numbers of at least 0", |value| {
            value.as_array()?.iter().map(number).collect()
        })
    }

    /// Takes the value of a key, which must be a boolean. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value has another type.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>, HfConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Takes the value of a key, which must be a string. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value has another type.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, HfConfigError> {
        self.typed(key, "a string", |value| value.as_str().map(String::from))
    }

    /// Takes the value of a required key. `take` is the method that takes the value.
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

    /// Takes a key and checks that its value is `null` or equal to `fits`.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
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

    /// Takes the value of a key, which must be a number above 0. Returns `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Value`] if the value is invalid.
    pub fn positive(&mut self, key: &str) -> Result<Option<f64>, HfConfigError> {
        match self.number(key)? {
            Some(0.0) => Err(self.refused(key, &Value::from(0.0), "a number above 0")),
            number => Ok(number),
        }
    }

    /// Takes the quantization settings of the weights, and checks that they are supported: FP8 in blocks of 128 x 128,
    /// or MXFP4. The settings are not needed, because they follow from the tensors.
    fn quantization(&mut self) -> Result<(), HfConfigError> {
        let Some(mut keys) = self.object("quantization_config")? else {
            return Ok(());
        };
        // These keys concern the quantization of activations, tensors that are not quantized, and the rounding of
        // scales before they were stored.
        for key in [
            "activation_scheme",
            "modules_to_not_convert",
            "ignored_layers",
            "scale_fmt",
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

    /// Creates the error for a missing key.
    pub fn missing(&self, key: &str) -> HfConfigError {
        HfConfigError::Missing {
            family: self.family,
            key: self.path(key),
        }
    }

    /// Creates the error for an unsupported value of a key. `fits` describes the supported values in the error message.
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

    /// Checks the keys that were not taken. Keys that do not change the results of the model are ignored. A key that
    /// neither `transformers` nor this crate reads is added to the [list of ignored keys](super::HfConfig::ignored).
    /// Any other key is an error.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Unknown`] for the first key that could change what the model computes.
    pub fn finish(mut self) -> Result<(), HfConfigError> {
        if self.within.is_empty() {
            self.quantization()?;
            for (key, off) in [
                ("add_cross_attention", Value::Bool(false)),
                ("is_encoder_decoder", Value::Bool(false)),
                ("pruned_heads", Value::Object(Map::new())),
                ("tie_encoder_decoder", Value::Bool(false)),
                ("use_mrope", Value::Bool(false)),
                // For these families, `is_decoder` only causes a warning.
                ("is_decoder", Value::Bool(false)),
            ] {
                self.only(key, off)?;
            }
        }
        for (key, value) in &self.map {
            match meaning(self.family, self.within, key, value) {
                Meaning::Harmless => {}
                Meaning::Ignored => self.ignored.borrow_mut().push(self.path(key)),
                Meaning::Dangerous => {
                    return Err(HfConfigError::Unknown {
                        family: self.family,
                        key: self.path(key),
                        value: shown(value),
                    });
                }
            }
        }
        Ok(())
    }

    /// Returns the list of ignored keys, which [`finish`](Self::finish) completes.
    pub(super) fn ignored(&self) -> Rc<RefCell<Vec<String>>> {
        self.ignored.clone()
    }
}

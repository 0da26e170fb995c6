//! Whether a run that goes on is the run that was saved: what may differ, and what may not.

use burn_megatron::data::Dataset;
use serde_json::{Map, Value};

use crate::data;
use crate::recipe::{Error, Recipe};

/// Settings, and tables of them, that say how the work is shared, where things lie and what is shown.
const FREE: [&str; 24] = [
    "parallel",
    "kernels",
    "sample",
    "checkpoint",
    "data.path",
    "data.cache",
    "data.files",
    "data.tokenizer",
    "model.vocabulary_divisible_by",
    "data_parallel.zero_stage",
    "data_parallel.hsdp",
    "data_parallel.bucket_size",
    "data_parallel.pad_buckets",
    "data_parallel.overlap_grad_reduce",
    "data_parallel.overlap_param_gather",
    "data_parallel.fp8_param_gather",
    "data_parallel.keep_gathered",
    "data_parallel.check_gradients",
    "train.micro_batch_size",
    "train.evaluate_every",
    "train.held_out_samples",
    "train.check_replicas_every",
    "train.count_zeros",
    "train.skip_limit",
];

/// Where the fingerprint of the data stands beside the tables of the recipe.
const FINGERPRINT: &str = "data_fingerprint";

/// What a checkpoint keeps of the run: the recipe, and which data it reads.
pub fn config(recipe: &Recipe, data: &dyn Dataset) -> Result<Value, Error> {
    let mut config = serde_json::to_value(recipe)?;
    if recipe.data.tokenizer.is_none()
        && let Some(tokenizer) = data::tokenizer(recipe)?
    {
        // The checkpoint will be read without the data, which may be all that names it.
        config["data"]["tokenizer"] = tokenizer.name().into();
    }
    config[FINGERPRINT] = format!("{:016x}", data.fingerprint()).into();
    Ok(config)
}

/// Checks that a run with the settings `now` goes on with what was `saved` under `name`, but for settings
/// that may change: those that change no mathematics, and `allowed` ones.
pub fn check(saved: &Value, now: &Value, allowed: &[String], name: &str) -> Result<(), Error> {
    for key in allowed {
        if at(saved, key).is_none() && at(now, key).is_none() {
            return Err(format!(
                "--resume-changing {key} names no setting of the recipe, where a setting is called as in \
                 train.steps"
            )
            .into());
        }
    }
    let mut different = vec![];
    compare("", saved, now, &mut different);
    let is_of = |key: &str, table: &str| {
        let rest = key.strip_prefix(table);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let may = |key: &str| {
        let mut free = FREE.into_iter().chain(allowed.iter().map(String::as_str));
        free.any(|table| is_of(key, table))
    };
    let refused: Vec<_> = different.into_iter().filter(|key| !may(key)).collect();
    let text = |value: Option<&Value>| match value {
        None | Some(Value::Null) => "nothing".to_string(),
        Some(value) => value.to_string(),
    };
    match &refused[..] {
        [] => Ok(()),
        [first, ..] => Err(format!(
            "{name} was saved by a run with {first} = {}, and this one has {}: it would be another run; give \
             it the same, or allow it with --resume-changing {}",
            text(at(saved, first)),
            text(at(now, first)),
            refused.join(","),
        )
        .into()),
    }
}

/// The value of a dotted key.
fn at<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(value, |value, key| value.get(key))
}

/// The dotted keys of what differs. What is not there is nothing.
fn compare(key: &str, a: &Value, b: &Value, different: &mut Vec<String>) {
    let none = Map::new();
    let (a, b) = match (a, b) {
        (Value::Object(a), Value::Object(b)) => (a, b),
        (Value::Object(a), Value::Null) => (a, &none),
        (Value::Null, Value::Object(b)) => (&none, b),
        (a, b) if a == b => return,
        _ => return different.push(key.to_string()),
    };
    let mut keys: Vec<_> = a.keys().chain(b.keys()).collect();
    keys.sort();
    keys.dedup();
    for name in keys {
        let key = match key.is_empty() {
            true => name.clone(),
            false => format!("{key}.{name}"),
        };
        let of = |table: &Map<String, Value>| table.get(name).cloned().unwrap_or_default();
        compare(&key, &of(a), &of(b), different);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl Fn(&mut Recipe), allowed: &[&str]) -> Option<String> {
        let mut recipe = Recipe::default();
        let saved = serde_json::to_value(&recipe).unwrap();
        change(&mut recipe);
        let now = serde_json::to_value(&recipe).unwrap();
        let allowed: Vec<_> = allowed.iter().map(|key| (*key).to_string()).collect();
        let checked = check(&saved, &now, &allowed, "step-7");
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn how_the_work_is_shared_may_change() {
        let shared = |recipe: &mut Recipe| {
            recipe.parallel.tensor = 4;
            recipe.parallel.virtual_stages = Some(2);
            recipe.data_parallel.hsdp = Some(2);
            recipe.train.micro_batch_size = 7;
            recipe.data.path = Some("elsewhere".into());
            recipe.checkpoint.every = Some(3);
        };
        assert_eq!(checked(shared, &[]), None);
    }

    #[test]
    fn what_changes_the_mathematics_is_named() {
        let longer = |recipe: &mut Recipe| {
            recipe.train.steps = 200;
            recipe.train.optimizer.beta2 = 0.5;
        };
        let error = checked(longer, &[]).unwrap();
        assert_eq!(
            error,
            "step-7 was saved by a run with train.optimizer.beta2 = 0.95, and this one has 0.5: it would \
             be another run; give it the same, or allow it with --resume-changing \
             train.optimizer.beta2,train.steps"
        );
        let error = checked(longer, &["train.optimizer"]).unwrap();
        assert!(
            error.contains("train.steps = 100, and this one has 200"),
            "{error}"
        );
        assert_eq!(
            checked(longer, &["train.optimizer.beta2", "train.steps"]),
            None
        );
        let wider = |recipe: &mut Recipe| recipe.model.groups = Some(1);
        let error = checked(wider, &[]).unwrap();
        assert!(
            error.contains("model.groups = nothing, and this one has 1"),
            "{error}"
        );
    }

    #[test]
    fn a_setting_that_is_none_cannot_be_allowed() {
        let error = checked(|_| {}, &["train.step"]).unwrap();
        assert!(error.contains("train.step names no setting"), "{error}");
    }

    /// Every free key is one of a recipe, so that none is misspelt.
    #[test]
    fn free_keys_are_keys() {
        let recipe = serde_json::to_value(Recipe::default()).unwrap();
        for key in FREE {
            assert!(at(&recipe, key).is_some(), "{key}");
        }
    }
}

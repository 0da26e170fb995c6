//! Checks that a resumed run has the settings of the saved run, except for settings that may differ.

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron_data::Dataset;
use burn_megatron_data::tokenizer::BYTES;
use burn_megatron_train::TrainConfig;
use serde::Deserialize;
use serde_json::{Map, Value};
use toml::Table;

use crate::data;
use crate::error::Error;
use crate::family::Families;
use crate::numbers::count;
use crate::recipe::{ModelBase, Recipe, RecipeOf};
use crate::settings::keys::{dotted, is_within, json_at as at};
use crate::settings::{ResumeRule, Settings};

/// The table of the optimizer. Its `name` determines which settings it has.
const OPTIMIZER: &str = "train.optimizer";

/// The key of the data fingerprint, next to the tables of the recipe.
const FINGERPRINT: &str = "data_fingerprint";

/// The key that records whether the documents of the data have special tokens. The fingerprint has this key too.
const SPECIAL_TOKENS: &str = "data_special_tokens";

/// Returns the configuration that a checkpoint records: the recipe, the fingerprint of the data, and whether its
/// documents have special tokens.
pub fn config(recipe: &Recipe, data: &dyn Dataset) -> Result<Value, Error> {
    let mut config = serde_json::to_value(recipe)?;
    if recipe.data.tokenizer.is_none()
        && let Some(tokenizer) = data::tokenizer(recipe)?
    {
        // The checkpoint may be read without the data, which may contain the only record of the tokenizer.
        config["data"]["tokenizer"] = tokenizer.name().into();
    }
    for key in ["/checkpoint/load", "/data/tokenizer", "/data/chat/template"] {
        if let Some(value) = config.pointer_mut(key)
            && let Some(path) = value.as_str().filter(|path| *path != BYTES)
        {
            // The checkpoint may be read from another working directory.
            *value = std::path::absolute(path)?.display().to_string().into();
        }
    }
    config[FINGERPRINT] = format!("{:016x}", data.fingerprint()).into();
    config[SPECIAL_TOKENS] = data::special_tokens(recipe)?.into();
    Ok(config)
}

/// Returns whether the documents of a checkpoint's run had the special tokens of their tokenizer. Returns `None` if the
/// checkpoint does not contain this information.
pub fn special_tokens(checkpoint: &Checkpoint) -> Option<bool> {
    checkpoint.metadata().config[SPECIAL_TOKENS].as_bool()
}

/// Returns the recipe that a checkpoint records, if the checkpoint belongs to a run.
///
/// # Errors
/// Returns an error if the settings are invalid.
pub fn recipe_of(checkpoint: &Checkpoint, families: &Families) -> Result<Option<Recipe>, Error> {
    let mut config = checkpoint.metadata().config.clone();
    if config.get("train").is_none() {
        return Ok(None);
    }
    if let Some(config) = config.as_object_mut() {
        config.remove(FINGERPRINT);
        config.remove(SPECIAL_TOKENS);
    }
    let read = || -> Result<Recipe, Error> {
        let tables: RecipeOf<Table> = Table::try_from(without_nulls(config))?.try_into()?;
        tables.in_family(families, ModelBase::Complete)
    };
    let recipe = read().map_err(|error| {
        let path = checkpoint.path().display();
        format!("{path}: invalid recipe: {error}")
    });
    Ok(Some(recipe?))
}

/// Removes settings that are null, because TOML has no null.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(table) => {
            let table = table.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(
                table
                    .map(|(key, value)| (key, without_nulls(value)))
                    .collect(),
            )
        }
        Value::Array(list) => Value::Array(list.into_iter().map(without_nulls).collect()),
        value => value,
    }
}

/// Checks that the settings `now` equal the settings `saved` in the checkpoint `name`. Settings that do not affect
/// the computation may differ, as well as `allowed` settings. `settings` contains the rules.
pub fn check(
    settings: &Settings,
    saved: &Value,
    now: &Value,
    allowed: &[String],
    name: &str,
) -> Result<(), Error> {
    let mut saved = saved.clone();
    // An earlier version may have used other key names.
    if let Some(train) = saved.get_mut("train")
        && let Ok(read) = TrainConfig::deserialize(&*train)
    {
        *train = serde_json::to_value(read)?;
    }
    add_missing(&mut saved, now, &serde_json::to_value(Recipe::default())?);
    let saved = &saved;
    for key in allowed {
        if at(saved, key).is_none() && at(now, key).is_none() {
            return Err(format!(
                "invalid --resume-allow-change {key}: expected a key of the recipe, as in train.steps"
            )
            .into());
        }
    }
    let different = differing(saved, now);
    let is_deterministic = at(now, "train.deterministic") == Some(&Value::Bool(true));
    let may = |key: &str| {
        let by_rule = match settings.resume_rule(key) {
            ResumeRule::Fixed | ResumeRule::Never => false,
            ResumeRule::MayDiffer => true,
            ResumeRule::OrderOfSums => !is_deterministic,
        };
        let may_be_allowed = settings.resume_rule(key) != ResumeRule::Never;
        by_rule || may_be_allowed && allowed.iter().any(|table| is_within(key, table))
    };
    let refused = different.into_iter().filter(|key| !may(key));
    let refused: Vec<_> = refused.filter(|key| key != SPECIAL_TOKENS).collect();
    let text = |value: Option<&Value>| match value {
        None | Some(Value::Null) => "not set".to_string(),
        Some(value) => value.to_string(),
    };
    let never = |key: &&String| settings.resume_rule(key) == ResumeRule::Never;
    let (key, remedy) = match &refused[..] {
        [] => return Ok(()),
        [key] if key == FINGERPRINT => return Err(other_data(saved, now, name)),
        [first, ..] => match refused.iter().find(never) {
            Some(key) => (
                key,
                "the tensors have other sizes; use the same, or start a new run".into(),
            ),
            None => (
                first,
                format!(
                    "use the same, or allow the change with --resume-allow-change {}",
                    refused.join(",")
                ),
            ),
        },
    };
    let (saved, now) = (text(at(saved, key)), text(at(now, key)));
    Err(
        format!("{name} was saved by a run with {key} = {saved}, and this run has {now}: {remedy}")
            .into(),
    )
}

/// Checks that the number of steps of a run is not below the steps of its checkpoint `name`.
pub fn check_steps(recipe: &Recipe, name: &str, done: u64) -> Result<(), Error> {
    let steps = recipe.train.steps;
    if done <= steps as u64 {
        return Ok(());
    }
    Err(format!(
        "invalid train.steps = {steps}: {name} has completed {}; set train.steps (--steps) to {done} or more, or resume from \
         an earlier checkpoint",
        count(usize::try_from(done)?, "step"),
    )
    .into())
}

/// Returns a message if the run was saved with another library for matrix multiplications on the CPU.
pub fn other_gemm(saved: &Value, recipe: &Recipe) -> Option<String> {
    let now = recipe.kernels.gemm.name();
    // Versions without the key used the default.
    let saved = saved["kernels"]["gemm"].as_str().unwrap_or("gemm");
    (saved != now).then(|| {
        format!(
            "the run was saved with kernels.gemm = \"{saved}\" and goes on with \"{now}\", which rounds sums in another \
             order"
        )
    })
}

/// Returns the error for data that differs from the data of the saved run.
fn other_data(saved: &Value, now: &Value, name: &str) -> Error {
    let of = |config: &Value| {
        let data = &config["data"];
        let chat = &data["chat"]["files"];
        let mut given = [&data["path"], &data["files"], chat].into_iter();
        let given = given.find(|paths| !paths.is_null() && **paths != Value::Array(vec![]));
        given.map_or("the text of this repository".into(), Value::to_string)
    };
    // Versions without the key added no special tokens to a text.
    let is_text = now["data"]["files"].as_array().is_none_or(Vec::is_empty);
    let is_without = is_text && saved[SPECIAL_TOKENS].is_null() && now[SPECIAL_TOKENS] == true;
    let special = match is_without {
        true => {
            ", set data.special_tokens = false, because the version that saved the checkpoint added no special tokens \
             to a text"
        }
        false => "",
    };
    let (saved, now) = (of(saved), of(now));
    let allow = format!("allow the change with --resume-allow-change {FINGERPRINT}");
    if saved == now {
        format!(
            "the data has changed since {name} was saved ({now}): restore it{special}, or {allow}"
        )
        .into()
    } else {
        format!(
            "the data differs: {name} was saved by a run with {saved}, and this run has {now}; give the same with \
             --data, or {allow}"
        )
        .into()
    }
}

/// Adds settings that are missing in `saved`, because an older version wrote it, with their default values.
fn add_missing(saved: &mut Value, now: &Value, defaults: &Value) {
    let (Value::Object(saved), Value::Object(now)) = (saved, now) else {
        return;
    };
    for (key, value) in now {
        match (saved.get_mut(key), defaults.get(key)) {
            (Some(saved), Some(default)) => add_missing(saved, value, default),
            (None, Some(default)) => {
                saved.insert(key.clone(), default.clone());
            }
            (_, None) => {}
        }
    }
}

/// Returns the dotted keys of values that differ.
pub fn differing(a: &Value, b: &Value) -> Vec<String> {
    let mut different = vec![];
    compare("", a, b, &mut different);
    different
}

/// Collects the dotted keys of values that differ. A missing value equals null.
fn compare(key: &str, a: &Value, b: &Value, different: &mut Vec<String>) {
    let name = |of: &Value| of.get("name").cloned();
    if key == OPTIMIZER && name(a) != name(b) {
        // Settings of different optimizers are not comparable.
        return different.push(format!("{key}.name"));
    }
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
        let key = dotted(key, name);
        let of = |table: &Map<String, Value>| table.get(name).cloned().unwrap_or_default();
        compare(&key, &of(a), &of(b), different);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Model;
    use burn_megatron::optim::{AdamWConfig, LionConfig, OptimizerConfig};
    use burn_megatron_models::TransformerConfig;
    use insta::assert_snapshot;

    fn settings(recipe: &Recipe) -> Settings {
        Settings::of_model(&recipe.model)
    }

    fn checked(change: impl Fn(&mut Recipe), allowed: &[&str]) -> Option<String> {
        let mut recipe = Recipe::default();
        let saved = serde_json::to_value(&recipe).unwrap();
        change(&mut recipe);
        let now = serde_json::to_value(&recipe).unwrap();
        let allowed: Vec<_> = allowed.iter().map(|key| (*key).to_string()).collect();
        let checked = check(&settings(&recipe), &saved, &now, &allowed, "step-7");
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn a_setting_that_was_not_known_has_its_default() {
        let mut recipe = Recipe::default();
        let mut saved = serde_json::to_value(&recipe).unwrap();
        let known = saved["model"].as_object_mut().unwrap();
        assert!(known.remove("post_norms").is_some());
        let now = |recipe: &Recipe| serde_json::to_value(recipe).unwrap();
        let rules = settings(&recipe);
        assert!(check(&rules, &saved, &now(&recipe), &[], "step-7").is_ok());
        recipe.model = Model::transformer(TransformerConfig {
            post_norms: true,
            ..TransformerConfig::default()
        });
        let error = check(&rules, &saved, &now(&recipe), &[], "step-7").unwrap_err();
        let expected = "saved by a run with model.post_norms = false, and this run has true";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn how_the_work_is_shared_may_change() {
        let shared = |recipe: &mut Recipe| {
            recipe.parallel.tensor = 4;
            recipe.parallel.virtual_stages = Some(2);
            recipe.data_parallel.hsdp = Some(2);
            recipe.data_parallel.hierarchical_reduce = true;
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
            recipe.train.optimizer = OptimizerConfig::AdamW(AdamWConfig {
                beta2: 0.5,
                ..AdamWConfig::default()
            });
        };
        let error = checked(longer, &[]).unwrap();
        assert_snapshot!(
            error,
            @"step-7 was saved by a run with train.optimizer.beta2 = 0.95, and this run has 0.5: use the same, or allow \
              the change with --resume-allow-change train.optimizer.beta2,train.steps"
        );
        let lion = |recipe: &mut Recipe| {
            recipe.train.optimizer = OptimizerConfig::Lion(LionConfig::default());
        };
        assert_snapshot!(
            checked(lion, &[]).unwrap(),
            @"step-7 was saved by a run with train.optimizer.name = \"adamw\", and this run has \"lion\": use the same, or \
              allow the change with --resume-allow-change train.optimizer.name"
        );
        assert_eq!(checked(lion, &["train.optimizer"]), None);
        let error = checked(longer, &["train.optimizer"]).unwrap();
        assert!(
            error.contains("train.steps = 100, and this run has 200"),
            "{error}"
        );
        assert_eq!(
            checked(longer, &["train.optimizer.beta2", "train.steps"]),
            None
        );
        let wider = |recipe: &mut Recipe| {
            recipe.model = Model::transformer(TransformerConfig {
                groups: Some(1),
                ..TransformerConfig::default()
            });
        };
        let error = checked(wider, &[]).unwrap();
        assert!(
            error.contains("model.groups = not set, and this run has 1"),
            "{error}"
        );
    }

    #[test]
    fn an_old_key_of_an_earlier_checkpoint_is_translated() {
        let recipe = Recipe::default();
        let now = serde_json::to_value(&recipe).unwrap();
        let mut saved = now.clone();
        let train = saved["train"].as_object_mut().unwrap();
        let value = train.remove("log_num_zeros_in_grad").unwrap();
        train.insert("count_zeros".into(), value);
        let rules = settings(&recipe);
        check(&rules, &saved, &now, &[], "step-7").unwrap();
        let text = "[train]\ncount_zeros = true";
        assert!(crate::recipe::parsed(text).unwrap().train.count_zeros);
    }

    #[test]
    fn another_library_for_products_is_told() {
        let recipe = crate::recipe::parsed("[kernels]\ngemm = 'openblas'").unwrap();
        let saved = serde_json::to_value(&recipe).unwrap();
        assert_eq!(other_gemm(&saved, &recipe), None);
        let told = other_gemm(&saved, &Recipe::default()).unwrap();
        assert!(
            told.contains("\"openblas\" and goes on with \"gemm\""),
            "{told}"
        );
        // Saved by a version without this setting.
        assert!(other_gemm(&Value::Null, &recipe).is_some());
        assert_eq!(other_gemm(&Value::Null, &Recipe::default()), None);
    }

    #[test]
    fn a_change_that_no_checkpoint_allows_is_not_suggested() {
        let wider = |recipe: &mut Recipe| {
            recipe.train.steps = 200;
            recipe.model = Model::transformer(TransformerConfig {
                hidden: 32,
                ..TransformerConfig::default()
            });
        };
        for allowed in [&[][..], &["model.hidden", "train.steps"]] {
            let error = checked(wider, allowed).unwrap();
            assert!(
                error.contains("model.hidden = ") && error.contains("start a new run"),
                "{error}"
            );
            assert!(!error.contains("--resume-allow-change"), "{error}");
        }
    }

    #[test]
    fn fewer_steps_than_the_checkpoint_are_refused() {
        let mut recipe = Recipe::default();
        recipe.train.steps = 20;
        check_steps(&recipe, "step-20", 20).unwrap();
        let error = check_steps(&recipe, "step-21", 21).unwrap_err();
        let wanted = "invalid train.steps = 20: step-21 has completed 21 steps; set train.steps (--steps) to 21 or more";
        assert!(error.to_string().starts_with(wanted), "{error}");
    }

    #[test]
    fn a_setting_that_is_none_cannot_be_allowed() {
        let error = checked(|_| {}, &["train.step"]).unwrap();
        assert!(
            error.contains("train.step: expected a key of the recipe"),
            "{error}"
        );
    }
}

//! Sets every number of a recipe to every extreme value, and expects an error of one line or a valid plan.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Device;
use toml::{Table, Value};

use super::*;
use crate::error::Error;
use crate::estimate::RankEstimates;
use crate::family::Families;
use crate::recipe::DEFAULT_RECIPE;

#[path = "refused_tests.rs"]
mod refused;

/// A recipe with every number that a recipe can have, except numbers that conflict with each other.
const ALL: &str = r#"
[parallel]
tensor = 2
pipeline = 2
data = 4
schedule = "interleaved"
virtual_stages = 2
defer_embedding_wgrad = 1
receives_ahead = 1

[model]
vocabulary = 256
vocabulary_divisible_by = 4
context = 32
hidden = 32
layers = 4
heads = 4
groups = 2
head_width = 8
mlp_width = 64
window = 8
positions = { rotary = { base = 10000.0, scaling = { yarn = { factor = 4.0, original = 8, beta_fast = 32.0, beta_slow = 1.0, mscale = 1.0, mscale_all_dim = 1.0 } } } }
norm = "rms"
bias = false
norm_epsilon = 1e-5
dropout = 0.1
attention_dropout = 0.1
init_std = 0.02
label_smoothing = 0.1
z_loss = 1e-4

[train]
steps = 20
micro_batch_size = 2
global_batch_size = 16
sequence_length = 32
seed = 1
learning_rate = 1e-3
min_learning_rate = 1e-4
warmup_steps = 2
schedule = { wsd = { decay_steps = 5, tail = "linear" } }
skip_limit = 5
check_replicas_every = 4
clip = 1.0
evaluate_every = 5
held_out_samples = 8
loss_scale = { initial = 65536.0, min = 1.0, growth = 2.0, backoff = 0.5, growth_interval = 100, hysteresis = 2 }
freeze = ["blocks.0.mlp.**"]
skip_spikes = { sigmas = 6.0, window = 128 }
ema = { decay = 0.999 }
qk_clip = { threshold = 100.0, alpha = 0.5 }
optimizer = { beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1, groups = [{ pattern = "*", weight_decay = 0.5, learning_rate = 0.5 }] }

[data_parallel]
zero_stage = 1
hsdp = 2
precision = "bf16"
bucket_size = 1000
gradient_limit = 100.0

[kernels]
loss_chunk_size = 100

[fp8]
recipe = "current"
first_last_bf16 = 1
saturation_limit = 0.5

[sample]
tokens = 4
temperature = 0.7
top_k = 4
top_p = 0.9
seed = 3

[checkpoint]
every = 10
keep_last = 2
keep_every = 20
"#;

/// Returns the values that each number is set to.
fn extremes() -> Vec<Value> {
    let integers = [
        0,
        -1,
        1,
        3,
        1 << 24,
        1 << 30,
        (1 << 30) + 1,
        1 << 38,
        1 << 53,
        i64::MAX - 1,
        i64::MAX,
    ];
    let floats = [
        0.0,
        -0.0,
        -1.0,
        1.0,
        2.0,
        0.5,
        1e-320,
        1e-60,
        1e39,
        f64::MAX,
        f64::MIN,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1.0 - 1e-16,
    ];
    let integers = integers.into_iter().map(Value::Integer);
    integers
        .chain(floats.into_iter().map(Value::Float))
        .collect()
}

/// Collects the paths of all numbers of a value.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    let below = |key: &str| match path {
        "" => key.to_string(),
        path => format!("{path}/{key}"),
    };
    match value {
        Value::Integer(_) | Value::Float(_) => found.push(path.to_string()),
        Value::Table(table) => table
            .iter()
            .for_each(|(key, value)| numbers(value, &below(key), found)),
        Value::Array(list) => {
            let list = list.iter().enumerate();
            list.for_each(|(place, value)| numbers(value, &below(&place.to_string()), found));
        }
        _ => {}
    }
}

fn at<'a>(recipe: &'a mut Value, path: &str) -> &'a mut Value {
    path.split('/').fold(recipe, |value, key| match value {
        Value::Table(table) => &mut table[key],
        Value::Array(list) => &mut list[key.parse::<usize>().unwrap()],
        _ => unreachable!("{path} is a path"),
    })
}

/// Plans a recipe up to the memory estimate of its ranks.
fn planned(recipe: &Recipe) -> Result<(), Error> {
    let plan = recipe.plan()?;
    RankEstimates::new(recipe, &plan, &Device::flex()).map(drop)
}

/// Reads and plans a recipe. Returns the error, if any.
fn refusal(recipe: &Value) -> Option<String> {
    let Value::Table(recipe) = recipe.clone() else {
        unreachable!("a recipe is a table")
    };
    match Recipe::from_table(recipe, &Families::transformers()) {
        Ok(recipe) => planned(&recipe).err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string().trim_end().replace('\n', " ")),
    }
}

/// Sets each number of a recipe to each value, and expects a plan or an error of one line.
fn every_number_is_checked(base: &str) {
    let base = Value::Table(base.parse::<Table>().unwrap());
    assert_eq!(refusal(&base), None);
    let mut paths = vec![];
    numbers(&base, "", &mut paths);
    let mut wrong = vec![];
    for path in &paths {
        for value in extremes() {
            let mut recipe = base.clone();
            *at(&mut recipe, path) = value.clone();
            let what = match catch_unwind(AssertUnwindSafe(|| refusal(&recipe))) {
                Ok(None) => continue,
                Ok(Some(error)) if !error.contains('\n') && error.len() < 600 => continue,
                Ok(Some(error)) => error,
                Err(_) => "a panic".to_string(),
            };
            wrong.push(format!("{path} = {value}: {what}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_number_of_a_full_recipe_is_checked() {
    every_number_is_checked(ALL);
}

#[test]
fn every_number_of_the_default_recipe_is_checked() {
    every_number_is_checked(DEFAULT_RECIPE);
    let whole = toml::to_string(&Recipe::default()).unwrap();
    every_number_is_checked(&whole);
}

#[test]
fn numbers_that_no_run_can_use_are_refused_by_name() {
    for (path, value, says) in [
        (
            "train/optimizer/beta1",
            "1.0",
            "invalid optimizer setting beta1 = 1: expected at least 0",
        ),
        (
            "train/optimizer/beta2",
            "-0.1",
            "invalid optimizer setting beta2 = -0.1",
        ),
        (
            "train/optimizer/beta2",
            "nan",
            "invalid optimizer setting beta2 = NaN",
        ),
        (
            "train/optimizer/epsilon",
            "0.0",
            "invalid optimizer setting epsilon = 0: expected above 0",
        ),
        (
            "train/optimizer/epsilon",
            "inf",
            "invalid optimizer setting epsilon = inf",
        ),
        (
            "train/optimizer/weight_decay",
            "-0.1",
            "invalid optimizer setting weight_decay = -0.1",
        ),
        (
            "train/optimizer/weight_decay",
            "inf",
            "invalid optimizer setting weight_decay = inf",
        ),
        (
            "train/global_batch_size",
            "9223372036854775806",
            "at most 16777216",
        ),
        (
            "train/steps",
            "9223372036854775806",
            "invalid steps = 9223372036854775806: expected at most",
        ),
        (
            "model/layers",
            "1073741824",
            "invalid layers = 1073741824: expected at most",
        ),
        (
            "model/hidden",
            "1073741824",
            "invalid head_width = 268435456: expected at most 65536",
        ),
        ("model/init_std", "-1.0", "invalid init_std = -1:"),
        ("model/z_loss", "-1.0", "invalid z_loss = -1:"),
        ("model/norm_epsilon", "0.0", "invalid norm_epsilon = 0:"),
    ] {
        let mut recipe = Value::Table(
            toml::to_string(&Recipe::default())
                .unwrap()
                .parse::<Table>()
                .unwrap(),
        );
        let value: Table = format!("x = {value}").parse().unwrap();
        *at(&mut recipe, path) = value["x"].clone();
        let error = refusal(&recipe).unwrap_or_default();
        assert!(error.contains(says), "{path}: {says}: {error}");
    }
}

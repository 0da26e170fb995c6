//! Tests that compare the keys of a recipe with the list of `cargo xtask fuzz-layouts`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::parsed;

/// The optimizers, whose settings differ.
const OPTIMIZERS: [&str; 8] = [
    "adamw", "muon", "sgd", "adam", "adan", "lion", "rmsprop", "adagrad",
];

/// A key that no table has, so that the error lists the keys of the table.
const UNKNOWN: &str = "no_such_key";

/// Returns the keys of a table. `None` if the value of this key is not a table with fixed keys.
fn keys_of(table: &str, optimizer: &str) -> Option<Vec<String>> {
    let name = match table {
        _ if table.starts_with("train.optimizer") => {
            format!("train.optimizer.name = {optimizer:?}\n")
        }
        _ => String::new(),
    };
    let key = match table {
        "" => UNKNOWN.to_string(),
        table => format!("{table}.{UNKNOWN}"),
    };
    let error = parsed(&format!("{name}{key} = 1")).err()?.to_string();
    if error.contains("unknown variant") {
        return None;
    }
    let (_, keys) = error.split_once(&format!("`{UNKNOWN}`, "))?;
    // The end names the table.
    let keys = keys.split("in `").next()?;
    let words: Vec<_> = keys.split('`').collect();
    let keys = words.iter().skip(1).step_by(2).map(|key| key.to_string());
    Some(keys.collect())
}

fn collect(table: &str, optimizer: &str, found: &mut BTreeSet<String>) {
    for key in keys_of(table, optimizer).unwrap_or_default() {
        let path = match table {
            "" => key,
            table => format!("{table}.{key}"),
        };
        match keys_of(&path, optimizer) {
            Some(_) => collect(&path, optimizer, found),
            None => drop(found.insert(path)),
        }
    }
}

/// `fuzz-layouts` must draw a new key, or its list must have a reason. A reason for a table covers its keys.
#[test]
fn every_key_of_a_recipe_is_in_the_list_of_fuzz_layouts() {
    // Tags, which select the keys of a table.
    let mut keys = BTreeSet::from(["model.family", "train.optimizer.name"].map(String::from));
    for optimizer in OPTIMIZERS {
        collect("", optimizer, &mut keys);
    }
    for expected in [
        "parallel.tensor",
        "model.moe.experts",
        "train.optimizer.beta3",
        "memory.recompute.modules",
    ] {
        assert!(keys.contains(expected), "{expected}: {keys:?}");
    }
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xtask/src/fuzz_layouts/keys.tsv");
    let list = fs::read_to_string(list).unwrap();
    let listed: Vec<_> = list
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .collect();
    let is_in = |key: &str, table: &str| {
        key.strip_prefix(table)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    let is_listed = |key: &str| {
        listed
            .iter()
            .any(|(name, reason)| *name == key || *reason != "drawn" && is_in(key, name))
    };
    let missing: Vec<_> = keys.iter().filter(|key| !is_listed(key)).collect();
    let names = listed.iter().map(|(name, _)| *name);
    let extra: Vec<_> = names
        .filter(|name| !keys.iter().any(|key| key == name || is_in(key, name)))
        .collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "not in xtask/src/fuzz_layouts/keys.tsv: {missing:?}\nno key of a recipe: {extra:?}"
    );
}

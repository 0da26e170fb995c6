//! The keys of a recipe: the keys that are drawn, and the other keys, each with a reason.

/// The reference page. It is generated from the settings and lists each key.
const REFERENCE: &str = include_str!("../../../docs/src/reference.md");

/// The list: a key, a tab, and the reason why the key is not drawn. Tests compare the list with the keys of a recipe
/// and with the draws, so that no new key is forgotten.
const LEFT_OUT: &str = include_str!("keys.tsv");

/// Returns all keys of a recipe.
fn all() -> impl Iterator<Item = &'static str> {
    let entries = REFERENCE
        .lines()
        .filter_map(|line| line.strip_prefix("- `"));
    entries.filter_map(|entry| entry.split('`').next())
}

/// Returns the keys that are not drawn, with the reasons.
fn left_out() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = LEFT_OUT.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once('\t'))
}

/// Returns whether a key equals `table` or is in this table.
fn is_within(key: &str, table: &str) -> bool {
    let rest = key.strip_prefix(table);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Prints the keys that are not drawn.
pub fn print() {
    let is_left_out = |key: &&str| left_out().any(|(table, _)| is_within(key, table));
    let left = all().filter(is_left_out).count();
    println!(
        "{} settings are drawn, and {left} are not:\n",
        all().count() - left
    );
    let width = left_out().map(|(key, _)| key.len()).max().unwrap_or(0);
    for (key, reason) in left_out() {
        println!("{key:width$}  {reason}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{Random, recipe};
    use std::collections::BTreeSet;

    /// Checks that a new key is drawn or has a reason.
    #[test]
    fn every_key_is_drawn_or_has_a_reason() {
        let recipes: Vec<_> = (0..5000)
            .map(|number| recipe(&mut Random::new(1, number)))
            .collect();
        let drawn: BTreeSet<_> = recipes.iter().flat_map(|recipe| recipe.keys()).collect();
        let keys: BTreeSet<_> = all().collect();
        assert!(keys.contains("train.optimizer.beta3"), "{keys:?}");
        // A table is drawn if one of its keys is drawn, and a variant if its settings are drawn.
        let is_drawn = |key: &str| {
            let mut drawn = drawn.iter();
            drawn.any(|other| is_within(key, other) || is_within(other, key))
        };
        let is_left_out = |key: &str| left_out().any(|(table, _)| is_within(key, table));
        let forgotten = keys
            .iter()
            .filter(|key| !is_drawn(key) && !is_left_out(key));
        let forgotten: Vec<_> = forgotten.collect();
        assert!(forgotten.is_empty(), "{forgotten:?}");
        let unknown = drawn.iter().filter(|key| !keys.contains(&key[..]));
        let unknown: Vec<_> = unknown.collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        let both = drawn.iter().filter(|key| is_left_out(key));
        let both: Vec<_> = both.collect();
        assert!(both.is_empty(), "{both:?}");
    }

    #[test]
    fn every_reason_is_of_a_key() {
        for (key, reason) in left_out() {
            assert!(all().any(|other| is_within(other, key)), "{key}");
            assert!(reason.len() > 10, "{key}");
        }
        let lines = LEFT_OUT.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.count(), left_out().count(), "a line has no tab");
    }
}

//! The keys of a recipe: the keys that are drawn, and the other keys, each with a reason.

/// The list: a key, a tab, and `drawn` or the reason why the key is not drawn. Tests compare the list with the keys of a
/// recipe and with the draws, so that no new key is forgotten.
const KEYS: &str = include_str!("keys.tsv");

const DRAWN: &str = "drawn";

/// Returns all keys. Each key that is not drawn has a reason.
pub fn all() -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    let lines = KEYS.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('\t'));
    pairs.map(|(key, reason)| (key, (reason != DRAWN).then_some(reason)))
}

/// Prints the keys that are not drawn.
pub fn print() {
    let left_out: Vec<_> = all()
        .filter_map(|(key, reason)| Some((key, reason?)))
        .collect();
    let drawn = all().count() - left_out.len();
    println!(
        "{drawn} settings are drawn, and {} are not:\n",
        left_out.len()
    );
    let width = left_out.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    for (key, reason) in left_out {
        println!("{key:width$}  {reason}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{Random, recipe};
    use std::collections::BTreeSet;

    #[test]
    fn every_key_that_the_list_calls_drawn_is_drawn_and_no_other() {
        let listed: BTreeSet<_> = all()
            .filter_map(|(key, reason)| reason.is_none().then_some(key))
            .collect();
        let recipes: Vec<_> = (0..5000)
            .map(|number| recipe(&mut Random::new(1, number)))
            .collect();
        let drawn: BTreeSet<_> = recipes.iter().flat_map(|recipe| recipe.keys()).collect();
        let difference: Vec<_> = listed.symmetric_difference(&drawn).collect();
        assert!(difference.is_empty(), "{difference:?}");
    }

    #[test]
    fn every_key_is_listed_once_with_a_reason() {
        let keys: BTreeSet<_> = all().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), all().count());
        let lines = KEYS.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(lines, all().count(), "a line has no tab");
        assert!(all().all(|(_, reason)| reason.is_none_or(|reason| reason.len() > 10)));
    }
}

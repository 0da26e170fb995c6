//! Values on a command line that contradict each other.

use toml::Value;

use super::keys::{get, is_within};
use super::value::Given;
use super::{SettingFlags, Settings};
use crate::error::Error;

/// Value that a flag or `--set` gives to a key.
#[derive(Clone, Copy)]
struct Argument<'a> {
    path: &'a str,
    given: &'a Given,
    is_set: bool,
}

impl Argument<'_> {
    /// Returns the name of the flag.
    fn name(&self) -> String {
        match self.is_set {
            true => format!("--set {}", self.path),
            false => format!("--{}", self.path),
        }
    }
}

fn arguments(of: &SettingFlags, is_set: bool) -> impl Iterator<Item = Argument<'_>> {
    of.given().iter().map(move |(path, given)| Argument {
        path,
        given,
        is_set,
    })
}

impl Settings {
    /// Checks that each value of a command line has an effect, and that no other value replaces it. `set` contains
    /// the values of `--set`.
    ///
    /// # Errors
    /// Returns an error for two arguments if one of them would be ignored.
    pub fn check_conflicts(&self, flags: &SettingFlags, set: &SettingFlags) -> Result<(), Error> {
        let all: Vec<_> = arguments(flags, false)
            .chain(arguments(set, true))
            .collect();
        for (at, first) in all.iter().enumerate() {
            for second in &all[at + 1..] {
                self.check_pair(first, second)?;
            }
        }
        Ok(())
    }

    fn check_pair(&self, a: &Argument<'_>, b: &Argument<'_>) -> Result<(), Error> {
        let contradict = if a.path == b.path {
            return match (a.is_set, b.is_set) {
                // clap allows repeated flags for lists. Each flag adds to the list.
                (false, false) => Ok(()),
                (true, true) => {
                    Err(format!("{} is set by --set twice: remove one of them", a.path).into())
                }
                _ => Err(twice(a.path)),
            };
        } else if is_within(b.path, a.path) {
            self.replaces(a, b)
        } else if is_within(a.path, b.path) {
            self.replaces(b, a)
        } else {
            self.are_of_two_variants(a.path, b.path)
        };
        if !contradict {
            return Ok(());
        }
        let [a, b] = [a, b].map(Argument::name);
        Err(format!("{a} conflicts with {b}: remove one of them").into())
    }

    /// Returns whether the value of a table excludes or repeats the value of a key in the table.
    fn replaces(&self, table: &Argument<'_>, key: &Argument<'_>) -> bool {
        let rest = &key.path[table.path.len() + 1..];
        let variant = rest.split('.').next().unwrap_or_default();
        let has_variants = |path| self.find(path).is_some_and(|setting| setting.has_variants);
        match table.given {
            Given::Unset | Given::Value(Value::Boolean(false)) => true,
            Given::Value(Value::String(name)) => name != variant,
            Given::Value(Value::Table(given)) => {
                let is_other = !given.is_empty() && !given.contains_key(variant);
                get(given, rest).is_some() || is_other && has_variants(table.path)
            }
            Given::Value(_) => false,
        }
    }

    /// Returns whether two keys are settings of different variants of the same setting.
    fn are_of_two_variants(&self, a: &str, b: &str) -> bool {
        let (mut a, mut b) = (a.split('.'), b.split('.'));
        let mut table = Some(self.root());
        while let (Some(of), Some(first), Some(second)) = (table, a.next(), b.next()) {
            if first != second {
                return of.has_variants;
            }
            table = of.key(first);
        }
        false
    }
}

/// Returns the error for a key that is set by two flags.
pub fn twice(key: &str) -> Error {
    format!("{key} is set by --set and by a flag: remove one of them").into()
}

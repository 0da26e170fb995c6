//! Reading variables so that what goes wrong can be told with their names.

use std::fmt;

use super::error::LaunchError;

/// The environment.
#[derive(Clone, Copy)]
pub(super) struct Vars<'a>(pub &'a dyn Fn(&str) -> Option<String>);

/// A variable that is set. It is written `NAME=value`.
#[derive(Clone, Debug)]
pub(super) struct Variable {
    pub name: &'static str,
    pub value: String,
}

/// A number, and the variables that say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub value: usize,
    pub from: String,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An empty value would look as if the rest of the message was it.
        match self.value.is_empty() {
            true => write!(f, "{}=\"\"", self.name),
            false => write!(f, "{}={}", self.name, self.value),
        }
    }
}

impl Variable {
    /// The value as a whole number.
    pub fn number(self) -> Result<Number, LaunchError> {
        let from = self.to_string();
        match parse(&self.value) {
            Some(value) => Ok(Number { value, from }),
            None => Err(LaunchError::Value {
                variable: from,
                fits: "a whole number from 0",
            }),
        }
    }
}

impl Vars<'_> {
    pub fn has(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    pub fn get(&self, name: &'static str) -> Option<Variable> {
        let value = (self.0)(name)?;
        Some(Variable { name, value })
    }

    /// The first of several names that is set.
    pub fn first(&self, names: &[&'static str]) -> Option<Variable> {
        names.iter().find_map(|name| self.get(name))
    }

    pub fn number(&self, name: &'static str) -> Result<Option<Number>, LaunchError> {
        self.get(name).map(Variable::number).transpose()
    }

    /// One of several names must be set where `beside` is.
    pub fn needed(
        &self,
        beside: &'static str,
        names: &[&'static str],
        cure: &'static str,
    ) -> Result<Variable, LaunchError> {
        self.first(names).ok_or_else(|| LaunchError::Missing {
            found: self
                .get(beside)
                .map_or(beside.into(), |found| found.to_string()),
            missing: names.join(" or "),
            cure,
        })
    }
}

/// Digits alone: `usize` would also take a sign.
fn parse(text: &str) -> Option<usize> {
    let text = text.trim();
    match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    }
}

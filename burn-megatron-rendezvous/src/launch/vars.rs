//! Access to environment variables. The names of the variables are kept for error messages.

use std::fmt;
use std::str::FromStr;

use super::error::LaunchEnvError;

/// The environment.
#[derive(Clone, Copy)]
pub(super) struct Vars<'a>(pub &'a dyn Fn(&str) -> Option<String>);

/// A variable that is set. `Display` writes `NAME=value`.
#[derive(Clone, Debug)]
pub(super) struct Variable {
    pub name: &'static str,
    pub value: String,
}

/// A number and the variables from which it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub value: usize,
    pub from: String,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Quotes make an empty value visible in the message.
        if self.value.is_empty() {
            write!(f, "{}=\"\"", self.name)
        } else {
            write!(f, "{}={}", self.name, self.value)
        }
    }
}

impl Variable {
    /// Parses the value as a whole number.
    pub fn number(self) -> Result<Number, LaunchEnvError> {
        let from = self.to_string();
        match digits(self.value.trim()) {
            Some(value) => Ok(Number { value, from }),
            None => Err(LaunchEnvError::Value {
                variable: from,
                expected: "a whole number",
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

    /// Returns the first of these variables that is set.
    pub fn first(&self, names: &[&'static str]) -> Option<Variable> {
        names.iter().find_map(|name| self.get(name))
    }

    pub fn number(&self, name: &'static str) -> Result<Option<Number>, LaunchEnvError> {
        self.get(name).map(Variable::number).transpose()
    }

    /// Returns the first of these variables that is set. Returns an error if none is set, because the variable `beside`
    /// is set and requires one of them.
    pub fn needed(
        &self,
        beside: &'static str,
        names: &[&'static str],
        hint: &'static str,
    ) -> Result<Variable, LaunchEnvError> {
        self.first(names).ok_or_else(|| LaunchEnvError::Missing {
            found: self
                .get(beside)
                .map_or(beside.into(), |found| found.to_string()),
            missing: names.join(" or "),
            hint,
        })
    }
}

/// Parses a number that consists only of digits. The standard library would also accept a sign.
pub(super) fn digits<T: FromStr>(text: &str) -> Option<T> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

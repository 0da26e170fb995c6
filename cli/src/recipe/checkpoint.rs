//! The `[checkpoint]` table of a recipe.

use std::path::PathBuf;

use burn_megatron::checkpoint::Retention;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The initial weights of a run, the steps at which checkpoints are saved, and the checkpoints that are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The checkpoint or Hugging Face folder from which the model and the initial weights are loaded.
    #[schemars(extend("flag" = "load", "value" = "PATH"))]
    pub load: Option<PathBuf>,
    /// Whether checkpoints are saved at the end of the run and when the run is interrupted.
    pub save: bool,
    /// The number of steps between checkpoints. A checkpoint is also saved at the end of the run.
    #[schemars(extend("flag" = "save-every"))]
    pub every: Option<u64>,
    /// The number of checkpoints to keep. Older checkpoints are removed. By default, all checkpoints are kept.
    pub keep_last: Option<usize>,
    /// Checkpoints whose step is a multiple of this number are never removed.
    pub keep_every: Option<u64>,
    /// Whether training continues while a checkpoint is written.
    pub asynchronous: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            load: None,
            save: true,
            every: None,
            keep_last: None,
            keep_every: None,
            asynchronous: false,
        }
    }
}

impl CheckpointConfig {
    /// Returns the settings of a run that resumes in the folder of a run started with `first`. Settings that the
    /// recipe does not set are taken from `first`, and checkpoints are saved at least as often.
    pub fn continue_from(&self, first: &Self) -> Self {
        Self {
            load: self.load.clone().or_else(|| first.load.clone()),
            save: self.save || first.save,
            every: self.every.into_iter().chain(first.every).min(),
            keep_last: self.keep_last.or(first.keep_last),
            keep_every: self.keep_every.or(first.keep_every),
            asynchronous: self.asynchronous || first.asynchronous,
        }
    }

    /// Disables saving, and resets the settings that no longer apply.
    pub fn discard(&mut self) {
        *self = Self {
            load: self.load.take(),
            save: false,
            ..Self::default()
        };
    }

    /// Returns the policy for keeping checkpoints.
    pub fn retention(&self) -> Retention {
        Retention {
            last: self.keep_last,
            every: self.keep_every,
        }
    }

    /// Checks the values, and that each setting has an effect.
    pub fn check(&self) -> Result<(), Error> {
        for (key, value) in [
            ("every", self.every),
            ("keep_last", self.keep_last.map(|last| last as u64)),
            ("keep_every", self.keep_every),
        ] {
            if value == Some(0) {
                return Err(format!("invalid checkpoint.{key} = 0: expected at least 1").into());
            }
            if value.is_some() && !self.save {
                return Err(format!(
                    "checkpoint.{key} has no effect with checkpoint.save = false; remove that (--no-save), or \
                     checkpoint.{key}"
                )
                .into());
            }
        }
        match (self.keep_every, self.keep_last) {
            (Some(_), None) => Err(
                "checkpoint.keep_every has no effect if all checkpoints are kept; set checkpoint.keep_last (--checkpoint.keep_last)"
                    .into(),
            ),
            _ if self.asynchronous && self.every.is_none() => Err(
                "checkpoint.asynchronous has no effect if only the end of the run is saved; set checkpoint.every \
                 (--save-every)"
                    .into(),
            ),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_without_a_meaning_are_refused() {
        let check = |text: &str| {
            let config: CheckpointConfig = toml::from_str(text).unwrap();
            config.check().err().map(|error| error.to_string())
        };
        assert_eq!(check(""), None);
        assert_eq!(check("keep_last = 2"), None);
        assert_eq!(check("save = false"), None);
        assert_eq!(check("every = 5\nkeep_last = 2\nkeep_every = 10"), None);
        for (text, says) in [
            ("every = 0", "invalid checkpoint.every = 0"),
            ("every = 1\nkeep_last = 0", "keep_last = 0"),
            (
                "save = false\nkeep_last = 2",
                "checkpoint.keep_last has no effect with checkpoint.save = false",
            ),
            (
                "every = 1\nkeep_every = 2",
                "set checkpoint.keep_last (--checkpoint.keep_last)",
            ),
            ("asynchronous = true", "asynchronous has no effect"),
        ] {
            let error = check(text).unwrap();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_run_that_goes_on_saves_no_less() {
        let of = |text: &str| toml::from_str::<CheckpointConfig>(text).unwrap();
        for (recipe, first, both) in [
            ("", "", ""),
            ("", "every = 5\nkeep_last = 2", "every = 5\nkeep_last = 2"),
            ("every = 9", "every = 5", "every = 5"),
            (
                "every = 2\nkeep_last = 3",
                "keep_last = 1",
                "every = 2\nkeep_last = 3",
            ),
            ("save = false", "every = 5", "every = 5"),
            ("", "save = false", ""),
        ] {
            assert_eq!(
                of(recipe).continue_from(&of(first)),
                of(both),
                "{recipe:?} {first:?}"
            );
        }
    }

    #[test]
    fn nothing_is_saved_where_that_is_asked_for() {
        let mut config = CheckpointConfig {
            every: Some(3),
            ..CheckpointConfig::default()
        };
        config.discard();
        assert!(!config.save);
        config.check().unwrap();
    }
}

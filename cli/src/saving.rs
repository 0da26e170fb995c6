//! Saving and resuming: the flags, and the `[checkpoint]` table of a recipe.

use std::path::PathBuf;

use burn_megatron::checkpoint::{LoadTolerance, Retention};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::convert::Dtype;
use crate::error::Error;

/// The weights that a run loads at its start, the times at which checkpoints are saved, and the checkpoints that are
/// kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The initial weights, and the model: a checkpoint or a Hugging Face folder.
    #[schemars(extend("flag" = "load", "value" = "PATH"))]
    pub load: Option<PathBuf>,
    /// Whether to save at the end of the run and when it is interrupted.
    pub save: bool,
    /// Steps between checkpoints; the run is also saved at its end.
    #[schemars(extend("flag" = "save-every"))]
    pub every: Option<u64>,
    /// The number of newest checkpoints that are kept; all by default.
    pub keep_last: Option<usize>,
    /// Also keep checkpoints whose step is a multiple of this.
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
    /// The settings of a run that resumes in the folder of a run started with `first`: what the recipe does not set is
    /// taken from `first`, and no fewer checkpoints are saved.
    pub fn continue_from(self, first: &Self) -> Self {
        Self {
            load: self.load.or_else(|| first.load.clone()),
            save: self.save || first.save,
            every: self.every.into_iter().chain(first.every).min(),
            keep_last: self.keep_last.or(first.keep_last),
            keep_every: self.keep_every.or(first.keep_every),
            asynchronous: self.asynchronous || first.asynchronous,
        }
    }

    /// Saves nothing: the other settings no longer apply.
    pub fn discard(&mut self) {
        *self = Self {
            load: self.load.take(),
            save: false,
            ..Self::default()
        };
    }

    /// Which checkpoints are kept.
    pub fn retention(&self) -> Retention {
        Retention {
            last: self.keep_last,
            every: self.keep_every,
        }
    }

    /// Checks the values, and that each has an effect.
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

/// Flags of checkpoints that are no settings of `[checkpoint]`.
#[derive(Args, Debug, Default)]
pub struct SavingArgs {
    /// Save no checkpoint, not even at the end: the weights are lost.
    #[arg(long, help_heading = "Checkpoints")]
    pub no_save: bool,
    /// Write a Hugging Face folder beside each checkpoint, in the folder `hugging-face` of the run folder, while training
    /// goes on; optionally with elements of this type, by default that of the checkpoint. Tokenizer and special tokens
    /// are those of --load. With [lora] in the recipe the folder has the adapters alone, in the format of peft. A folder whose checkpoint is not kept is removed after the next one is written.
    #[arg(
        long,
        value_enum,
        value_name = "DTYPE",
        num_args = 0..=1,
        conflicts_with = "no_save",
        help_heading = "Checkpoints"
    )]
    pub save_hf: Option<Option<Dtype>>,
    /// Resume a run. A run folder is resumed in place, with its recipe and the flags given; auto does so with
    /// --run-dir, and starts a new run if the folder does not exist. A checkpoint, or a folder of them, is
    /// resumed in a new run folder, unless --run-dir is its own. The layout may differ.
    #[arg(long, value_name = "auto|PATH", help_heading = "Checkpoints")]
    pub resume: Option<String>,
    /// Skip the checkpoint of this step if it cannot be read now, or has another format version: it may be
    /// intact, and is kept under another name. May be repeated.
    #[arg(
        long,
        value_name = "STEP",
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_skip: Vec<u64>,
    /// Resume from an earlier checkpoint of the same run: the later ones are renamed, and removed when the
    /// first new one is saved.
    #[arg(long, requires = "resume", help_heading = "Checkpoints")]
    pub discard_later: bool,
    /// Keys of the recipe that may differ from those of the checkpoint, such as train.steps. The layout, paths
    /// and output settings may always differ.
    #[arg(
        long,
        value_name = "KEY,..",
        value_delimiter = ',',
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_allow_change: Vec<String>,
    /// Differences to accept when loading: `missing` tensors that the checkpoint lacks, `unexpected` ones that
    /// the model lacks, `rounding` of values to narrower types, `settings` of [model] that differ from
    /// those of --load.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT,..",
        value_delimiter = ',',
        help_heading = "Checkpoints"
    )]
    pub lenient: Vec<Lenient>,
}

/// A difference that loading can accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lenient {
    /// Tensors that the checkpoint lacks.
    Missing,
    /// Tensors that the model lacks.
    Unexpected,
    /// Values that are rounded to narrower types.
    Rounding,
    /// Settings of the model.
    Settings,
}

impl SavingArgs {
    /// The differences that loading accepts.
    pub fn leniency(&self) -> LoadTolerance {
        LoadTolerance {
            missing: self.allows(Lenient::Missing),
            unexpected: self.allows(Lenient::Unexpected),
            rounding: self.allows(Lenient::Rounding),
        }
    }

    /// Checks that each flag has an effect.
    ///
    /// # Errors
    /// The flag, and what it needs.
    pub fn check(&self, config: &CheckpointConfig) -> Result<(), Error> {
        match (self.allows(Lenient::Settings), &config.load) {
            (true, None) => Err(
                "--lenient settings applies to the model of --load, which is not given; a run that is resumed has \
                 --resume-allow-change"
                    .into(),
            ),
            _ => Ok(()),
        }
    }

    /// Whether loading accepts this difference.
    pub fn allows(&self, what: Lenient) -> bool {
        self.lenient.contains(&what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_what_is_not_loaded_are_refused() {
        let check = |load: Option<&str>, lenient| {
            let args = SavingArgs {
                lenient: vec![lenient],
                ..SavingArgs::default()
            };
            let config = CheckpointConfig {
                load: load.map(PathBuf::from),
                ..CheckpointConfig::default()
            };
            args.check(&config).map_err(|error| error.to_string())
        };
        assert_eq!(check(Some("x"), Lenient::Settings), Ok(()));
        assert_eq!(check(None, Lenient::Missing), Ok(()));
        let error = check(None, Lenient::Settings).unwrap_err();
        assert!(error.contains("applies to the model of --load"), "{error}");
    }

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

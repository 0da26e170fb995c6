//! What a run saves, and where it goes on: the flags, and the table of a recipe.

use std::path::PathBuf;

use burn_megatron::checkpoint::{Leniency, Retention};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::recipe::{Error, Recipe};

/// When a run saves, and what it keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Whether the end of the run is saved, and where it is interrupted.
    pub save: bool,
    /// Steps between two checkpoints before that.
    pub every: Option<u64>,
    /// The newest so many are kept; all where not given.
    pub keep_last: Option<usize>,
    /// Besides them those whose step is a multiple of this.
    pub keep_every: Option<u64>,
    /// Whether training goes on while a checkpoint is written.
    pub asynchronous: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            save: true,
            every: None,
            keep_last: None,
            keep_every: None,
            asynchronous: false,
        }
    }
}

impl CheckpointConfig {
    /// What a recipe says, of a run that goes on in the folder of one that was started with `first`: what
    /// the recipe leaves out is as it was, and no fewer checkpoints are saved.
    pub fn goes_on(self, first: &Self) -> Self {
        Self {
            save: self.save || first.save,
            every: self.every.into_iter().chain(first.every).min(),
            keep_last: self.keep_last.or(first.keep_last),
            keep_every: self.keep_every.or(first.keep_every),
            asynchronous: self.asynchronous || first.asynchronous,
        }
    }

    /// Which checkpoints stay.
    pub fn retention(&self) -> Retention {
        Retention {
            last: self.keep_last,
            every: self.keep_every,
        }
    }

    /// Checks what makes no sense.
    pub fn check(&self) -> Result<(), Error> {
        for (key, value) in [
            ("every", self.every),
            ("keep_last", self.keep_last.map(|last| last as u64)),
            ("keep_every", self.keep_every),
        ] {
            if value == Some(0) {
                return Err(format!("checkpoint.{key} = 0 makes no sense; 1 and more do").into());
            }
            if value.is_some() && !self.save {
                return Err(format!(
                    "checkpoint.{key} is about checkpoints, and none is saved; leave out \
                     checkpoint.save = false (--no-save)"
                )
                .into());
            }
        }
        match (self.keep_every, self.keep_last) {
            (Some(_), None) => Err(
                "checkpoint.keep_every is about what is kept besides the newest, and all are kept; \
                 set checkpoint.keep_last (--keep-last)"
                    .into(),
            ),
            _ if self.asynchronous && self.every.is_none() => Err(
                "checkpoint.asynchronous is about checkpoints that are saved while the run goes on, and \
                 only its end is saved; set checkpoint.every (--save-every)"
                    .into(),
            ),
            _ => Ok(()),
        }
    }
}

/// Flags of checkpoints; the first five each take the place of a key of `[checkpoint]`.
#[derive(Args, Debug, Default)]
pub struct SavingArgs {
    /// Steps between two checkpoints, which lie in the run folder, in `checkpoints`. The end of the run
    /// is saved in any case, and so is where it is interrupted.
    #[arg(long, value_name = "STEPS", help_heading = "Checkpoints")]
    pub save_every: Option<u64>,
    /// Save nothing, not even the end: the weights are lost with the process.
    #[arg(
        long,
        conflicts_with_all = ["save_every", "keep_last", "keep_every", "async_save"],
        help_heading = "Checkpoints"
    )]
    pub no_save: bool,
    /// Keep the newest N checkpoints; all by default.
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    pub keep_last: Option<usize>,
    /// Keep besides them those whose step is a multiple of K.
    #[arg(long, value_name = "K", help_heading = "Checkpoints")]
    pub keep_every: Option<u64>,
    /// Go on with training while a checkpoint is written.
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true",
        help_heading = "Checkpoints"
    )]
    pub async_save: Option<bool>,
    /// Go on where a run was saved. A run folder alone goes on in it, with its recipe and settings but for
    /// the flags given; auto does so with --run-dir, and begins where there is none. A checkpoint, or a
    /// folder of them, goes on in a new folder, unless --run-dir is its own. Any layout will do.
    #[arg(long, value_name = "auto|PATH", help_heading = "Checkpoints")]
    pub resume: Option<String>,
    /// Pass over the checkpoint of this step where it cannot be read now, or is of another version of the
    /// format: it may be whole, and is kept under another name. May be given several times.
    #[arg(
        long,
        value_name = "STEP",
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_skip: Vec<u64>,
    /// Let a run go back to an earlier one of its checkpoints: the later ones get other names, and are
    /// removed when the first new one is saved.
    #[arg(long, requires = "resume", help_heading = "Checkpoints")]
    pub discard_later: bool,
    /// Settings that may be others than those of the checkpoint, such as train.steps. Those that only
    /// say how the work is shared, and what is shown, always may.
    #[arg(
        long,
        value_name = "KEY",
        value_delimiter = ',',
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_changing: Vec<String>,
    /// Begin with the weights of a checkpoint, or of a folder of Hugging Face, and with nothing else of
    /// it. The recipe's model must be the same.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "resume",
        help_heading = "Checkpoints"
    )]
    pub load: Option<PathBuf>,
    /// What may be otherwise in what is loaded: `missing` is what the model has and the checkpoint has
    /// not, `unexpected` the reverse, `rounding` lets values be rounded to narrower types, `settings` lets
    /// [model] be another one than that of --load.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        value_delimiter = ',',
        help_heading = "Checkpoints"
    )]
    pub lenient: Vec<Lenient>,
}

/// What loading can let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lenient {
    /// What the model has and the checkpoint has not.
    Missing,
    /// What the checkpoint has and the model has not.
    Unexpected,
    /// Values in types that cannot hold them.
    Rounding,
    /// Settings of the model.
    Settings,
}

impl SavingArgs {
    /// Puts what was given into a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        let config = &mut recipe.checkpoint;
        if self.no_save {
            // What the recipe says of its checkpoints has no meaning any more.
            *config = CheckpointConfig {
                save: false,
                ..CheckpointConfig::default()
            };
        }
        config.every = self.save_every.or(config.every);
        config.keep_last = self.keep_last.or(config.keep_last);
        config.keep_every = self.keep_every.or(config.keep_every);
        config.asynchronous = self.async_save.unwrap_or(config.asynchronous);
    }

    /// What loading lets pass.
    pub fn leniency(&self) -> Leniency {
        Leniency {
            missing: self.lets(Lenient::Missing),
            unexpected: self.lets(Lenient::Unexpected),
            rounding: self.lets(Lenient::Rounding),
        }
    }

    /// Checks what would have no effect.
    ///
    /// # Errors
    /// The flag, and what it needs.
    pub fn check(&self) -> Result<(), Error> {
        match (self.lets(Lenient::Settings), &self.load) {
            (true, None) => Err(
                "--lenient settings is about the model of --load, which is not given; a run that goes on \
                 has --resume-changing"
                    .into(),
            ),
            _ => Ok(()),
        }
    }

    /// Whether loading lets this pass.
    pub fn lets(&self, what: Lenient) -> bool {
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
                load: load.map(PathBuf::from),
                lenient: vec![lenient],
                ..SavingArgs::default()
            };
            args.check().map_err(|error| error.to_string())
        };
        assert_eq!(check(Some("x"), Lenient::Settings), Ok(()));
        assert_eq!(check(None, Lenient::Missing), Ok(()));
        let error = check(None, Lenient::Settings).unwrap_err();
        assert!(error.contains("is about the model of --load"), "{error}");
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
            ("every = 0", "every = 0 makes no sense"),
            ("every = 1\nkeep_last = 0", "keep_last = 0"),
            (
                "save = false\nkeep_last = 2",
                "checkpoint.keep_last is about checkpoints, and none is saved",
            ),
            (
                "every = 1\nkeep_every = 2",
                "set checkpoint.keep_last (--keep-last)",
            ),
            ("asynchronous = true", "asynchronous is about checkpoints"),
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
                of(recipe).goes_on(&of(first)),
                of(both),
                "{recipe:?} {first:?}"
            );
        }
    }

    #[test]
    fn nothing_is_saved_where_that_is_asked_for() {
        let mut recipe = Recipe::default();
        recipe.checkpoint.every = Some(3);
        let no_save = true;
        let flags = SavingArgs {
            no_save,
            ..SavingArgs::default()
        };
        flags.apply(&mut recipe);
        assert!(!recipe.checkpoint.save);
        recipe.checkpoint.check().unwrap();
    }
}

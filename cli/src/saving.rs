//! The flags of saving and resuming.

use burn_megatron::checkpoint::LoadTolerance;
use clap::{Args, ValueEnum};

use crate::convert::Dtype;
use crate::error::Error;
use crate::recipe::checkpoint::CheckpointConfig;

/// Checkpoint flags that are not settings of `[checkpoint]`.
#[derive(Args, Debug, Default)]
pub struct SavingArgs {
    /// Save no checkpoint, not even at the end. The weights are lost.
    #[arg(long, help_heading = "Checkpoints")]
    pub no_save: bool,
    /// Write a Hugging Face folder for each checkpoint to the folder `hugging-face` of the run folder, in the
    /// background. The optional value is the type of the elements; the default is the type of the checkpoint. The
    /// tokenizer and the special tokens are copied from --load. With [lora] in the recipe, the folder holds only the
    /// adapters, in the format of peft. If a checkpoint is not kept, its folder is removed after the next folder is
    /// written.
    #[arg(
        long,
        value_enum,
        value_name = "DTYPE",
        num_args = 0..=1,
        conflicts_with = "no_save",
        help_heading = "Checkpoints"
    )]
    pub save_hf: Option<Option<Dtype>>,
    /// Resume a run. A run folder is resumed in place, with its recipe and the given flags. auto resumes --run-dir in
    /// the same way, or starts a new run if the folder does not exist. A checkpoint, or a folder of checkpoints, is
    /// resumed in a new run folder, unless --run-dir is the run folder that contains it. The layout may differ.
    #[arg(long, value_name = "auto|PATH", help_heading = "Checkpoints")]
    pub resume: Option<String>,
    /// Skip the checkpoint of this step if it is currently unreadable or has another format version. It may be
    /// intact, and is kept under another name. May be repeated.
    #[arg(
        long,
        value_name = "STEP",
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_skip: Vec<u64>,
    /// Resume from an earlier checkpoint of the same run. The later checkpoints are renamed, and removed when the
    /// first new checkpoint is saved.
    #[arg(long, requires = "resume", help_heading = "Checkpoints")]
    pub discard_later: bool,
    /// Keys of the recipe that may differ from the checkpoint, such as train.steps. The layout, paths and output
    /// settings may always differ.
    #[arg(
        long,
        value_name = "KEY,..",
        value_delimiter = ',',
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_allow_change: Vec<String>,
    /// Differences to accept when loading: `missing` (tensors of the model that the checkpoint lacks), `unexpected`
    /// (tensors of the checkpoint that the model lacks), `rounding` (values are rounded to narrower types),
    /// `settings` ([model] differs from the model of --load).
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
    /// Settings of `[model]` that differ.
    Settings,
}

impl SavingArgs {
    /// Returns the differences that loading accepts.
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
    ///
    /// Returns an error that names the flag and the setting that it requires.
    pub fn check(&self, config: &CheckpointConfig) -> Result<(), Error> {
        if self.allows(Lenient::Settings) && config.load.is_none() {
            return Err(
                "--lenient settings requires --load; for a run that is resumed, use --resume-allow-change"
                    .into(),
            );
        }
        Ok(())
    }

    /// Returns whether loading accepts this difference.
    pub fn allows(&self, what: Lenient) -> bool {
        self.lenient.contains(&what)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

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
        assert!(
            error.contains("--lenient settings requires --load"),
            "{error}"
        );
    }
}

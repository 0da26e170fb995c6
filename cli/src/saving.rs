//! The flags of saving and resuming.

use burn_megatron::checkpoint::LoadTolerance;
use clap::{Args, ValueEnum};

use crate::convert::Dtype;
use crate::error::Error;
use crate::recipe::checkpoint::CheckpointConfig;

/// Checkpoint flags that are not settings of `[checkpoint]`.
#[derive(Args, Debug, Default)]
pub struct SavingArgs {
    /// Save no checkpoint, not even at the end of the run. The trained weights are lost.
    #[arg(long, help_heading = "Checkpoints")]
    pub no_save: bool,
    /// Also write each checkpoint as a Hugging Face folder, in the background. It is written to the folder
    /// `hugging-face` in the run folder. The optional value is the dtype of the weights. The default is the dtype of
    /// the checkpoint. The tokenizer and the special tokens are copied from the model in --load. With [lora] in the
    /// recipe, the folder contains only the adapters, in the format of peft. When a checkpoint is removed, its Hugging
    /// Face folder is removed after the next folder is written.
    #[arg(
        long,
        value_enum,
        value_name = "DTYPE",
        num_args = 0..=1,
        conflicts_with = "no_save",
        help_heading = "Checkpoints"
    )]
    pub save_hf: Option<Option<Dtype>>,
    /// Resume a run. If the value is a run folder, the run continues in this folder, with its recipe and the given
    /// flags. With `auto`, the run in --run-dir is resumed in the same way, or a new run is started if this folder does
    /// not exist. If the value is a checkpoint or a folder of checkpoints, the run continues in a new run folder.
    /// However, if --run-dir is the run folder that contains the checkpoint, the run continues there. The parallel
    /// layout may differ from the layout of the checkpoint.
    #[arg(long, value_name = "auto|PATH", help_heading = "Checkpoints")]
    pub resume: Option<String>,
    /// Skip the checkpoint of this step if it cannot be read at the moment, or if it has another format version.
    /// Because the checkpoint may be intact, it is renamed instead of removed. May be repeated.
    #[arg(
        long,
        value_name = "STEP",
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_skip: Vec<u64>,
    /// Allow resuming from a checkpoint that is not the latest checkpoint of the run. The later checkpoints are
    /// renamed, and they are removed when the first new checkpoint is saved.
    #[arg(long, requires = "resume", help_heading = "Checkpoints")]
    pub discard_later: bool,
    /// Keys of the recipe whose values may differ from the recipe in the checkpoint, such as train.steps. The layout,
    /// paths and output settings may always differ.
    #[arg(
        long,
        value_name = "KEY,..",
        value_delimiter = ',',
        requires = "resume",
        help_heading = "Checkpoints"
    )]
    pub resume_allow_change: Vec<String>,
    /// Differences to accept when weights are loaded. `missing`: the checkpoint does not contain some tensors of the
    /// model. `unexpected`: the checkpoint contains tensors that the model does not have. `rounding`: values are
    /// rounded to narrower dtypes. `settings`: the table [model] differs from the model in --load.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT,..",
        value_delimiter = ',',
        help_heading = "Checkpoints"
    )]
    pub lenient: Vec<Lenient>,
}

/// A difference that can be accepted when weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lenient {
    /// Tensors of the model that the checkpoint does not contain.
    Missing,
    /// Tensors of the checkpoint that the model does not have.
    Unexpected,
    /// Values that are rounded to narrower dtypes.
    Rounding,
    /// Settings in the table `[model]` that differ from the loaded model.
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

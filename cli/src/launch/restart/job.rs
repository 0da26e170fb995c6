//! The job that is restarted: `pretrain` from the newest checkpoint of its run folder, or another program.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::CheckpointFolder;
use burn_megatron_train::metrics::{MetricsRecord, read_metrics};
use burn_megatron_train::run_folder::RunFolder;
use clap::FromArgMatches;
use tempfile::NamedTempFile;

use crate::cli::{Cli, Command};
use crate::error::Error;
use crate::family::Families;
use crate::launch::args::LaunchArgs;
use crate::launch::error::LaunchError;
use crate::pretrain::args::PretrainArgs;
use crate::pretrain::resolve::replica;
use crate::recipe::Recipe;
use crate::resume_mode::ResumeMode;

/// Run of `pretrain`.
pub struct PretrainJob {
    folder: PathBuf,
    /// The resolved recipe in TOML, for later attempts.
    recipe: String,
    /// The checkpoints that `--resume-skip` skips.
    skip: Vec<u64>,
}

/// Progress of a run before an attempt, read from its folder.
#[derive(Clone, Copy)]
pub struct Progress {
    /// The step of the newest checkpoint, or 0 without a checkpoint.
    pub saved: u64,
    /// The length of the metrics file, which grows with each attempt that reaches its first step.
    metrics_bytes: u64,
}

impl PretrainJob {
    /// Returns the job for these arguments, or `None` for a program that resumes automatically.
    ///
    /// # Errors
    /// Returns an error with the reason if the command cannot be restarted. Also returns the errors of `pretrain`
    /// itself.
    pub fn of(
        args: &LaunchArgs,
        families: &Families,
        default_recipe: &str,
    ) -> Result<Option<Self>, LaunchError> {
        if args.program.is_some() {
            return Ok(None);
        }
        let words = std::iter::once(OsString::from("burn-megatron"));
        let words = words.chain(args.command.iter().cloned());
        let matches = Cli::with_families(families).try_get_matches_from(words);
        let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
        let Cli { command, .. } =
            cli.map_err(|error| LaunchError::NoRestart(error.to_string().trim_end().to_owned()))?;
        let Command::Pretrain(mut pretrain) = command else {
            let first = args.command[0].to_string_lossy();
            let text = format!(
                "--max-restarts applies to pretrain, which resumes from a checkpoint, and to --program; remove it from \
                 `launch ... -- {first}`"
            );
            return Err(LaunchError::NoRestart(text));
        };
        if pretrain.settings.is_data_auto() {
            follow_ranks(&mut pretrain, args.ranks, families, default_recipe)?;
        }
        Self::new(&pretrain, families, default_recipe).map(Some)
    }

    fn new(
        args: &PretrainArgs,
        families: &Families,
        default_recipe: &str,
    ) -> Result<Self, LaunchError> {
        let mode = ResumeMode::of(args)?;
        let folder = match mode {
            ResumeMode::InPlace(folder) => Ok(folder),
            ResumeMode::Fresh => args.run_dir.as_deref().ok_or(
                "--max-restarts resumes a run from the checkpoints of its folder: name the folder with --run-dir",
            ),
            ResumeMode::NewFolder(_) => Err(
                "--max-restarts resumes a run in its own folder, and --resume names a checkpoint: give the run folder, \
                 or start the run without --max-restarts until its first checkpoint, then with --resume auto",
            ),
        };
        let folder = folder.map_err(|text| LaunchError::NoRestart(text.to_owned()))?;
        let recipe = Recipe::resolve(args, families, default_recipe)?.recipe;
        recipe.plan()?;
        if !recipe.checkpoint.save {
            let text = "--max-restarts conflicts with --no-save, because it resumes a run from its checkpoints; remove \
                        one of them";
            return Err(LaunchError::NoRestart(text.into()));
        }
        let text = toml::to_string(&recipe.complete()).map_err(Error::from)?;
        Ok(Self {
            folder: folder.to_owned(),
            recipe: text,
            skip: args.saving.resume_skip.clone(),
        })
    }

    /// Returns the run folder, which may not exist yet.
    pub fn folder(&self) -> &PathBuf {
        &self.folder
    }

    /// Writes the resolved recipe to a file for the next attempt. Each attempt gets a new file, because old temporary
    /// files may be removed during a run of several weeks.
    ///
    /// # Errors
    /// Returns an error if the temporary folder is not writable.
    pub fn write_recipe(&self) -> Result<NamedTempFile, Error> {
        let failed = |error: io::Error| format!("cannot write the recipe of a restart: {error}");
        let mut builder = tempfile::Builder::new();
        let file = builder.prefix("recipe-").suffix(".toml").tempfile();
        let mut file = file.map_err(failed)?;
        file.write_all(self.recipe.as_bytes()).map_err(failed)?;
        Ok(file)
    }

    /// Returns the arguments of a restart: the `given` arguments, with the recipe file and the run folder.
    pub fn restart_command(&self, given: &[OsString], recipe: &Path) -> Vec<OsString> {
        let restart = [
            "--restart".into(),
            recipe.into(),
            self.folder.clone().into(),
        ];
        given.iter().cloned().chain(restart).collect()
    }

    /// Returns the step of the newest complete checkpoint, from which the next attempt resumes. Returns `None`
    /// without a complete checkpoint.
    ///
    /// # Errors
    /// Returns an error if a checkpoint is currently unreadable.
    pub fn saved(&self) -> Result<Option<u64>, Error> {
        let checkpoints = self
            .folder
            .join(burn_megatron_train::run_folder::CHECKPOINTS);
        let newest = match checkpoints.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            _ => {
                let folder = CheckpointFolder::open(&checkpoints)?;
                folder.newest_complete(&self.skip)?.checkpoint
            }
        };
        Ok(newest.map(|newest| newest.metadata().step))
    }

    /// Returns the progress of the run, from which the next attempt starts.
    ///
    /// # Errors
    /// See [`saved`](Self::saved).
    pub fn progress(&self) -> Result<Progress, Error> {
        let saved = self.saved()?.unwrap_or(0);
        let (_, metrics_bytes) = self.metrics().unwrap_or_default();
        Ok(Progress {
            saved,
            metrics_bytes,
        })
    }

    /// Returns the last step of an attempt that began at `before`. If the attempt completed no step, returns the step
    /// of its checkpoint.
    pub fn last_step(&self, before: Progress) -> u64 {
        match self.metrics() {
            Some((steps, bytes)) if bytes != before.metrics_bytes => steps.max(before.saved),
            _ => before.saved,
        }
    }

    /// Returns the number of steps in the metrics file and the length of the file, or `None` if there is no run.
    fn metrics(&self) -> Option<(u64, u64)> {
        let path = RunFolder::open(&self.folder).ok()?.metrics();
        let records = read_metrics(&path).unwrap_or_default();
        let steps = records.iter().filter_map(|record| match record {
            MetricsRecord::Step(metrics) => Some(metrics.step as u64),
            _ => None,
        });
        let bytes = fs::metadata(path).map_or(0, |metrics| metrics.len());
        Some((steps.max().unwrap_or(0), bytes))
    }
}

/// Replaces `--dp auto` by the number of data-parallel ranks that follows from the total number of ranks.
fn follow_ranks(
    args: &mut PretrainArgs,
    ranks: usize,
    families: &Families,
    default_recipe: &str,
) -> Result<(), Error> {
    let micro_batches = args.micro_batches.take();
    args.settings.set_data(1);
    let one = Recipe::resolve(args, families, default_recipe)?.recipe;
    args.micro_batches = micro_batches;
    // The ranks reject a number that is not a multiple.
    let data = ranks / replica(&one.parallel).max(1);
    args.settings.set_data(data.max(1));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parse_text;
    use crate::recipe::DEFAULT_RECIPE;

    fn job(command: &str) -> Result<PretrainJob, String> {
        let args = parse_text(&format!("--ranks 4 -- {command}")).unwrap();
        let job = PretrainJob::of(&args, &Families::transformers(), DEFAULT_RECIPE);
        job.map(Option::unwrap).map_err(|error| error.to_string())
    }

    #[test]
    fn a_restart_resumes_in_the_run_folder_with_the_same_recipe() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let flags = format!(
            "--inject kill@rank=1,call=3 --dp 2 --pp 1 --micro-batches=4 --run-dir {} --steps 9 --kernels norm=unfused \
             --set train.clip=0.5 --timeout 7",
            run.display()
        );
        let families = Families::transformers();
        let resolve = |args: &PretrainArgs| {
            let layered = Recipe::resolve(args, &families, DEFAULT_RECIPE);
            layered.unwrap().recipe
        };
        let first = resolve(&parse_text(&flags).unwrap());
        let job = job(&format!("pretrain {flags}")).unwrap();
        let given: Vec<_> = flags.split_whitespace().map(OsString::from).collect();
        let file = job.write_recipe().unwrap();
        let words = job.restart_command(&given, file.path());
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let mut args: PretrainArgs = crate::flags::parse(&words).unwrap();
        args.follow_restart();
        // While there is no run folder, the job starts as in the first attempt.
        assert_eq!(ResumeMode::of(&args).unwrap(), ResumeMode::Fresh);
        assert_eq!(resolve(&args), first);
        assert!(args.inject.is_empty() && args.ranks.deadline == 7.0);
        fs::create_dir(&run).unwrap();
        let text = toml::to_string(&first.complete()).unwrap();
        fs::write(run.join("config.toml"), text).unwrap();
        assert_eq!(ResumeMode::of(&args).unwrap(), ResumeMode::InPlace(&run));
        assert_eq!(resolve(&args), first);
    }

    #[test]
    fn what_cannot_be_started_again_is_refused() {
        for (command, says) in [
            ("conformance", "--max-restarts applies to pretrain"),
            ("pretrain", "name the folder with --run-dir"),
            ("pretrain --run-dir x --no-save", "conflicts with --no-save"),
            ("pretrain --run-dir x --resume y", "then with --resume auto"),
            ("pretrain --run-dir x --no-such-flag", "--no-such-flag"),
            ("pretrain --run-dir x --steps 0", "steps"),
        ] {
            let error = job(command).map(drop).unwrap_err();
            assert!(error.contains(says), "{command}: {error}");
        }
    }
}

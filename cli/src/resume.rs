//! The start of a run: its folder, and the checkpoint that it resumes from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn_megatron::atomic_file::is_staged;
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, LOCK, NewestCheckpoint, SkippedCheckpoint,
    TensorSource, UnusableReason, check_output,
};
use burn_megatron::regular_file::is_there;
use burn_megatron_data::Dataset;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::is_peft_folder;
use burn_megatron_train::metrics::{MetricsRecord, last_saved_step, read_metrics};
use burn_megatron_train::run_folder::RunFolder;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::error::Error;
use crate::numbers::count;
use crate::pretrain::args::PretrainArgs;
use crate::recipe::Recipe;
use crate::resume_check;
use crate::resume_mode::ResumeMode;
use crate::settings::Settings;
use crate::verify_progress::VerifyProgress;

/// Start of a run, as decided by rank 0.
pub enum StartDecision {
    /// The run has steps to train.
    Train(Box<TrainStart>),
    /// All steps of the run are done.
    Finished(FinishedRun),
}

/// Start of a run that has steps to train.
pub struct TrainStart {
    pub folder: RunFolder,
    /// Whether the folder belongs to a run that is resumed.
    pub continues: bool,
    pub from: Option<ResumePoint>,
    /// Newer checkpoints that are unusable and were skipped.
    pub passed: Vec<SkippedCheckpoint>,
    /// The new recipe of a continued folder. It replaces the old recipe once the first checkpoint is saved.
    pub config: Option<Recipe>,
    /// The folder of run folders, if this start created it too.
    made_parent: Option<PathBuf>,
}

/// Checkpoint that a run resumes from, in the form that is broadcast to all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumePoint {
    pub path: PathBuf,
    pub step: u64,
    /// Whether the checkpoint is in the folder of this run. Later checkpoints in this folder then become obsolete.
    pub is_own: bool,
}

/// Run whose steps are all done.
pub struct FinishedRun {
    from: ResumePoint,
    steps: usize,
}

impl fmt::Display for FinishedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, steps } = self;
        write!(
            f,
            "nothing to do: the run has completed {} of {}\nthe weights are in {}",
            from.step,
            count(*steps, "step"),
            from.path.display()
        )
    }
}

/// Checkpoint and folder that were found before anything is written.
#[derive(Default)]
struct LocatedCheckpoint {
    /// The folder of the run that is resumed in place.
    folder: Option<RunFolder>,
    from: Option<ResumePoint>,
    passed: Vec<SkippedCheckpoint>,
}

impl TrainStart {
    /// Returns the number of steps to keep in the files of the folder, if they are continued.
    pub fn resumed_steps(&self) -> Option<usize> {
        let step = self.from.as_ref().map_or(0, |from| from.step as usize);
        self.continues.then_some(step)
    }
}

/// Decides how a run starts. Used on rank 0.
pub struct StartResolver<'a> {
    args: &'a PretrainArgs,
    recipe: &'a Recipe,
    data: &'a dyn Dataset,
    mode: ResumeMode<'a>,
    decision: OnceLock<StartDecision>,
}

impl<'a> StartResolver<'a> {
    pub fn new(
        args: &'a PretrainArgs,
        recipe: &'a Recipe,
        data: &'a dyn Dataset,
    ) -> Result<Self, Error> {
        Ok(Self {
            args,
            recipe,
            data,
            mode: ResumeMode::of(args)?,
            decision: OnceLock::new(),
        })
    }

    /// Runs all checks that do not read a whole checkpoint. Writes nothing.
    pub fn check(&self) -> Result<(), Error> {
        self.find(false).map(drop)
    }

    /// Returns the start of the run. The first call finds the checkpoint, which may take long, and checks that it
    /// belongs to this run. It then opens or creates the folder with the recipe. On an error, or if the run is
    /// finished, nothing changes.
    pub fn decision(&self) -> Result<&StartDecision, Error> {
        match self.decision.get() {
            Some(decision) => Ok(decision),
            None => {
                let decision = self.decide()?;
                Ok(self.decision.get_or_init(|| decision))
            }
        }
    }

    fn decide(&self) -> Result<StartDecision, Error> {
        let LocatedCheckpoint {
            folder,
            from,
            passed,
        } = self.find(true)?;
        for SkippedCheckpoint { error, .. } in &passed {
            eprintln!("warning: skipped a checkpoint that cannot be used: {error}");
        }
        if let Some(from) = &from {
            let saved = Checkpoint::open(&from.path)?;
            let warning = resume_check::other_gemm(&saved.metadata().config, self.recipe);
            warning.inspect(|warning| eprintln!("warning: {warning}"));
        }
        if let (Some(folder), Some(from)) = (&folder, from.as_ref().filter(|from| from.is_own)) {
            warn_of_missing(folder, from, &passed);
        }
        let steps = self.recipe.train.steps;
        let made_all = from.clone().filter(|from| from.step >= steps as u64);
        if let Some(from) = made_all.filter(|_| folder.as_ref().is_none_or(is_evaluated)) {
            return Ok(StartDecision::Finished(FinishedRun { from, steps }));
        }
        let continues = folder.is_some();
        let parent = self.parent();
        let made_parent = (!continues && !parent.exists()).then(|| parent.to_path_buf());
        let folder = match folder {
            Some(folder) => folder,
            None => self.new_folder()?,
        };
        let is_new = !folder.config().exists();
        if is_new {
            folder.write_config(&self.recipe.complete())?;
        }
        Ok(StartDecision::Train(Box::new(TrainStart {
            folder,
            continues,
            from,
            passed,
            config: (!is_new).then(|| self.recipe.clone()),
            made_parent,
        })))
    }

    /// Removes the folder that this start created, unless it contains files of a run. Such a folder is left by a
    /// start that failed before the first step.
    pub fn remove_unused(&self) {
        let Some(StartDecision::Train(start)) = self.decision.get() else {
            return;
        };
        if !start.continues && start.folder.remove_unused() {
            // If another run has begun in the parent folder, the folder is not empty, and is kept.
            let _ = start.made_parent.as_ref().map(std::fs::remove_dir);
        }
    }

    /// Finds the checkpoint. `whole` states whether the whole checkpoint is read.
    fn find(&self, whole: bool) -> Result<LocatedCheckpoint, Error> {
        match self.mode {
            ResumeMode::Fresh => {
                self.new_name()?;
                Ok(LocatedCheckpoint::default())
            }
            ResumeMode::InPlace(path) => self.go_on(path, whole),
            ResumeMode::NewFolder(path) => self.from(path),
        }
    }

    /// Checks that a checkpoint belongs to this run.
    fn check_settings(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let (name, metadata) = (checkpoint.name(), checkpoint.metadata());
        if metadata.state.as_object().is_some_and(Map::is_empty) {
            return Err(format!(
                "{name} has weights only, so there is no run to resume: start a run with --load"
            )
            .into());
        }
        resume_check::check_steps(self.recipe, &name, metadata.step)?;
        let now = resume_check::config(self.recipe, self.data)?;
        let allowed = &self.args.saving.resume_allow_change;
        let settings = Settings::of_model(&self.recipe.model);
        resume_check::check(&settings, &metadata.config, &now, allowed, &name)?;
        RunState::of(checkpoint)?;
        Ok(())
    }

    /// Resumes from the newest checkpoint in a run folder, or starts in a folder without a checkpoint.
    fn go_on(&self, path: &Path, whole: bool) -> Result<LocatedCheckpoint, Error> {
        let folder = RunFolder::open(path)?;
        if !folder.config().exists() && !is_unused(path)? {
            let path = path.display();
            return Err(format!("{path} is not a run folder: it has no config.toml").into());
        }
        let checkpoints = folder.checkpoints();
        // A dangling link (for example to an unmounted disk) is an error, not a folder without checkpoints.
        let NewestCheckpoint {
            checkpoint,
            skipped: passed,
        } = match checkpoints.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                NewestCheckpoint::default()
            }
            _ => newest(&checkpoints, &self.args.saving.resume_skip, whole)?,
        };
        match &checkpoint {
            Some(checkpoint) => self.check_settings(checkpoint)?,
            None if !passed.is_empty() => {
                return Err(format!(
                    "no checkpoint in {} is intact; use another --run-dir to start a new run",
                    checkpoints.display()
                )
                .into());
            }
            None if !self.recipe.checkpoint.save => {
                return Err(format!(
                    "{} has no checkpoint to resume from: it was run with checkpoint.save = false; \
                     use another --run-dir to start a new run",
                    folder.path().display()
                )
                .into());
            }
            None => check_no_step_is_lost(&folder)?,
        }
        Ok(LocatedCheckpoint {
            folder: Some(folder),
            from: checkpoint.map(|newest| ResumePoint {
                path: newest.path().to_path_buf(),
                step: newest.metadata().step,
                is_own: true,
            }),
            passed,
        })
    }

    /// Resumes from a checkpoint by its path: in its own run folder if that is --run-dir, else in a new run folder.
    fn from(&self, path: &Path) -> Result<LocatedCheckpoint, Error> {
        let below = path.join("checkpoints");
        let checkpoint = Checkpoint::open(if below.is_dir() { &below } else { path })?;
        self.check_settings(&checkpoint)?;
        let mut from = ResumePoint {
            path: checkpoint.path().to_path_buf(),
            step: checkpoint.metadata().step,
            is_own: false,
        };
        let own = self.args.run_dir.as_ref().filter(|folder| folder.exists());
        let folder = own.map(|folder| RunFolder::open(folder)).transpose()?;
        match &folder {
            None => self.new_name()?,
            Some(own) => {
                let checkpoints = own.checkpoints();
                from.is_own = lies_in(&from.path, &checkpoints);
                if !from.is_own {
                    return Err(format!(
                        "the run folder {} exists already, and {} is not one of its checkpoints; use a \
                         --run-dir that does not exist",
                        own.path().display(),
                        from.path.display(),
                    )
                    .into());
                }
                self.check_later(&checkpoints, &from)?;
            }
        }
        Ok(LocatedCheckpoint {
            folder,
            from: Some(from),
            passed: vec![],
        })
    }

    /// Checks that there are no later checkpoints, or that they may be discarded.
    fn check_later(&self, checkpoints: &Path, from: &ResumePoint) -> Result<(), Error> {
        let steps = CheckpointFolder::open(checkpoints)?.steps()?.into_iter();
        let later = steps.filter(|step| *step > from.step);
        let later: Vec<_> = later.map(|step| step.to_string()).collect();
        if later.is_empty() || self.args.saving.discard_later {
            return Ok(());
        }
        Err(format!(
            "{} has checkpoints of later steps than {}: {}; discard them with --discard-later, or \
             keep them and use another --run-dir",
            checkpoints.display(),
            from.step,
            later.join(", "),
        )
        .into())
    }

    /// Checks that a new folder can be created at --run-dir.
    fn new_name(&self) -> Result<(), Error> {
        let Some(path) = &self.args.run_dir else {
            return Ok(());
        };
        match (
            path.file_name().and_then(|name| name.to_str()),
            path.exists(),
        ) {
            (None, _) => Err(format!("{} is not a folder name", path.display()).into()),
            (_, true) => Err(format!(
                "the run folder {} exists already; resume it with --resume auto",
                path.display()
            )
            .into()),
            (Some(_), false) => {
                let load = self.recipe.checkpoint.load.as_deref();
                let load = load.filter(|load| is_hf_folder(load) || is_peft_folder(load));
                Ok(check_output(path, &Vec::from_iter(load))?)
            }
        }
    }

    fn new_folder(&self) -> Result<RunFolder, Error> {
        self.new_name()?;
        let path = self.args.run_dir.as_ref();
        let name = path.and_then(|path| path.file_name()?.to_str());
        Ok(RunFolder::create(self.parent(), name)?)
    }

    /// Returns the parent folder of a new run folder.
    fn parent(&self) -> &Path {
        match (&self.args.run_dir, &self.args.runs_dir) {
            (Some(path), _) => path.parent().unwrap_or(Path::new("")),
            (None, Some(runs)) => runs,
            (None, None) => Path::new("runs"),
        }
    }
}

/// Checks that a run folder without a checkpoint has no recorded steps. If it has, its checkpoints are elsewhere, for
/// example on a disk that is not mounted. A lock file shows that the run was killed before its first checkpoint.
fn check_no_step_is_lost(folder: &RunFolder) -> Result<(), Error> {
    let checkpoints = folder.checkpoints();
    let (run, metrics, timings) = (folder.path(), folder.metrics(), folder.timings());
    let saved = is_there(&timings).then(|| last_saved_step(&timings));
    let what = if let Some(step) = saved.transpose()?.flatten() {
        format!("its timings.jsonl lists a checkpoint of step {step}")
    } else if is_there(&metrics) && !is_there(&checkpoints.join(LOCK)) {
        match last_step(&read_metrics(&metrics)?) {
            Some(step) => format!("its metrics.jsonl has {}", count(step, "step")),
            None => return Ok(()),
        }
    } else {
        return Ok(());
    };
    Err(format!(
        "{run} has no checkpoint to resume from, but {what}: mount or restore {checkpoints}, or start a new run in \
         another --run-dir",
        run = run.display(),
        checkpoints = checkpoints.display(),
    )
    .into())
}

/// Warns if a checkpoint later than `from` was saved, but is neither in the folder nor in `passed`.
fn warn_of_missing(folder: &RunFolder, from: &ResumePoint, passed: &[SkippedCheckpoint]) {
    // An unreadable file is reported later, when the file is continued.
    let saved = last_saved_step(&folder.timings()).ok().flatten();
    let known = passed.iter().map(SkippedCheckpoint::step).max();
    if let Some(saved) = saved.filter(|saved| *saved > known.unwrap_or(from.step)) {
        eprintln!(
            "warning: the checkpoint of step {saved} is not in {} any more: the run goes on from step {}",
            folder.checkpoints().display(),
            from.step
        );
    }
}

/// Returns the last training step of these records.
fn last_step(records: &[MetricsRecord]) -> Option<usize> {
    let steps = records.iter().filter_map(|record| match record {
        MetricsRecord::Step(metrics) => Some(metrics.step),
        _ => None,
    });
    steps.max()
}

/// Returns whether the held-out loss after the last step was recorded. A run that was killed after its last save
/// still has to measure it.
fn is_evaluated(folder: &RunFolder) -> bool {
    let records = read_metrics(&folder.metrics()).unwrap_or_default();
    let evaluated = records.iter().filter_map(|record| match record {
        MetricsRecord::HeldOut(metrics) => Some(metrics.step),
        _ => None,
    });
    evaluated.max() >= last_step(&records)
}

/// Returns the newest checkpoint of a folder. `whole` states whether the whole checkpoint is read.
fn newest(checkpoints: &Path, skip: &[u64], whole: bool) -> Result<NewestCheckpoint, Error> {
    let folder = CheckpointFolder::open(checkpoints)?;
    let newest = if whole {
        let mut progress = VerifyProgress::default();
        folder.newest_verified(skip, &mut |checkpoint, bytes| {
            progress.show(checkpoint, bytes)
        })
    } else {
        folder.newest_complete(skip)
    };
    newest.map_err(|error| match &error {
        CheckpointError::MayBeIntact { step, source } => {
            let until = match source.unusable_reason() {
                UnusableReason::Version => "resume with the version of the program that wrote it",
                UnusableReason::Unreadable | UnusableReason::Corrupt => "resume when it can be read",
            };
            format!(
                "{error}; {until}, or skip it with --resume-skip {step}, which keeps it under another name"
            )
            .into()
        }
        _ => error.into(),
    })
}

/// Returns whether the checkpoint of a step is in this folder. The checkpoint itself may be a link to another disk.
fn lies_in(step: &Path, folder: &Path) -> bool {
    let parent = step
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).canonicalize().ok();
    parent.is_some() && parent == folder.canonicalize().ok()
}

/// Returns whether a run can begin in the folder. The folder must be empty, except for the temporary file of a run
/// that was killed while it wrote its first file.
fn is_unused(folder: &Path) -> std::io::Result<bool> {
    for entry in folder.read_dir()? {
        if !is_staged(&entry?.file_name()) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_was_linked_back_is_one_of_its_run() {
        let held = tempfile::tempdir().unwrap();
        let at = |path: &str| held.path().join(path);
        for folder in ["run/checkpoints/step-1", "other/step-1"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::os::unix::fs::symlink(at("other/step-1"), at("run/checkpoints/step-2")).unwrap();
        let checkpoints = at("run/checkpoints");
        for (step, is_own) in [
            ("run/checkpoints/step-1", true),
            ("run/../run/checkpoints/step-2", true),
            ("other/step-1", false),
        ] {
            assert_eq!(lies_in(&at(step), &checkpoints), is_own, "{step}");
        }
        assert!(!lies_in(&at("none/step-1"), &at("none")));
    }
}

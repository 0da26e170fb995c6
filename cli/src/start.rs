//! Where a run begins: its folder, and the checkpoint that it goes on from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, Newest, PassedOver, TensorSource, Unusable,
};
use burn_megatron::data::Dataset;
use burn_megatron::train::metrics::{Record, read_metrics};
use burn_megatron::train::run_folder::RunFolder;
use serde::{Deserialize, Serialize};

use crate::changes;
use crate::cli::PretrainArgs;
use crate::reading::Reading;
use crate::recipe::{Error, Recipe};
use crate::way::Way;

/// Where a run begins, as its first rank decides it.
pub enum Begun {
    /// There are steps to make.
    Run(Box<Start>),
    /// All were made.
    Over(Over),
}

/// Where a run with steps to make begins.
pub struct Start {
    pub folder: RunFolder,
    /// Whether the folder is that of a run that was interrupted.
    pub goes_on: bool,
    pub from: Option<From>,
    /// Newer checkpoints, which cannot be used.
    pub passed: Vec<PassedOver>,
    /// What takes the place of other settings in the folder, when the first checkpoint was saved with it.
    pub config: Option<Recipe>,
}

/// The checkpoint that a run goes on from, as all ranks are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct From {
    pub path: PathBuf,
    pub step: u64,
    /// Whether it lies in the folder of this run, where later ones are out of date then.
    pub is_own: bool,
}

/// A run that has made all of its steps.
pub struct Over {
    from: From,
    steps: usize,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, steps } = self;
        write!(
            f,
            "nothing is left to do: the run has made {} of {steps} steps\nthe weights are in {}",
            from.step,
            from.path.display()
        )
    }
}

/// What there is, before anything is written.
struct Found {
    /// The folder that the run goes on in.
    folder: Option<RunFolder>,
    from: Option<From>,
    passed: Vec<PassedOver>,
}

impl Start {
    /// The steps that count of what the files of the folder have, if they go on.
    pub fn kept_steps(&self) -> Option<usize> {
        let step = self.from.as_ref().map_or(0, |from| from.step as usize);
        self.goes_on.then_some(step)
    }
}

/// The beginning of a run, for its first rank.
pub struct Begin<'a> {
    args: &'a PretrainArgs,
    recipe: &'a Recipe,
    data: &'a dyn Dataset,
    way: Way<'a>,
    begun: OnceLock<Begun>,
}

impl<'a> Begin<'a> {
    pub fn new(
        args: &'a PretrainArgs,
        recipe: &'a Recipe,
        data: &'a dyn Dataset,
    ) -> Result<Self, Error> {
        Ok(Self {
            args,
            recipe,
            data,
            way: Way::of(args)?,
            begun: OnceLock::new(),
        })
    }

    /// Finds what can be found at once, and refuses what would be refused later; nothing is written.
    pub fn check(&self) -> Result<(), Error> {
        self.find(false).map(drop)
    }

    /// Where the run begins. The first call finds the checkpoint, which may take long, checks that it is
    /// one of this run, and opens or creates the folder, with the recipe in it. What is refused leaves
    /// everything as it was, and so does a run that is over.
    pub fn begun(&self) -> Result<&Begun, Error> {
        match self.begun.get() {
            Some(begun) => Ok(begun),
            None => {
                let begun = self.begin()?;
                Ok(self.begun.get_or_init(|| begun))
            }
        }
    }

    fn begin(&self) -> Result<Begun, Error> {
        let Found {
            folder,
            from,
            passed,
        } = self.find(true)?;
        for PassedOver { error, .. } in &passed {
            eprintln!("warning: passed over a checkpoint that cannot be used: {error}");
        }
        let steps = self.recipe.train.steps;
        let made_all = from.clone().filter(|from| from.step >= steps as u64);
        if let Some(from) = made_all.filter(|_| folder.as_ref().is_none_or(is_evaluated)) {
            return Ok(Begun::Over(Over { from, steps }));
        }
        let goes_on = folder.is_some();
        let folder = match folder {
            Some(folder) => folder,
            None => self.new_folder()?,
        };
        let is_new = !folder.config().exists();
        if is_new {
            folder.write_config(self.recipe)?;
        }
        Ok(Begun::Run(Box::new(Start {
            folder,
            goes_on,
            from,
            passed,
            config: (!is_new).then(|| self.recipe.clone()),
        })))
    }

    /// Finds the checkpoint; `whole` says whether all of it is read.
    fn find(&self, whole: bool) -> Result<Found, Error> {
        match self.way {
            Way::New => {
                self.new_name()?;
                Ok(Found {
                    folder: None,
                    from: None,
                    passed: vec![],
                })
            }
            Way::GoOn(path) => self.go_on(path, whole),
            Way::From(path) => self.from(path),
        }
    }

    /// Checks that a checkpoint is one of this run.
    fn check_settings(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let now = changes::config(self.recipe, self.data)?;
        let allowed = &self.args.saving.resume_changing;
        let saved = &checkpoint.about().config;
        changes::check(saved, &now, allowed, &checkpoint.name())?;
        RunState::of(checkpoint)?;
        Ok(())
    }

    /// Goes on with what is in a run folder, which may be nothing yet.
    fn go_on(&self, path: &Path, whole: bool) -> Result<Found, Error> {
        let folder = RunFolder::open(path)?;
        if !folder.config().exists() && path.read_dir()?.next().is_some() {
            let path = path.display();
            return Err(format!("{path} is no run folder: it has no config.toml").into());
        }
        let checkpoints = folder.checkpoints();
        // A link to a disk that is not there is no folder without checkpoints.
        let Newest { checkpoint, passed } = match checkpoints.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Newest::default(),
            _ => newest(&checkpoints, &self.args.saving.resume_skip, whole)?,
        };
        match &checkpoint {
            Some(checkpoint) => self.check_settings(checkpoint)?,
            None if !passed.is_empty() => {
                return Err(format!(
                    "no checkpoint in {} is whole; give the run another --run-dir to begin anew",
                    checkpoints.display()
                )
                .into());
            }
            None if !self.recipe.checkpoint.save => {
                return Err(format!(
                    "{} has no checkpoint to go on from: it was to save none (checkpoint.save = false); \
                     give the run another --run-dir to begin anew",
                    folder.path().display()
                )
                .into());
            }
            None => {}
        }
        Ok(Found {
            folder: Some(folder),
            from: checkpoint.map(|newest| From {
                path: newest.path().to_path_buf(),
                step: newest.about().step,
                is_own: true,
            }),
            passed,
        })
    }

    /// Goes on from a checkpoint by its path, in its own run folder where that is --run-dir, else in a new
    /// one.
    fn from(&self, path: &Path) -> Result<Found, Error> {
        let below = path.join("checkpoints");
        let checkpoint = Checkpoint::open(if below.is_dir() { &below } else { path })?;
        self.check_settings(&checkpoint)?;
        let mut from = From {
            path: checkpoint.path().to_path_buf(),
            step: checkpoint.about().step,
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
                        "the run folder {} is there already, and {} is no checkpoint of it; give a \
                         --run-dir that is not there yet",
                        own.path().display(),
                        from.path.display(),
                    )
                    .into());
                }
                self.check_later(&checkpoints, &from)?;
            }
        }
        Ok(Found {
            folder,
            from: Some(from),
            passed: vec![],
        })
    }

    /// Checks that what would be discarded may be.
    fn check_later(&self, checkpoints: &Path, from: &From) -> Result<(), Error> {
        let steps = CheckpointFolder::open(checkpoints)?.steps()?.into_iter();
        let later = steps.filter(|step| *step > from.step);
        let later: Vec<_> = later.map(|step| step.to_string()).collect();
        if later.is_empty() || self.args.saving.discard_later {
            return Ok(());
        }
        Err(format!(
            "{} has checkpoints of later steps than {}: {}; allow the run to discard them with \
             --discard-later, or give it another --run-dir, and they stay",
            checkpoints.display(),
            from.step,
            later.join(", "),
        )
        .into())
    }

    /// Checks that a new folder can have the name that was given.
    fn new_name(&self) -> Result<(), Error> {
        let Some(path) = &self.args.run_dir else {
            return Ok(());
        };
        match (
            path.file_name().and_then(|name| name.to_str()),
            path.exists(),
        ) {
            (None, _) => Err(format!("{} names no folder", path.display()).into()),
            (_, true) => Err(format!(
                "the run folder {} is there already; go on with it by --resume auto",
                path.display()
            )
            .into()),
            (Some(_), false) => Ok(()),
        }
    }

    fn new_folder(&self) -> Result<RunFolder, Error> {
        self.new_name()?;
        let Some(path) = &self.args.run_dir else {
            let runs = self.args.runs.as_deref();
            return Ok(RunFolder::create(runs.unwrap_or(Path::new("runs")), None)?);
        };
        let name = path.file_name().and_then(|name| name.to_str());
        let parent = path.parent().unwrap_or(Path::new(""));
        Ok(RunFolder::create(parent, name)?)
    }
}

/// Whether the last thing that a run measures, the held-out loss after its last step, was measured: one that
/// was killed after its last save still has that to do.
fn is_evaluated(folder: &RunFolder) -> bool {
    let records = read_metrics(&folder.metrics()).unwrap_or_default();
    let [steps, evaluated] = [false, true].map(|held_out| {
        let at = records.iter().filter_map(|record| match record {
            Record::Step(metrics) if !held_out => Some(metrics.step + 1),
            Record::HeldOut(metrics) if held_out => Some(metrics.step),
            _ => None,
        });
        at.max()
    });
    evaluated >= steps
}

/// The newest checkpoint of a folder; `whole` says whether all of it is read.
fn newest(checkpoints: &Path, skip: &[u64], whole: bool) -> Result<Newest, Error> {
    let folder = CheckpointFolder::open(checkpoints)?;
    let newest = match whole {
        true => {
            let mut reading = Reading::default();
            folder.newest_whole(skip, &mut |checkpoint, bytes| {
                reading.show(checkpoint, bytes)
            })
        }
        false => folder.newest_complete(skip),
    };
    newest.map_err(|error| match &error {
        CheckpointError::MayBeWhole { step, source } => {
            let until = match source.unusable() {
                Unusable::Version => "resume with the program that wrote it",
                Unusable::Unreadable | Unusable::Corrupt => "resume when it can be read",
            };
            format!(
                "{error}; {until}, or pass over it with --resume-skip {step}, which keeps it under another \
                 name"
            )
            .into()
        }
        _ => error.into(),
    })
}

/// Whether a step has its name in this folder; the step itself may be a link to another disk.
fn lies_in(step: &Path, folder: &Path) -> bool {
    let parent = step
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).canonicalize().ok();
    parent.is_some() && parent == folder.canonicalize().ok()
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

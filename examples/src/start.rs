//! Where a run begins: its folder, and the checkpoint that it goes on from.

use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{Checkpoint, CheckpointFolder, TensorSource};
use burn_megatron::data::Dataset;
use burn_megatron::train::run_folder::RunFolder;
use serde::{Deserialize, Serialize};

use crate::changes;
use crate::cli::PretrainArgs;
use crate::recipe::{Error, Recipe};

/// What `--resume` says for the newest checkpoint of the run's own folder.
const AUTO: &str = "auto";

/// Where a run begins, as its first rank decides it.
pub struct Start {
    pub folder: RunFolder,
    /// Whether the folder is that of a run that was interrupted.
    pub goes_on: bool,
    pub from: Option<From>,
}

/// The checkpoint that a run goes on from, as all ranks are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct From {
    pub path: PathBuf,
    pub step: u64,
    /// Whether it lies in the folder of this run, where later ones are out of date then.
    pub is_own: bool,
}

impl Start {
    /// Finds the checkpoint, checks that it is one of this run, and opens or creates the folder, with the
    /// recipe in it. What is refused leaves everything as it was.
    pub fn find(args: &PretrainArgs, recipe: &Recipe, data: &dyn Dataset) -> Result<Self, Error> {
        let check = |checkpoint: &Checkpoint| {
            let now = changes::config(recipe, data)?;
            let allowed = &args.saving.resume_changing;
            changes::check(
                &checkpoint.about().config,
                &now,
                allowed,
                &checkpoint.name(),
            )?;
            RunState::of(checkpoint)?;
            Ok(())
        };
        let start = match (args.saving.resume.as_deref(), &args.run_dir) {
            (Some(AUTO), None) => {
                return Err(
                    "--resume auto goes on with the newest checkpoint of a run folder; say which \
                     one with --run-dir"
                        .into(),
                );
            }
            (Some(AUTO), Some(folder)) if folder.exists() => go_on(folder, check)?,
            (Some(AUTO) | None, _) => Self {
                folder: new_folder(args)?,
                goes_on: false,
                from: None,
            },
            (Some(path), _) => from(Path::new(path), args, check)?,
        };
        start.folder.write_config(recipe)?;
        Ok(start)
    }

    /// The steps that the files of the folder are kept to, if they go on.
    pub fn kept_steps(&self) -> Option<usize> {
        let step = self.from.as_ref().map_or(0, |from| from.step as usize);
        self.goes_on.then_some(step)
    }
}

/// Goes on with what is in a run folder, which may be nothing yet.
fn go_on(path: &Path, check: impl Fn(&Checkpoint) -> Result<(), Error>) -> Result<Start, Error> {
    let folder = RunFolder::open(path)?;
    if !folder.config().exists() && path.read_dir()?.next().is_some() {
        let path = path.display();
        return Err(format!("{path} is no run folder: it has no config.toml").into());
    }
    let checkpoints = folder.checkpoints();
    let (newest, passed) = match checkpoints.exists() {
        true => CheckpointFolder::open(&checkpoints)?.newest_whole()?,
        false => (None, vec![]),
    };
    for reason in &passed {
        eprintln!("warning: passed over a checkpoint that is not whole: {reason}");
    }
    if newest.is_none() && !passed.is_empty() {
        return Err(format!(
            "no checkpoint in {} is whole; give the run another --run-dir to begin anew",
            checkpoints.display()
        )
        .into());
    }
    newest.as_ref().map_or(Ok(()), check)?;
    Ok(Start {
        folder,
        goes_on: true,
        from: newest.map(|newest| From {
            path: newest.path().to_path_buf(),
            step: newest.about().step,
            is_own: true,
        }),
    })
}

/// Goes on from a checkpoint by its path, in its own run folder where that is --run-dir, else in a new one.
fn from(
    path: &Path,
    args: &PretrainArgs,
    check: impl Fn(&Checkpoint) -> Result<(), Error>,
) -> Result<Start, Error> {
    let below = path.join("checkpoints");
    let checkpoint = Checkpoint::open(if below.is_dir() { &below } else { path })?;
    check(&checkpoint)?;
    let mut from = From {
        path: checkpoint.path().to_path_buf(),
        step: checkpoint.about().step,
        is_own: false,
    };
    let Some(folder) = args.run_dir.as_ref().filter(|folder| folder.exists()) else {
        return Ok(Start {
            folder: new_folder(args)?,
            goes_on: false,
            from: Some(from),
        });
    };
    let own = RunFolder::open(folder)?;
    from.is_own =
        from.path.canonicalize()?.parent() == own.checkpoints().canonicalize().ok().as_deref();
    match from.is_own {
        true => Ok(Start {
            folder: own,
            goes_on: true,
            from: Some(from),
        }),
        false => Err(format!(
            "the run folder {} is there already, and {} is no checkpoint of it; give a --run-dir that is \
             not there yet",
            folder.display(),
            from.path.display(),
        )
        .into()),
    }
}

fn new_folder(args: &PretrainArgs) -> Result<RunFolder, Error> {
    let Some(path) = &args.run_dir else {
        return Ok(RunFolder::create(&args.runs, None)?);
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(format!("{} names no folder", path.display()).into());
    };
    if path.exists() {
        return Err(format!(
            "the run folder {} is there already; go on with it by --resume auto",
            path.display()
        )
        .into());
    }
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    Ok(RunFolder::create(
        parent.unwrap_or(Path::new(".")),
        Some(name),
    )?)
}

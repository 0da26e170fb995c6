//! Determines the start of a run from its flags.

use std::path::{Path, PathBuf, absolute};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::regular_file::is_there;
use burn_megatron_train::run_folder::CHECKPOINTS;

use crate::error::Error;
use crate::family::Families;
use crate::pretrain::args::PretrainArgs;
use crate::recipe::Recipe;
use crate::resume_check;

/// The value of `--resume` that selects the newest checkpoint of the run's own folder.
pub const AUTO: &str = "auto";

/// Start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeMode<'a> {
    /// Start from the beginning, in a new folder.
    Fresh,
    /// Resume from the newest checkpoint of this run folder, in the same folder.
    InPlace(&'a Path),
    /// Resume from this checkpoint, or from the latest checkpoint of this folder. The run continues in a new folder,
    /// unless --run-dir is the run folder of the checkpoint.
    NewFolder(&'a Path),
}

impl<'a> ResumeMode<'a> {
    /// Returns the mode for these flags.
    ///
    /// # Errors
    /// Returns an error if flags do not apply in this mode.
    pub fn of(args: &'a PretrainArgs) -> Result<Self, Error> {
        let (saving, run_dir) = (&args.saving, args.run_dir.as_deref());
        if saving.resume.is_some() && args.settings.has("checkpoint.load") {
            return Err("--load conflicts with --resume: remove one of them".into());
        }
        let mode = match (saving.resume.as_deref(), run_dir) {
            (Some(AUTO), None) => {
                return Err(
                    "--resume auto resumes from the newest checkpoint of a run folder; name the folder \
                     with --run-dir"
                        .into(),
                );
            }
            // A dangling link counts as an existing folder.
            (Some(AUTO), Some(folder)) if folder.symlink_metadata().is_ok() => {
                Self::InPlace(folder)
            }
            (Some(AUTO) | None, _) => Self::Fresh,
            (Some(path), run_dir) => {
                let path = Path::new(path);
                let same = |other: &Path| other.canonicalize().ok() == path.canonicalize().ok();
                // --runs-dir requests a new folder.
                let here = run_dir.map_or(args.runs_dir.is_none(), same);
                if here && config_of(path).is_some() {
                    Self::InPlace(path)
                } else {
                    Self::NewFolder(path)
                }
            }
        };
        match mode {
            Self::NewFolder(_) if !saving.resume_skip.is_empty() => Err(
                "--resume-skip requires the newest checkpoint of a run folder, but --resume names a checkpoint; \
                 name another one"
                    .into(),
            ),
            Self::NewFolder(_) if saving.discard_later && run_dir.is_none_or(|path| !path.exists()) => Err(
                "--discard-later requires resuming in the same run folder, but this run goes into a new folder; \
                 remove it, or use the run's own --run-dir"
                    .into(),
            ),
            Self::InPlace(_) if saving.discard_later => Err(
                "--discard-later requires resuming from an earlier checkpoint, but --resume takes the newest here; \
                 remove it, or name a checkpoint"
                    .into(),
            ),
            mode => Ok(mode),
        }
    }

    /// Returns the run folder or the checkpoint that is resumed.
    pub fn path(self) -> Option<&'a Path> {
        match self {
            Self::Fresh => None,
            Self::InPlace(path) | Self::NewFolder(path) => Some(path),
        }
    }

    /// Returns the recipe of the run that is resumed: the recipe of its folder, or else of the checkpoint.
    pub fn recipe(self, families: &Families) -> Result<Option<Recipe>, Error> {
        let run = match self {
            Self::Fresh => None,
            Self::InPlace(folder) => Some(folder.to_path_buf()),
            Self::NewFolder(path) => run_of(path),
        };
        if let Some(config) = run.and_then(|run| config_of(&run)) {
            return Ok(Some(Recipe::read_of_run(&config, families)?));
        }
        // A checkpoint that cannot be opened is reported later, with the reason.
        match self {
            Self::NewFolder(path) => match Checkpoint::open(path) {
                Ok(checkpoint) => resume_check::recipe_of(&checkpoint, families),
                Err(_) => Ok(None),
            },
            Self::Fresh | Self::InPlace(_) => Ok(None),
        }
    }

    /// Returns whether the run is resumed in its own folder.
    pub fn is_own(self, run_dir: Option<&Path>) -> bool {
        match self {
            Self::Fresh => false,
            Self::InPlace(_) => true,
            Self::NewFolder(path) => run_of(path)
                .zip(run_dir)
                .is_some_and(|(run, own)| run.canonicalize().ok() == own.canonicalize().ok()),
        }
    }
}

/// Returns whether a folder is a run folder.
pub fn is_run_folder(path: &Path) -> bool {
    config_of(path).is_some()
}

/// Returns the path of the recipe of a run folder, if it exists.
fn config_of(run: &Path) -> Option<PathBuf> {
    Some(run.join("config.toml")).filter(|config| is_there(config))
}

/// Returns the run folder for a path to the folder, to its checkpoints, or to one of its checkpoints.
fn run_of(path: &Path) -> Option<PathBuf> {
    let path = absolute(path).ok()?;
    let mut checkpoints = path.ancestors().take(2);
    let of_checkpoints = checkpoints.find(|path| path.ends_with(CHECKPOINTS));
    let run = of_checkpoints.and_then(Path::parent).unwrap_or(&path);
    config_of(run).map(|_| run.to_path_buf())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::flags::parse_text;

    fn args(flags: &str) -> PretrainArgs {
        parse_text(flags).unwrap()
    }

    #[test]
    fn a_run_folder_is_resumed_in_place_and_a_checkpoint_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let step = run.join("checkpoints/step-00000003");
        fs::create_dir_all(&step).unwrap();
        fs::write(run.join("config.toml"), "[train]\nseed = 33\n").unwrap();
        let path = |path: &Path| path.display().to_string();
        let (own, other) = (path(&run), path(&folder.path().join("new")));
        let own_step = path(&step);
        for (flags, mode, is_own) in [
            (String::new(), ResumeMode::Fresh, false),
            (format!("--resume {own}"), ResumeMode::InPlace(&run), true),
            (
                format!("--resume auto --run-dir {own}"),
                ResumeMode::InPlace(&run),
                true,
            ),
            (
                format!("--resume auto --run-dir {other}"),
                ResumeMode::Fresh,
                false,
            ),
            (
                format!("--resume {own} --run-dir {own}"),
                ResumeMode::InPlace(&run),
                true,
            ),
            (
                format!("--resume {own} --run-dir {other}"),
                ResumeMode::NewFolder(&run),
                false,
            ),
            (
                format!("--resume {own} --runs-dir {other}"),
                ResumeMode::NewFolder(&run),
                false,
            ),
            (
                format!("--resume {own_step}"),
                ResumeMode::NewFolder(&step),
                false,
            ),
            (
                format!("--resume {own_step} --run-dir {own}"),
                ResumeMode::NewFolder(&step),
                true,
            ),
        ] {
            let args = args(&flags);
            let found = ResumeMode::of(&args).unwrap();
            assert_eq!(found, mode, "{flags}");
            assert_eq!(found.is_own(args.run_dir.as_deref()), is_own, "{flags}");
            let recipe = found.recipe(&Families::transformers()).unwrap();
            let seed = recipe.map(|recipe| recipe.train.seed);
            assert_eq!(seed, (mode != ResumeMode::Fresh).then_some(33), "{flags}");
        }
        for (flags, says) in [
            ("--resume auto".into(), "name the folder with --run-dir"),
            (
                format!("--resume {own} --discard-later"),
                "remove it, or name a checkpoint",
            ),
            (
                format!("--resume {own_step} --discard-later"),
                "goes into a new folder",
            ),
            (
                format!("--resume {own_step} --resume-skip 3"),
                "name another one",
            ),
        ] {
            let error = ResumeMode::of(&args(&flags)).unwrap_err().to_string();
            assert!(error.contains(says), "{flags}: {error}");
        }
    }
}

//! Which way a run begins, by its flags alone.

use std::path::{Path, PathBuf, absolute};

use burn_megatron::train::run_folder::CHECKPOINTS;

use crate::cli::PretrainArgs;
use crate::recipe::{Error, Recipe};

/// What `--resume` says for the newest checkpoint of the run's own folder.
const AUTO: &str = "auto";

/// Which way a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way<'a> {
    /// At the beginning, in a new folder.
    New,
    /// Where the run of this folder is, in this folder.
    GoOn(&'a Path),
    /// From a checkpoint, by the path of it, of a folder of them or of a run.
    From(&'a Path),
}

impl<'a> Way<'a> {
    /// The way that the flags say.
    ///
    /// # Errors
    /// Flags that have no meaning there.
    pub fn of(args: &'a PretrainArgs) -> Result<Self, Error> {
        let (saving, run_dir) = (&args.saving, args.run_dir.as_deref());
        let way = match (saving.resume.as_deref(), run_dir) {
            (Some(AUTO), None) => {
                return Err(
                    "--resume auto goes on with the newest checkpoint of a run folder; say which \
                     one with --run-dir"
                        .into(),
                );
            }
            // A link that leads nowhere is there.
            (Some(AUTO), Some(folder)) if folder.symlink_metadata().is_ok() => Self::GoOn(folder),
            (Some(AUTO) | None, _) => Self::New,
            (Some(path), run_dir) => {
                let path = Path::new(path);
                let same = |other: &Path| other.canonicalize().ok() == path.canonicalize().ok();
                // With --runs a new folder is asked for.
                let here = run_dir.map_or(args.runs.is_none(), same);
                match here && config_of(path).is_some() {
                    true => Self::GoOn(path),
                    false => Self::From(path),
                }
            }
        };
        match way {
            Self::From(_) if !saving.resume_skip.is_empty() => Err(
                "--resume-skip is about the newest checkpoint of a run folder, and --resume names one; \
                 name another"
                    .into(),
            ),
            Self::From(_) if saving.discard_later && run_dir.is_none_or(|path| !path.exists()) => Err(
                "--discard-later is about the later checkpoints of the same run, and this one goes into a \
                 new folder; leave it out, or give the run's own --run-dir"
                    .into(),
            ),
            Self::GoOn(_) if saving.discard_later => Err(
                "--discard-later is about later checkpoints than the one of --resume, which goes on from \
                 the newest here; leave it out, or name a checkpoint"
                    .into(),
            ),
            way => Ok(way),
        }
    }

    /// The recipe of the run that goes on, where its folder has it.
    pub fn recipe(self) -> Result<Option<Recipe>, Error> {
        let run = match self {
            Self::New => None,
            Self::GoOn(folder) => Some(folder.to_path_buf()),
            Self::From(path) => run_of(path),
        };
        let config = run.and_then(|run| config_of(&run));
        config.map(|config| Recipe::read(&config)).transpose()
    }

    /// Whether the run goes on in the folder that it began in.
    pub fn is_own(self, run_dir: Option<&Path>) -> bool {
        match self {
            Self::New => false,
            Self::GoOn(_) => true,
            Self::From(path) => run_of(path)
                .zip(run_dir)
                .is_some_and(|(run, own)| run.canonicalize().ok() == own.canonicalize().ok()),
        }
    }
}

/// What a run was started with.
fn config_of(run: &Path) -> Option<PathBuf> {
    Some(run.join("config.toml")).filter(|config| config.is_file())
}

/// The folder of the run that a path of it, of its checkpoints, or of one of them leads to.
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

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn args(flags: &str) -> PretrainArgs {
        let words = ["burn-megatron", "pretrain"].into_iter();
        match Cli::parse_from(words.chain(flags.split_whitespace())).command {
            Command::Pretrain(args) => *args,
            _ => unreachable!("pretrain was asked for"),
        }
    }

    #[test]
    fn a_run_folder_goes_on_in_itself_and_a_checkpoint_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let step = run.join("checkpoints/step-00000003");
        fs::create_dir_all(&step).unwrap();
        fs::write(run.join("config.toml"), "[train]\nseed = 33\n").unwrap();
        let path = |path: &Path| path.display().to_string();
        let (own, other) = (path(&run), path(&folder.path().join("new")));
        let own_step = path(&step);
        for (flags, way, is_own) in [
            (String::new(), Way::New, false),
            (format!("--resume {own}"), Way::GoOn(&run), true),
            (
                format!("--resume auto --run-dir {own}"),
                Way::GoOn(&run),
                true,
            ),
            (format!("--resume auto --run-dir {other}"), Way::New, false),
            (
                format!("--resume {own} --run-dir {own}"),
                Way::GoOn(&run),
                true,
            ),
            (
                format!("--resume {own} --run-dir {other}"),
                Way::From(&run),
                false,
            ),
            (
                format!("--resume {own} --runs {other}"),
                Way::From(&run),
                false,
            ),
            (format!("--resume {own_step}"), Way::From(&step), false),
            (
                format!("--resume {own_step} --run-dir {own}"),
                Way::From(&step),
                true,
            ),
        ] {
            let args = args(&flags);
            let found = Way::of(&args).unwrap();
            assert_eq!(found, way, "{flags}");
            assert_eq!(found.is_own(args.run_dir.as_deref()), is_own, "{flags}");
            let recipe = found.recipe().unwrap();
            let seed = recipe.map(|recipe| recipe.train.seed);
            assert_eq!(seed, (way != Way::New).then_some(33), "{flags}");
        }
        for (flags, says) in [
            ("--resume auto".into(), "say which one with --run-dir"),
            (
                format!("--resume {own} --discard-later"),
                "leave it out, or name a checkpoint",
            ),
            (
                format!("--resume {own_step} --discard-later"),
                "into a new folder",
            ),
            (
                format!("--resume {own_step} --resume-skip 3"),
                "name another",
            ),
        ] {
            let error = Way::of(&args(&flags)).unwrap_err().to_string();
            assert!(error.contains(says), "{flags}: {error}");
        }
    }
}

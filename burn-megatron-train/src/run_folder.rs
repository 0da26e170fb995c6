//! The folder for the output files of a run.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use chrono::DateTime;
use serde::Serialize;

use super::metrics::{MetricsRecord, read_metrics};
use burn_megatron::atomic_file::replace_file;
use burn_megatron::checkpoint::LOCK;
use burn_megatron::regular_file;
use burn_megatron::regular_file::is_there;

/// An error that occurred while a run folder was created or used.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// The name is not a valid folder name.
    #[error(
        "invalid run name '{name}': expected one folder name, without '/' or '\\', not starting with '.'"
    )]
    Name {
        /// The invalid name.
        name: String,
    },
    /// An I/O error.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The path of the file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The configuration cannot be expressed in TOML.
    #[error("cannot write the configuration to '{path}': {source}")]
    Config {
        /// The path of the file.
        path: PathBuf,
        /// The error of the TOML serializer.
        source: toml::ser::Error,
    },
}

/// The maximum size of a configuration that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The name of the checkpoint folder in a run folder.
pub const CHECKPOINTS: &str = "checkpoints";

/// The output folder of one run. It contains `config.toml`, `metrics.jsonl`, `timings.jsonl`, `loss.svg`, `memory.svg`,
/// `experts.svg` (for a model with experts), `sample.txt` and `checkpoints`.
///
/// One rank of a run creates the folder. The other ranks do not need the folder.
///
/// ```
/// use burn_megatron_train::TrainConfig;
/// use burn_megatron_train::run_folder::RunFolder;
///
/// let root = tempfile::tempdir()?;
/// let run = RunFolder::create(root.path(), Some("baseline"))?;
/// run.write_config(&TrainConfig::default())?;
/// assert!(run.config().is_file());
/// // The name of a second run gets a number.
/// let second = RunFolder::create(root.path(), Some("baseline"))?;
/// assert!(second.path().ends_with("baseline-2"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Creates the folder `root/name`, and also `root` if it does not exist. The default name is the time in UTC, such
    /// as `2026-05-31-142501`.
    ///
    /// If the folder already exists, the name of the new folder gets the suffix `-2`, `-3` and so on.
    ///
    /// # Errors
    ///
    /// [`RunFolderError::Name`] for an invalid name; [`RunFolderError::Io`] if the folder cannot be created.
    pub fn create(root: &Path, name: Option<&str>) -> Result<Self, RunFolderError> {
        let name = match name {
            Some(name)
                if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\']) =>
            {
                return Err(RunFolderError::Name {
                    name: name.to_string(),
                });
            }
            Some(name) => name.to_string(),
            None => utc_name(SystemTime::now()),
        };
        let failed = |path: &Path, source| io_error("create the folder", path, source);
        fs::create_dir_all(root).map_err(|source| failed(root, source))?;

        let mut path = root.join(&name);
        let mut copy = 1;
        // The creation is also the check: another run could take the name between a check and the creation.
        while let Err(source) = fs::create_dir(&path) {
            if source.kind() != ErrorKind::AlreadyExists {
                return Err(failed(&path, source));
            }
            copy += 1;
            path = root.join(format!("{name}-{copy}"));
        }
        Ok(Self { path })
    }

    /// Opens the folder of an earlier run, to resume the run or to read its results.
    ///
    /// # Errors
    ///
    /// [`RunFolderError::Io`] if there is no folder at `path`.
    pub fn open(path: &Path) -> Result<Self, RunFolderError> {
        fs::read_dir(path).map_err(|source| io_error("open the run folder", path, source))?;
        Ok(Self {
            path: path.to_path_buf(),
        })
    }

    /// Writes the resolved configuration to `config.toml`. It contains all settings that are needed to repeat the run.
    ///
    /// # Errors
    ///
    /// [`RunFolderError::Config`] for a value that TOML cannot represent; [`RunFolderError::Io`] if the file cannot be
    /// written.
    pub fn write_config(&self, config: &impl Serialize) -> Result<(), RunFolderError> {
        let path = self.config();
        let text = self.text_of(config)?;
        replace_file(&path, text.as_bytes()).map_err(|source| io_error("write", &path, source))
    }

    /// Replaces `config.toml` with the configuration of a resumed run. Previous configurations are kept as
    /// `config-1.toml`, `config-2.toml` and so on. If the configuration has not changed, nothing is written.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::write_config`].
    pub fn replace_config(&self, config: &impl Serialize) -> Result<(), RunFolderError> {
        let (path, text) = (self.config(), self.text_of(config)?);
        let failed = |source| io_error("replace", &path, source);
        let before = regular_file::read(&path, MAX_CONFIG_BYTES).map_err(failed)?;
        if before == text.as_bytes() {
            return Ok(());
        }
        let numbered = |number| self.path.join(format!("config-{number}.toml"));
        let free = (1..).map(numbered).find(|path| !path.exists());
        let kept = free.expect("there is always a next number");
        replace_file(&kept, &before).map_err(|source| io_error("write", &kept, source))?;
        replace_file(&path, text.as_bytes()).map_err(failed)
    }

    fn text_of(&self, config: &impl Serialize) -> Result<String, RunFolderError> {
        toml::to_string_pretty(config).map_err(|source| RunFolderError::Config {
            path: self.config(),
            source,
        })
    }

    /// Returns the path of the run folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of `config.toml`, which contains the resolved configuration.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Returns the path of `metrics.jsonl`, which contains losses, gradient norms, learning rates and expert loads.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Returns the path of `timings.jsonl`, which contains the times and the throughput of the steps.
    pub fn timings(&self) -> PathBuf {
        self.path.join("timings.jsonl")
    }

    /// Returns the path of `loss.svg`, a plot of the loss curve.
    pub fn loss_svg(&self) -> PathBuf {
        self.path.join("loss.svg")
    }

    /// Returns the path of `memory.svg`, a plot of the planned memory of a step.
    pub fn memory_svg(&self) -> PathBuf {
        self.path.join("memory.svg")
    }

    /// Returns the path of `experts.svg`, a heat map of the load of the experts.
    pub fn experts_svg(&self) -> PathBuf {
        self.path.join("experts.svg")
    }

    /// Returns the path of `checkpoints`, the folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// Removes the folder of a run that failed before its first step. Such a folder contains only the configuration,
    /// logs without a step, and an empty folder of checkpoints. If it contains anything else, nothing is removed.
    /// Returns whether the folder was removed.
    pub fn remove_unused(&self) -> bool {
        let checkpoints = self.checkpoints();
        let [config, metrics, timings] = [self.config(), self.metrics(), self.timings()];
        let is_step = |record: &MetricsRecord| !matches!(record, MetricsRecord::Run(_));
        let has_steps = || match read_metrics(&metrics) {
            Ok(records) => records.iter().any(is_step),
            Err(_) => true,
        };
        let is_used = (is_there(&metrics) && has_steps())
            || timings.metadata().is_ok_and(|timings| timings.len() > 0)
            || !has_only(&self.path, &[&config, &metrics, &timings, &checkpoints])
            || (checkpoints.exists() && !has_only(&checkpoints, &[&checkpoints.join(LOCK)]));
        if is_used {
            return false;
        }
        for file in [&config, &metrics, &timings, &checkpoints.join(LOCK)] {
            let _ = fs::remove_file(file);
        }
        // `remove_dir` removes only an empty folder.
        let _ = fs::remove_dir(&checkpoints);
        fs::remove_dir(&self.path).is_ok()
    }

    /// Returns the path of `sample.txt`, the text that the trained model generates.
    pub fn sample(&self) -> PathBuf {
        self.path.join("sample.txt")
    }
}

/// Returns whether a folder has only these entries.
fn has_only(folder: &Path, entries: &[&PathBuf]) -> bool {
    let found = fs::read_dir(folder).and_then(|found| found.collect::<io::Result<Vec<_>>>());
    found.is_ok_and(|found| found.iter().all(|entry| entries.contains(&&entry.path())))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> RunFolderError {
    RunFolderError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// Formats `time` in UTC as `year-month-day-hhmmss`. A time before 1970 becomes 1970.
fn utc_name(time: SystemTime) -> String {
    let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since_1970.unwrap_or(Duration::ZERO).as_secs();
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    let utc = DateTime::from_timestamp_secs(seconds).unwrap_or_default();
    utc.format("%Y-%m-%d-%H%M%S").to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use burn_megatron_test_support::TestFolder;

    #[test]
    fn known_moments_have_their_names() {
        // From `date --utc --date=@...`.
        for (seconds, name) in [
            (0, "1970-01-01-000000"),
            (951_782_399, "2000-02-28-235959"),
            (951_782_400, "2000-02-29-000000"),
            (951_868_800, "2000-03-01-000000"),
            (1_234_567_890, "2009-02-13-233130"),
            (1_735_689_599, "2024-12-31-235959"),
            (4_107_542_400, "2100-03-01-000000"),
            (16_725_225_600, "2500-01-01-000000"),
        ] {
            assert_eq!(
                utc_name(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)),
                name
            );
        }
        assert_eq!(
            utc_name(SystemTime::UNIX_EPOCH - Duration::from_secs(9)),
            "1970-01-01-000000"
        );
    }

    #[test]
    fn a_taken_name_gets_a_number() {
        let folder = TestFolder::new();
        let root = folder.path().join("deep/runs");
        let names: Vec<_> = (0..3)
            .map(|_| RunFolder::create(&root, Some("tiny")).expect("creates"))
            .map(|run| run.path().file_name().expect("named").to_os_string())
            .collect();
        assert_eq!(names, ["tiny", "tiny-2", "tiny-3"]);
        let unnamed = RunFolder::create(&root, None).expect("creates");
        assert!(unnamed.path().is_dir());
        assert_eq!(RunFolder::open(unnamed.path()).expect("is there"), unnamed);
    }

    #[test]
    fn the_configuration_is_written_and_read_back() {
        let folder = TestFolder::new();
        let run = RunFolder::create(folder.path(), Some("a")).expect("creates");
        let config = BTreeMap::from([("steps", 10), ("seq", 128)]);
        run.write_config(&config).expect("writes");
        let text = fs::read_to_string(run.path().join("config.toml")).expect("there");
        assert_eq!(
            toml::from_str::<BTreeMap<String, i32>>(&text).expect("TOML")["seq"],
            128
        );
        let longer = BTreeMap::from([("steps", 20)]);
        run.replace_config(&config).expect("the same");
        run.replace_config(&longer).expect("writes");
        run.replace_config(&config).expect("writes");
        let read = |name| fs::read_to_string(run.path().join(name)).expect("there");
        assert_eq!(read("config.toml"), text);
        assert_eq!(read("config-1.toml"), text);
        assert_eq!(read("config-2.toml"), "steps = 20\n");
        assert_eq!(run.path().read_dir().expect("there").count(), 3);
        assert!(matches!(
            run.write_config(&3),
            Err(RunFolderError::Config { .. })
        ));
        for file in [run.metrics(), run.timings(), run.loss_svg(), run.sample()] {
            assert!(file.starts_with(run.path()));
        }
    }

    #[test]
    fn only_an_unused_folder_is_removed() {
        let folder = TestFolder::new();
        let started = |name: &str| {
            let run = RunFolder::create(folder.path(), Some(name)).expect("creates");
            run.write_config(&BTreeMap::from([("steps", 10)]))
                .expect("writes");
            crate::metrics::MetricsLog::create(&run.metrics()).expect("new");
            fs::write(run.timings(), "").expect("writable");
            fs::create_dir(run.checkpoints()).expect("new");
            fs::write(run.checkpoints().join(LOCK), "").expect("writable");
            run
        };
        let run = started("failed");
        assert!(run.remove_unused() && !run.path().exists());
        let step = r#"{"step":1,"seconds":0.5,"tokens_per_second":1.0,"flops_per_second":1.0}"#;
        for (name, text) in [
            ("timings.jsonl", step),
            ("metrics.jsonl", "not a record\n"),
            ("burn-megatron-calls-1-1.jsonl", ""),
            ("checkpoints/step-00000001", ""),
        ] {
            let run = started(&name.replace('/', "-"));
            fs::write(run.path().join(name), text).expect("writable");
            assert!(!run.remove_unused(), "{name}");
            assert!(run.config().exists() && run.checkpoints().join(LOCK).exists());
        }
    }

    #[test]
    fn what_fails_is_named() {
        let folder = TestFolder::new();
        folder.write("file", "");
        for name in ["", ".", "..", "../out", "a/b", "a\\b", ".hidden"] {
            let refused = RunFolder::create(folder.path(), Some(name));
            assert!(
                matches!(refused, Err(RunFolderError::Name { .. })),
                "{name}"
            );
        }
        let below_a_file = RunFolder::create(&folder.path().join("file"), Some("a"));
        assert!(below_a_file.unwrap_err().to_string().contains("file"));
        let message = RunFolder::open(&folder.path().join("none"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("none"), "{message}");
        assert!(RunFolder::open(&folder.path().join("file")).is_err());
    }
}

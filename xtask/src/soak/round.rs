//! One round: an undisturbed run, and a run that is disturbed and resumed until it is complete.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::check::{FileTree, checkpoints, lost};
use super::disturb::Disturbance;
use super::draw::RoundConfig;
use super::metrics::RunMetrics;
use super::processes::{ProcessTag, signal};
use crate::draw::Random;
use crate::temp::TempDir;

/// Timeout of a run. The deadlines of the run are included.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// The maximum time that processes of a run may outlive the first process.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of ranks as processes. Each attempt starts new processes, which takes time.
const MAX_PROCESSES: usize = 4;

/// The maximum number of recipes that are drawn for a round until the program accepts one.
const MAX_DRAWS: usize = 20;

/// The maximum number of disturbances of a run.
const MAX_DISTURBANCES: usize = 5;

/// The entries in the folder of a round that may change: the run, temporary files, and logs.
const CHANGING: [&str; 3] = ["run", "tmp", "logs"];

/// Counts over all rounds.
#[derive(Default)]
pub struct Counts {
    pub rounds: usize,
    pub runs: usize,
    pub kills: usize,
    pub stops: usize,
    pub faults: usize,
    pub resumes: usize,
    pub findings: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rounds, {} runs, {} kills, {} signals to stop, {} faults injected, {} resumes, {} \
             findings",
            self.rounds,
            self.runs,
            self.kills,
            self.stops,
            self.faults,
            self.resumes,
            self.findings
        )
    }
}

pub struct Round<'a> {
    pub program: &'a Path,
    pub number: u64,
    pub random: Random,
    /// Whether ranks can be processes.
    pub processes: bool,
    /// The time after which no disturbance starts.
    pub until: Instant,
}

impl Round<'_> {
    /// Runs the round. The error describes the finding. The folder of a finding is kept.
    pub fn run(mut self, counts: &mut Counts) -> Result<(), String> {
        counts.rounds += 1;
        let mut folder = TempDir::new("soak").map_err(|e| format!("a temporary folder: {e}"))?;
        let mut folders = RoundFolder {
            program: self.program,
            folder: folder.path().to_path_buf(),
            config: RoundConfig::new(&mut self.random),
        };
        let result = folders
            .set_up()
            .and_then(|()| folders.draw_until_accepted(&mut self.random))
            .and_then(|()| {
                let (layout, saving) = (folders.config.layout(), folders.config.saving.join(" "));
                println!("round {}: {layout} {saving}", self.number);
                self.run_in(&folders, counts)
            });
        result.map_err(|finding| {
            folder.keep();
            format!("{finding}\n  kept: {}", folder.path().display())
        })
    }

    fn run_in(&mut self, folders: &RoundFolder<'_>, counts: &mut Counts) -> Result<(), String> {
        let config = &folders.config;
        let undisturbed = folders.start("whole", "whole", false, &[]);
        let status =
            undisturbed.and_then(|attempt| attempt.end(&Disturbance::None, &folders.whole()))?;
        counts.runs += 1;
        let whole = RunMetrics::of(&folders.whole());
        if !status.success() || whole.steps() != config.steps {
            return Err(format!(
                "the undisturbed run ended with {status}, after {} steps",
                whole.steps()
            ));
        }
        let before = folders.tree()?;
        let strikes = self.random.within((1, MAX_DISTURBANCES));
        for attempt in 0.. {
            let over = attempt >= strikes || Instant::now() >= self.until;
            let numbers = RunMetrics::of(&folders.run());
            let disturbance = if over {
                Disturbance::None
            } else {
                Disturbance::new(
                    &mut self.random,
                    numbers.steps(),
                    config.steps,
                    config.ranks,
                )
            };
            let processes = self.processes
                && (2..=MAX_PROCESSES).contains(&config.ranks)
                && self.random.once_in(2);
            let engine = if processes { "processes" } else { "threads" };
            let published = checkpoints(&folders.run())?;
            println!("  {engine}, {disturbance}");
            counts.count(&disturbance, !published.is_empty());
            let status = folders.run_disturbed(attempt, processes, &disturbance)?;
            let numbers = RunMetrics::of(&folders.run());
            let is_whole = numbers.lacks(&whole).is_none();
            let wrong = disturbance
                .check_exit(status, is_whole)
                .or_else(|| numbers.differ_from(&whole))
                .or_else(|| {
                    folders
                        .tree()
                        .and_then(|tree| tree.first_change(&before).map_or(Ok(()), Err))
                        .err()
                })
                .or_else(|| folders.lost(&published).err());
            if let Some(finding) = wrong {
                return Err(format!("{engine}, {disturbance}: {finding}"));
            }
            if is_whole && status.success() {
                break;
            }
        }
        Ok(())
    }
}

impl Counts {
    fn count(&mut self, disturbance: &Disturbance, resumed: bool) {
        self.runs += 1;
        self.resumes += usize::from(resumed);
        match disturbance {
            Disturbance::None => {}
            Disturbance::Fault(_) => self.faults += 1,
            kill if kill.is_kill() => self.kills += 1,
            Disturbance::Signal { .. } => self.stops += 1,
        }
    }
}

/// The folder of a round. It contains the data, both runs, and files that must not change.
struct RoundFolder<'a> {
    program: &'a Path,
    folder: PathBuf,
    config: RoundConfig,
}

impl RoundFolder<'_> {
    fn set_up(&self) -> Result<(), String> {
        let write = |name: &str, text: String| fs::write(self.folder.join(name), text);
        let make = || {
            for name in ["text", "beside", "work", "tmp", "logs"] {
                fs::create_dir(self.folder.join(name))?;
            }
            for file in 0..4 {
                let text = format!("fn number_{file}() -> usize {{ {file} }}\n").repeat(40);
                write(&format!("text/{file}.rs"), text.clone())?;
                write(&format!("beside/{file}.txt"), text)?;
            }
            Ok::<_, std::io::Error>(())
        };
        make().map_err(|error| format!("{}: {error}", self.folder.display()))
    }

    /// Draws recipes until the program accepts one. Some settings conflict with 16-bit types, or with other drawn
    /// settings.
    fn draw_until_accepted(&mut self, random: &mut Random) -> Result<(), String> {
        for _ in 0..MAX_DRAWS {
            let recipe = self.folder.join("recipe.toml");
            fs::write(&recipe, self.config.settings.to_toml())
                .map_err(|error| format!("{}: {error}", recipe.display()))?;
            let dry_run = self.start("dry-run", "none", false, &["--dry-run"])?;
            let ended = dry_run.end(&Disturbance::None, &self.folder.join("none"))?;
            if ended.success() {
                return Ok(());
            }
            self.config = RoundConfig::new(random);
        }
        Err(format!("the program refused {MAX_DRAWS} recipes in a row"))
    }

    fn whole(&self) -> PathBuf {
        self.folder.join("whole")
    }

    fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    fn tree(&self) -> Result<FileTree, String> {
        FileTree::of(&self.folder, &CHANGING).map_err(|e| format!("{}: {e}", self.folder.display()))
    }

    fn start(
        &self,
        name: &str,
        run: &str,
        processes: bool,
        more: &[&str],
    ) -> Result<Attempt, String> {
        let ranks = self.config.ranks.to_string();
        let mut command = Command::new(self.program);
        if processes {
            command.args(["launch", "--ranks", &ranks, "--grace", "20", "--"]);
        }
        command.arg("pretrain").args(more);
        for (flag, path) in [
            ("--recipe", "recipe.toml"),
            ("--data", "text"),
            ("--run-dir", run),
        ] {
            command.arg(flag).arg(self.folder.join(path));
        }
        command.args(["--compute-threads", "1"]);
        command.args([
            "--timeout",
            "30",
            "--first-timeout",
            "90",
            "--heartbeat-timeout",
            "20",
        ]);
        let tag = ProcessTag::new(format!("{}/{name}", self.folder.display()));
        let (variable, value) = tag.variable();
        let log = self.folder.join(format!("logs/{name}.log"));
        let log_file = || File::create(&log).and_then(|file| Ok((file.try_clone()?, file)));
        let (out, error) = log_file().map_err(|e| format!("{}: {e}", log.display()))?;
        let child = command
            .current_dir(self.folder.join("work"))
            .env(variable, value)
            .env("TMPDIR", self.folder.join("tmp"))
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(error)
            .spawn();
        let child = child.map_err(|e| format!("{}: {e}", self.program.display()))?;
        Ok(Attempt { child, tag })
    }

    /// Starts or resumes the run, and disturbs it.
    fn run_disturbed(
        &self,
        attempt: usize,
        processes: bool,
        disturbance: &Disturbance,
    ) -> Result<ExitStatus, String> {
        let saving = self.config.saving.iter().map(String::as_str);
        let mut more: Vec<_> = saving.chain(["--resume", "auto"]).collect();
        if let Disturbance::Fault(fault) = disturbance {
            more.extend(["--inject", fault]);
        }
        let attempt = self.start(&format!("attempt-{attempt}"), "run", processes, &more)?;
        attempt.end(disturbance, &self.run())
    }

    /// Fails if checkpoints are lost, or if the latest checkpoint is not intact.
    fn lost(&self, before: &[u64]) -> Result<(), String> {
        let after = checkpoints(&self.run())?;
        if let Some(lost) = lost(before, &after, self.config.kept) {
            return Err(lost);
        }
        let Some(newest) = after.last() else {
            return Ok(());
        };
        let path = self.run().join(format!("checkpoints/step-{newest:08}"));
        let verified = Command::new(self.program)
            .args(["checkpoint", "verify"])
            .arg(&path)
            .output()
            .map_err(|e| format!("checkpoint verify: {e}"))?;
        if verified.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&verified.stderr).trim().to_owned())
        }
    }
}

/// A run that has been started.
struct Attempt {
    child: Child,
    tag: ProcessTag,
}

impl Attempt {
    /// Disturbs the run at its time, and waits for the end. No process may be left.
    fn end(mut self, disturbance: &Disturbance, run: &Path) -> Result<ExitStatus, String> {
        let begun = Instant::now();
        let mut due = None;
        let mut sent = false;
        let status = loop {
            let ended = self.child.try_wait().map_err(|e| format!("its end: {e}"))?;
            if let Some(status) = ended {
                break status;
            }
            if let Disturbance::Signal {
                signal,
                whom,
                steps,
                then,
            } = disturbance
            {
                if due.is_none() && RunMetrics::of(run).steps() >= *steps {
                    due = Some(Instant::now() + *then);
                }
                if !sent && due.is_some_and(|due| Instant::now() >= due) {
                    self.send(*signal, *whom);
                    sent = true;
                }
            }
            if begun.elapsed() > RUN_TIMEOUT {
                self.tag.end_within(Duration::ZERO);
                let _ = self.child.wait();
                return Err(format!(
                    "{disturbance}: no end after {} s",
                    RUN_TIMEOUT.as_secs()
                ));
            }
            sleep(Duration::from_millis(5));
        };
        match self.tag.end_within(EXIT_TIMEOUT) {
            0 => Ok(status),
            left => Err(format!(
                "{disturbance}: {left} processes are left {} s after its end",
                EXIT_TIMEOUT.as_secs()
            )),
        }
    }

    /// Sends a signal to stop to the first process, and a kill to any process.
    fn send(&self, what: i32, whom: usize) {
        let first = self.child.id() as i32;
        let all = self.tag.processes();
        let any = all.get(whom % all.len().max(1)).copied().unwrap_or(first);
        signal(if what == libc::SIGKILL { any } else { first }, what);
    }
}

//! `cargo xtask fuzz-layouts`: compares random recipes in random layouts with one rank in f64.
//!
//! A case depends on the seed and its number alone. The first case of each fault is shrunk to a minimal recipe, whose folder
//! is kept.

mod case;
mod compare;
mod keys;
mod run;
mod shrink;
mod totals;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;

use crate::draw::{self, Random, Settings};
use crate::minutes;
use crate::process::{cargo, run as run_command, target_folder};
use crate::report::Report;
use crate::temp::TempDir;
use case::{Comparison, Verdict};
pub use run::Runner;
use run::{Finding, Kind};
use totals::Totals;

/// The options of `cargo xtask fuzz-layouts`.
#[derive(Args)]
pub struct Options {
    /// Minutes after which no further case starts.
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes::parse)]
    minutes: f64,
    /// Maximum number of cases.
    #[arg(long, value_name = "N")]
    cases: Option<u64>,
    /// Seed of the cases. The seed is printed. The default is the time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run only this case of the seed.
    #[arg(long, value_name = "N", requires = "seed", conflicts_with = "cases")]
    case: Option<u64>,
    /// Number of cases that run at the same time. The default is the number of processors.
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Seconds after which a command of a case is killed and counts as a hang.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
    /// Run this program. The default is to build `burn-megatron` with optimization.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Leave out cases that set one of these keys or tables, or a key to this value (KEY=VALUE), such as known faults.
    #[arg(long, value_name = "KEY[=VALUE],..", value_delimiter = ',')]
    without: Vec<String>,
    /// List the settings that are not drawn, with the reasons, and run nothing.
    #[arg(long, exclusive = true)]
    list: bool,
}

impl Options {
    /// Returns options for at most one minute with a fixed seed. The number of cases is fixed too, so that a faster
    /// machine does not run other cases.
    fn of_tests() -> Self {
        Self {
            minutes: 1.0,
            cases: Some(100),
            seed: Some(1),
            case: None,
            jobs: None,
            timeout: 120,
            program: None,
            without: vec![],
            list: false,
        }
    }
}

/// Maximum number of seconds for shrinking one fault.
const SHRINK_SECONDS: u64 = 120;

/// Builds the program and runs cases.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    if options.list {
        keys::print();
        return;
    }
    let mut program = Err(String::new());
    match &options.program {
        // Each case runs in a separate folder.
        Some(path) => {
            program = path
                .canonicalize()
                .map_err(|error| format!("{}: {error}", path.display()))
        }
        None => report.step("build", || {
            program = build(root);
            program.as_ref().map(drop).map_err(Clone::clone)
        }),
    }
    report.step("fuzz-layouts", || fuzz(options, &program?));
}

/// Runs 100 cases with a fixed seed for at most one minute. `program` is the program that the tests have built.
pub fn run_with_tests(program: &Path) -> Result<(), String> {
    fuzz(&Options::of_tests(), program)
}

fn build(root: &Path) -> Result<PathBuf, String> {
    run_command(&mut cargo(
        root,
        &["build", "--release", "-p", "burn-megatron-cli"],
    ))?;
    Ok(target_folder(root)?.join("release/burn-megatron"))
}

fn fuzz(options: &Options, program: &Path) -> Result<(), String> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = options
        .seed
        .unwrap_or(time.map_or(0, |time| time.as_secs()));
    let runner = Runner {
        program,
        timeout: Duration::from_secs(options.timeout),
    };
    let data = TempDir::new("fuzz-data").map_err(|error| format!("a temporary folder: {error}"))?;
    make_data(&runner, data.path())?;
    println!("seed {seed}");
    let cases = match (options.case, options.cases) {
        (Some(case), _) => case..case.saturating_add(1),
        (None, cases) => 0..cases.unwrap_or(u64::MAX),
    };
    let fuzzer = Fuzzer {
        runner,
        data: data.path(),
        seed,
        until: Instant::now() + Duration::from_secs_f64(60.0 * options.minutes),
        next: AtomicU64::new(cases.start),
        end: cases.end,
        without: &options.without,
        totals: Mutex::default(),
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let begun = Instant::now();
    let ended = thread::scope(|scope| {
        let workers: Vec<_> = (0..options.jobs.unwrap_or(processors).max(1))
            .map(|_| scope.spawn(|| fuzzer.work()))
            .collect();
        let ended = workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker panicked"));
        ended.fold(Ok(()), Result::and)
    });
    let totals = fuzzer.totals.into_inner().expect("a worker panicked");
    println!(
        "\nseed {seed}, {:.0} s\n{totals}",
        begun.elapsed().as_secs_f64()
    );
    ended?;
    totals.result()
}

/// Writes the text and the token files that recipes read.
fn make_data(runner: &Runner<'_>, folder: &Path) -> Result<(), String> {
    let documents = "documents.txt";
    draw::write_text(folder, &folder.join(documents))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    let args = [
        "preprocess",
        documents,
        "--lines",
        "-o",
        draw::TOKENS,
        "--tokenizer",
        "bytes",
        "--append-eod",
    ];
    let ended = runner.run(folder, "preprocess", &args)?;
    match ended.classify(false) {
        run::End::Complete => Ok(()),
        end => Err(format!("preprocess: {end:?}")),
    }
}

struct Fuzzer<'a> {
    runner: Runner<'a>,
    data: &'a Path,
    seed: u64,
    until: Instant,
    next: AtomicU64,
    /// The number after the last case.
    end: u64,
    without: &'a [String],
    totals: Mutex<Totals>,
}

impl Fuzzer<'_> {
    /// Runs cases until the time is up.
    fn work(&self) -> Result<(), String> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let is_first = self.totals.lock().expect("a worker panicked").cases == 0;
            if number >= self.end || !is_first && Instant::now() >= self.until {
                return Ok(());
            }
            self.case(number)?;
        }
    }

    fn case(&self, number: u64) -> Result<(), String> {
        let settings = draw::recipe(&mut Random::new(self.seed, number));
        if self.without.iter().any(|setting| settings.matches(setting)) {
            return Ok(());
        }
        let mut folder = self.folder()?;
        let mut comparison = if draw::is_for_verify_alone(&settings) {
            Comparison::Verify
        } else {
            Comparison::Pretrain
        };
        let mut verdict = self.runner.check(&settings, folder.path(), comparison)?;
        // In a third of the cases, `verify` also compares the gradients of each parameter.
        if verdict == Verdict::Passed
            && comparison == Comparison::Pretrain
            && number.is_multiple_of(3)
        {
            let verified = self
                .runner
                .check(&settings, folder.path(), Comparison::Verify)?;
            // If only `verify` refuses a setting, the results of `pretrain` have been compared above.
            if !matches!(verified, Verdict::Refused(_)) {
                (verdict, comparison) = (verified, Comparison::Verify);
            }
        }
        let mut totals = self.totals.lock().expect("a worker panicked");
        let is_new = totals.count(number, &settings, &verdict);
        let Verdict::Found(finding) = verdict else {
            return Ok(());
        };
        println!(
            "case {number}: {}: {}",
            finding.kind.name(),
            finding.message
        );
        // Other threads continue in the meantime.
        drop(totals);
        if !is_new {
            return Ok(());
        }
        let smallest = self.shrink(&settings, &finding, folder.path(), comparison)?;
        let last = self.runner.check(&smallest, folder.path(), comparison)?;
        folder.keep();
        println!(
            "case {number}: {last:?}\n{}\nrepeat the case:   cargo xtask fuzz-layouts --seed {} --case {number}\n\
             repeat the recipe: cd {}\n{}\n",
            smallest.to_toml(),
            self.seed,
            folder.path().display(),
            case::commands(comparison),
        );
        Ok(())
    }

    fn folder(&self) -> Result<TempDir, String> {
        let folder =
            TempDir::new("fuzz-layouts").map_err(|error| format!("a temporary folder: {error}"))?;
        let copy = || {
            for entry in fs::read_dir(self.data)? {
                let entry = entry?;
                fs::copy(entry.path(), folder.path().join(entry.file_name()))?;
            }
            Ok::<_, std::io::Error>(())
        };
        copy().map_err(|error| format!("{}: {error}", folder.path().display()))?;
        Ok(folder)
    }

    fn shrink(
        &self,
        settings: &Settings,
        finding: &Finding,
        folder: &Path,
        comparison: Comparison,
    ) -> Result<Settings, String> {
        // Each hang takes the whole deadline.
        if finding.kind == Kind::TimedOut {
            return Ok(settings.clone());
        }
        let until = Instant::now() + Duration::from_secs(SHRINK_SECONDS);
        let mut error = None;
        let smallest = shrink::shrink(
            settings,
            || Instant::now() < until,
            |next| match self.runner.check(next, folder, comparison) {
                Ok(Verdict::Found(found)) => {
                    totals::signature(&found) == totals::signature(finding)
                }
                Ok(_) => false,
                Err(message) => {
                    error = Some(message);
                    false
                }
            },
        );
        error.map_or(Ok(smallest), Err)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A program whose runs have the same loss in every layout, except for three faults.
    const PROGRAM: &str = r#"#!/bin/sh
[ "$1" = pretrain ] || exit 0
mkdir "$5"
loss=5.5
has() { grep -q "^$1" "$recipe"; }
recipe=$3
has tensor && has dropout && loss=5.6
has 'zero_stage = 2' && has clip && { echo "panicked at clip.rs:3" >&2; exit 101; }
echo '{"kind":"step","step":1,"loss":'$loss'}' > "$5/metrics.jsonl"
has context_split && has window && { echo "error: rank 1 failed" >&2; exit 1; }
exit 0
"#;

    #[test]
    fn three_planted_faults_are_found_and_shrunk_to_their_settings() {
        let folder = TempDir::new("fuzz-planted").unwrap();
        folder.write("program", PROGRAM);
        let program = folder.path().join("program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let fuzzer = Fuzzer {
            runner: Runner {
                program: &program,
                timeout: Duration::from_secs(60),
            },
            data: folder.path(),
            seed: 1,
            until: Instant::now(),
            next: AtomicU64::new(0),
            end: 1,
            without: &[],
            totals: Mutex::default(),
        };
        for (kind, planted) in [
            (
                Kind::Differs,
                [("model.dropout", "0.2"), ("parallel.tensor", "2")],
            ),
            (
                Kind::Panicked,
                [("data_parallel.zero_stage", "2"), ("train.clip", "0.05")],
            ),
            (
                Kind::Failed,
                [
                    ("model.window", "5"),
                    ("parallel.context_split", "\"striped\""),
                ],
            ),
        ] {
            let mut settings = draw::recipe(&mut Random::new(1, 1));
            for key in [
                "data_parallel",
                "lora",
                "memory",
                "model.dropout",
                "model.window",
                "parallel",
                "train.clip",
            ] {
                settings.remove(key);
            }
            let run = fuzzer.folder().unwrap();
            let check = |settings: &Settings| {
                let compared = Comparison::Pretrain;
                fuzzer.runner.check(settings, run.path(), compared).unwrap()
            };
            assert_eq!(check(&settings), Verdict::Passed);
            for (key, value) in planted {
                settings.set(key, value);
            }
            let Verdict::Found(finding) = check(&settings) else {
                panic!("{planted:?} is not found");
            };
            assert_eq!(finding.kind, kind, "{finding:?}");
            let compared = Comparison::Pretrain;
            let smallest = fuzzer.shrink(&settings, &finding, run.path(), compared);
            let smallest = smallest.unwrap();
            let left: Vec<_> = smallest
                .keys()
                .filter(|key| !shrink::is_kept(key))
                .collect();
            assert_eq!(left, planted.map(|(key, _)| key));
        }
    }
}

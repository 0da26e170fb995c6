//! `cargo xtask soak`: kills, disturbs and resumes runs for a given time.
//!
//! Each round draws a layout, a precision and checkpoint settings. It trains once undisturbed, and again with
//! disturbances until that run is complete as well. After each disturbance it checks the results. A round depends
//! only on the seed and its number, except for the moments of the disturbances.

mod check;
mod disturb;
mod draw;
mod metrics;
pub mod processes;
mod round;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};

use crate::draw::Random;
use crate::minutes;
use crate::mpi;
use crate::process::{cargo, run as run_command, target_folder};
use crate::report::{Outcome, Report};

use round::{Counts, Round};

/// The duration of the run, and the settings to repeat a round.
#[derive(Args)]
pub struct Options {
    /// Minutes after which no further round starts.
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes::parse)]
    minutes: f64,
    /// Seed of the rounds. The seed is printed. The default is the time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run only this round. Use it with the seed to repeat a round.
    #[arg(long, value_name = "N", requires = "seed")]
    round: Option<u64>,
    /// The profile of the program.
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Profile {
    Release,
    Dev,
}

/// Builds the program and runs rounds until the time is up.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    if !cfg!(target_os = "linux") {
        report.step("soak", || {
            Outcome::Failed("soak needs Linux: it finds processes in /proc".into())
        });
        return;
    }
    let processes = mpi::missing().is_empty();
    let mut program = Err(String::new());
    report.step("build", || {
        program = build(options.profile, processes, root);
        program.as_ref().map(drop).map_err(Clone::clone)
    });
    if let Ok(program) = program {
        report.step("soak", || soak(options, &program, processes));
    }
}

fn build(profile: Profile, processes: bool, root: &Path) -> Result<PathBuf, String> {
    let mut command = cargo(root, &["build", "-p", "burn-megatron-cli"]);
    if profile == Profile::Release {
        command.arg("--release");
    }
    if processes {
        command.args(["--features", "mpi"]);
    }
    run_command(&mut command)?;
    let folder = match profile {
        Profile::Release => "release",
        Profile::Dev => "debug",
    };
    Ok(target_folder(root)?.join(folder).join("burn-megatron"))
}

fn soak(options: &Options, program: &Path, processes: bool) -> Result<(), String> {
    let begun = Instant::now();
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = options
        .seed
        .unwrap_or(time.map_or(0, |time| time.as_secs()));
    let until = begun + Duration::from_secs_f64(60.0 * options.minutes);
    let rounds = match options.round {
        Some(round) => round..=round,
        None => 0..=u64::MAX,
    };
    println!("seed {seed}");
    if !processes {
        println!("without MPI: ranks are threads in all rounds");
    }
    let mut counts = Counts::default();
    for number in rounds {
        if counts.rounds > 0 && Instant::now() >= until {
            break;
        }
        let round = Round {
            program,
            number,
            random: Random::new(seed, number),
            processes,
            until,
        };
        let began = Instant::now();
        let found = round.run(&mut counts);
        let seconds = began.elapsed().as_secs_f64();
        match found {
            Ok(()) => println!("  passed in {seconds:.1} s"),
            Err(finding) => {
                counts.findings += 1;
                println!(
                    "  FINDING: {finding}\n  repeat it: cargo xtask soak --seed {seed} --round {number}"
                );
            }
        }
    }
    println!(
        "\nseed {seed}: {counts} in {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    match counts.findings {
        0 => Ok(()),
        findings => Err(format!("{findings} findings, seed {seed}")),
    }
}

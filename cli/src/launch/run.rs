//! The run of a launcher.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::args::LaunchArgs;
use super::ending::{Ending, signal_name};
use super::error::LaunchError;
use super::hub::Hub;
use super::output::Output;
use super::plan::{Plan, Way};
use super::start::Started;
use super::supervise::{Action, Controls, Event, Failure, Supervisor, conduct};
use super::sys;
use super::watch::{Lookout, Watch};
use crate::recipe::Error;

/// The hidden command that a keeper is.
const KEEPER: &str = "launch-keeper";

/// Starts the ranks and sees them through; the exit code tells how it went.
pub fn run(args: &LaunchArgs) -> Result<ExitCode, Error> {
    let ended = Plan::new(args, &|name| env::var_os(name)).and_then(|plan| launch(args, &plan));
    let code = ended.unwrap_or_else(|error| {
        say(&format!("error: {error}"));
        error.exit_code()
    });
    Ok(ExitCode::from(code))
}

/// Shows a line on standard error, which may be gone.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// The call of a keeper: this program with the rank's command.
pub fn keeper_command(plan: &Plan) -> Result<Vec<OsString>, LaunchError> {
    let own = env::current_exe().map_err(LaunchError::system("this program is not to be found"))?;
    let head = [own.into_os_string(), KEEPER.into(), "--".into()];
    Ok(head
        .into_iter()
        .chain(plan.command.iter().cloned())
        .collect())
}

fn launch(args: &LaunchArgs, plan: &Plan) -> Result<u8, LaunchError> {
    sys::raise_open_files();
    let ranks = plan.first..plan.first + plan.ranks;
    let output = Output::new(
        plan.world,
        ranks,
        args.quiet_ranks,
        args.output_dir.as_deref(),
    )?;
    // Before any thread: those that are started later hold the signals too.
    sys::hold_ending_signals().map_err(LaunchError::system("signals cannot be held"))?;
    let watch = Lookout::open(plan)?;
    let (events, happened) = mpsc::channel();
    listen_to_signals(events.clone(), args.grace)?;
    let host = match &plan.way {
        Way::Own { .. } => "127.0.0.1",
        Way::Mpirun { host, .. } => host,
    };
    let (first, ranks) = (plan.first, plan.ranks);
    let hub = Hub::listen(host, &plan.token, first, ranks, output, events.clone())?;
    let started = Started::start(plan, &|host| hub.link(host), &watch, events)?;

    let grace = Duration::from_secs_f64(args.grace);
    let mut supervisor = Supervisor::new(plan.first, plan.ranks, grace, Instant::now());
    let launcher = Launcher { hub, started };
    let over = AtomicBool::new(false);
    let verdict = thread::scope(|scope| {
        let verdict = scope.spawn(|| tell_verdict(&watch, &over));
        conduct(&mut supervisor, &happened, &launcher, &watch);
        over.store(true, Ordering::Release);
        verdict.join().unwrap_or_default()
    });
    if let Some(Failure::Starter(_) | Failure::NotStarted(_)) = &supervisor.failure {
        launcher.started.remarks.show();
    }
    if let Some(rank) = watch.culprit() {
        supervisor.blame(rank);
    }
    // It may have been decided in the last moment.
    let late = watch.verdict().filter(|_| !verdict);
    for line in late.into_iter().chain(summary(&supervisor)) {
        say(&line);
    }
    Ok(exit_code(&supervisor))
}

/// Tells the verdict as soon as it is there, while ranks may still have to be ended; whether there was one.
fn tell_verdict(watch: &dyn Watch, over: &AtomicBool) -> bool {
    while !over.load(Ordering::Acquire) {
        if let Some(verdict) = watch.verdict() {
            say(&verdict);
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

/// What carries out the supervisor's decisions.
struct Launcher {
    hub: Hub,
    started: Started,
}

impl Controls for Launcher {
    fn act(&self, action: Action) {
        match action {
            Action::RequestStop => {}
            Action::Signal(signal) => self.hub.signal(signal),
            Action::Leave => self.hub.leave(),
            Action::EndStarter => self.started.end(),
            Action::KillStarter => self.started.kill(),
        }
    }
}

fn listen_to_signals(events: Sender<Event>, grace: f64) -> Result<(), LaunchError> {
    let mut first = true;
    let listen = move || {
        while let Ok(signal) = sys::next_ending_signal() {
            match std::mem::take(&mut first) {
                true => say(&format!(
                    "\ninterrupted: the ranks have {grace} s to stop (once more kills them)"
                )),
                false => say("\ninterrupted again: the ranks are killed"),
            }
            if events.send(Event::Interrupted(signal)).is_err() {
                return;
            }
        }
    };
    let builder = thread::Builder::new().name("signals".into());
    let started = builder.spawn(listen);
    started
        .map(drop)
        .map_err(LaunchError::system("a thread cannot be started"))
}

/// What is said at the end of a run that did not go well.
pub fn summary(supervisor: &Supervisor) -> Vec<String> {
    let failure = supervisor.failure.as_ref().map(|failure| match failure {
        Failure::Rank {
            rank,
            ending,
            after: Some(after),
        } => {
            let after = after.as_secs_f64();
            match ending {
                Ending::Lost(why) => format!("rank {rank} was lost after {after:.1} s: {why}"),
                // It has not run.
                Ending::Unstartable(_) => format!("rank {rank} {ending}"),
                Ending::Code(_) | Ending::Signal(_) => {
                    format!("rank {rank} {ending} after {after:.1} s")
                }
            }
        }
        Failure::Rank { rank, ending, .. } => format!("rank {rank} {ending}"),
        Failure::Starter(ending) => format!("mpirun {ending} before its ranks did"),
        Failure::NotStarted(ranks) => format!("{} did not start in time", list(ranks)),
    });
    let killed = match &supervisor.killed[..] {
        [] => None,
        ranks => Some(format!("{} had to be killed", list(ranks))),
    };
    let stopped = supervisor
        .interrupted
        .map(|signal| format!("stopped by {}", signal_name(signal)));
    [failure, killed, stopped].into_iter().flatten().collect()
}

fn list(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

/// The exit code of a run: whatever ended it.
pub fn exit_code(supervisor: &Supervisor) -> u8 {
    match (&supervisor.failure, supervisor.interrupted) {
        (_, Some(signal)) => Ending::Signal(signal).exit_code(),
        (None, None) => 0,
        (Some(Failure::Rank { ending, .. }), None) => ending.exit_code(),
        // mpirun that ended well before its ranks has not done what it should.
        (Some(Failure::Starter(ending)), None) => ending.exit_code().max(1),
        (Some(Failure::NotStarted(_)), None) => 1,
    }
}

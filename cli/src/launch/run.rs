//! Runs the launcher: from the flags to the exit code.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::agent_server::AgentServer;
use super::args::LaunchArgs;
use super::error::LaunchError;
use super::exit_status::{RankExitStatus, signal_name};
use super::monitor::{JobMonitor, RendezvousMonitor};
use super::output::JobOutput;
use super::plan::{LaunchPlan, Starter};
use super::start::StartedProcesses;
use super::supervise::{
    ActionHandler, JobFailure, Supervisor, SupervisorAction, SupervisorEvent, supervise,
};
use super::sys;
use crate::error::Error;

/// The hidden command that runs an agent.
const AGENT_COMMAND: &str = "launch-agent";

/// Starts the ranks and waits for their end; returns the exit code of the run.
pub fn run(args: &LaunchArgs) -> Result<ExitCode, Error> {
    let ended =
        LaunchPlan::new(args, &|name| env::var_os(name)).and_then(|plan| launch(args, &plan));
    let code = ended.unwrap_or_else(|error| {
        print_line(&format!("error: {error}"));
        error.exit_code()
    });
    Ok(ExitCode::from(code))
}

/// Prints a line to standard error; failing to is ignored.
pub fn print_line(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// The command line of an agent: this program with the rank's command.
pub fn agent_command(plan: &LaunchPlan) -> Result<Vec<OsString>, LaunchError> {
    let own = env::current_exe().map_err(LaunchError::system(
        "the path of this program cannot be found",
    ))?;
    let head = [own.into_os_string(), AGENT_COMMAND.into(), "--".into()];
    Ok(head
        .into_iter()
        .chain(plan.command.iter().cloned())
        .collect())
}

fn launch(args: &LaunchArgs, plan: &LaunchPlan) -> Result<u8, LaunchError> {
    sys::raise_open_files();
    let ranks = plan.first..plan.first + plan.ranks;
    let output = JobOutput::new(
        plan.world,
        ranks,
        args.quiet_ranks,
        args.output_dir.as_deref(),
    )?;
    // Before any thread, as threads inherit the signal mask.
    sys::block_termination_signals().map_err(LaunchError::system("signals cannot be blocked"))?;
    let monitor = RendezvousMonitor::open(plan)?;
    let (events, happened) = mpsc::channel();
    watch_signals(events.clone(), args.grace)?;
    let host = match &plan.starter {
        Starter::Spawn { .. } => "127.0.0.1",
        Starter::Mpirun { host, .. } => host,
    };
    let (first, ranks) = (plan.first, plan.ranks);
    let server = AgentServer::listen(host, &plan.token, first, ranks, output, events.clone())?;
    let started = StartedProcesses::start(plan, &|host| server.link(host), &monitor, events)?;

    let grace = Duration::from_secs_f64(args.grace);
    let mut supervisor = Supervisor::new(plan.first, plan.ranks, grace, Instant::now());
    let launcher = LauncherActions { server, started };
    let over = AtomicBool::new(false);
    let reported = thread::scope(|scope| {
        let reporter = scope.spawn(|| report_failure(&monitor, &over));
        supervise(&mut supervisor, &happened, &launcher, &monitor);
        over.store(true, Ordering::Release);
        reporter.join().unwrap_or_default()
    });
    if let Some(JobFailure::Starter(_) | JobFailure::NotStarted(_)) = &supervisor.failure {
        launcher.started.remarks.show();
    }
    if let Some(rank) = monitor.failed_rank() {
        supervisor.set_first_failure(rank);
    }
    // The report may have been made after the last poll.
    let late = monitor.failure_report().filter(|_| !reported);
    for line in late.into_iter().chain(summary(&supervisor)) {
        print_line(&line);
    }
    Ok(exit_code(&supervisor))
}

/// Prints the failure report as soon as there is one, while ranks may still be running; returns whether there was one.
fn report_failure(monitor: &dyn JobMonitor, over: &AtomicBool) -> bool {
    while !over.load(Ordering::Acquire) {
        if let Some(report) = monitor.failure_report() {
            print_line(&report);
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Carries out the supervisor's decisions.
struct LauncherActions {
    server: AgentServer,
    started: StartedProcesses,
}

impl ActionHandler for LauncherActions {
    fn handle(&self, action: SupervisorAction) {
        match action {
            SupervisorAction::RequestStop => {}
            SupervisorAction::Signal(signal) => self.server.signal(signal),
            SupervisorAction::ReleaseAgents => self.server.release(),
            SupervisorAction::TerminateStarter => self.started.end(),
            SupervisorAction::KillStarter => self.started.kill(),
        }
    }
}

fn watch_signals(events: Sender<SupervisorEvent>, grace: f64) -> Result<(), LaunchError> {
    let mut first = true;
    let listen = move || {
        while let Ok(signal) = sys::wait_for_termination_signal() {
            if std::mem::take(&mut first) {
                print_line(&format!(
                    "\ninterrupted: the ranks have {grace} s to stop (interrupt again to kill them)"
                ))
            } else {
                print_line("\ninterrupted again: the ranks are killed")
            }
            if events.send(SupervisorEvent::Interrupted(signal)).is_err() {
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

/// The closing lines of a run that did not end normally.
pub fn summary(supervisor: &Supervisor) -> Vec<String> {
    let failure = supervisor.failure.as_ref().map(|failure| match failure {
        JobFailure::Rank {
            rank,
            status,
            after: Some(after),
        } => {
            let after = after.as_secs_f64();
            match status {
                RankExitStatus::Lost(why) => {
                    format!("rank {rank} was lost after {after:.1} s: {why}")
                }
                // It never ran.
                RankExitStatus::NotStarted(_) => format!("rank {rank} {status}"),
                RankExitStatus::Code(_) | RankExitStatus::Signal(_) => {
                    format!("rank {rank} {status} after {after:.1} s")
                }
            }
        }
        JobFailure::Rank { rank, status, .. } => format!("rank {rank} {status}"),
        JobFailure::Starter(status) => format!("mpirun {status} before its ranks did"),
        JobFailure::NotStarted(ranks) => format!("{} did not start in time", list(ranks)),
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

/// The exit code of a run.
pub fn exit_code(supervisor: &Supervisor) -> u8 {
    match (&supervisor.failure, supervisor.interrupted) {
        (_, Some(signal)) => RankExitStatus::Signal(signal).exit_code(),
        (None, None) => 0,
        (Some(JobFailure::Rank { status, .. }), None) => status.exit_code(),
        // mpirun exited before its ranks, which is a failure even with exit code 0.
        (Some(JobFailure::Starter(status)), None) => status.exit_code().max(1),
        (Some(JobFailure::NotStarted(_)), None) => 1,
    }
}

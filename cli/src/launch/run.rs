//! Runs the launcher: from the flags to the exit code.

use std::env;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use burn_megatron::comm::Token;

use super::args::LaunchArgs;
use super::error::LaunchError;
use super::exit_status::{RankExitStatus, signal_name};
use super::monitor::{JobMonitor, RendezvousMonitor};
use super::mpirun::Mpirun;
use super::output::JobOutput;
use super::plan::{LaunchPlan, Starter};
use super::processes::{RankCommand, RankProcesses};
use super::supervise::{
    ActionHandler, JobFailure, Supervisor, SupervisorAction, SupervisorEvent, supervise,
};
use super::sys;
use crate::error::Error;
use crate::terminal;

/// The variable with the address of the rendezvous.
const RENDEZVOUS: &str = "BURN_MEGATRON_RENDEZVOUS";

/// The commands of this program whose ranks communicate.
const WITH_RANKS: [&str; 3] = ["pretrain", "generate", "conformance"];

/// Starts the ranks and waits for their end; returns the exit code of the run.
pub fn run(args: &LaunchArgs) -> Result<ExitCode, Error> {
    let plan = LaunchPlan::new(args, &|name| env::var_os(name));
    let plan = plan.and_then(|plan| check_compiled(args, plan));
    let ended = plan.and_then(|plan| launch(args, plan));
    let code = ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit_code()
    });
    Ok(ExitCode::from(code))
}

/// Checks, before any process is started, that this program has the engine that its ranks will use.
fn check_compiled(args: &LaunchArgs, plan: LaunchPlan) -> Result<LaunchPlan, LaunchError> {
    let first = args.command.first().and_then(|word| word.to_str());
    let has_ranks = first.is_some_and(|word| WITH_RANKS.contains(&word));
    let (feature, is_compiled) = match plan.starter {
        Starter::Spawn { .. } => ("cuda", cfg!(feature = "cuda")),
        Starter::Mpirun { .. } => ("mpi", cfg!(feature = "mpi")),
    };
    if args.program.is_none() && has_ranks && !is_compiled {
        let engine = plan.engine();
        return Err(LaunchError::NotCompiled { engine, feature });
    }
    Ok(plan)
}

fn launch(args: &LaunchArgs, plan: LaunchPlan) -> Result<u8, LaunchError> {
    sys::raise_open_files();
    let output = JobOutput::new(plan.ranks, args.quiet_ranks, args.output_dir.as_deref())?;
    // Before any thread, as threads inherit the signal mask.
    sys::block_termination_signals().map_err(LaunchError::system("signals cannot be blocked"))?;
    let port = match plan.starter {
        Starter::Spawn { port } => port,
        Starter::Mpirun { .. } => 0,
    };
    let monitor = RendezvousMonitor::open(port, plan.ranks, &plan.token)?;
    let (events, happened) = mpsc::channel();
    watch_signals(events.clone(), args.grace)?;
    let command = RankCommand {
        variables: variables(&plan, &monitor.address())?,
        words: plan.command,
        ranks: plan.ranks,
    };
    let ranks = RankProcesses::new(command, output, events.clone())?;
    let mpirun = match &plan.starter {
        Starter::Spawn { .. } => {
            for rank in 0..plan.ranks {
                let _ = events.send(SupervisorEvent::RankReady(rank));
            }
            None
        }
        Starter::Mpirun { mpirun, arguments } => {
            Some(Mpirun::start(mpirun, arguments, plan.ranks, events)?)
        }
    };

    let grace = Duration::from_secs_f64(args.grace);
    let mut supervisor = Supervisor::new(plan.ranks, mpirun.is_some(), grace, Instant::now());
    let mut launcher = Launcher { ranks, mpirun };
    let over = AtomicBool::new(false);
    let reported = thread::scope(|scope| {
        let reporter = scope.spawn(|| report_failure(&monitor, &over));
        supervise(&mut supervisor, &happened, &mut launcher, &monitor);
        over.store(true, Ordering::Release);
        reporter.join().unwrap_or_default()
    });
    launcher.end(supervisor.failure.as_ref());
    if let Some(rank) = monitor.failed_rank() {
        supervisor.set_first_failure(rank);
    }
    // The report may have been made after the last poll.
    let late = monitor.failure_report().filter(|_| !reported);
    for line in late.into_iter().chain(summary(&supervisor)) {
        eprintln!("{line}");
    }
    Ok(exit_code(&supervisor))
}

/// The variables that are the same for all ranks.
fn variables(
    plan: &LaunchPlan,
    rendezvous: &str,
) -> Result<Vec<(&'static str, String)>, LaunchError> {
    let mut variables = vec![
        (RENDEZVOUS, rendezvous.to_owned()),
        (Token::VARIABLE, plan.token.reveal()),
        (crate::ranks::ENGINE, plan.engine().to_owned()),
    ];
    if let Some(width) = terminal::width() {
        // What a line has beside the name of its rank.
        let name = "[rank ] ".len() + (plan.ranks - 1).to_string().len();
        variables.push((terminal::VARIABLE, width.saturating_sub(name).to_string()));
    }
    if let Starter::Spawn { port } = plan.starter {
        let port = match port {
            0 => free_port().map_err(LaunchError::system("no free port for the ranks"))?,
            port => port,
        };
        // For programs that know torchrun's variables.
        variables.push(("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()));
        variables.push(("MASTER_PORT", port.to_string()));
    }
    Ok(variables)
}

/// A free port of this machine.
fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// Prints the failure report as soon as there is one, while ranks may still be running; returns whether there was one.
fn report_failure(monitor: &dyn JobMonitor, over: &AtomicBool) -> bool {
    while !over.load(Ordering::Acquire) {
        if let Some(report) = monitor.failure_report() {
            eprintln!("{report}");
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

/// The running processes. It carries out the supervisor's decisions.
struct Launcher {
    ranks: RankProcesses,
    mpirun: Option<Mpirun>,
}

impl Launcher {
    /// Leaves no process, and prints what mpirun said if it is to blame for the failure.
    fn end(self, failure: Option<&JobFailure>) {
        self.ranks.end();
        if let Some(mpirun) = self.mpirun {
            if let Some(JobFailure::Starter(_) | JobFailure::NotStarted(_)) = failure {
                mpirun.show_messages();
            }
            mpirun.end();
        }
    }
}

impl ActionHandler for Launcher {
    fn handle(&mut self, action: SupervisorAction) {
        match (action, &mut self.mpirun) {
            (SupervisorAction::Start(rank), mpirun) => {
                let variables = mpirun.as_mut().map(|mpirun| mpirun.variables(rank));
                self.ranks.start(rank, variables.unwrap_or_default());
            }
            (SupervisorAction::Signal(signal), _) => self.ranks.signal(signal),
            (SupervisorAction::ReleaseStarter, Some(mpirun)) => mpirun.release(),
            (SupervisorAction::TerminateStarter, Some(mpirun)) => mpirun.signal(libc::SIGTERM),
            (SupervisorAction::KillStarter, Some(mpirun)) => mpirun.signal(libc::SIGKILL),
            (_, _) => {}
        }
    }
}

fn watch_signals(events: Sender<SupervisorEvent>, grace: f64) -> Result<(), LaunchError> {
    let mut first = true;
    let listen = move || {
        while let Ok(signal) = sys::wait_for_termination_signal() {
            if std::mem::take(&mut first) {
                eprintln!(
                    "\ninterrupted: the ranks have {grace} s to stop (interrupt again to kill them)"
                )
            } else {
                eprintln!("\ninterrupted again: the ranks are killed")
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
        JobFailure::Guard(status) => format!("the guard process {status} before the ranks did"),
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
        // Exiting before the ranks is a failure even with exit code 0.
        (Some(JobFailure::Starter(status) | JobFailure::Guard(status)), None) => {
            status.exit_code().max(1)
        }
        (Some(JobFailure::NotStarted(_)), None) => 1,
    }
}

//! Runs one world: its ranks, from the start of the first rank to the end of the last rank.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use burn_megatron::comm::{Coordinator, FailureKind, Launch, Token};
use nix::sys::signal::Signal;

use super::args::LaunchArgs;
use super::error::LaunchError;
use super::exit_status::{RankExitStatus, signal_name};
use super::mpirun::Mpirun;
use super::output::JobOutput;
use super::plan::{LaunchPlan, Starter};
use super::processes::{RankCommand, RankProcesses};
use super::signals::TerminationSignals;
use super::supervise::{
    ActionHandler, JobFailure, Supervisor, SupervisorAction, SupervisorEvent, supervise,
};
use crate::terminal;

/// The variable with the address of the rendezvous.
const RENDEZVOUS: &str = "BURN_MEGATRON_RENDEZVOUS";
/// The variable with the number of previous restarts.
const RESTART_COUNT: &str = "BURN_MEGATRON_RESTART_COUNT";
/// The timeout of the rendezvous. Ranks set their own timeouts when they join, and a program that is not a rank never
/// joins.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Attempt at a job: the first start or a restart.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The number of the attempt, from 0.
    pub number: usize,
    /// The unique id of the launch.
    launch: String,
}

impl Attempt {
    /// Returns the first attempt.
    pub fn first() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = since.unwrap_or_default().as_secs();
        Self {
            number: 0,
            launch: format!("{seconds:x}-{}", process::id()),
        }
    }

    /// Returns the unique id of the world.
    pub fn job(&self) -> String {
        format!("{}.{}", self.launch, self.number)
    }
}

/// Result of a world.
#[derive(Debug, Default)]
pub struct RunResult {
    /// The signal that stopped the world.
    pub interrupted: Option<i32>,
    /// The first failure.
    pub failure: Option<JobFailure>,
    /// The kind of the failure, from the rendezvous.
    pub kind: Option<FailureKind>,
    /// The first line of the failure report.
    pub report: Option<String>,
    /// Whether any rank was started.
    pub has_started: bool,
    /// The closing lines that were printed.
    pub summary: Vec<String>,
    /// The exit code.
    pub code: u8,
}

/// Starts the ranks of a plan, and waits until they end. No process remains afterwards.
pub fn run(
    args: &LaunchArgs,
    plan: &LaunchPlan,
    attempt: &Attempt,
    signals: &TerminationSignals,
) -> Result<RunResult, LaunchError> {
    let port = match plan.starter {
        Starter::Spawn { port } => port,
        Starter::Mpirun { .. } => 0,
    };
    let rendezvous = host_rendezvous(port, plan.ranks, &attempt.job(), &plan.token)?;
    // The output is created after the rendezvous, which raises the limit on open files. Each rank needs up to five
    // files.
    let output = JobOutput::new(plan.ranks, args.quiet_ranks, args.output_dir.as_deref())?;
    let (events, happened) = mpsc::channel();
    signals.attach(&events);
    let command = RankCommand {
        variables: variables(plan, attempt, &rendezvous.address().to_string())?,
        words: plan.command.clone(),
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
    let mut launcher = Launcher {
        ranks,
        mpirun,
        rendezvous: &rendezvous,
        has_started: false,
    };
    let over = AtomicBool::new(false);
    let reported = thread::scope(|scope| {
        let reporter = scope.spawn(|| report_failure(&rendezvous, &over));
        supervise(&mut supervisor, &happened, &mut launcher);
        over.store(true, Ordering::Release);
        reporter.join().unwrap_or_default()
    });
    signals.detach();
    let has_started = launcher.has_started;
    launcher.end(supervisor.failure.as_ref());
    if let Some(rank) = rendezvous.failed_rank() {
        supervisor.set_first_failure(rank);
    }
    // The report may have arrived after the last poll.
    let report = rendezvous.failure_report();
    let summary = summary(&supervisor);
    for line in report.iter().filter(|_| !reported).chain(&summary) {
        eprintln!("{line}");
    }
    Ok(RunResult {
        interrupted: supervisor.interrupted,
        kind: rendezvous.failure_kind(),
        report: report.and_then(|report| report.lines().next().map(str::to_owned)),
        has_started,
        summary,
        code: exit_code(&supervisor),
        failure: supervisor.failure,
    })
}

/// Hosts the rendezvous for the ranks of the world `job` at 127.0.0.1. Port 0 selects a free port.
fn host_rendezvous(
    port: u16,
    ranks: usize,
    job: &str,
    token: &Token,
) -> Result<Coordinator, LaunchError> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let hosted = Coordinator::host(address, ranks, Some(job), token, NO_TIMEOUT, NO_TIMEOUT);
    hosted.map_err(|source| match port {
        0 => LaunchError::system("cannot open a port for the rendezvous")(source),
        port => LaunchError::PortTaken { port, source },
    })
}

/// Returns the variables that are the same for all ranks.
fn variables(
    plan: &LaunchPlan,
    attempt: &Attempt,
    rendezvous: &str,
) -> Result<Vec<(&'static str, String)>, LaunchError> {
    let mut variables = vec![
        (RENDEZVOUS, rendezvous.to_owned()),
        (Token::VARIABLE, plan.token.reveal()),
        (crate::ranks::ENGINE, plan.engine().to_owned()),
        (Launch::JOB_ID, attempt.job()),
        (RESTART_COUNT, attempt.number.to_string()),
    ];
    if let Some(width) = terminal::width() {
        // The number of characters that the prefix of a line needs.
        let name = "[rank ] ".len() + (plan.ranks - 1).to_string().len();
        variables.push((terminal::VARIABLE, width.saturating_sub(name).to_string()));
    }
    if let Starter::Spawn { port } = plan.starter {
        let port = match port {
            0 => free_port().map_err(LaunchError::system("no free port for the ranks"))?,
            port => port,
        };
        // For programs that use the variables of torchrun.
        variables.push(("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()));
        variables.push(("MASTER_PORT", port.to_string()));
    }
    Ok(variables)
}

/// Returns a free port of this machine.
fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// Prints the failure report as soon as it is available, while ranks may still be running. Returns whether there was
/// a report.
fn report_failure(rendezvous: &Coordinator, over: &AtomicBool) -> bool {
    while !over.load(Ordering::Acquire) {
        if let Some(report) = rendezvous.failure_report() {
            eprintln!("{report}");
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Running processes, to which the supervisor's actions apply.
struct Launcher<'a> {
    ranks: RankProcesses,
    mpirun: Option<Mpirun>,
    rendezvous: &'a Coordinator,
    /// Whether any rank was started.
    has_started: bool,
}

impl Launcher<'_> {
    /// Ends all processes. Prints the messages of mpirun if mpirun caused the failure.
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

impl ActionHandler for Launcher<'_> {
    fn handle(&mut self, action: SupervisorAction) {
        match (action, &mut self.mpirun) {
            (SupervisorAction::Start(rank), mpirun) => {
                let variables = mpirun.as_mut().map(|mpirun| mpirun.variables(rank));
                self.ranks.start(rank, variables.unwrap_or_default());
                self.has_started = true;
            }
            (SupervisorAction::Signal(signal), _) => self.ranks.signal(signal),
            (SupervisorAction::ReleaseStarter, Some(mpirun)) => mpirun.release(),
            (SupervisorAction::TerminateStarter, Some(mpirun)) => mpirun.signal(Signal::SIGTERM),
            (SupervisorAction::KillStarter, Some(mpirun)) => mpirun.signal(Signal::SIGKILL),
            (_, _) => {}
        }
    }

    fn request_stop(&mut self) -> bool {
        self.rendezvous.request_stop()
    }

    fn process_ended(&mut self, rank: usize, how: &str) {
        self.rendezvous.process_ended(rank, how);
    }
}

/// Returns the closing lines of a run that did not end normally.
pub fn summary(supervisor: &Supervisor) -> Vec<String> {
    let failure = supervisor.failure.as_ref().map(|failure| match failure {
        JobFailure::Rank {
            rank,
            status,
            after,
        } => {
            let seconds = after.unwrap_or_default().as_secs_f64();
            match status {
                RankExitStatus::Lost(why) if after.is_some() => {
                    format!("rank {rank} was lost after {seconds:.1} s: {why}")
                }
                RankExitStatus::Code(_) | RankExitStatus::Signal(_) if after.is_some() => {
                    format!("rank {rank} {status} after {seconds:.1} s")
                }
                // The rank never ran.
                _ => format!("rank {rank} {status}"),
            }
        }
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

/// Returns the exit code of a run.
pub fn exit_code(supervisor: &Supervisor) -> u8 {
    match (&supervisor.failure, supervisor.interrupted) {
        (_, Some(signal)) => RankExitStatus::Signal(signal).exit_code(),
        (None, None) => 0,
        (Some(JobFailure::Rank { status, .. }), None) => status.exit_code(),
        // An exit before the ranks is a failure, even with exit code 0.
        (Some(JobFailure::Starter(status) | JobFailure::Guard(status)), None) => {
            status.exit_code().max(1)
        }
        (Some(JobFailure::NotStarted(_)), None) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rendezvous_is_at_a_port_of_this_machine() {
        let token = Token::random().unwrap();
        let here = host_rendezvous(0, 2, "a.0", &token).unwrap();
        assert!(here.address().ip().is_loopback());
        // No rank has joined yet.
        assert!(!here.request_stop());
        assert_eq!(here.failure_report(), None);
        let error = host_rendezvous(here.address().port(), 2, "a.0", &token);
        assert!(matches!(error, Err(LaunchError::PortTaken { .. })));
    }
}

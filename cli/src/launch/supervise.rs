//! Supervises the ranks from the start of the first rank to the exit of the last rank. Decides how to react to a
//! failed rank and to Ctrl-C.
//!
//! [`Supervisor`] is a pure state machine: its inputs are events and times, and its outputs are actions.
//! [`supervise`] runs it.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::exit_status::RankExitStatus;

/// Timeout for all ranks to be started.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The time that ranks may still run after a rank has failed. They are notified and exit on their own.
const FAILURE_GRACE: Duration = Duration::from_secs(5);
/// The time that ranks may run after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Timeout for the system to end a process.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Timeout for mpirun to exit after its ranks.
const STARTER_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Event to which the supervisor reacts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SupervisorEvent {
    /// A rank can be started.
    RankReady(usize),
    /// A rank has exited.
    RankExited(usize, RankExitStatus),
    /// SIGINT, SIGTERM or SIGHUP was received.
    Interrupted(i32),
    /// mpirun has exited.
    StarterExited(RankExitStatus),
    /// The guard has exited.
    GuardExited(RankExitStatus),
}

/// Action of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisorAction {
    /// Start a rank.
    Start(usize),
    /// Ask the ranks to stop after their current step.
    RequestStop,
    /// Send a signal to every rank.
    Signal(Signal),
    /// Let mpirun exit, because no rank is running.
    ReleaseStarter,
    /// End mpirun.
    TerminateStarter,
    /// Kill mpirun.
    KillStarter,
}

/// Handler that carries out actions.
pub trait ActionHandler {
    /// Carries out any action except [`SupervisorAction::RequestStop`].
    fn handle(&mut self, action: SupervisorAction);

    /// Asks every rank to finish its step and stop. Returns whether the ranks have joined the rendezvous.
    fn request_stop(&mut self) -> bool;

    /// Reports to the rendezvous that the process of a rank has exited. `how` describes the exit.
    fn process_ended(&mut self, rank: usize, how: &str);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankState {
    Pending,
    Running(Instant),
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobPhase {
    Starting,
    Running,
    /// The ranks were asked to stop.
    StopRequested,
    /// A rank has failed.
    Failed,
    Terminated,
    Killed,
    /// All ranks have exited, but mpirun has not.
    AllExited,
    /// mpirun was asked to exit.
    StarterTerminated,
    Done,
}

/// Reason why a run has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobFailure {
    /// This rank failed first, `after` this time since its start.
    Rank {
        rank: usize,
        status: RankExitStatus,
        after: Option<Duration>,
    },
    /// mpirun exited before its ranks.
    Starter(RankExitStatus),
    /// The guard exited before the ranks.
    Guard(RankExitStatus),
    /// These ranks were not started in time.
    NotStarted(Vec<usize>),
}

/// State of a run.
pub struct Supervisor {
    ranks: Vec<RankState>,
    grace: Duration,
    phase: JobPhase,
    deadline: Option<Instant>,
    /// Whether mpirun has exited. Also true if there is no mpirun.
    starter_ended: bool,
    /// The signal that stopped the run.
    pub interrupted: Option<i32>,
    /// The first failure.
    pub failure: Option<JobFailure>,
    /// The ranks that failed on their own, in the order of their exits.
    failures: Vec<JobFailure>,
    /// The ranks that were ended by SIGKILL.
    pub killed: Vec<usize>,
}

impl Supervisor {
    /// Creates the supervisor of `ranks` ranks. With `through_mpirun`, mpirun starts them. The ranks have `grace` to
    /// stop after Ctrl-C.
    pub fn new(ranks: usize, through_mpirun: bool, grace: Duration, now: Instant) -> Self {
        Self {
            ranks: vec![RankState::Pending; ranks],
            grace,
            phase: JobPhase::Starting,
            deadline: Some(now + START_TIMEOUT),
            starter_ended: !through_mpirun,
            interrupted: None,
            failure: None,
            failures: Vec::new(),
            killed: Vec::new(),
        }
    }

    /// Handles an event, and returns the next action.
    pub fn on_event(&mut self, event: SupervisorEvent, now: Instant) -> Option<SupervisorAction> {
        match event {
            SupervisorEvent::RankReady(rank) => self.ready(rank, now),
            SupervisorEvent::RankExited(rank, status) => self.ended(rank, status, now),
            SupervisorEvent::Interrupted(signal) => self.interrupted(signal, now),
            SupervisorEvent::StarterExited(status) => self.starter_ended(status, now),
            SupervisorEvent::GuardExited(status) => self.guard_ended(status, now),
        }
    }

    /// Sets the rank that failed first according to the rendezvous. A rank that was notified of the failure may have
    /// exited earlier.
    pub fn set_first_failure(&mut self, culprit: usize) {
        let is_its = |failure: &&JobFailure| matches!(failure, JobFailure::Rank { rank, .. } if *rank == culprit);
        if let Some(failure) = self.failures.iter().find(is_its) {
            self.failure = Some(failure.clone());
        }
    }

    /// Handles the timeout of a phase, and returns the next action.
    pub fn on_timeout(&mut self, now: Instant) -> Option<SupervisorAction> {
        match self.phase {
            JobPhase::Starting => {
                let missing = self.ranks_where(|rank| rank == RankState::Pending);
                self.failure.get_or_insert(JobFailure::NotStarted(missing));
                self.kill(now)
            }
            JobPhase::Failed => {
                self.enter(JobPhase::Terminated, now, Some(TERM_GRACE));
                Some(SupervisorAction::Signal(Signal::SIGTERM))
            }
            JobPhase::StopRequested | JobPhase::Terminated => self.kill(now),
            JobPhase::Killed | JobPhase::AllExited if !self.starter_ended => {
                self.enter(JobPhase::StarterTerminated, now, Some(KILL_GRACE));
                Some(SupervisorAction::TerminateStarter)
            }
            JobPhase::StarterTerminated if !self.starter_ended => {
                self.enter(JobPhase::Done, now, None);
                Some(SupervisorAction::KillStarter)
            }
            JobPhase::Killed | JobPhase::AllExited | JobPhase::StarterTerminated => {
                self.enter(JobPhase::Done, now, None);
                None
            }
            JobPhase::Running | JobPhase::Done => None,
        }
    }

    /// Returns the time at which the current phase times out.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.phase == JobPhase::Done
    }

    fn ready(&mut self, rank: usize, now: Instant) -> Option<SupervisorAction> {
        if *self.state(rank)? != RankState::Pending {
            return None;
        }
        if self.phase != JobPhase::Starting {
            // The run is over before this rank has started.
            *self.state(rank)? = RankState::Exited;
            let none_left = self.ranks.iter().all(|rank| *rank == RankState::Exited);
            return none_left.then(|| self.all_ended(now)).flatten();
        }
        *self.state(rank)? = RankState::Running(now);
        if !self.ranks.contains(&RankState::Pending) {
            self.enter(JobPhase::Running, now, None);
        }
        Some(SupervisorAction::Start(rank))
    }

    fn ended(
        &mut self,
        rank: usize,
        status: RankExitStatus,
        now: Instant,
    ) -> Option<SupervisorAction> {
        let before = std::mem::replace(self.state(rank)?, RankState::Exited);
        if before == RankState::Exited {
            return None;
        }
        let expected = status.is_success() || self.interrupted.is_some() && is_stop(&status);
        if !expected {
            let after = match before {
                RankState::Running(since) => Some(now - since),
                _ => None,
            };
            let failure = JobFailure::Rank {
                rank,
                status,
                after,
            };
            // An exit after a signal of the launcher is not a failure of the rank.
            let by_itself = matches!(
                self.phase,
                JobPhase::Starting | JobPhase::Running | JobPhase::Failed
            );
            if by_itself {
                self.failures.push(failure.clone());
            }
            self.failure.get_or_insert(failure);
        }
        if self
            .ranks_where(|rank| rank != RankState::Exited)
            .is_empty()
        {
            return self.all_ended(now);
        }
        match (self.phase, expected) {
            (JobPhase::Starting | JobPhase::Running, false) => {
                self.enter(JobPhase::Failed, now, Some(FAILURE_GRACE));
                None
            }
            (JobPhase::Killed, _) if self.running().is_empty() => self.on_timeout(now),
            _ => None,
        }
    }

    fn all_ended(&mut self, now: Instant) -> Option<SupervisorAction> {
        match (self.phase, self.starter_ended) {
            (JobPhase::AllExited | JobPhase::StarterTerminated | JobPhase::Done, _) => None,
            (_, true) => {
                self.enter(JobPhase::Done, now, None);
                None
            }
            (_, false) => {
                self.enter(JobPhase::AllExited, now, Some(STARTER_EXIT_TIMEOUT));
                Some(SupervisorAction::ReleaseStarter)
            }
        }
    }

    fn interrupted(&mut self, signal: i32, now: Instant) -> Option<SupervisorAction> {
        match self.phase {
            JobPhase::Starting | JobPhase::Running => {
                self.interrupted = Some(signal);
                self.enter(JobPhase::StopRequested, now, Some(self.grace));
                Some(SupervisorAction::RequestStop)
            }
            JobPhase::StopRequested | JobPhase::Failed | JobPhase::Terminated => self.kill(now),
            JobPhase::Killed
            | JobPhase::AllExited
            | JobPhase::StarterTerminated
            | JobPhase::Done => None,
        }
    }

    fn starter_ended(&mut self, status: RankExitStatus, now: Instant) -> Option<SupervisorAction> {
        self.starter_ended = true;
        match self.phase {
            JobPhase::AllExited | JobPhase::StarterTerminated => {
                self.enter(JobPhase::Done, now, None);
                None
            }
            JobPhase::Killed | JobPhase::Done => None,
            _ => {
                self.failure.get_or_insert(JobFailure::Starter(status));
                self.enter(JobPhase::Killed, now, Some(KILL_GRACE));
                Some(SupervisorAction::Signal(Signal::SIGKILL))
            }
        }
    }

    /// Kills the ranks if the guard exits too early. Without the guard, processes could outlive the launcher.
    fn guard_ended(&mut self, status: RankExitStatus, now: Instant) -> Option<SupervisorAction> {
        match self.phase {
            JobPhase::Starting | JobPhase::Running | JobPhase::Failed | JobPhase::StopRequested => {
                self.failure.get_or_insert(JobFailure::Guard(status));
                self.kill(now)
            }
            _ => None,
        }
    }

    fn kill(&mut self, now: Instant) -> Option<SupervisorAction> {
        self.killed = self.running();
        self.enter(JobPhase::Killed, now, Some(KILL_GRACE));
        Some(SupervisorAction::Signal(Signal::SIGKILL))
    }

    fn enter(&mut self, phase: JobPhase, now: Instant, lasts: Option<Duration>) {
        self.phase = phase;
        self.deadline = lasts.map(|lasts| now + lasts);
    }

    fn state(&mut self, rank: usize) -> Option<&mut RankState> {
        self.ranks.get_mut(rank)
    }

    fn running(&self) -> Vec<usize> {
        self.ranks_where(|rank| matches!(rank, RankState::Running(_)))
    }

    fn ranks_where(&self, is: impl Fn(RankState) -> bool) -> Vec<usize> {
        let numbered = self.ranks.iter().enumerate();
        let found = numbered.filter(|(_, rank)| is(**rank));
        found.map(|(rank, _)| rank).collect()
    }
}

/// Returns whether a rank exited like a rank that is asked to stop.
fn is_stop(status: &RankExitStatus) -> bool {
    match status {
        RankExitStatus::Signal(signal) => [libc::SIGTERM, libc::SIGKILL].contains(signal),
        RankExitStatus::Code(code) => {
            [libc::SIGHUP, libc::SIGINT, libc::SIGTERM].contains(&(code - 128))
        }
        RankExitStatus::NotStarted(_) | RankExitStatus::Lost(_) => false,
    }
}

/// Runs the supervisor until the end of the job.
pub fn supervise(
    supervisor: &mut Supervisor,
    events: &Receiver<SupervisorEvent>,
    handler: &mut dyn ActionHandler,
) {
    while !supervisor.is_done() {
        let event = match supervisor.deadline() {
            Some(deadline) => {
                events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            }
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if let Ok(SupervisorEvent::RankExited(rank, status)) = &event {
            handler.process_ended(*rank, &status.to_string());
        }
        let now = Instant::now();
        let action = match event {
            Ok(event) => supervisor.on_event(event, now),
            Err(RecvTimeoutError::Timeout) => supervisor.on_timeout(now),
            // All senders were dropped.
            Err(RecvTimeoutError::Disconnected) => return,
        };
        match action {
            None => {}
            // Ranks that have not joined the rendezvous get SIGTERM instead.
            Some(SupervisorAction::RequestStop) if handler.request_stop() => {}
            Some(SupervisorAction::RequestStop) => {
                handler.handle(SupervisorAction::Signal(Signal::SIGTERM))
            }
            Some(action) => handler.handle(action),
        }
    }
}

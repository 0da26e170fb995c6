//! From the start of the ranks to the end of the last: what is done when one fails, and on Ctrl-C.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::ending::Ending;
use super::watch::Watch;

/// How long the ranks may take until all have been started.
const START: Duration = Duration::from_secs(120);
/// How long ranks may run on after one has failed: they learn of it and end by themselves.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// How long they may run on after SIGTERM.
const AFTER_TERM: Duration = Duration::from_secs(2);
/// How long the system may take to end a process.
const AFTER_KILL: Duration = Duration::from_secs(2);
/// How long mpirun may take to end after its ranks.
const AFTER_ALL: Duration = Duration::from_secs(10);

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A rank is about to run.
    Joined(usize),
    /// A rank has ended.
    Ended(usize, Ending),
    /// The process that keeps a rank has ended.
    KeeperGone(usize),
    /// SIGINT, SIGTERM or SIGHUP came.
    Interrupted(i32),
    /// What started the ranks has ended: mpirun, and how; or the last keeper.
    StarterEnded(Option<Ending>),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the ranks to stop after this step.
    RequestStop,
    /// Send a signal to every rank.
    Signal(i32),
    /// Let the keepers go: no rank runs.
    Leave,
    /// End what started the ranks, with what it still has.
    EndStarter,
    /// Kill it.
    KillStarter,
}

/// Who can do it.
pub trait Controls {
    /// Does one thing, [`Action::RequestStop`] excepted.
    fn act(&self, action: Action);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    Awaited,
    Running(Instant),
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    /// They were asked to stop.
    Asked,
    /// One has failed.
    Failed,
    Terminated,
    Killed,
    /// All have ended, and what started them has not.
    Leaving,
    /// So that has been asked to end.
    Ending,
    Done,
}

/// Why a run has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A rank ended first, so long after its start.
    Rank {
        rank: usize,
        ending: Ending,
        after: Option<Duration>,
    },
    /// mpirun ended before its ranks.
    Starter(Ending),
    /// Ranks that never came.
    NotStarted(Vec<usize>),
}

/// What is known of a run, and what is next.
pub struct Supervisor {
    first: usize,
    ranks: Vec<Rank>,
    grace: Duration,
    phase: Phase,
    until: Option<Instant>,
    starter_ended: bool,
    /// The signal that ended the run.
    pub interrupted: Option<i32>,
    /// What ended the run.
    pub failure: Option<Failure>,
    /// The ranks that failed by themselves, in the order of their ends.
    failures: Vec<Failure>,
    /// The ranks that only SIGKILL could end.
    pub killed: Vec<usize>,
}

impl Supervisor {
    /// Awaits `ranks` ranks from `first` on; `grace` is what they get to end on Ctrl-C.
    pub fn new(first: usize, ranks: usize, grace: Duration, now: Instant) -> Self {
        Self {
            first,
            ranks: vec![Rank::Awaited; ranks],
            grace,
            phase: Phase::Starting,
            until: Some(now + START),
            starter_ended: false,
            interrupted: None,
            failure: None,
            failures: Vec::new(),
            killed: Vec::new(),
        }
    }

    /// Takes in what happened.
    pub fn on(&mut self, event: Event, now: Instant) -> Option<Action> {
        match event {
            Event::Joined(rank) => self.joined(rank, now),
            Event::Ended(rank, ending) => self.ended(rank, ending, now),
            Event::KeeperGone(rank) => match self.state(rank) {
                Some(Rank::Awaited) => {
                    let reason = "the process that keeps it ended before".to_owned();
                    self.ended(rank, Ending::Unstartable(reason), now)
                }
                // Its connection ends as well, with the rest of its output.
                _ => None,
            },
            Event::Interrupted(signal) => self.interrupted(signal, now),
            Event::StarterEnded(ending) => self.starter_ended(ending, now),
        }
    }

    /// The rank that is known to have failed first: one that heard of it may have ended before it.
    pub fn blame(&mut self, culprit: usize) {
        let is_its =
            |failure: &&Failure| matches!(failure, Failure::Rank { rank, .. } if *rank == culprit);
        if let Some(failure) = self.failures.iter().find(is_its) {
            self.failure = Some(failure.clone());
        }
    }

    /// Goes on when the time of a phase is over.
    pub fn late(&mut self, now: Instant) -> Option<Action> {
        match self.phase {
            Phase::Starting => {
                let missing = self.which(|rank| rank == Rank::Awaited);
                self.failure.get_or_insert(Failure::NotStarted(missing));
                self.kill(now)
            }
            Phase::Failed => {
                self.enter(Phase::Terminated, now, Some(AFTER_TERM));
                Some(Action::Signal(libc::SIGTERM))
            }
            Phase::Asked | Phase::Terminated => self.kill(now),
            Phase::Killed | Phase::Leaving if !self.starter_ended => {
                self.enter(Phase::Ending, now, Some(AFTER_KILL));
                Some(Action::EndStarter)
            }
            Phase::Ending if !self.starter_ended => {
                self.enter(Phase::Done, now, None);
                Some(Action::KillStarter)
            }
            Phase::Killed | Phase::Leaving | Phase::Ending => {
                self.enter(Phase::Done, now, None);
                None
            }
            Phase::Running | Phase::Done => None,
        }
    }

    /// When it is too late for what is awaited.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    fn joined(&mut self, rank: usize, now: Instant) -> Option<Action> {
        *self.state(rank)? = Rank::Running(now);
        let all = self.which(|rank| rank == Rank::Awaited).is_empty();
        if all && self.phase == Phase::Starting {
            self.enter(Phase::Running, now, None);
        }
        None
    }

    fn ended(&mut self, rank: usize, ending: Ending, now: Instant) -> Option<Action> {
        let before = std::mem::replace(self.state(rank)?, Rank::Ended);
        if before == Rank::Ended {
            return None;
        }
        let expected = ending.is_success() || self.interrupted.is_some() && is_stop(&ending);
        if !expected {
            let after = match before {
                Rank::Running(since) => Some(now - since),
                _ => None,
            };
            let failure = Failure::Rank {
                rank,
                ending,
                after,
            };
            // What ended by a signal of ours says nothing.
            let by_itself = matches!(self.phase, Phase::Starting | Phase::Running | Phase::Failed);
            if by_itself {
                self.failures.push(failure.clone());
            }
            self.failure.get_or_insert(failure);
        }
        if self.which(|rank| rank != Rank::Ended).is_empty() {
            return self.all_ended(now);
        }
        match (self.phase, expected) {
            (Phase::Starting | Phase::Running, false) => {
                self.enter(Phase::Failed, now, Some(AFTER_FAILURE));
                None
            }
            (Phase::Killed, _) if self.running().is_empty() => self.late(now),
            _ => None,
        }
    }

    fn all_ended(&mut self, now: Instant) -> Option<Action> {
        match (self.phase, self.starter_ended) {
            (Phase::Leaving | Phase::Ending | Phase::Done, _) => None,
            (_, true) => {
                self.enter(Phase::Done, now, None);
                None
            }
            (_, false) => {
                self.enter(Phase::Leaving, now, Some(AFTER_ALL));
                Some(Action::Leave)
            }
        }
    }

    fn interrupted(&mut self, signal: i32, now: Instant) -> Option<Action> {
        match self.phase {
            Phase::Starting | Phase::Running => {
                self.interrupted = Some(signal);
                self.enter(Phase::Asked, now, Some(self.grace));
                Some(Action::RequestStop)
            }
            Phase::Asked | Phase::Failed | Phase::Terminated => self.kill(now),
            Phase::Killed | Phase::Leaving | Phase::Ending | Phase::Done => None,
        }
    }

    fn starter_ended(&mut self, ending: Option<Ending>, now: Instant) -> Option<Action> {
        self.starter_ended = true;
        match self.phase {
            Phase::Leaving | Phase::Ending => {
                self.enter(Phase::Done, now, None);
                None
            }
            Phase::Killed | Phase::Done => None,
            _ => {
                // Of keepers, each one tells of its rank.
                if let Some(ending) = ending {
                    self.failure.get_or_insert(Failure::Starter(ending));
                }
                self.enter(Phase::Killed, now, Some(AFTER_KILL));
                Some(Action::Signal(libc::SIGKILL))
            }
        }
    }

    fn kill(&mut self, now: Instant) -> Option<Action> {
        self.killed = self.running();
        self.enter(Phase::Killed, now, Some(AFTER_KILL));
        Some(Action::Signal(libc::SIGKILL))
    }

    fn enter(&mut self, phase: Phase, now: Instant, lasts: Option<Duration>) {
        self.phase = phase;
        self.until = lasts.map(|lasts| now + lasts);
    }

    fn state(&mut self, rank: usize) -> Option<&mut Rank> {
        self.ranks.get_mut(rank.checked_sub(self.first)?)
    }

    fn running(&self) -> Vec<usize> {
        self.which(|rank| matches!(rank, Rank::Running(_)))
    }

    fn which(&self, is: impl Fn(Rank) -> bool) -> Vec<usize> {
        let numbered = self.ranks.iter().enumerate();
        let found = numbered.filter(|(_, rank)| is(**rank));
        found.map(|(index, _)| self.first + index).collect()
    }
}

/// Whether a rank ended as one does that was asked to stop.
fn is_stop(ending: &Ending) -> bool {
    match ending {
        Ending::Signal(signal) => [libc::SIGTERM, libc::SIGKILL].contains(signal),
        Ending::Code(code) => [libc::SIGHUP, libc::SIGINT, libc::SIGTERM].contains(&(code - 128)),
        Ending::Unstartable(_) | Ending::Lost(_) => false,
    }
}

/// Sees the ranks through to their end.
pub fn conduct(
    supervisor: &mut Supervisor,
    events: &Receiver<Event>,
    controls: &dyn Controls,
    watch: &dyn Watch,
) {
    while !supervisor.is_done() {
        let event = match supervisor.until() {
            Some(until) => events.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if let Ok(Event::Ended(rank, ending)) = &event {
            watch.process_ended(*rank, &ending.to_string());
        }
        let now = Instant::now();
        let action = match event {
            Ok(event) => supervisor.on(event, now),
            Err(RecvTimeoutError::Timeout) => supervisor.late(now),
            // Nothing can happen any more.
            Err(RecvTimeoutError::Disconnected) => return,
        };
        match action {
            None => {}
            // Who does not listen to the rendezvous gets the signal.
            Some(Action::RequestStop) if watch.request_stop() => {}
            Some(Action::RequestStop) => controls.act(Action::Signal(libc::SIGTERM)),
            Some(action) => controls.act(action),
        }
    }
}

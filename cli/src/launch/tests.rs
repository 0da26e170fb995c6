//! What the supervisor decides, event by event, and what the launcher says of it.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::exit_status::RankExitStatus;
use super::monitor::JobMonitor;
use super::run::{exit_code, summary};
use super::supervise::{
    ActionHandler, JobFailure, Supervisor, SupervisorAction, SupervisorEvent, supervise,
};

const GRACE: Duration = Duration::from_secs(30);
const TERM: SupervisorAction = SupervisorAction::Signal(libc::SIGTERM);
const KILL: SupervisorAction = SupervisorAction::Signal(libc::SIGKILL);

/// A supervisor of ranks 4, 5 and 6, which all run, and a clock.
struct Story {
    supervisor: Supervisor,
    now: Instant,
}

impl Story {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            supervisor: Supervisor::new(4, 3, GRACE, now),
            now,
        }
    }

    fn running() -> Self {
        let mut story = Self::new();
        for rank in 4..7 {
            assert_eq!(story.on(SupervisorEvent::AgentConnected(rank)), None);
        }
        story
    }

    fn on(&mut self, event: SupervisorEvent) -> Option<SupervisorAction> {
        self.supervisor.on_event(event, self.now)
    }

    fn ended(&mut self, rank: usize, status: RankExitStatus) -> Option<SupervisorAction> {
        self.on(SupervisorEvent::RankExited(rank, status))
    }

    /// Lets the time of the phase pass, and checks how long it was.
    #[track_caller]
    fn after(&mut self, seconds: u64) -> Option<SupervisorAction> {
        let until = self
            .supervisor
            .deadline()
            .expect("a phase that ends by itself");
        assert_eq!(until - self.now, Duration::from_secs(seconds));
        self.now = until;
        self.supervisor.on_timeout(until)
    }

    #[track_caller]
    fn ends(self, code: u8, lines: &[&str]) {
        assert!(self.supervisor.is_done());
        assert_eq!(summary(&self.supervisor), lines);
        assert_eq!(exit_code(&self.supervisor), code);
    }
}

#[test]
fn a_run_without_trouble() {
    let mut story = Story::running();
    assert_eq!(story.supervisor.deadline(), None, "a run may last");
    assert_eq!(story.ended(5, RankExitStatus::Code(0)), None);
    assert_eq!(story.ended(4, RankExitStatus::Code(0)), None);
    assert_eq!(
        story.ended(6, RankExitStatus::Code(0)),
        Some(SupervisorAction::ReleaseAgents)
    );
    assert_eq!(story.on(SupervisorEvent::AgentExited(4)), None);
    assert_eq!(story.on(SupervisorEvent::StarterExited(None)), None);
    story.ends(0, &[]);
}

#[test]
fn a_rank_fails_and_the_others_do_not_end_by_themselves() {
    let mut story = Story::running();
    story.now += Duration::from_millis(12_300);
    assert_eq!(story.ended(5, RankExitStatus::Signal(9)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.ended(4, RankExitStatus::Signal(15)), None);
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(
        story.ended(6, RankExitStatus::Signal(9)),
        Some(SupervisorAction::ReleaseAgents)
    );
    // mpirun takes its time, and longer than that.
    assert_eq!(story.after(10), Some(SupervisorAction::TerminateStarter));
    assert_eq!(story.after(2), Some(SupervisorAction::KillStarter));
    story.ends(
        137,
        &[
            "rank 5 ended by signal 9 (SIGKILL) after 12.3 s",
            "rank 6 had to be killed",
        ],
    );
}

#[test]
fn a_keeper_that_even_sigkill_does_not_reach() {
    let mut story = Story::running();
    assert_eq!(story.ended(4, RankExitStatus::Code(3)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(story.after(2), Some(SupervisorAction::TerminateStarter));
    assert_eq!(story.on(SupervisorEvent::StarterExited(None)), None);
    story.ends(
        3,
        &[
            "rank 4 ended with exit code 3 after 0.0 s",
            "ranks 5, 6 had to be killed",
        ],
    );
}

#[test]
fn ctrl_c_lets_the_ranks_stop() {
    let mut story = Story::running();
    assert_eq!(
        story.on(SupervisorEvent::Interrupted(2)),
        Some(SupervisorAction::RequestStop)
    );
    assert_eq!(story.ended(4, RankExitStatus::Code(130)), None);
    assert_eq!(story.ended(5, RankExitStatus::Signal(15)), None);
    assert_eq!(
        story.ended(6, RankExitStatus::Code(0)),
        Some(SupervisorAction::ReleaseAgents)
    );
    story.on(SupervisorEvent::StarterExited(None));
    story.ends(130, &["stopped by signal 2 (SIGINT)"]);
}

#[test]
fn a_second_ctrl_c_and_the_end_of_the_grace_kill() {
    let mut twice = Story::running();
    twice.on(SupervisorEvent::Interrupted(15));
    assert_eq!(twice.on(SupervisorEvent::Interrupted(2)), Some(KILL));
    assert_eq!(twice.on(SupervisorEvent::Interrupted(2)), None);
    let mut late = Story::running();
    late.on(SupervisorEvent::Interrupted(15));
    assert_eq!(late.after(30), Some(KILL));
    for mut story in [twice, late] {
        for rank in 4..7 {
            story.ended(rank, RankExitStatus::Signal(9));
        }
        story.on(SupervisorEvent::StarterExited(None));
        story.ends(
            143,
            &[
                "ranks 4, 5, 6 had to be killed",
                "stopped by signal 15 (SIGTERM)",
            ],
        );
    }
}

#[test]
fn a_fault_while_stopping_is_told() {
    let mut story = Story::running();
    story.on(SupervisorEvent::Interrupted(2));
    assert_eq!(story.ended(4, RankExitStatus::Signal(11)), None);
    story.ended(5, RankExitStatus::Code(130));
    assert_eq!(
        story.ended(6, RankExitStatus::Code(130)),
        Some(SupervisorAction::ReleaseAgents)
    );
    story.on(SupervisorEvent::StarterExited(None));
    let lines = [
        "rank 4 ended by signal 11 (SIGSEGV) after 0.0 s",
        "stopped by signal 2 (SIGINT)",
    ];
    story.ends(130, &lines);
}

#[test]
fn mpirun_dies_first() {
    let mut story = Story::running();
    let killed = SupervisorEvent::StarterExited(Some(RankExitStatus::Signal(9)));
    assert_eq!(story.on(killed), Some(KILL));
    for rank in 4..7 {
        assert_eq!(story.ended(rank, RankExitStatus::Signal(9)), None);
    }
    story.ends(
        137,
        &["mpirun ended by signal 9 (SIGKILL) before its ranks did"],
    );
}

#[test]
fn mpirun_starts_nothing() {
    let mut story = Story::new();
    let ended = SupervisorEvent::StarterExited(Some(RankExitStatus::Code(0)));
    assert_eq!(story.on(ended), Some(KILL));
    assert_eq!(story.after(2), None);
    story.ends(1, &["mpirun ended with exit code 0 before its ranks did"]);
}

#[test]
fn ranks_that_never_start_have_a_deadline() {
    let mut story = Story::new();
    story.on(SupervisorEvent::AgentConnected(5));
    assert_eq!(story.after(120), Some(KILL));
    assert_eq!(
        story.ended(5, RankExitStatus::Signal(9)),
        Some(SupervisorAction::TerminateStarter)
    );
    story.on(SupervisorEvent::StarterExited(Some(RankExitStatus::Code(
        1,
    ))));
    story.ends(
        1,
        &[
            "ranks 4, 6 did not start in time",
            "rank 5 had to be killed",
        ],
    );
}

#[test]
fn a_keeper_that_fails_before_its_rank() {
    let mut story = Story::new();
    story.on(SupervisorEvent::AgentConnected(4));
    story.on(SupervisorEvent::AgentConnected(6));
    assert_eq!(story.on(SupervisorEvent::AgentExited(5)), None);
    assert_eq!(story.after(5), Some(TERM));
    story.ended(4, RankExitStatus::Signal(15));
    assert_eq!(
        story.ended(6, RankExitStatus::Signal(15)),
        Some(SupervisorAction::ReleaseAgents)
    );
    story.on(SupervisorEvent::StarterExited(None));
    story.ends(
        127,
        &["rank 5 could not be started: its agent exited before"],
    );
}

/// One that heard of the failure may end before the rank that failed.
#[test]
fn the_rank_that_is_known_to_have_failed_is_blamed() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(0, 3, GRACE, now);
    for event in [
        SupervisorEvent::AgentConnected(0),
        SupervisorEvent::AgentConnected(1),
        SupervisorEvent::AgentConnected(2),
        SupervisorEvent::RankExited(2, RankExitStatus::Code(3)),
        SupervisorEvent::RankExited(0, RankExitStatus::Code(1)),
    ] {
        supervisor.on_event(event, now);
    }
    assert_eq!(exit_code(&supervisor), 3);
    // Of this one nothing is known.
    supervisor.set_first_failure(1);
    assert_eq!(exit_code(&supervisor), 3);
    supervisor.set_first_failure(0);
    assert_eq!(exit_code(&supervisor), 1);
    assert_eq!(
        summary(&supervisor),
        ["rank 0 ended with exit code 1 after 0.0 s"]
    );
}

/// Remembers what it was told.
#[derive(Default)]
struct Witness {
    hears: bool,
    stops: Mutex<usize>,
    ended: Mutex<Vec<(usize, String)>>,
}

impl JobMonitor for Witness {
    fn address(&self) -> String {
        "10.0.0.1:1234".into()
    }

    fn request_stop(&self) -> bool {
        *self.stops.lock().unwrap() += 1;
        self.hears
    }

    fn failure_report(&self) -> Option<String> {
        None
    }

    fn failed_rank(&self) -> Option<usize> {
        None
    }

    fn process_ended(&self, rank: usize, how: &str) {
        self.ended.lock().unwrap().push((rank, how.to_owned()));
    }
}

#[derive(Default)]
struct Acts(RefCell<Vec<SupervisorAction>>);

impl ActionHandler for Acts {
    fn handle(&self, action: SupervisorAction) {
        self.0.borrow_mut().push(action);
    }
}

/// Two ranks that are stopped; the last of them fails.
fn supervised(monitor: &dyn JobMonitor) -> Vec<SupervisorAction> {
    let (tell, events) = mpsc::channel();
    for event in [
        SupervisorEvent::AgentConnected(0),
        SupervisorEvent::AgentConnected(1),
        SupervisorEvent::Interrupted(2),
        SupervisorEvent::RankExited(1, RankExitStatus::Code(0)),
        SupervisorEvent::RankExited(0, RankExitStatus::Signal(11)),
        SupervisorEvent::StarterExited(None),
    ] {
        tell.send(event).unwrap();
    }
    let mut supervisor = Supervisor::new(0, 2, GRACE, Instant::now());
    let acts = Acts::default();
    supervise(&mut supervisor, &events, &acts, monitor);
    assert!(matches!(
        supervisor.failure,
        Some(JobFailure::Rank { rank: 0, .. })
    ));
    acts.0.into_inner()
}

#[test]
fn ranks_that_listen_are_asked_to_stop_and_others_get_a_signal() {
    for (hears, acts) in [
        (true, &[SupervisorAction::ReleaseAgents][..]),
        (false, &[TERM, SupervisorAction::ReleaseAgents]),
    ] {
        let witness = Witness {
            hears,
            ..Witness::default()
        };
        assert_eq!(supervised(&witness), acts);
        assert_eq!(*witness.stops.lock().unwrap(), 1);
        let told = witness.ended.into_inner().unwrap();
        let ended = [
            (1, "ended with exit code 0"),
            (0, "ended by signal 11 (SIGSEGV)"),
        ];
        assert_eq!(told, ended.map(|(rank, how)| (rank, how.to_owned())));
    }
}

//! Tests the decisions of the supervisor, event by event, and the messages of the launcher.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::exit_status::RankExitStatus;
use super::supervise::{
    ActionHandler, JobFailure, Supervisor, SupervisorAction, SupervisorEvent, supervise,
};
use super::world::{exit_code, summary};

const GRACE: Duration = Duration::from_secs(30);
const TERM: SupervisorAction = SupervisorAction::Signal(Signal::SIGTERM);
const KILL: SupervisorAction = SupervisorAction::Signal(Signal::SIGKILL);

/// Supervisor of ranks 0, 1 and 2, which are started through mpirun, with a clock.
struct Story {
    supervisor: Supervisor,
    now: Instant,
}

impl Story {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            supervisor: Supervisor::new(3, true, GRACE, now),
            now,
        }
    }

    fn running() -> Self {
        let mut story = Self::new();
        for rank in 0..3 {
            let start = Some(SupervisorAction::Start(rank));
            assert_eq!(story.on(SupervisorEvent::RankReady(rank)), start);
        }
        story
    }

    fn on(&mut self, event: SupervisorEvent) -> Option<SupervisorAction> {
        self.supervisor.on_event(event, self.now)
    }

    fn ended(&mut self, rank: usize, status: RankExitStatus) -> Option<SupervisorAction> {
        self.on(SupervisorEvent::RankExited(rank, status))
    }

    /// Advances the clock to the timeout of the phase, and checks the duration.
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
    assert_eq!(story.ended(1, RankExitStatus::Code(0)), None);
    assert_eq!(story.ended(0, RankExitStatus::Code(0)), None);
    assert_eq!(
        story.ended(2, RankExitStatus::Code(0)),
        Some(SupervisorAction::ReleaseStarter)
    );
    assert_eq!(
        story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0))),
        None
    );
    story.ends(0, &[]);
}

#[test]
fn a_rank_fails_and_the_others_do_not_end_by_themselves() {
    let mut story = Story::running();
    story.now += Duration::from_millis(12_300);
    assert_eq!(story.ended(1, RankExitStatus::Signal(9)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.ended(0, RankExitStatus::Signal(15)), None);
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(
        story.ended(2, RankExitStatus::Signal(9)),
        Some(SupervisorAction::ReleaseStarter)
    );
    // mpirun takes longer than its timeout.
    assert_eq!(story.after(10), Some(SupervisorAction::TerminateStarter));
    assert_eq!(story.after(2), Some(SupervisorAction::KillStarter));
    story.ends(
        137,
        &[
            "rank 1 ended by signal 9 (SIGKILL) after 12.3 s",
            "rank 2 had to be killed",
        ],
    );
}

#[test]
fn a_rank_that_even_sigkill_does_not_end() {
    let mut story = Story::running();
    assert_eq!(story.ended(0, RankExitStatus::Code(3)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(story.after(2), Some(SupervisorAction::TerminateStarter));
    assert_eq!(
        story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0))),
        None
    );
    story.ends(
        3,
        &[
            "rank 0 ended with exit code 3 after 0.0 s",
            "ranks 1, 2 had to be killed",
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
    assert_eq!(story.ended(0, RankExitStatus::Code(130)), None);
    assert_eq!(story.ended(1, RankExitStatus::Signal(15)), None);
    assert_eq!(
        story.ended(2, RankExitStatus::Code(0)),
        Some(SupervisorAction::ReleaseStarter)
    );
    story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0)));
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
        for rank in 0..3 {
            story.ended(rank, RankExitStatus::Signal(9));
        }
        story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0)));
        story.ends(
            143,
            &[
                "ranks 0, 1, 2 had to be killed",
                "stopped by signal 15 (SIGTERM)",
            ],
        );
    }
}

#[test]
fn a_fault_while_stopping_is_told() {
    let mut story = Story::running();
    story.on(SupervisorEvent::Interrupted(2));
    assert_eq!(story.ended(0, RankExitStatus::Signal(11)), None);
    story.ended(1, RankExitStatus::Code(130));
    assert_eq!(
        story.ended(2, RankExitStatus::Code(130)),
        Some(SupervisorAction::ReleaseStarter)
    );
    story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0)));
    let lines = [
        "rank 0 ended by signal 11 (SIGSEGV) after 0.0 s",
        "stopped by signal 2 (SIGINT)",
    ];
    story.ends(130, &lines);
}

#[test]
fn mpirun_dies_first() {
    let mut story = Story::running();
    let killed = SupervisorEvent::StarterExited(RankExitStatus::Signal(9));
    assert_eq!(story.on(killed), Some(KILL));
    for rank in 0..3 {
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
    let ended = SupervisorEvent::StarterExited(RankExitStatus::Code(0));
    assert_eq!(story.on(ended), Some(KILL));
    assert_eq!(story.after(2), None);
    story.ends(1, &["mpirun ended with exit code 0 before its ranks did"]);
}

#[test]
fn ranks_that_never_start_have_a_deadline() {
    let mut story = Story::new();
    story.on(SupervisorEvent::RankReady(1));
    assert_eq!(story.after(120), Some(KILL));
    assert_eq!(
        story.ended(1, RankExitStatus::Signal(9)),
        Some(SupervisorAction::TerminateStarter)
    );
    story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(1)));
    story.ends(
        1,
        &[
            "ranks 0, 2 did not start in time",
            "rank 1 had to be killed",
        ],
    );
}

#[test]
fn a_rank_that_cannot_be_started() {
    let mut story = Story::new();
    story.on(SupervisorEvent::RankReady(0));
    story.on(SupervisorEvent::RankReady(1));
    let reason = "rank: no such file".to_owned();
    assert_eq!(story.ended(1, RankExitStatus::NotStarted(reason)), None);
    // This event is too late to start the rank.
    assert_eq!(story.on(SupervisorEvent::RankReady(2)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(
        story.ended(0, RankExitStatus::Signal(15)),
        Some(SupervisorAction::ReleaseStarter)
    );
    story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0)));
    story.ends(127, &["rank 1 could not be started: rank: no such file"]);
}

#[test]
fn ranks_that_become_ready_after_ctrl_c_are_not_started() {
    let mut story = Story::new();
    let stop = story.on(SupervisorEvent::Interrupted(2));
    assert_eq!(stop, Some(SupervisorAction::RequestStop));
    assert_eq!(story.on(SupervisorEvent::RankReady(0)), None);
    assert_eq!(story.on(SupervisorEvent::RankReady(1)), None);
    let release = story.on(SupervisorEvent::RankReady(2));
    assert_eq!(release, Some(SupervisorAction::ReleaseStarter));
    story.on(SupervisorEvent::StarterExited(RankExitStatus::Code(0)));
    story.ends(130, &["stopped by signal 2 (SIGINT)"]);
}

/// Checks that a run ends if its guard exits. Without the guard, processes of the ranks could outlive the launcher.
#[test]
fn the_run_ends_with_its_guard() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(1, false, GRACE, now);
    let start = supervisor.on_event(SupervisorEvent::RankReady(0), now);
    assert_eq!(start, Some(SupervisorAction::Start(0)));
    let killed = SupervisorEvent::GuardExited(RankExitStatus::Signal(9));
    assert_eq!(supervisor.on_event(killed, now), Some(KILL));
    let ended = SupervisorEvent::RankExited(0, RankExitStatus::Signal(9));
    assert_eq!(supervisor.on_event(ended, now), None);
    let lines = [
        "the guard process ended by signal 9 (SIGKILL) before the ranks did",
        "rank 0 had to be killed",
    ];
    Story { supervisor, now }.ends(137, &lines);
}

/// Checks that the first failed rank is reported, even if a rank that was notified of the failure ends earlier.
#[test]
fn the_rank_that_is_known_to_have_failed_is_blamed() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(3, true, GRACE, now);
    for event in [
        SupervisorEvent::RankReady(0),
        SupervisorEvent::RankReady(1),
        SupervisorEvent::RankReady(2),
        SupervisorEvent::RankExited(2, RankExitStatus::Code(3)),
        SupervisorEvent::RankExited(0, RankExitStatus::Code(1)),
    ] {
        supervisor.on_event(event, now);
    }
    assert_eq!(exit_code(&supervisor), 3);
    // The supervisor has no failure of this rank.
    supervisor.set_first_failure(1);
    assert_eq!(exit_code(&supervisor), 3);
    supervisor.set_first_failure(0);
    assert_eq!(exit_code(&supervisor), 1);
    assert_eq!(
        summary(&supervisor),
        ["rank 0 ended with exit code 1 after 0.0 s"]
    );
}

/// Recorder of the actions and the reports to the rendezvous.
#[derive(Default)]
struct Recorder {
    have_joined: bool,
    actions: Vec<SupervisorAction>,
    stops: usize,
    ended: Vec<(usize, String)>,
}

impl ActionHandler for Recorder {
    fn handle(&mut self, action: SupervisorAction) {
        self.actions.push(action);
    }

    fn request_stop(&mut self) -> bool {
        self.stops += 1;
        self.have_joined
    }

    fn process_ended(&mut self, rank: usize, how: &str) {
        self.ended.push((rank, how.to_owned()));
    }
}

/// Runs two ranks that are stopped. The last rank fails.
fn supervised(have_joined: bool) -> Recorder {
    let (tell, events) = mpsc::channel();
    for event in [
        SupervisorEvent::RankReady(0),
        SupervisorEvent::RankReady(1),
        SupervisorEvent::Interrupted(2),
        SupervisorEvent::RankExited(1, RankExitStatus::Code(0)),
        SupervisorEvent::RankExited(0, RankExitStatus::Signal(11)),
        SupervisorEvent::StarterExited(RankExitStatus::Code(0)),
    ] {
        tell.send(event).unwrap();
    }
    let mut supervisor = Supervisor::new(2, true, GRACE, Instant::now());
    let mut recorder = Recorder {
        have_joined,
        ..Recorder::default()
    };
    supervise(&mut supervisor, &events, &mut recorder);
    assert!(matches!(
        supervisor.failure,
        Some(JobFailure::Rank { rank: 0, .. })
    ));
    recorder
}

#[test]
fn ranks_that_have_joined_are_asked_to_stop_and_others_get_a_signal() {
    for (have_joined, actions) in [(true, &[][..]), (false, &[TERM])] {
        let recorder = supervised(have_joined);
        let starts = [0, 1].map(SupervisorAction::Start);
        let actions = [&starts, actions, &[SupervisorAction::ReleaseStarter]].concat();
        assert_eq!(recorder.actions, actions);
        assert_eq!(recorder.stops, 1);
        let ended = [
            (1, "ended with exit code 0"),
            (0, "ended by signal 11 (SIGSEGV)"),
        ];
        assert_eq!(
            recorder.ended,
            ended.map(|(rank, how)| (rank, how.to_owned()))
        );
    }
}

//! What the supervisor decides, event by event, and what the launcher says of it.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::ending::Ending;
use super::run::{exit_code, summary};
use super::supervise::{Action, Controls, Event, Failure, Supervisor, conduct};
use super::watch::Watch;

const GRACE: Duration = Duration::from_secs(30);
const TERM: Action = Action::Signal(libc::SIGTERM);
const KILL: Action = Action::Signal(libc::SIGKILL);

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
            assert_eq!(story.on(Event::Joined(rank)), None);
        }
        story
    }

    fn on(&mut self, event: Event) -> Option<Action> {
        self.supervisor.on(event, self.now)
    }

    fn ended(&mut self, rank: usize, ending: Ending) -> Option<Action> {
        self.on(Event::Ended(rank, ending))
    }

    /// Lets the time of the phase pass, and checks how long it was.
    #[track_caller]
    fn after(&mut self, seconds: u64) -> Option<Action> {
        let until = self
            .supervisor
            .until()
            .expect("a phase that ends by itself");
        assert_eq!(until - self.now, Duration::from_secs(seconds));
        self.now = until;
        self.supervisor.late(until)
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
    assert_eq!(story.supervisor.until(), None, "a run may last");
    assert_eq!(story.ended(5, Ending::Code(0)), None);
    assert_eq!(story.ended(4, Ending::Code(0)), None);
    assert_eq!(story.ended(6, Ending::Code(0)), Some(Action::Leave));
    assert_eq!(story.on(Event::KeeperGone(4)), None);
    assert_eq!(story.on(Event::StarterEnded(None)), None);
    story.ends(0, &[]);
}

#[test]
fn a_rank_fails_and_the_others_do_not_end_by_themselves() {
    let mut story = Story::running();
    story.now += Duration::from_millis(12_300);
    assert_eq!(story.ended(5, Ending::Signal(9)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.ended(4, Ending::Signal(15)), None);
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(story.ended(6, Ending::Signal(9)), Some(Action::Leave));
    // mpirun takes its time, and longer than that.
    assert_eq!(story.after(10), Some(Action::EndStarter));
    assert_eq!(story.after(2), Some(Action::KillStarter));
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
    assert_eq!(story.ended(4, Ending::Code(3)), None);
    assert_eq!(story.after(5), Some(TERM));
    assert_eq!(story.after(2), Some(KILL));
    assert_eq!(story.after(2), Some(Action::EndStarter));
    assert_eq!(story.on(Event::StarterEnded(None)), None);
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
    assert_eq!(story.on(Event::Interrupted(2)), Some(Action::RequestStop));
    assert_eq!(story.ended(4, Ending::Code(130)), None);
    assert_eq!(story.ended(5, Ending::Signal(15)), None);
    assert_eq!(story.ended(6, Ending::Code(0)), Some(Action::Leave));
    story.on(Event::StarterEnded(None));
    story.ends(130, &["stopped by signal 2 (SIGINT)"]);
}

#[test]
fn a_second_ctrl_c_and_the_end_of_the_grace_kill() {
    let mut twice = Story::running();
    twice.on(Event::Interrupted(15));
    assert_eq!(twice.on(Event::Interrupted(2)), Some(KILL));
    assert_eq!(twice.on(Event::Interrupted(2)), None);
    let mut late = Story::running();
    late.on(Event::Interrupted(15));
    assert_eq!(late.after(30), Some(KILL));
    for mut story in [twice, late] {
        for rank in 4..7 {
            story.ended(rank, Ending::Signal(9));
        }
        story.on(Event::StarterEnded(None));
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
    story.on(Event::Interrupted(2));
    assert_eq!(story.ended(4, Ending::Signal(11)), None);
    story.ended(5, Ending::Code(130));
    assert_eq!(story.ended(6, Ending::Code(130)), Some(Action::Leave));
    story.on(Event::StarterEnded(None));
    let lines = [
        "rank 4 ended by signal 11 (SIGSEGV) after 0.0 s",
        "stopped by signal 2 (SIGINT)",
    ];
    story.ends(130, &lines);
}

#[test]
fn mpirun_dies_first() {
    let mut story = Story::running();
    let killed = Event::StarterEnded(Some(Ending::Signal(9)));
    assert_eq!(story.on(killed), Some(KILL));
    for rank in 4..7 {
        assert_eq!(story.ended(rank, Ending::Signal(9)), None);
    }
    story.ends(
        137,
        &["mpirun ended by signal 9 (SIGKILL) before its ranks did"],
    );
}

#[test]
fn mpirun_starts_nothing() {
    let mut story = Story::new();
    let ended = Event::StarterEnded(Some(Ending::Code(0)));
    assert_eq!(story.on(ended), Some(KILL));
    assert_eq!(story.after(2), None);
    story.ends(1, &["mpirun ended with exit code 0 before its ranks did"]);
}

#[test]
fn ranks_that_never_start_have_a_deadline() {
    let mut story = Story::new();
    story.on(Event::Joined(5));
    assert_eq!(story.after(120), Some(KILL));
    assert_eq!(story.ended(5, Ending::Signal(9)), Some(Action::EndStarter));
    story.on(Event::StarterEnded(Some(Ending::Code(1))));
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
    story.on(Event::Joined(4));
    story.on(Event::Joined(6));
    assert_eq!(story.on(Event::KeeperGone(5)), None);
    assert_eq!(story.after(5), Some(TERM));
    story.ended(4, Ending::Signal(15));
    assert_eq!(story.ended(6, Ending::Signal(15)), Some(Action::Leave));
    story.on(Event::StarterEnded(None));
    story.ends(
        127,
        &["rank 5 could not be started: the process that keeps it ended before"],
    );
}

/// One that heard of the failure may end before the rank that failed.
#[test]
fn the_rank_that_is_known_to_have_failed_is_blamed() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(0, 3, GRACE, now);
    for event in [
        Event::Joined(0),
        Event::Joined(1),
        Event::Joined(2),
        Event::Ended(2, Ending::Code(3)),
        Event::Ended(0, Ending::Code(1)),
    ] {
        supervisor.on(event, now);
    }
    assert_eq!(exit_code(&supervisor), 3);
    // Of this one nothing is known.
    supervisor.blame(1);
    assert_eq!(exit_code(&supervisor), 3);
    supervisor.blame(0);
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

impl Watch for Witness {
    fn address(&self) -> String {
        "10.0.0.1:1234".into()
    }

    fn request_stop(&self) -> bool {
        *self.stops.lock().unwrap() += 1;
        self.hears
    }

    fn verdict(&self) -> Option<String> {
        None
    }

    fn culprit(&self) -> Option<usize> {
        None
    }

    fn process_ended(&self, rank: usize, how: &str) {
        self.ended.lock().unwrap().push((rank, how.to_owned()));
    }
}

#[derive(Default)]
struct Acts(RefCell<Vec<Action>>);

impl Controls for Acts {
    fn act(&self, action: Action) {
        self.0.borrow_mut().push(action);
    }
}

/// Two ranks that are stopped; the last of them fails.
fn conducted(watch: &dyn Watch) -> Vec<Action> {
    let (tell, events) = mpsc::channel();
    for event in [
        Event::Joined(0),
        Event::Joined(1),
        Event::Interrupted(2),
        Event::Ended(1, Ending::Code(0)),
        Event::Ended(0, Ending::Signal(11)),
        Event::StarterEnded(None),
    ] {
        tell.send(event).unwrap();
    }
    let mut supervisor = Supervisor::new(0, 2, GRACE, Instant::now());
    let acts = Acts::default();
    conduct(&mut supervisor, &events, &acts, watch);
    assert!(matches!(
        supervisor.failure,
        Some(Failure::Rank { rank: 0, .. })
    ));
    acts.0.into_inner()
}

#[test]
fn ranks_that_listen_are_asked_to_stop_and_others_get_a_signal() {
    for (hears, acts) in [
        (true, &[Action::Leave][..]),
        (false, &[TERM, Action::Leave]),
    ] {
        let witness = Witness {
            hears,
            ..Witness::default()
        };
        assert_eq!(conducted(&witness), acts);
        assert_eq!(*witness.stops.lock().unwrap(), 1);
        let told = witness.ended.into_inner().unwrap();
        let ended = [
            (1, "ended with exit code 0"),
            (0, "ended by signal 11 (SIGSEGV)"),
        ];
        assert_eq!(told, ended.map(|(rank, how)| (rank, how.to_owned())));
    }
}

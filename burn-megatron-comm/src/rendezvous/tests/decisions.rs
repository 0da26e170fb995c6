//! The registry by itself, with a clock of its own.

use std::time::Duration;

use crate::log::Position;
use crate::rendezvous::message::{
    CallOf, Cause, CauseKind, Down, Failure, Hello, Stand, Up, Whereabouts,
};
use crate::rendezvous::registry::{Patience, Refusal, Registry, To};

const ZERO: Duration = Duration::ZERO;
const PATIENCE: Patience = Patience {
    gather: Duration::from_secs(60),
    silence: Duration::from_secs(30),
};

fn hello(rank: usize, size: usize) -> Hello {
    Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        rank,
        size,
        world: 7,
        host: format!("node{rank}"),
        process: 100 + rank as u32,
        gather: 60.0,
        silence: 30.0,
    }
}

/// A registry that all ranks have come to.
fn full(size: usize) -> Registry {
    let mut registry = Registry::new(size, 7, PATIENCE);
    for rank in 0..size {
        let said = registry.join(hello(rank, size), ZERO).unwrap();
        let expected = match rank + 1 == size {
            true => vec![(To::All, Down::Complete)],
            false => vec![],
        };
        assert_eq!(said, expected);
    }
    registry
}

fn at(call: &str) -> Position {
    Position::At(call.into())
}

fn failed(kind: CauseKind, message: &str) -> Up {
    Up::Failed {
        cause: Cause {
            kind,
            message: message.into(),
        },
        stood: Position::Nowhere,
    }
}

/// The question that was put to these ranks.
fn asked(said: &[(To, Down)], ranks: &[usize]) -> u64 {
    let to: Vec<_> = said.iter().map(|(to, _)| *to).collect();
    let expected: Vec<_> = ranks.iter().map(|rank| To::Rank(*rank)).collect();
    assert_eq!(to, expected, "{said:?}");
    match said[0].1 {
        Down::Ask { question, .. } => question,
        ref other => panic!("{other:?} is no question"),
    }
}

fn stands(question: u64, position: Position) -> Up {
    let stand = Stand {
        position,
        came: false,
        call: None,
    };
    Up::Stands { question, stand }
}

fn failure(said: Vec<(To, Down)>) -> Failure {
    match said.as_slice() {
        [(To::All, Down::Failure(failure))] => failure.clone(),
        other => panic!("{other:?} is no failure"),
    }
}

#[test]
fn a_rank_that_dies_is_named_with_the_place_where_it_was_seen_last() {
    let mut registry = full(3);
    let late = Duration::from_secs(10);
    registry.hear(
        1,
        Up::Alive(at("call 4 barrier over world [0, 1, 2] in step 2")),
        ZERO,
    );
    let said = registry.closed(1, late);
    let question = asked(&said, &[0, 2]);
    let answer = || stands(question, at("call 5 barrier"));
    assert_eq!(registry.hear(0, answer(), late), []);
    // There is nothing more telling to wait for.
    let failure = failure(registry.hear(2, answer(), late));
    assert_eq!(failure.rank, 1);
    assert_eq!(
        failure.message,
        "its process 101 on node1 has ended without a word"
    );
    assert_eq!(
        failure.verdict,
        "ranks 0, 2 are at call 5 barrier; rank 1 has ended without a word, last seen at call 4 \
         barrier over world [0, 1, 2] in step 2"
    );
    assert_eq!(registry.failure(), Some(&failure));
    assert_eq!(registry.closed(0, late), []);
}

#[test]
fn the_most_telling_cause_wins_over_the_first() {
    let mut registry = full(3);
    let said = registry.hear(0, failed(CauseKind::Transport, "mpi: broken pipe"), ZERO);
    asked(&said, &[1, 2]);
    assert_eq!(
        registry.hear(2, failed(CauseKind::Waited, "deadline"), ZERO),
        []
    );
    assert_eq!(
        registry.tick(Duration::from_millis(200)),
        [],
        "another cause may be on its way"
    );
    let failure = failure(registry.closed(1, Duration::from_millis(220)));
    assert_eq!(failure.rank, 1);
    assert!(failure.message.contains("process 101"), "{failure:?}");
    assert!(
        failure
            .verdict
            .starts_with("ranks 0, 2 failed before any call"),
        "{failure:?}"
    );
}

#[test]
fn who_does_not_answer_is_silent_in_the_verdict() {
    let mut registry = full(2);
    registry.hear(
        1,
        Up::Alive(at("call 9 all_gather")),
        Duration::from_secs(5),
    );
    let now = Duration::from_secs(20);
    registry.hear(0, Up::Alive(Position::Nowhere), now);
    let said = registry.hear(0, failed(CauseKind::Waited, "deadline: rank 1 ..."), now);
    asked(&said, &[1]);
    assert_eq!(registry.tick(now + Duration::from_millis(900)), []);
    let failure = failure(registry.tick(now + Duration::from_secs(1)));
    assert_eq!(
        failure.verdict,
        "rank 0 failed before any call; rank 1 has not been heard of for 16 s, last seen at call \
         9 all_gather"
    );
}

#[test]
fn silence_is_a_failure() {
    let mut registry = full(2);
    let now = Duration::from_secs(29);
    registry.hear(0, Up::Alive(Position::Nowhere), now);
    assert_eq!(registry.tick(now), []);
    let now = Duration::from_secs(30);
    let said = registry.tick(now);
    let question = asked(&said, &[0]);
    registry.hear(0, stands(question, at("call 3 barrier")), now);
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_eq!(failure.rank, 1);
    assert_eq!(
        failure.message,
        "its process 101 on node1 has not been heard of for 30 s: it is stopped, or cut off"
    );
}

#[test]
fn ranks_that_never_come_are_named() {
    let mut registry = Registry::new(4, 7, PATIENCE);
    registry.join(hello(0, 4), ZERO).unwrap();
    registry.join(hello(2, 4), ZERO).unwrap();
    for now in [10, 20, 40, 59] {
        let now = Duration::from_secs(now);
        registry.hear(0, Up::Alive(Position::Nowhere), now);
        registry.hear(2, Up::Alive(Position::Nowhere), now);
        assert_eq!(registry.tick(now), []);
    }
    let now = Duration::from_secs(60);
    let question = asked(&registry.tick(now), &[0, 2]);
    registry.hear(0, stands(question, Position::Nowhere), now);
    registry.hear(2, stands(question, Position::Nowhere), now);
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_eq!(
        failure.message,
        "ranks 1, 3 have not come to the rendezvous within 60 s, where 2 of 4 ranks are; started \
         with the same address?"
    );
    assert_eq!(
        failure.verdict,
        "ranks 0, 2 have made no call; ranks 1, 3 have never come"
    );
}

#[test]
fn a_rank_that_ends_before_it_comes_is_not_waited_for() {
    let mut registry = Registry::new(2, 7, PATIENCE);
    registry.join(hello(0, 2), ZERO).unwrap();
    // One that came has its connection.
    assert_eq!(
        registry.process_ended(0, "ended with exit code 1", ZERO),
        []
    );
    let question = asked(
        &registry.process_ended(1, "ended with exit code 1", ZERO),
        &[0],
    );
    registry.hear(0, stands(question, Position::Nowhere), ZERO);
    let failure = failure(registry.tick(Duration::from_millis(250)));
    assert_eq!(failure.rank, 1);
    assert_eq!(
        failure.message,
        "its process ended with exit code 1 before it came to the rendezvous"
    );
}

#[test]
fn a_call_that_waits_learns_who_has_not_come_and_what_the_others_called() {
    let mut registry = full(3);
    let call = CallOf {
        group: 5,
        sequence: 8,
    };
    let said = registry.hear(0, Up::Where { question: 3, call }, ZERO);
    let question = asked(&said, &[0, 1, 2]);
    let answer = |came, call: Option<&str>| Up::Stands {
        question,
        stand: Stand {
            position: Position::Nowhere,
            came,
            call: call.map(str::to_owned),
        },
    };
    assert_eq!(registry.hear(0, answer(true, Some("barrier")), ZERO), []);
    assert_eq!(
        registry.hear(1, answer(true, Some("all_gather of 3 f32")), ZERO),
        []
    );
    let said = registry.hear(2, answer(false, None), ZERO);
    let found = Whereabouts {
        absent: vec![2],
        calls: vec![(0, "barrier".into()), (1, "all_gather of 3 f32".into())],
    };
    assert_eq!(
        said,
        [(To::Rank(0), Down::Whereabouts { question: 3, found })]
    );
}

#[test]
fn values_are_handed_to_readers_before_and_after_they_are_posted() {
    let mut registry = full(3);
    let (key, value) = ("id".to_owned(), vec![1, 2]);
    let read = || Up::Read { key: key.clone() };
    let posted = || Down::Posted {
        key: key.clone(),
        value: value.clone(),
    };
    assert_eq!(registry.hear(1, read(), ZERO), []);
    let post = Up::Post {
        key: key.clone(),
        value: value.clone(),
    };
    assert_eq!(registry.hear(0, post, ZERO), [(To::Rank(1), posted())]);
    assert_eq!(registry.hear(2, read(), ZERO), [(To::Rank(2), posted())]);
}

#[test]
fn the_world_ends_when_all_have_returned() {
    let mut registry = full(2);
    let calls = vec![(0, 12)];
    let said = registry.hear(1, Up::Returned(calls.clone()), ZERO);
    assert_eq!(said, [(To::All, Down::Returned { rank: 1, calls })]);
    let said = registry.hear(0, Up::Returned(vec![]), ZERO);
    assert_eq!(said, [(To::All, Down::AllReturned)]);
    // Leaving after that is no failure.
    assert_eq!(registry.closed(0, ZERO), []);
    assert!(registry.all_returned() && !registry.all_gone());
    registry.closed(1, ZERO);
    assert!(registry.all_gone());
}

#[test]
fn who_does_not_fit_is_refused_and_ends_the_world() {
    let stranger = Hello {
        world: 8,
        ..hello(1, 2)
    };
    let mut registry = Registry::new(2, 7, PATIENCE);
    registry.join(hello(0, 2), ZERO).unwrap();
    match registry.join(stranger, ZERO) {
        Err(Refusal::Stranger(reason)) => assert!(reason.contains("another run"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let refused = |hello: Hello| {
        let mut registry = Registry::new(2, 7, PATIENCE);
        registry.join(self::hello(0, 2), ZERO).unwrap();
        match registry.join(hello, ZERO) {
            Err(Refusal::Misfit { reason, said }) => {
                asked(&said, &[0]);
                reason
            }
            other => panic!("{other:?}"),
        }
    };
    let old = Hello {
        version: "0.0.1".into(),
        ..hello(1, 2)
    };
    assert!(refused(old).starts_with("rank 1 runs version 0.0.1 of burn-megatron"));
    assert_eq!(
        refused(hello(1, 4)),
        "rank 1 was told that there are 4 ranks, the rendezvous 2; give all the same WORLD_SIZE"
    );
    assert_eq!(
        refused(hello(2, 2)),
        "a process says that it is rank 2 of 2; 0 to 1 would fit"
    );
    assert_eq!(
        refused(hello(0, 2)),
        "two processes say that they are rank 0: process 100 on node0 and process 100 on node0"
    );
    let mut registry = full(2);
    match registry.join(hello(1, 2), ZERO) {
        Err(Refusal::Stranger(reason)) => assert!(reason.contains("have come already"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

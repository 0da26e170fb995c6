//! Tests of the registry without connections, with simulated time.

use std::time::Duration;

use insta::assert_snapshot;

use crate::failure_report::{FailureReport, RankPosition};
use crate::rank_runs::RankRuns;
use crate::rendezvous::GroupId;
use crate::rendezvous::message::{
    CallId, CoordinatorMessage, FailureCause, FailureKind, Hello, MissingRanks, RankMessage,
    RankStatus,
};
use crate::rendezvous::registry::{JoinError, Recipient, Registry, RendezvousTimeouts};

pub const ZERO: Duration = Duration::ZERO;
pub const TIMEOUTS: RendezvousTimeouts = RendezvousTimeouts {
    join: Duration::from_secs(60),
    heartbeat: Duration::from_secs(30),
};

pub fn hello(rank: usize, size: usize) -> Hello {
    Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        rank,
        size,
        world: 7,
        host: format!("node{rank}"),
        process: 100 + rank as u32,
        join_timeout: 60.0,
        heartbeat_timeout: 30.0,
    }
}

/// Creates a registry that all ranks have joined.
pub fn full(size: usize) -> Registry {
    let mut registry = Registry::new(size, 7, TIMEOUTS);
    for rank in 0..size {
        let outgoing = registry.join(hello(rank, size), ZERO).unwrap();
        let expected = if rank + 1 == size {
            vec![(Recipient::All, CoordinatorMessage::AllJoined)]
        } else {
            vec![]
        };
        assert_eq!(outgoing, expected);
    }
    registry
}

pub fn at(call: &str) -> RankPosition {
    RankPosition::Waiting(call.into())
}

pub fn failed(kind: FailureKind, message: &str) -> RankMessage {
    RankMessage::Failed {
        cause: FailureCause {
            kind,
            message: message.into(),
        },
        position: RankPosition::NoCalls,
    }
}

/// Returns the number of the status query, which must have been sent to the ranks in `ranks`.
pub fn asked(outgoing: &[(Recipient, CoordinatorMessage)], ranks: &[usize]) -> u64 {
    let recipients: Vec<_> = outgoing.iter().map(|(recipient, _)| *recipient).collect();
    let expected: Vec<_> = ranks.iter().map(|rank| Recipient::Rank(*rank)).collect();
    assert_eq!(recipients, expected, "{outgoing:?}");
    match outgoing[0].1 {
        CoordinatorMessage::QueryStatus { question, .. } => question,
        ref other => panic!("{other:?} is not a query"),
    }
}

pub fn answer_status(question: u64, position: RankPosition) -> RankMessage {
    let status = RankStatus {
        position,
        joined: false,
        call: None,
    };
    RankMessage::Status { question, status }
}

pub fn failure(outgoing: Vec<(Recipient, CoordinatorMessage)>) -> FailureReport {
    match outgoing.as_slice() {
        [(Recipient::All, CoordinatorMessage::Failure(failure))] => failure.clone(),
        other => panic!("{other:?} is not a failure"),
    }
}

#[test]
fn a_rank_that_dies_is_named_with_its_last_position() {
    let mut registry = full(3);
    let late = Duration::from_secs(10);
    registry.handle(
        1,
        RankMessage::Heartbeat(at("call 4 barrier over world [0, 1, 2] in step 2")),
        ZERO,
    );
    let outgoing = registry.disconnected(1, late);
    let question = asked(&outgoing, &[0, 2]);
    let answer = || answer_status(question, at("call 5 barrier"));
    assert_eq!(registry.handle(0, answer(), late), []);
    // No cause of higher precedence can follow.
    let failure = failure(registry.handle(2, answer(), late));
    assert_eq!(failure.rank, 1);
    assert_snapshot!(
        failure.message,
        @"its process 101 on node1 exited without reporting an error"
    );
    assert_snapshot!(
        failure.positions,
        @"ranks 0, 2 are at call 5 barrier; rank 1 exited without reporting an error, last seen at call \
          4 barrier over world [0, 1, 2] in step 2"
    );
    let decided = registry.failure.as_ref().map(|(_, report)| report);
    assert_eq!(decided, Some(&failure));
    assert_eq!(registry.disconnected(0, late), []);
}

#[test]
fn the_cause_of_the_highest_precedence_is_reported() {
    let mut registry = full(3);
    let outgoing = registry.handle(0, failed(FailureKind::Transport, "mpi: broken pipe"), ZERO);
    asked(&outgoing, &[1, 2]);
    assert_eq!(
        registry.handle(2, failed(FailureKind::Timeout, "deadline"), ZERO),
        []
    );
    assert_eq!(
        registry.tick(Duration::from_millis(200)),
        [],
        "another cause may follow"
    );
    let failure = failure(registry.disconnected(1, Duration::from_millis(220)));
    assert_eq!(failure.rank, 1);
    assert!(failure.message.contains("process 101"), "{failure:?}");
    assert!(
        failure
            .positions
            .starts_with("ranks 0, 2 failed before any call"),
        "{failure:?}"
    );
}

#[test]
fn a_rank_that_does_not_answer_has_no_heartbeat_in_the_report() {
    let mut registry = full(2);
    registry.handle(
        1,
        RankMessage::Heartbeat(at("call 9 all_gather")),
        Duration::from_secs(5),
    );
    let now = Duration::from_secs(20);
    registry.handle(0, RankMessage::Heartbeat(RankPosition::NoCalls), now);
    let outgoing = registry.handle(0, failed(FailureKind::Timeout, "deadline: rank 1 ..."), now);
    asked(&outgoing, &[1]);
    assert_eq!(registry.tick(now + Duration::from_millis(900)), []);
    let failure = failure(registry.tick(now + Duration::from_secs(1)));
    assert_snapshot!(
        failure.positions,
        @"rank 0 failed before any call; rank 1 has sent no heartbeat for 16 s, last seen at call \
          9 all_gather"
    );
}

#[test]
fn a_missing_heartbeat_is_a_failure() {
    let mut registry = full(2);
    let now = Duration::from_secs(29);
    registry.handle(0, RankMessage::Heartbeat(RankPosition::NoCalls), now);
    assert_eq!(registry.tick(now), []);
    let now = Duration::from_secs(30);
    let outgoing = registry.tick(now);
    let question = asked(&outgoing, &[0]);
    registry.handle(0, answer_status(question, at("call 3 barrier")), now);
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_eq!(failure.rank, 1);
    assert_snapshot!(
        failure.message,
        @"its process 101 on node1 has sent no heartbeat for 30 s: it is stopped, or cut off from the \
          network"
    );
}

#[test]
fn ranks_that_never_join_are_named() {
    let mut registry = Registry::new(4, 7, TIMEOUTS);
    registry.join(hello(0, 4), ZERO).unwrap();
    registry.join(hello(2, 4), ZERO).unwrap();
    for now in [10, 20, 40, 59] {
        let now = Duration::from_secs(now);
        registry.handle(0, RankMessage::Heartbeat(RankPosition::NoCalls), now);
        registry.handle(2, RankMessage::Heartbeat(RankPosition::NoCalls), now);
        assert_eq!(registry.tick(now), []);
    }
    let now = Duration::from_secs(60);
    let question = asked(&registry.tick(now), &[0, 2]);
    registry.handle(0, answer_status(question, RankPosition::NoCalls), now);
    registry.handle(2, answer_status(question, RankPosition::NoCalls), now);
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_snapshot!(
        failure.message,
        @"ranks 1, 3 have not joined the rendezvous within 60 s; 2 of 4 ranks have: were all started \
          with the same address?"
    );
    assert_snapshot!(failure.positions, @"ranks 0, 2 have made no call; ranks 1, 3 never joined");
}

#[test]
fn a_rank_that_ends_before_it_joins_is_not_waited_for() {
    let mut registry = Registry::new(2, 7, TIMEOUTS);
    registry.join(hello(0, 2), ZERO).unwrap();
    // A rank that has joined reports its failure on its own connection.
    assert_eq!(
        registry.process_ended(0, "ended with exit code 1", ZERO),
        []
    );
    let question = asked(
        &registry.process_ended(1, "ended with exit code 1", ZERO),
        &[0],
    );
    registry.handle(0, answer_status(question, RankPosition::NoCalls), ZERO);
    let failure = failure(registry.tick(Duration::from_millis(250)));
    assert_eq!(failure.rank, 1);
    assert_snapshot!(
        failure.message,
        @"its process ended with exit code 1 before it joined the rendezvous"
    );
}

#[test]
fn a_query_finds_missing_ranks_and_the_calls_of_the_others() {
    let mut registry = full(3);
    let call = CallId {
        group: GroupId(5),
        sequence: 8,
    };
    let find = || RankMessage::FindMissing {
        call,
        ranks: RankRuns::new(&[0, 1, 2]),
    };
    let outgoing = registry.handle(0, find(), ZERO);
    let question = asked(&outgoing, &[0, 1, 2]);
    // Other ranks that ask wait for the same query.
    assert_eq!(registry.handle(2, find(), ZERO), []);
    let answer = |joined, call: Option<&str>| RankMessage::Status {
        question,
        status: RankStatus {
            position: RankPosition::NoCalls,
            joined,
            call: call.map(str::to_owned),
        },
    };
    assert_eq!(registry.handle(0, answer(true, Some("barrier")), ZERO), []);
    assert_eq!(
        registry.handle(1, answer(true, Some("all_gather of 3 f32")), ZERO),
        []
    );
    let outgoing = registry.handle(2, answer(false, None), ZERO);
    let ranks = |ranks: &[usize]| RankRuns::new(ranks);
    let found = MissingRanks {
        absent: ranks(&[2]),
        calls: vec![
            ("barrier".into(), ranks(&[0])),
            ("all_gather of 3 f32".into(), ranks(&[1])),
        ],
    };
    let answer = |rank| {
        let found = found.clone();
        let answer = CoordinatorMessage::MissingRanks { call, found };
        (Recipient::Rank(rank), answer)
    };
    assert_eq!(outgoing, [answer(0), answer(2)]);
    // A recent answer is reused.
    assert_eq!(registry.handle(1, find(), ZERO), [answer(1)]);
    registry.tick(Duration::from_secs(2));
    asked(&registry.handle(1, find(), ZERO), &[0, 1, 2]);
}

#[test]
fn a_query_for_other_ranks_than_those_of_the_world_is_ignored() {
    let mut registry = full(3);
    let call = CallId {
        group: GroupId(5),
        sequence: 8,
    };
    let ranks = RankRuns::new(&[0, 3]);
    assert_eq!(
        registry.handle(0, RankMessage::FindMissing { call, ranks }, ZERO),
        []
    );
}

#[test]
fn values_are_sent_to_readers_before_and_after_they_are_posted() {
    let mut registry = full(3);
    let (key, value) = ("id".to_owned(), vec![1, 2]);
    let read = || RankMessage::Read { key: key.clone() };
    let posted = || CoordinatorMessage::Posted {
        key: key.clone(),
        value: value.clone(),
    };
    assert_eq!(registry.handle(1, read(), ZERO), []);
    let post = RankMessage::Post {
        key: key.clone(),
        value: value.clone(),
    };
    assert_eq!(
        registry.handle(0, post, ZERO),
        [(Recipient::Rank(1), posted())]
    );
    assert_eq!(
        registry.handle(2, read(), ZERO),
        [(Recipient::Rank(2), posted())]
    );
}

#[test]
fn the_world_ends_when_all_have_returned() {
    let mut registry = full(2);
    assert_eq!(
        registry.handle(1, RankMessage::Returned(vec![(0, 12)]), ZERO),
        []
    );
    let ranks = RankRuns::new(&[1]);
    let returned = (Recipient::All, CoordinatorMessage::Returned(ranks.clone()));
    assert_eq!(registry.tick(ZERO), [returned]);
    for (sequence, before) in [(11, RankRuns::default()), (12, ranks.clone())] {
        let call = CallId {
            group: GroupId(0),
            sequence,
        };
        let find = RankMessage::FindReturned {
            call,
            ranks: RankRuns::new(&[0, 1]),
        };
        let answer = CoordinatorMessage::ReturnedBefore {
            call,
            ranks: before,
        };
        assert_eq!(
            registry.handle(0, find, ZERO),
            [(Recipient::Rank(0), answer)]
        );
    }
    let outgoing = registry.handle(0, RankMessage::Returned(vec![]), ZERO);
    assert_eq!(
        outgoing,
        [(Recipient::All, CoordinatorMessage::AllReturned)]
    );
    // A disconnect after the return of a rank is not a failure.
    assert_eq!(registry.disconnected(0, ZERO), []);
    assert!(registry.all_returned() && !registry.all_disconnected());
    registry.disconnected(1, ZERO);
    assert!(registry.all_disconnected());
}

#[test]
fn an_incompatible_rank_is_refused_and_ends_the_world() {
    let unknown = Hello {
        world: 8,
        ..hello(1, 2)
    };
    let mut registry = Registry::new(2, 7, TIMEOUTS);
    registry.join(hello(0, 2), ZERO).unwrap();
    match registry.join(unknown, ZERO) {
        Err(JoinError::UnknownClient(reason)) => {
            assert!(reason.contains("another run"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    let refused = |hello: Hello| {
        let mut registry = Registry::new(2, 7, TIMEOUTS);
        registry.join(self::hello(0, 2), ZERO).unwrap();
        match registry.join(hello, ZERO) {
            Err(JoinError::Incompatible { reason, outgoing }) => {
                asked(&outgoing, &[0]);
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
    assert_snapshot!(
        refused(hello(1, 4)),
        @"rank 1 expects 4 ranks, but the rendezvous expects 2: set the same WORLD_SIZE on all ranks"
    );
    assert_snapshot!(refused(hello(2, 2)), @"invalid rank 2 of 2: expected 0 to 1");
    assert_snapshot!(
        refused(hello(0, 2)),
        @"two processes are started as rank 0: process 100 on node0 and process 100 on node0"
    );
    let mut registry = full(2);
    match registry.join(hello(1, 2), ZERO) {
        Err(JoinError::UnknownClient(reason)) => {
            assert!(reason.contains("have already joined"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
}

//! Tests that count the messages for different numbers of ranks.

use std::thread;
use std::time::{Duration, Instant};

use super::connections::{clients, coordinator};
use super::decisions::{TIMEOUTS, ZERO, answer_status, at, failed, hello};
use crate::failure_report::RankPosition;
use crate::rank_runs::RankRuns;
use crate::rendezvous::FailureCause;
use crate::rendezvous::GroupId;
use crate::rendezvous::message::{CallId, CoordinatorMessage, FailureKind, RankMessage};
use crate::rendezvous::registry::{Outgoing, Recipient, Registry};
use burn_megatron_test_support::TIMEOUT;

/// The number of messages for each purpose.
struct Counted {
    join: usize,
    heartbeats: usize,
    missing: usize,
    failure: usize,
    /// The time from the start of the first thread until all ranks have joined.
    joined_after: Duration,
}

/// Runs ranks as threads. They join and send heartbeats for one second. Then all ranks send a query for the ranks that
/// have not joined a call of the world, and one rank fails. Returns the number of messages in each phase.
fn count(size: usize) -> Counted {
    let coordinator = coordinator(size, TIMEOUT, 2 * TIMEOUT);
    let began = Instant::now();
    let clients = clients(coordinator.address(), size);
    let joined_after = began.elapsed();
    let mut before = 0;
    let mut since = || {
        let of_ranks: usize = clients.iter().map(|client| client.sent()).sum();
        let sent = coordinator.sent() + of_ranks;
        let last = std::mem::replace(&mut before, sent);
        sent - last
    };
    let join = since();
    thread::sleep(Duration::from_secs(1));
    let heartbeats = since();
    let began = Instant::now();
    let all: Vec<usize> = (0..size).collect();
    let call = CallId {
        group: GroupId(1),
        sequence: 9,
    };
    thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| assert_eq!(client.missing_ranks(call, &all).absent.0.len(), 1));
        }
    });
    // Heartbeats continue in the meantime.
    let beats = |seconds: f64| (heartbeats as f64 * seconds) as usize;
    let missing = since().saturating_sub(beats(began.elapsed().as_secs_f64()));
    let began = Instant::now();
    let cause = FailureCause {
        kind: FailureKind::OwnError,
        message: "no such file".into(),
    };
    let reported = clients[size - 1]
        .fail(cause, RankPosition::NoCalls)
        .unwrap();
    for client in &clients {
        assert_eq!(client.await_failure(TIMEOUT).as_ref(), Some(&reported));
    }
    let failure = since().saturating_sub(beats(began.elapsed().as_secs_f64()));
    clients.iter().for_each(|client| client.leave());
    assert!(coordinator.wait_for_disconnects(TIMEOUT));
    Counted {
        join,
        heartbeats,
        missing,
        failure,
        joined_after,
    }
}

/// The maximum number of messages per rank and per doubling of the number of ranks, for each phase.
const MOST: f64 = 3.0;

fn check(sizes: &[usize]) {
    for size in sizes {
        let found = count(*size);
        let scale = *size as f64 * (*size as f64).log2();
        let all = [found.join, found.heartbeats, found.missing, found.failure];
        let per = all.map(|messages| messages as f64 / scale);
        println!(
            "{size} ranks joined in {:.3} s; messages: join {}, heartbeats of a second {}, missing ranks {}, failure {}; \
             of N log N {per:.2?}",
            found.joined_after.as_secs_f64(),
            found.join,
            found.heartbeats,
            found.missing,
            found.failure,
        );
        assert!(
            per.iter().all(|messages| *messages <= MOST),
            "{size} ranks: {per:?}"
        );
    }
}

#[test]
fn messages_grow_no_faster_than_n_log_n() {
    check(&[8, 32, 128]);
}

/// This test requires more than two file descriptors per rank. A hard limit of 4096 (`ulimit -H -n`) is enough.
#[test]
#[ignore = "slow: run by hand"]
fn messages_grow_no_faster_than_n_log_n_up_to_1024_ranks() {
    check(&[8, 64, 256, 512, 1024]);
}

/// Returns the number of messages. A message to all ranks counts once per rank.
fn lines(outgoing: &Outgoing, size: usize) -> usize {
    let of = |recipient: &Recipient| match recipient {
        Recipient::All => size,
        Recipient::Rank(_) => 1,
    };
    outgoing.iter().map(|(recipient, _)| of(recipient)).sum()
}

/// Tests the decisions for 16,384 ranks. Each group of eight ranks waits for a missing rank, and then one rank fails.
/// The registry sends a few messages per rank. The test takes a few seconds.
#[test]
fn the_registry_of_16384_ranks_sends_a_few_messages_to_each() {
    let size = 16_384;
    let began = Instant::now();
    let mut registry = Registry::new(size, 7, TIMEOUTS);
    let mut sent = 0;
    for rank in 0..size {
        sent += lines(&registry.join(hello(rank, size), ZERO).unwrap(), size);
    }
    let mut answer = |registry: &mut Registry, outgoing: Outgoing| {
        let mut further = vec![];
        for (recipient, message) in outgoing {
            sent += lines(&vec![(recipient, message.clone())], size);
            if let (Recipient::Rank(rank), CoordinatorMessage::QueryStatus { question, .. }) =
                (recipient, message)
            {
                let position = at(&format!("call 3 barrier over tensor {}", rank / 8));
                further.extend(registry.handle(rank, answer_status(question, position), ZERO));
            }
        }
        sent += lines(&further, size);
    };
    for rank in 0..size {
        let group = rank / 8;
        let members: Vec<usize> = (8 * group..8 * group + 8).collect();
        let call = CallId {
            group: GroupId(group as u64),
            sequence: 3,
        };
        let ranks = RankRuns::new(&members);
        let outgoing = registry.handle(rank, RankMessage::FindMissing { call, ranks }, ZERO);
        answer(&mut registry, outgoing);
    }
    for rank in 0..size {
        let outgoing = registry.handle(rank, failed(FailureKind::Timeout, "deadline"), ZERO);
        answer(&mut registry, outgoing);
    }
    let outgoing = registry.tick(Duration::from_secs(1));
    answer(&mut registry, outgoing);
    assert!(registry.failure.is_some());
    println!("{size} ranks: {sent} messages, {:.1?}", began.elapsed());
    assert!(sent <= 6 * size, "{sent}");
}

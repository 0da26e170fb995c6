//! How the number of messages grows with the number of ranks.

use std::thread;
use std::time::{Duration, Instant};

use super::decisions::{TIMEOUTS, ZERO, answer_status, at, failed, hello};
use super::relays::Nodes;
use crate::rank_runs::RankRuns;
use crate::rendezvous::message::{CallId, CoordinatorMessage, FailureKind, RankMessage};
use crate::rendezvous::registry::{Outgoing, Recipient, Registry};
use crate::rendezvous::{FailureCause, Relay};
use crate::report::call_log::RankPosition;
use crate::testing::TIMEOUT;

/// Ranks of a node.
const PER_NODE: usize = 8;

impl Nodes {
    /// The messages that the coordinator, all relays and all ranks have sent.
    fn sent(&self) -> usize {
        let relays: usize = self.relays.iter().map(|relay| relay.sent()).sum();
        let ranks: usize = self.clients.iter().map(|client| client.sent()).sum();
        self.coordinator.counts().0 + relays + ranks
    }
}

/// Messages by what they are sent for.
struct Counted {
    join: usize,
    heartbeats: usize,
    missing: usize,
    failure: usize,
    /// Connections of the coordinator.
    connections: usize,
    /// What relays have sent of the heartbeats, for each and a second.
    heartbeats_of_a_relay: f64,
    /// What the coordinator has sent of `missing` and `failure`, with its heartbeats.
    answers: usize,
}

/// Ranks as threads join, send heartbeats for a second, all ask which ranks have not joined a call of the world, and one of
/// them fails. Returns the messages that were sent.
fn count(size: usize) -> Counted {
    let nodes = Nodes::join(size, PER_NODE, 2 * TIMEOUT);
    let mut before = 0;
    let mut since = || {
        let (sent, last) = (nodes.sent(), before);
        before = sent;
        sent - last
    };
    let join = since();
    let connections = nodes.coordinator.counts().1;
    let relayed = || nodes.relays.iter().map(Relay::sent).sum::<usize>();
    let (began, relayed_before) = (Instant::now(), relayed());
    thread::sleep(Duration::from_secs(1));
    let heartbeats = since();
    // One more may fall into the time.
    let seconds = began.elapsed().as_secs_f64() + 1.0;
    let relays = nodes.relays.len().max(1) as f64;
    let heartbeats_of_a_relay = (relayed() - relayed_before) as f64 / (relays * seconds);
    let answered = nodes.coordinator.counts().0;
    let began = Instant::now();
    let all: Vec<usize> = (0..size).collect();
    let call = CallId {
        group: 1,
        sequence: 9,
    };
    thread::scope(|scope| {
        for client in &nodes.clients {
            scope.spawn(|| assert_eq!(client.missing_ranks(call, &all).absent.runs().len(), 1));
        }
    });
    // Heartbeats go on meanwhile.
    let beats = |seconds: f64| (heartbeats as f64 * seconds) as usize;
    let missing = since().saturating_sub(beats(began.elapsed().as_secs_f64()));
    let began = Instant::now();
    let cause = FailureCause {
        kind: FailureKind::OwnError,
        message: "no such file".into(),
    };
    let reported = nodes.clients[size - 1]
        .fail(cause, RankPosition::NoCalls)
        .unwrap();
    for client in &nodes.clients {
        assert_eq!(client.await_failure(TIMEOUT).as_ref(), Some(&reported));
    }
    let failure = since().saturating_sub(beats(began.elapsed().as_secs_f64()));
    let answers = nodes.coordinator.counts().0 - answered;
    nodes.clients.iter().for_each(|client| client.leave());
    assert!(nodes.coordinator.wait_for_disconnects(TIMEOUT));
    Counted {
        join,
        heartbeats,
        missing,
        failure,
        connections,
        heartbeats_of_a_relay,
        answers,
    }
}

/// The most messages per rank and doubling of the number of ranks, of any of these. Measured: at most 1.
const MOST: f64 = 3.0;

fn check(sizes: &[usize]) {
    for size in sizes {
        let began = Instant::now();
        let found = count(*size);
        let scale = *size as f64 * (*size as f64).log2();
        let all = [found.join, found.heartbeats, found.missing, found.failure];
        let per = all.map(|messages| messages as f64 / scale);
        println!(
            "{size} ranks: {} connections of the coordinator; messages: join {}, heartbeats of a second {}, missing \
             ranks {}, failure {}; of N log N {per:.2?}; of a relay {:.1} heartbeats in a second; of the coordinator {} \
             for all answers; {:.1?}",
            found.connections,
            found.join,
            found.heartbeats,
            found.missing,
            found.failure,
            found.heartbeats_of_a_relay,
            found.answers,
            began.elapsed()
        );
        assert!(
            per.iter().all(|messages| *messages <= MOST),
            "{size} ranks: {per:?}"
        );
        assert!(found.connections <= size / PER_NODE + PER_NODE);
        // Four of its own for all its ranks, and one of the coordinator to each of them.
        assert!(found.heartbeats_of_a_relay <= (4 + PER_NODE) as f64);
        // The ranks of a node are asked, and told, in one message.
        assert!(
            *size == PER_NODE || found.answers <= 2 * size,
            "{}",
            found.answers
        );
    }
}

#[test]
fn messages_grow_no_faster_than_n_log_n() {
    check(&[8, 32, 128]);
}

/// Needs as many file descriptors: `ulimit -n 20000`.
#[test]
#[ignore = "slow: run by hand"]
fn messages_grow_no_faster_than_n_log_n_up_to_1024_ranks() {
    check(&[8, 64, 256, 512, 1024]);
}

/// The number of messages, where one to all ranks counts as many.
fn lines(outgoing: &Outgoing, size: usize) -> usize {
    let of = |recipient: &Recipient| match recipient {
        Recipient::All => size,
        Recipient::Rank(_) => 1,
    };
    outgoing.iter().map(|(recipient, _)| of(recipient)).sum()
}

/// The decisions for 16,384 ranks, of which each group of eight waits in vain and then one fails: a number of messages per rank,
/// in a few seconds.
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
            group: group as u64,
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
    assert!(registry.failure().is_some());
    println!("{size} ranks: {sent} messages, {:.1?}", began.elapsed());
    assert!(sent <= 6 * size, "{sent}");
}

//! Ranks behind relays.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::connections::{FixedStatus, anywhere, coordinator, join, request, token};
use super::decisions::{TIMEOUTS, ZERO, answer_status, asked, at, failed, failure, hello};
use crate::process::KeyValueStore;
use crate::rank_runs::RankRuns;
use crate::rendezvous::connect::connect;
use crate::rendezvous::message::{CallId, FailureKind, Hello, RankMessage};
use crate::rendezvous::registry::Registry;
use crate::rendezvous::relay_message::RelayMessage;
use crate::rendezvous::{
    Coordinator, FailureCause, JoinRequest, Relay, RendezvousClient, RendezvousError,
};
use crate::report::call_log::RankPosition;
use crate::testing::{TIMEOUT, wait_until};

/// A world on nodes of equally many ranks, of which those after the first have relays.
pub struct Nodes {
    pub coordinator: Coordinator,
    pub relays: Vec<Relay>,
    pub clients: Vec<Arc<RendezvousClient>>,
}

impl Nodes {
    /// Joins all ranks, with a heartbeat timeout.
    pub fn join(size: usize, per_node: usize, heartbeat: Duration) -> Self {
        let coordinator = coordinator(size, TIMEOUT, heartbeat);
        let address = coordinator.address();
        let relays = (1..size / per_node).map(|node| relay(address, node * per_node, size));
        let relays: Vec<Relay> = relays.collect();
        let joining: Vec<_> = (0..size)
            .map(|rank| {
                let address = match rank / per_node {
                    0 => address,
                    node => relays[node - 1].address(),
                };
                thread::spawn(move || join(address, rank, size).unwrap())
            })
            .collect();
        let clients = joining.into_iter().map(|thread| thread.join().unwrap());
        Self {
            clients: clients.collect(),
            coordinator,
            relays,
        }
    }
}

fn relay(coordinator: SocketAddr, rank: usize, size: usize) -> Relay {
    Relay::open(anywhere(), 8, &[coordinator], &request(rank, size))
        .unwrap()
        .unwrap()
}

fn cause(message: &str) -> FailureCause {
    FailureCause {
        kind: FailureKind::OwnError,
        message: message.into(),
    }
}

#[test]
fn ranks_behind_relays_have_all_of_the_rendezvous() {
    let nodes = Nodes::join(6, 2, TIMEOUT);
    let clients = &nodes.clients;
    // Values, both ways.
    clients[0].post("id", &[1, 2]).unwrap();
    clients[5].post("other", &[3]).unwrap();
    assert_eq!(clients[3].read("id", TIMEOUT).unwrap(), [1, 2]);
    assert_eq!(clients[2].read("other", TIMEOUT).unwrap(), [3]);
    // Queries, which all ranks join before call 5.
    let call = CallId {
        group: 1,
        sequence: 5,
    };
    let members = [1, 3, 4];
    assert_eq!(
        clients[3].missing_ranks(call, &members).absent,
        RankRuns::new(&members)
    );
    // The stop.
    nodes.coordinator.request_stop();
    wait_until("the request to stop arrives", || {
        clients[4].stop_requested()
    });
    // One that has returned, and then all.
    let first = clients[4].clone();
    let mut returning = vec![thread::spawn(move || first.return_with_all(vec![(1, 5)]))];
    wait_until("rank 4 has returned", || {
        clients[2].first_returned(&[1, 4], call) == Some(4)
    });
    for client in clients.iter().filter(|client| client.rank() != 4) {
        let client = client.clone();
        returning.push(thread::spawn(move || client.return_with_all(vec![])));
    }
    for thread in returning {
        assert_eq!(thread.join().unwrap(), Ok(()));
    }
    clients.iter().for_each(|client| client.leave());
    assert!(nodes.coordinator.wait_for_disconnects(TIMEOUT));
    assert_eq!(nodes.coordinator.failure_report(), None);
}

#[test]
fn a_failure_behind_a_relay_is_reported_to_all_with_the_positions() {
    let nodes = Nodes::join(6, 2, TIMEOUT);
    let reported = nodes.clients[3]
        .fail(cause("no such file"), at("call d"))
        .unwrap();
    assert_eq!(
        (reported.rank, reported.message.as_str()),
        (3, "no such file")
    );
    let positions = "rank 0 is at call a; ranks 1, 4 are at call b; ranks 2, 5 are at call c; rank 3 failed \
                     at call d";
    assert_eq!(reported.positions, positions);
    for client in &nodes.clients {
        assert_eq!(client.await_failure(TIMEOUT).as_ref(), Some(&reported));
    }
}

/// As when a process is killed, and it has no relay.
#[test]
fn a_closed_connection_behind_a_relay_is_the_end_of_that_rank() {
    let nodes = Nodes::join(4, 2, TIMEOUT);
    nodes.clients[3].leave();
    for rank in [0, 1, 2] {
        let reported = nodes.clients[rank].await_failure(TIMEOUT).unwrap();
        assert_eq!(reported.rank, 3);
        assert!(
            reported
                .message
                .ends_with("exited without reporting an error"),
            "{reported:?}"
        );
    }
}

/// As when the process with a relay is killed: all ranks name it, also those that have no other connection.
#[test]
fn the_end_of_a_relay_is_that_of_its_rank() {
    let mut nodes = Nodes::join(6, 2, TIMEOUT);
    drop(nodes.relays.remove(0));
    for rank in [0, 1, 4, 5] {
        let reported = nodes.clients[rank].await_failure(TIMEOUT).unwrap();
        assert_eq!(reported.rank, 2);
        let message = "exited without reporting an error; it relayed ranks 2, 3";
        assert!(reported.message.ends_with(message), "{reported:?}");
    }
    let cut_off = nodes.clients[3].await_failure(TIMEOUT).unwrap();
    assert_eq!(cut_off.rank, 2);
    let message = "its process, which relays the messages of rank 3 to the rendezvous, has closed the connection";
    assert_eq!(cut_off.message, message);
    assert!(!nodes.clients[3].is_lost());
}

/// A process that is stopped keeps its connection: the relay knows since when it has sent nothing.
#[test]
fn a_rank_that_sends_nothing_behind_a_relay_is_found() {
    let server = coordinator(3, TIMEOUT, Duration::from_millis(1500));
    let relay = relay(server.address(), 1, 3);
    let until = Instant::now() + TIMEOUT;
    let stopped = connect(&[relay.address()], &request(2, 3), false, until).unwrap();
    let others = [(0, server.address()), (1, relay.address())];
    let others = others.map(|(rank, at)| thread::spawn(move || join(at, rank, 3).unwrap()));
    for client in others.map(|thread| thread.join().unwrap()) {
        let reported = client.await_failure(TIMEOUT).unwrap();
        assert_eq!(reported.rank, 2);
        assert!(
            reported.message.contains("has sent no heartbeat"),
            "{reported:?}"
        );
    }
    drop(stopped);
}

#[test]
fn a_lost_coordinator_is_known_behind_relays() {
    let nodes = Nodes::join(4, 2, TIMEOUT);
    drop(nodes.coordinator);
    let failure = nodes.clients[3].await_failure(TIMEOUT).unwrap();
    assert_eq!(failure.message, "the rendezvous has closed the connection");
    assert_eq!(failure.rank, 0);
    assert!(nodes.clients[3].is_lost());
}

#[test]
fn a_relay_refuses_a_second_rank_of_one_number_and_the_world_ends() {
    let server = coordinator(4, TIMEOUT, TIMEOUT);
    let relay = relay(server.address(), 2, 4);
    let address = relay.address();
    let first = thread::spawn(move || join(address, 3, 4).unwrap_err());
    wait_until("rank 3 has joined", || relay.ranks() == 1);
    let second = join(address, 3, 4).unwrap_err().to_string();
    let first = first.join().unwrap().to_string();
    for error in [first, second] {
        assert!(
            error.contains("two processes are started as rank 3: process"),
            "{error}"
        );
    }
}

#[test]
fn a_relay_of_another_run_is_refused_with_its_ranks() {
    let server = coordinator(4, TIMEOUT, TIMEOUT);
    let other = JoinRequest {
        world: 4,
        ..request(2, 4)
    };
    let relay = Relay::open(anywhere(), 2, &[server.address()], &other)
        .unwrap()
        .unwrap();
    let error = RendezvousClient::join(&[relay.address()], other, Arc::new(FixedStatus("x")));
    let error = error.unwrap_err();
    assert!(matches!(error, RendezvousError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("another run"), "{error}");
    assert_eq!(server.failure_report(), None);
}

#[test]
fn the_relay_of_other_ranks_on_the_machine_serves_these_too() {
    let server = coordinator(4, TIMEOUT, TIMEOUT);
    let first = relay(server.address(), 1, 4);
    let second = Relay::open(first.address(), 2, &[server.address()], &request(2, 4));
    assert!(second.unwrap().is_none());
}

/// A relay of ranks 2 and 3 of four, which all have joined, with a registry in simulated time.
fn relayed() -> Registry {
    let mut registry = Registry::new(4, 7, TIMEOUTS);
    let of_relay = Hello {
        relay: true,
        ..hello(2, 4)
    };
    registry.relay_joins(&of_relay, ZERO).unwrap();
    registry.join(hello(0, 4), ZERO).unwrap();
    registry.join(hello(1, 4), ZERO).unwrap();
    let joined = RelayMessage {
        joined: vec![hello(2, 4), hello(3, 4)],
        ..RelayMessage::default()
    };
    let outcome = registry.handle_relay(2, joined, ZERO);
    assert_eq!((outcome.joined, outcome.outgoing.len()), (vec![2, 3], 1));
    registry
}

/// Heartbeats of the ranks 0 and 1.
fn beat(registry: &mut Registry, now: Duration) {
    for rank in [0, 1] {
        registry.handle(rank, RankMessage::Heartbeat(RankPosition::NoCalls), now);
    }
}

#[test]
fn a_message_of_a_relay_is_a_heartbeat_of_its_ranks_but_the_silent_ones() {
    let mut registry = relayed();
    let now = Duration::from_secs(40);
    beat(&mut registry, now);
    let message = RelayMessage {
        silent: vec![(3, 31.0)],
        positions: vec![(at("call 1"), vec![2, 3])],
        ..RelayMessage::default()
    };
    registry.handle_relay(2, message, now);
    let question = asked(&registry.tick(now), &[0, 1, 2]);
    let answers = RelayMessage {
        messages: vec![(answer_status(question, at("call 2")), vec![2])],
        ..RelayMessage::default()
    };
    registry.handle_relay(2, answers, now);
    for rank in [0, 1] {
        registry.handle(rank, answer_status(question, at("call 2")), now);
    }
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_eq!(failure.rank, 3);
    assert!(
        failure.message.contains("has sent no heartbeat for 31 s"),
        "{failure:?}"
    );
    let positions =
        "ranks 0, 1, 2 are at call 2; rank 3 has sent no heartbeat for 31 s, last seen at call 1";
    assert_eq!(failure.positions, positions);
}

#[test]
fn a_relay_that_sends_nothing_is_named() {
    let mut registry = relayed();
    let now = Duration::from_secs(30);
    beat(&mut registry, now);
    let question = asked(&registry.tick(now), &[0, 1]);
    for rank in [0, 1] {
        registry.handle(rank, answer_status(question, at("call 2")), now);
    }
    let failure = failure(registry.tick(now + Duration::from_millis(250)));
    assert_eq!(failure.rank, 2);
    let message = "its process 102 on node2, which relays ranks 2, 3, has sent no heartbeat for 30 s: it is stopped, or \
                   cut off from the network";
    assert_eq!(failure.message, message);
    assert!(
        failure
            .positions
            .contains("ranks 2, 3 have sent no heartbeat for 30 s"),
        "{failure:?}"
    );
}

#[test]
fn a_relay_speaks_for_its_own_ranks_alone() {
    let mut registry = relayed();
    let message = RelayMessage {
        positions: vec![(at("call 9"), vec![0, 3, 77])],
        messages: vec![(failed(FailureKind::OwnError, "x"), vec![0, 77])],
        silent: vec![(1, 100.0), (77, 100.0)],
        disconnected: vec![0, 77],
        ..RelayMessage::default()
    };
    let outcome = registry.handle_relay(2, message, ZERO);
    assert_eq!(outcome.outgoing, []);
    assert_eq!(registry.tick(ZERO), []);
    assert_eq!(registry.relay_disconnected(0, ZERO), []);
}

#[test]
fn the_token_is_required_by_relays_too() {
    let server = coordinator(4, TIMEOUT, TIMEOUT);
    let relay = relay(server.address(), 2, 4);
    let other = JoinRequest {
        token: crate::auth::Token::random().ok(),
        ..request(3, 4)
    };
    assert_ne!(other.token.as_ref().unwrap().reveal(), token().reveal());
    let error = RendezvousClient::join(&[relay.address()], other, Arc::new(FixedStatus("x")));
    assert!(matches!(error.unwrap_err(), RendezvousError::Token { .. }));
}

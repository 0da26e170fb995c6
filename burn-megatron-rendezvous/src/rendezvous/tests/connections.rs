//! Tests of the coordinator and clients over TCP.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::auth::Token;
use crate::failure_report::RankPosition;
use crate::rank_runs::RankRuns;
use crate::rendezvous::GroupId;
use crate::rendezvous::{
    CallId, Coordinator, FailureCause, FailureKind, JoinRequest, RankStatus, RendezvousClient,
    RendezvousError, RendezvousTimeouts, StatusProvider,
};
use burn_megatron_test_support::{TIMEOUT, wait_until};

pub const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const SECOND: Duration = Duration::from_secs(1);

pub struct FixedStatus(pub &'static str);

impl StatusProvider for FixedStatus {
    fn position(&self) -> RankPosition {
        RankPosition::Waiting(self.0.into())
    }

    fn status(&self, call: Option<CallId>) -> RankStatus {
        RankStatus {
            position: self.position(),
            joined: call.is_some_and(|call| call.sequence < 5),
            call: call.map(|_| self.0.into()),
        }
    }
}

pub fn token() -> Token {
    Token::parse(TOKEN, "a constant").unwrap()
}

pub fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub fn coordinator(size: usize, join: Duration, heartbeat: Duration) -> Coordinator {
    let timeouts = RendezvousTimeouts { join, heartbeat };
    Coordinator::listen(&[anywhere()], size, 3, Some(&token()), timeouts).unwrap()
}

pub fn request(rank: usize, size: usize) -> JoinRequest {
    JoinRequest {
        rank,
        size,
        world: 3,
        token: Some(token()),
        join_timeout: TIMEOUT,
        heartbeat_timeout: TIMEOUT,
    }
}

pub fn join(
    address: SocketAddr,
    rank: usize,
    size: usize,
) -> Result<Arc<RendezvousClient>, RendezvousError> {
    let provider = Arc::new(FixedStatus(["call a", "call b", "call c"][rank % 3]));
    RendezvousClient::join(&[address], request(rank, size), provider)
}

/// Joins all ranks at the same time, because they wait for each other.
pub fn clients(address: SocketAddr, size: usize) -> Vec<Arc<RendezvousClient>> {
    let join = |rank| thread::spawn(move || join(address, rank, size).unwrap());
    let joining: Vec<_> = (0..size).map(join).collect();
    joining
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

#[test]
fn values_are_exchanged_and_all_ranks_return_together() {
    let server = coordinator(3, TIMEOUT, TIMEOUT);
    let clients = clients(server.address(), 3);
    let reader = clients[2].clone();
    let reading = thread::spawn(move || reader.read("id", TIMEOUT).unwrap());
    thread::sleep(Duration::from_millis(50));
    clients[0].post("id", &[0, 10, 255]).unwrap();
    assert_eq!(reading.join().unwrap(), vec![0, 10, 255]);
    let error = clients[1]
        .read("never", Duration::from_millis(50))
        .unwrap_err();
    let text = "no rank has published never within 0.1 s";
    assert_eq!(error.to_string(), text);

    assert!(!clients[1].stop_requested());
    server.request_stop();
    wait_until("the request to stop arrives", || {
        clients[1].stop_requested()
    });

    let first = clients[0].clone();
    let returning = thread::spawn(move || first.return_with_all(vec![(9, 4)]));
    let call = |sequence| CallId {
        group: GroupId(9),
        sequence,
    };
    wait_until("rank 0 has returned", || {
        clients[1].first_returned(&[0, 2], call(4)) == Some(0)
    });
    for _ in 0..10 {
        let returned = clients[1].first_returned(&[0, 2], call(3));
        assert_eq!(returned, None, "it has joined that one");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(clients[1].first_returned(&[2], call(4)), None);
    assert!(!returning.is_finished());
    let others: Vec<_> = [1, 2]
        .map(|rank| clients[rank].clone())
        .map(|client| thread::spawn(move || client.return_with_all(vec![])))
        .into();
    for thread in others.into_iter().chain([returning]) {
        assert_eq!(thread.join().unwrap(), Ok(()));
    }
    clients.iter().for_each(|client| client.leave());
    assert!(server.wait_for_disconnects(TIMEOUT));
    assert_eq!(server.failure_report(), None);
}

#[test]
fn a_failure_is_sent_to_all_with_the_positions() {
    let server = coordinator(3, TIMEOUT, TIMEOUT);
    let clients = clients(server.address(), 3);
    let cause = FailureCause {
        kind: FailureKind::OwnError,
        message: "no such file".into(),
    };
    let failure = clients[1]
        .fail(cause, RankPosition::Waiting("call b".into()))
        .unwrap();
    assert_eq!(
        (failure.rank, failure.message.as_str()),
        (1, "no such file")
    );
    assert!(
        failure.positions.contains("rank 0 is at call a")
            && failure.positions.contains("rank 1 failed at call b")
            && failure.positions.contains("rank 2 is at call c"),
        "{failure:?}"
    );
    assert_eq!(clients[2].await_failure(TIMEOUT).as_ref(), Some(&failure));
    let report = server.failure_report().unwrap();
    assert!(
        report.starts_with("rank 1 failed: no such file\n"),
        "{report}"
    );
}

#[test]
fn a_closed_connection_is_detected_before_the_heartbeat_timeout() {
    let server = coordinator(2, TIMEOUT, 2 * TIMEOUT);
    let clients = clients(server.address(), 2);
    // The operating system does the same when a process is killed.
    clients[1]
        .stream
        .lock()
        .shutdown(std::net::Shutdown::Both)
        .unwrap();
    let failure = clients[0].await_failure(TIMEOUT).unwrap();
    assert_eq!(failure.rank, 1);
    assert!(
        failure
            .positions
            .contains("rank 1 exited without reporting an error"),
        "{failure:?}"
    );
}

#[test]
fn a_lost_coordinator_ends_the_world() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let clients = clients(server.address(), 2);
    drop(server);
    let failure = clients[1].await_failure(TIMEOUT).unwrap();
    assert!(clients[1].is_lost());
    assert!(
        failure.message.contains("has closed the connection"),
        "{failure:?}"
    );
    assert!(
        failure.positions.starts_with("rank 1 is at call b"),
        "{failure:?}"
    );
}

#[test]
fn missing_ranks_are_queried() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let clients = clients(server.address(), 2);
    let ask = |sequence| {
        clients[0].missing_ranks(
            CallId {
                group: GroupId(1),
                sequence,
            },
            &[0, 1],
        )
    };
    let ranks = |ranks: &[usize]| RankRuns::new(ranks);
    let calls = vec![
        ("call a".into(), ranks(&[0])),
        ("call b".into(), ranks(&[1])),
    ];
    assert_eq!((ask(4).absent, ask(4).calls), (ranks(&[]), calls));
    assert_eq!(ask(5).absent, ranks(&[0, 1]));
}

#[test]
fn a_rank_that_never_joins_is_named_by_all() {
    let server = coordinator(2, 2 * SECOND, TIMEOUT);
    let error = join(server.address(), 0, 2).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("rank 1 has not joined the rendezvous within 2 s"),
        "{text}"
    );
}

#[test]
fn an_address_where_no_rendezvous_answers_is_named() {
    let free = TcpListener::bind(anywhere()).unwrap().local_addr().unwrap();
    let request = JoinRequest {
        join_timeout: Duration::from_millis(300),
        ..request(1, 2)
    };
    let error = RendezvousClient::join(&[free], request, Arc::new(FixedStatus("x"))).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("cannot reach the rendezvous at {free} within")),
        "{text}"
    );
}

#[test]
fn the_rendezvous_of_another_run_refuses_the_rank() {
    let server = coordinator(1, TIMEOUT, TIMEOUT);
    let other = Coordinator::host(anywhere(), 1, None, &token(), TIMEOUT, TIMEOUT).unwrap();
    let error = join(other.address(), 0, 1).unwrap_err();
    assert!(error.to_string().contains("another run"), "{error}");
    // The other rendezvous continues.
    assert!(join(server.address(), 0, 1).is_ok());
    assert_eq!(other.failure_report(), None);
}

//! Coordinator and members over TCP.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::auth::Token;
use crate::log::Position;
use crate::process::Bulletin;
use crate::rendezvous::{
    CallOf, Cause, CauseKind, Coordinator, Introduction, Member, Patience, RendezvousError, Stand,
    Witness,
};
use crate::testing::{TIMEOUT, wait_until};

pub const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const SECOND: Duration = Duration::from_secs(1);

pub struct Standing(pub &'static str);

impl Witness for Standing {
    fn position(&self) -> Position {
        Position::At(self.0.into())
    }

    fn stand(&self, call: Option<CallOf>) -> Stand {
        Stand {
            position: self.position(),
            came: call.is_some_and(|call| call.sequence < 5),
            call: call.map(|_| self.0.into()),
        }
    }
}

pub fn token() -> Token {
    TOKEN.parse().unwrap()
}

pub fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub fn coordinator(size: usize, gather: Duration, silence: Duration) -> Coordinator {
    let patience = Patience { gather, silence };
    Coordinator::listen(&[anywhere()], size, 3, Some(&token()), patience).unwrap()
}

pub fn introduction(rank: usize, size: usize) -> Introduction {
    Introduction {
        rank,
        size,
        world: 3,
        token: Some(token()),
        gather: TIMEOUT,
        silence: TIMEOUT,
    }
}

pub fn join(address: SocketAddr, rank: usize, size: usize) -> Result<Arc<Member>, RendezvousError> {
    let witness = Arc::new(Standing(["call a", "call b", "call c"][rank]));
    Member::join(&[address], introduction(rank, size), witness)
}

/// All ranks at once, as they wait for each other.
fn members(address: SocketAddr, size: usize) -> Vec<Arc<Member>> {
    let join = |rank| thread::spawn(move || join(address, rank, size).unwrap());
    let joining: Vec<_> = (0..size).map(join).collect();
    joining
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

#[test]
fn values_go_round_and_all_return_together() {
    let held = coordinator(3, TIMEOUT, TIMEOUT);
    let members = members(held.address(), 3);
    let reader = members[2].clone();
    let reading = thread::spawn(move || reader.read("id", TIMEOUT).unwrap());
    thread::sleep(Duration::from_millis(50));
    members[0].post("id", &[0, 10, 255]).unwrap();
    assert_eq!(reading.join().unwrap(), vec![0, 10, 255]);
    let error = members[1]
        .read("never", Duration::from_millis(50))
        .unwrap_err();
    let text = "rendezvous: no rank has posted never within 0.1 s";
    assert_eq!(error.to_string(), text);

    assert!(!members[1].stop_requested());
    held.request_stop();
    wait_until("it is to stop", || members[1].stop_requested());

    let first = members[0].clone();
    let returning = thread::spawn(move || first.return_with_all(vec![(9, 4)]));
    let call = |sequence| CallOf { group: 9, sequence };
    wait_until("rank 0 has returned", || {
        members[1].has_returned_before(0, call(4))
    });
    assert!(
        !members[1].has_returned_before(0, call(3)),
        "it came to that one"
    );
    assert!(!members[1].has_returned_before(2, call(4)));
    assert!(!returning.is_finished());
    let others: Vec<_> = [1, 2]
        .map(|rank| members[rank].clone())
        .map(|member| thread::spawn(move || member.return_with_all(vec![])))
        .into();
    for thread in others.into_iter().chain([returning]) {
        assert_eq!(thread.join().unwrap(), Ok(()));
    }
    members.iter().for_each(|member| member.leave());
    assert!(held.await_departure(TIMEOUT));
    assert_eq!(held.verdict(), None);
}

#[test]
fn a_failure_is_told_to_all_with_a_verdict() {
    let held = coordinator(3, TIMEOUT, TIMEOUT);
    let members = members(held.address(), 3);
    let cause = Cause {
        kind: CauseKind::Own,
        message: "no such file".into(),
    };
    let failure = members[1]
        .fail(cause, Position::At("call b".into()))
        .unwrap();
    assert_eq!(
        (failure.rank, failure.message.as_str()),
        (1, "no such file")
    );
    assert!(
        failure.verdict.contains("rank 0 is at call a")
            && failure.verdict.contains("rank 1 failed at call b")
            && failure.verdict.contains("rank 2 is at call c"),
        "{failure:?}"
    );
    assert_eq!(members[2].await_failure(TIMEOUT).as_ref(), Some(&failure));
    let verdict = held.verdict().unwrap();
    assert!(
        verdict.starts_with("rank 1 failed: no such file\n"),
        "{verdict}"
    );
}

#[test]
fn a_closed_connection_is_noticed_before_its_silence() {
    let held = coordinator(2, TIMEOUT, 2 * TIMEOUT);
    let members = members(held.address(), 2);
    // As the operating system does when a process is killed.
    members[1]
        .line()
        .shutdown(std::net::Shutdown::Both)
        .unwrap();
    let failure = members[0].await_failure(TIMEOUT).unwrap();
    assert_eq!(failure.rank, 1);
    assert!(
        failure.verdict.contains("rank 1 has ended without a word"),
        "{failure:?}"
    );
}

#[test]
fn a_lost_coordinator_ends_the_world() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let members = members(held.address(), 2);
    drop(held);
    let failure = members[1].await_failure(TIMEOUT).unwrap();
    assert!(members[1].is_lost());
    assert!(
        failure.message.contains("has closed the connection"),
        "{failure:?}"
    );
    assert!(
        failure.verdict.starts_with("rank 1 is at call b"),
        "{failure:?}"
    );
}

#[test]
fn a_call_asks_who_is_missing() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let members = members(held.address(), 2);
    let ask = |sequence| members[0].whereabouts(CallOf { group: 1, sequence });
    let calls = vec![(0, "call a".into()), (1, "call b".into())];
    assert_eq!((ask(4).absent, ask(4).calls), (vec![], calls));
    assert_eq!(ask(5).absent, [0, 1]);
}

#[test]
fn a_rank_that_never_comes_is_named_by_all() {
    let held = coordinator(2, 2 * SECOND, TIMEOUT);
    let error = join(held.address(), 0, 2).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("rank 1 has not come to the rendezvous within 2 s"),
        "{text}"
    );
}

#[test]
fn an_address_where_nobody_is_is_named() {
    let free = TcpListener::bind(anywhere()).unwrap().local_addr().unwrap();
    let introduction = Introduction {
        gather: Duration::from_millis(300),
        ..introduction(1, 2)
    };
    let error = Member::join(&[free], introduction, Arc::new(Standing("x"))).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("the rendezvous at {free} cannot be reached")),
        "{text}"
    );
}

#[test]
fn the_rendezvous_of_another_run_is_left_alone() {
    let held = coordinator(1, TIMEOUT, TIMEOUT);
    let other = Coordinator::host(anywhere(), 1, &token(), TIMEOUT, TIMEOUT).unwrap();
    let error = join(other.address(), 0, 1).unwrap_err();
    assert!(error.to_string().contains("another run"), "{error}");
    // The other one goes on.
    assert!(join(held.address(), 0, 1).is_ok());
    assert_eq!(other.verdict(), None);
}

//! Ranks that never come, broken wires, worlds that are given up.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::*;
use crate::process::GroupId;
use crate::testing::wait_until;
use crate::{CommError, ReduceOp};

const SHORT: Duration = Duration::from_millis(200);

#[test]
fn who_has_not_come_is_named() {
    let hub = Hub::new(4, 0);
    let told = AtomicUsize::new(0);
    let errors = run_open(&hub, 4, PATIENCE, |member| {
        let world = &member.world;
        let part = world.split("part", &[vec![3, 1, 2], vec![0]]).unwrap();
        if !matches!(member.rank, 1 | 2) {
            wait_until("both are told", || told.load(Ordering::SeqCst) == 2);
            return None;
        }
        let id = GroupId::WORLD.part(0, 0);
        let group = Arc::new(part.group().clone());
        let part = End::new(member.exchange.clone(), group, id, Patience(SHORT));
        let pending = part.start_all_reduce(zeros(3), ReduceOp::Sum).unwrap();
        let is_late = || member.exchange.missing(id, 0) == Some(vec![0]);
        wait_until("only rank 3 is missing", is_late);
        let error = pending.wait().unwrap_err();
        told.fetch_add(1, Ordering::SeqCst);
        Some(error)
    });
    for rank in [1, 2] {
        let text = errors[rank].as_ref().unwrap().to_string();
        let wanted = "rank 3 has not come to call 0 all_reduce(sum) of 3 f32 over part [3, 1, 2]";
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn of_a_call_that_is_not_under_way_nobody_is_missing() {
    run(2, 0, |member| {
        member.world.barrier().unwrap();
        assert_eq!(member.exchange.missing(GroupId::WORLD, 0), None);
        assert_eq!(member.exchange.missing(GroupId::WORLD, 7), None);
    });
}

#[test]
fn a_broken_wire_ends_every_call() {
    let hub = Hub::new(2, 0);
    let broken = Arc::clone(&hub.broken);
    run_open(&hub, 2, PATIENCE, |member| {
        let comm = &member.world;
        if member.rank == 1 {
            thread::sleep(Duration::from_millis(30));
            broken.store(true, Ordering::Release);
        }
        let receive = comm.start_receive(1 - member.rank, DType::F32, 5).unwrap();
        let wanted = CommError::Engine {
            engine: "memory".to_owned(),
            message: "the wire is broken".to_owned(),
        };
        if member.rank == 0 {
            assert_eq!(comm.barrier(), Err(wanted.clone()));
        }
        assert_eq!(receive.wait(), Err(wanted.clone()));
        assert_eq!(comm.barrier(), Err(wanted.clone()));
        assert_eq!(
            member.exchange.share(Some(b"x"), PATIENCE),
            Err(wanted.clone())
        );
        assert_eq!(member.exchange.close(PATIENCE), Err(wanted));
    });
}

#[test]
fn what_is_given_up_leaves_its_slots_empty() {
    let hub = Hub::new(2, 0);
    run_open(&hub, 2, SHORT, |member| {
        if member.rank == 1 {
            return;
        }
        let comm = &member.world;
        let pending = comm.start_barrier().unwrap();
        let other = Arc::clone(&member.exchange);
        thread::spawn(move || (other.abort(), other.abort()))
            .join()
            .unwrap();
        assert!(matches!(pending.wait(), Err(CommError::Deadline { .. })));
        let after = comm.start_barrier().unwrap();
        assert!(matches!(after.wait(), Err(CommError::Deadline { .. })));
        let error = member.exchange.close(SHORT).unwrap_err().to_string();
        assert_eq!(
            error,
            "memory: the engine has ended, so that it moves nothing any more"
        );
    });
}

#[test]
fn a_world_that_does_not_end_names_who_is_not_at_its_end() {
    let hub = Hub::new(3, 0);
    let told = AtomicUsize::new(0);
    run_open(&hub, 3, PATIENCE, |member| {
        if member.rank == 1 {
            wait_until("both are told", || told.load(Ordering::SeqCst) == 2);
            return;
        }
        let wanted = "memory: the world has not ended after 0.2 s: rank 1 has not come to its end";
        // Until the other is there, it has not come either.
        wait_until("rank 1 alone is named", || {
            member.exchange.close(SHORT).unwrap_err().to_string() == wanted
        });
        told.fetch_add(1, Ordering::SeqCst);
    });
}

#[test]
fn after_the_end_calls_fail() {
    run_open(&Hub::new(2, 0), 2, PATIENCE, |member| {
        member.exchange.close(PATIENCE).unwrap();
        assert!(matches!(
            member.world.barrier(),
            Err(CommError::Engine { .. })
        ));
    });
}

#[test]
fn a_start_that_fails_or_takes_too_long_says_so() {
    use super::wire::MemoryWire;
    type Open = Box<dyn FnOnce() -> Result<(MemoryWire, String), CommError> + Send>;
    let launch = |open: Open| {
        Exchange::launch("memory", Arc::default(), SHORT, open)
            .unwrap_err()
            .to_string()
    };
    let (over, told) = mpsc::channel::<()>();
    let slow = launch(Box::new(move || {
        let _ = told.recv();
        Ok((Hub::new(2, 0).wire(0), String::new()))
    }));
    drop(over);
    assert_eq!(
        slow,
        "memory: the start has not returned after 0.2 s; it returns when every rank of the world has \
         come to it"
    );
    let failed = launch(Box::new(|| {
        Err(CommError::Engine {
            engine: "memory".to_owned(),
            message: "no wire".to_owned(),
        })
    }));
    assert_eq!(failed, "memory: no wire");
}

#[test]
fn nobody_is_told_what_rank_0_does_not_tell() {
    let hub = Hub::new(2, 0);
    run_open(&hub, 2, PATIENCE, |member| {
        if member.rank == 1 {
            let error = member.exchange.share(None, SHORT).unwrap_err().to_string();
            assert_eq!(error, "memory: rank 0 has told nothing after 0.2 s");
        }
    });
}

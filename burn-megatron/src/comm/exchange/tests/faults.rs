//! Ranks that never come, broken wires, worlds that are given up.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::*;
use crate::comm::{CommError, ReduceOp};

const SHORT: Duration = Duration::from_millis(200);

#[test]
fn who_has_not_come_is_named() {
    let hub = Hub::new(4, 0);
    let errors = run_open(&hub, 4, SHORT, |member| {
        let world = &member.world;
        let part = world.split("part", &[vec![3, 1, 2], vec![0]]).unwrap();
        match member.rank {
            1 | 2 => Some(part.all_reduce(zeros(3), ReduceOp::Sum).unwrap_err()),
            _ => {
                thread::sleep(2 * SHORT);
                None
            }
        }
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
        use crate::comm::process::GroupId;
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
    run_open(&hub, 3, PATIENCE, |member| {
        if member.rank == 1 {
            thread::sleep(2 * SHORT);
            return;
        }
        let began = Instant::now();
        let error = member.exchange.close(SHORT).unwrap_err().to_string();
        assert!(began.elapsed() >= SHORT);
        assert_eq!(
            error,
            "memory: the world has not ended after 0.2 s: rank 1 has not come to its end"
        );
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
    let launch = |open: fn() -> Result<(MemoryWire, String), CommError>| {
        Exchange::launch("memory", Arc::default(), SHORT, open)
            .unwrap_err()
            .to_string()
    };
    let slow = launch(|| {
        thread::sleep(2 * SHORT);
        Ok((Hub::new(2, 0).wire(0), String::new()))
    });
    assert_eq!(
        slow,
        "memory: the start has not returned after 0.2 s; it returns when every rank of the world has \
         come to it"
    );
    let failed = launch(|| {
        Err(CommError::Engine {
            engine: "memory".to_owned(),
            message: "no wire".to_owned(),
        })
    });
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

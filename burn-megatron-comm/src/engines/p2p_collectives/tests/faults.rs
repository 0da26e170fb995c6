//! Tests of ranks that never call, broken transports, and aborted worlds.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use insta::assert_snapshot;

use super::*;
use crate::process::part_id;
use crate::{CommError, ReduceOp};
use burn_megatron_rendezvous::GroupId;
use burn_megatron_test_support::wait_until;

const SHORT: Duration = Duration::from_millis(200);

#[test]
fn missing_ranks_are_named() {
    let network = MemoryNetwork::new(4, 0);
    let failed = AtomicUsize::new(0);
    let errors = run_open(&network, 4, TIMEOUT, |this| {
        let world = &this.world;
        let part = world.split("part", &[vec![3, 1, 2], vec![0]]).unwrap();
        if !matches!(this.rank, 1 | 2) {
            wait_until("both have failed", || failed.load(Ordering::SeqCst) == 2);
            return None;
        }
        let id = part_id(GroupId::WORLD, 0, 0);
        let group = Arc::new(part.group().clone());
        let part = TestCommunicator::new(this.engine.clone(), group, id, CallTimeout(SHORT));
        let pending = part.start_all_reduce(zeros(3), ReduceOp::Sum).unwrap();
        let is_late = || this.engine.missing(id, 0) == Some(vec![0]);
        wait_until("only rank 3 is missing", is_late);
        let error = pending.wait().unwrap_err();
        failed.fetch_add(1, Ordering::SeqCst);
        Some(error)
    });
    for rank in [1, 2] {
        let text = errors[rank].as_ref().unwrap().to_string();
        let wanted = "rank 3 has not joined call 0 all_reduce(sum) of 3 f32 over part [3, 1, 2]";
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn a_call_that_is_not_in_flight_has_no_missing_ranks() {
    run(2, 0, |this| {
        this.world.barrier().unwrap();
        assert_eq!(this.engine.missing(GroupId::WORLD, 0), None);
        assert_eq!(this.engine.missing(GroupId::WORLD, 7), None);
    });
}

#[test]
fn a_broken_transport_fails_every_call() {
    let network = MemoryNetwork::new(2, 0);
    let broken = Arc::clone(&network.broken);
    run_open(&network, 2, TIMEOUT, |this| {
        let comm = &this.world;
        if this.rank == 1 {
            thread::sleep(Duration::from_millis(30));
            broken.store(true, Ordering::Release);
        }
        let receive = comm.start_receive(1 - this.rank, DType::F32, 5).unwrap();
        let wanted = CommError::Engine {
            engine: "memory".to_owned(),
            message: "the transport is broken".to_owned(),
        };
        if this.rank == 0 {
            assert_eq!(comm.barrier(), Err(wanted.clone()));
        }
        assert_eq!(receive.wait(), Err(wanted.clone()));
        assert_eq!(comm.barrier(), Err(wanted.clone()));
        assert_eq!(this.engine.share(Some(b"x"), TIMEOUT), Err(wanted.clone()));
        assert_eq!(this.engine.close(TIMEOUT), Err(wanted));
    });
}

#[test]
fn an_abort_leaves_slots_empty() {
    let network = MemoryNetwork::new(2, 0);
    run_open(&network, 2, SHORT, |this| {
        if this.rank == 1 {
            return;
        }
        let comm = &this.world;
        let pending = comm.start_barrier().unwrap();
        let other = Arc::clone(&this.engine);
        thread::spawn(move || (other.abort(), other.abort()))
            .join()
            .unwrap();
        assert!(matches!(pending.wait(), Err(CommError::Deadline { .. })));
        let after = comm.start_barrier().unwrap();
        assert!(matches!(after.wait(), Err(CommError::Deadline { .. })));
        let error = this.engine.close(SHORT).unwrap_err().to_string();
        assert_eq!(
            error,
            "memory: the engine has stopped and starts no more calls"
        );
    });
}

#[test]
fn a_close_that_times_out_names_the_ranks_that_have_not_closed() {
    let network = MemoryNetwork::new(3, 0);
    let failed = AtomicUsize::new(0);
    run_open(&network, 3, TIMEOUT, |this| {
        if this.rank == 1 {
            wait_until("both have failed", || failed.load(Ordering::SeqCst) == 2);
            return;
        }
        let wanted = "memory: the world is not closed after 0.2 s: rank 1 has not closed the world";
        // The error also names the other rank until that rank closes.
        wait_until("rank 1 alone is named", || {
            this.engine.close(SHORT).unwrap_err().to_string() == wanted
        });
        failed.fetch_add(1, Ordering::SeqCst);
    });
}

#[test]
fn calls_after_the_close_fail() {
    run_open(&MemoryNetwork::new(2, 0), 2, TIMEOUT, |this| {
        this.engine.close(TIMEOUT).unwrap();
        assert!(matches!(
            this.world.barrier(),
            Err(CommError::Engine { .. })
        ));
    });
}

#[test]
fn a_start_that_fails_or_takes_too_long_says_so() {
    use super::memory_p2p::MemoryP2p;
    type Open = Box<dyn FnOnce() -> Result<(MemoryP2p, String), CommError> + Send>;
    let launch = |open: Open| {
        P2pCollectives::launch("memory", Arc::default(), SHORT, open)
            .unwrap_err()
            .to_string()
    };
    let (over, told) = mpsc::channel::<()>();
    let slow = launch(Box::new(move || {
        let _ = told.recv();
        Ok((MemoryNetwork::new(2, 0).transport(0), String::new()))
    }));
    drop(over);
    assert_snapshot!(
        slow,
        @"memory: not started after 0.2 s: expected all ranks of the world to start the engine"
    );
    let failed = launch(Box::new(|| {
        Err(CommError::Engine {
            engine: "memory".to_owned(),
            message: "no transport".to_owned(),
        })
    }));
    assert_snapshot!(failed, @"memory: no transport");
}

#[test]
fn a_share_without_rank_0_times_out() {
    let network = MemoryNetwork::new(2, 0);
    run_open(&network, 2, TIMEOUT, |this| {
        if this.rank == 1 {
            let error = this.engine.share(None, SHORT).unwrap_err().to_string();
            assert_eq!(error, "memory: nothing received from rank 0 after 0.2 s");
        }
    });
}

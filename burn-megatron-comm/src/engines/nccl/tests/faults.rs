//! Tests that faults are reported and that no rank blocks forever.

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};

use super::fake_nccl::{ABORTED, ALIVE};
use super::harness::{TIMEOUT, TestRun, TestSetup};
use crate::process::Transport;
use crate::{Communicator, DType, ReduceOp};
use burn_megatron_test_support::wait_until;

/// The error code `ncclRemoteError`.
const REMOTE: i32 = 6;

#[test]
fn a_rank_that_never_starts_is_reported_at_the_start() {
    let timeout = Duration::from_millis(200);
    let run = TestRun::new(
        2,
        TestSetup {
            timeout,
            ..TestSetup::default()
        },
    );
    let message = run.start(0).unwrap_err().to_string();
    for part in ["nccl", "0.2 s", "all 2 ranks", "NCCL_DEBUG"] {
        assert!(message.contains(part), "{message:?} does not name {part:?}");
    }
}

#[test]
fn an_id_that_is_never_published_is_reported() {
    let timeout = Duration::from_millis(200);
    let run = TestRun::new(
        2,
        TestSetup {
            timeout,
            ..TestSetup::default()
        },
    );
    // Rank 0 would publish the id. Either the store or the engine reports the error, whichever is first.
    let message = run.start(1).unwrap_err().to_string();
    assert!(
        message.contains("nccl/world") || message.contains("all 2 ranks"),
        "{message}"
    );
}

/// The other ranks wait in a collective that rank 1 never calls.
#[test]
fn an_abort_ends_what_waits_and_leaves_its_slots_empty() {
    let run = TestRun::new(3, TestSetup::default());
    run.on_all(|transport, comm| {
        comm.barrier().unwrap();
        if comm.rank() != 1 {
            let pending = comm.start_all_gather(vec![1u8; 5000].into()).unwrap();
            let message = comm.start_receive(1, DType::F32, 3).unwrap();
            let empty = Tensor::<1>::ones([4], &Device::flex());
            let call = crate::Call::AllReduce(ReduceOp::Sum);
            let tensor = comm.on_device().unwrap().start(vec![(call, empty)]);
            thread::sleep(Duration::from_millis(50));
            drop((pending, message, tensor));
        }
        let began = Instant::now();
        // Any thread may abort, and more than once.
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| transport.abort());
            }
        });
        // Well before the deadline of any call.
        assert!(began.elapsed() < TIMEOUT / 2);
        let slot = comm.start_barrier().unwrap();
        drop(slot);
        let message = transport.close(TIMEOUT).unwrap_err().to_string();
        assert!(message.contains("aborted"), "{message}");
    });
    assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
    assert!(ABORTED.load(Ordering::SeqCst) >= 3);
}

#[test]
fn an_error_on_the_device_ends_the_calls_that_wait_and_those_that_follow() {
    let run = TestRun::new(2, TestSetup::default());
    let reported = Barrier::new(2);
    run.on_all(|transport, comm| {
        comm.barrier().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let pending = comm.start_all_gather(vec![1i64; 7].into()).unwrap();
            thread::sleep(Duration::from_millis(50));
            run.world().error.store(REMOTE, Ordering::SeqCst);
            let message = pending.wait().unwrap_err().to_string();
            for part in [
                "remote error (6)",
                "NCCL knows",
                "all_gather of 7 i64 over world [0, 1]",
            ] {
                assert!(message.contains(part), "{message:?} does not name {part:?}");
            }
            let later = comm.barrier().unwrap_err().to_string();
            assert_eq!(later, message);
        }
        reported.wait();
        transport.abort();
    });
}

#[test]
fn memory_that_cannot_be_resolved_is_reported() {
    let setup = TestSetup {
        breaks: true,
        ..TestSetup::default()
    };
    let run = TestRun::new(2, setup);
    run.on_all(|transport, comm| {
        let x = Tensor::<1>::ones([4], &Device::flex());
        let call = crate::Call::AllReduce(ReduceOp::Sum);
        let mut started = comm.on_device().unwrap().start(vec![(call, x)]).unwrap();
        let message = started.remove(0).wait().unwrap_err().to_string();
        for part in ["the memory is gone", "all_reduce(sum) of 4 f32"] {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
        transport.abort();
    });
}

/// A call is still in flight during the close.
#[test]
fn a_close_ends_by_its_deadline() {
    let run = TestRun::new(2, TestSetup::default());
    let reported = Barrier::new(2);
    run.on_all(|transport, comm| {
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let pending = comm.start_barrier().unwrap();
            let deadline = Duration::from_millis(200);
            let message = transport.close(deadline).unwrap_err().to_string();
            assert!(message.contains("1 calls are not complete"), "{message}");
            drop(pending);
        }
        reported.wait();
        transport.abort();
    });
    assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
}

/// A message that is never received does not prevent the sender from closing.
#[test]
fn a_transport_that_is_dropped_leaves_no_communicator() {
    let run = TestRun::new(2, TestSetup::default());
    run.on_all(|transport, comm| {
        if comm.rank() == 0 {
            comm.send(vec![1u8; 3].into(), 1).unwrap();
        }
        comm.barrier().unwrap();
        drop((transport, comm));
    });
    wait_until("none lives", || ALIVE.load(Ordering::SeqCst) == 0);
}

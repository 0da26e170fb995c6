//! Which calls wait for which.

use std::sync::atomic::{AtomicBool, Ordering};

use super::harness::{TIMEOUT, TestRun, TestSetup, over};
use crate::process::Transport;
use crate::testing::wait_until;
use crate::{Buffer, Communicator, DType, ReduceOp};

/// A message that nobody receives yet blocks neither the sender nor its collectives.
#[test]
fn a_send_blocks_nothing() {
    over(2, TestSetup::default(), |comm| {
        let (own, other) = (comm.rank(), 1 - comm.rank());
        let big: Buffer = vec![own as f32; 100_000].into();
        comm.send(big, other).unwrap();
        for _ in 0..3 {
            comm.barrier().unwrap();
        }
        let received = comm.receive(other, DType::F32, 100_000).unwrap();
        assert_eq!(received, vec![other as f32; 100_000].into());
    });
}

/// A collective that waits for a rank blocks no message of the other ranks.
#[test]
fn messages_pass_a_collective_that_waits() {
    over(3, TestSetup::default(), |comm| {
        let rank = comm.rank();
        let sum = match rank {
            2 => {
                // Calls the collective when the others have exchanged their messages.
                comm.receive(0, DType::U8, 1).unwrap();
                comm.start_all_reduce(vec![1f32].into(), ReduceOp::Sum)
            }
            _ => {
                let sum = comm.start_all_reduce(vec![1f32].into(), ReduceOp::Sum);
                let other = 1 - rank;
                comm.send(vec![rank as i32].into(), other).unwrap();
                let received = comm.receive(other, DType::I32, 1).unwrap();
                assert_eq!(received, vec![other as i32].into());
                if rank == 0 {
                    comm.send(vec![1u8].into(), 2).unwrap();
                }
                sum
            }
        };
        assert_eq!(sum.unwrap().wait().unwrap(), vec![3f32].into());
    });
}

#[test]
fn all_ranks_get_what_rank_0_shares() {
    let run = TestRun::new(3, TestSetup::default());
    let shared = run.on_all(|transport, comm| {
        let own = (comm.rank() == 0).then_some(&b"127.0.0.1:15000"[..]);
        let shared = transport.share(own, TIMEOUT).unwrap();
        transport.close(TIMEOUT).unwrap();
        shared
    });
    assert_eq!(shared, vec![b"127.0.0.1:15000".to_vec(); 3]);
}

/// A start returns at once, though another rank is late.
#[test]
fn a_start_does_not_wait() {
    let started = AtomicBool::new(false);
    over(2, TestSetup::default(), |comm| {
        if comm.rank() == 1 {
            wait_until("the other has started its calls", || {
                started.load(Ordering::SeqCst)
            });
        }
        let pending: Vec<_> = (0..20)
            .map(|_| comm.start_all_gather(vec![1u8; 10].into()).unwrap())
            .collect();
        started.store(true, Ordering::SeqCst);
        for pending in pending {
            assert_eq!(pending.wait().unwrap().len(), 20);
        }
    });
}

//! Tests that compare every operation with a simple reference implementation.

use super::programs::{contribution, expected};
use super::*;
use crate::engines::p2p_collectives::control::MAX_INLINE_BYTES;
use crate::{Call, CommError, ReduceOp};

/// Lengths that are close to the limit of a control message, less than the number of ranks, or greater than the limit
/// of a short broadcast.
const LENGTHS: [usize; 9] = [0, 1, 3, 7, 991, 992, 993, 4000, 40_003];

#[test]
fn collectives_give_what_the_reference_gives() {
    for size in [2, 3, 5] {
        run(size, 1, |this| {
            let comm = &this.world;
            let mut number = 0;
            let mut check = |call: Call, dtype: DType, len: usize| {
                number += 1;
                let inputs: Vec<Buffer> = (0..size)
                    .map(|rank| contribution(dtype, len, rank, number))
                    .collect();
                let input = inputs[this.rank].clone();
                let result = comm.start(call.clone(), input).unwrap().wait().unwrap();
                let wanted = expected(&call, this.rank, &inputs);
                assert_eq!(result, wanted, "{call:?} of {len} {dtype}");
            };
            for dtype in DType::ALL {
                for len in LENGTHS {
                    check(Call::AllGather, dtype, len);
                    for root in [0, size - 1] {
                        check(Call::Broadcast { root }, dtype, len);
                    }
                    check(Call::AllReduce(ReduceOp::Sum), dtype, len);
                    check(Call::ReduceScatter(ReduceOp::Sum), dtype, len * size);
                    check(Call::AllReduce(ReduceOp::Max), dtype, len);
                    check(Call::ReduceScatter(ReduceOp::Min), dtype, len * size);
                    if dtype.is_float() {
                        check(Call::AllReduce(ReduceOp::Average), dtype, len);
                    }
                }
            }
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn uneven_counts_reach_their_ranks() {
    // No elements, one direction only, short, and long.
    let count = |from: usize, to: usize| [0, 1, 3000, 70_000][(from * 2 + to) % 4];
    for size in [2, 3, 4] {
        run(size, 1, |this| {
            let own = this.rank;
            let send: Vec<usize> = (0..size).map(|to| count(own, to)).collect();
            let receive: Vec<usize> = (0..size).map(|from| count(from, own)).collect();
            let piece = |from: usize, to: usize| vec![(from * 10 + to) as i32; count(from, to)];
            let input: Vec<i32> = (0..size).flat_map(|to| piece(own, to)).collect();
            let wanted: Vec<i32> = (0..size).flat_map(|from| piece(from, own)).collect();
            let result = this.world.all_to_all(input.into(), send, receive);
            assert_eq!(result.unwrap(), wanted.into());
        });
    }
}

#[test]
fn a_barrier_waits_for_all_ranks() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let arrived = AtomicUsize::new(0);
    run(4, 2, |this| {
        for round in 1..20 {
            std::thread::sleep(Duration::from_micros(this.rank as u64 * 300));
            arrived.fetch_add(1, Ordering::SeqCst);
            this.world.barrier().unwrap();
            assert!(arrived.load(Ordering::SeqCst) >= 4 * round);
        }
    });
}

#[test]
fn messages_come_in_order_whatever_their_size() {
    let len = |number: usize| [1, 5000, 0, 200, 100_000][number % 5];
    run(3, 2, |this| {
        let (own, comm) = (this.rank, &this.world);
        let (to, from) = ((own + 1) % 3, (own + 2) % 3);
        let receives: Vec<_> = (0..20)
            .map(|n| (n, comm.start_receive(from, DType::F32, len(n)).unwrap()))
            .collect();
        for n in 0..20 {
            comm.send(contribution(DType::F32, len(n), own, n), to)
                .unwrap();
        }
        for (n, receive) in receives.into_iter().rev() {
            // Some handles are dropped before their message arrives.
            if n % 3 > 0 {
                assert_eq!(
                    receive.wait().unwrap(),
                    contribution(DType::F32, len(n), from, n)
                );
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn sends_do_not_wait_for_the_receiver() {
    run(2, 0, |this| {
        let comm = &this.world;
        for n in 0..8 {
            comm.send(
                contribution(DType::F32, 50_000, this.rank, n),
                1 - this.rank,
            )
            .unwrap();
        }
        for n in 0..8 {
            let result = comm.receive(1 - this.rank, DType::F32, 50_000).unwrap();
            assert_eq!(result, contribution(DType::F32, 50_000, 1 - this.rank, n));
        }
    });
}

#[test]
fn a_rank_may_send_to_itself() {
    run(2, 1, |this| {
        let (own, comm) = (this.rank, &this.world);
        for len in [0, 7, 5000] {
            comm.send(contribution(DType::I32, len, own, len), own)
                .unwrap();
        }
        for len in [0, 7, 5000] {
            let received = comm.receive(own, DType::I32, len).unwrap();
            assert_eq!(received, contribution(DType::I32, len, own, len));
        }
    });
}

#[test]
fn long_all_reduces_send_chunks_and_long_broadcasts_too() {
    let (size, len) = (4, 100_000);
    for call in [Call::AllReduce(ReduceOp::Sum), Call::Broadcast { root: 1 }] {
        let network = MemoryNetwork::new(size, 0);
        run_open(&network, size, TIMEOUT, |this| {
            this.world
                .start(call.clone(), zeros(len))
                .unwrap()
                .wait()
                .unwrap();
            this.engine.close(TIMEOUT).unwrap();
        });
        assert_eq!(network.longest(), len / size * 4);
    }
}

#[test]
fn short_payloads_are_sent_inside_control_messages() {
    let network = MemoryNetwork::new(3, 0);
    run_open(&network, 3, TIMEOUT, |this| {
        this.world
            .all_gather(Buffer::zeros(DType::U8, MAX_INLINE_BYTES))
            .unwrap();
        assert_eq!(network.longest(), 0);
        this.world.barrier().unwrap();
        this.world
            .all_gather(Buffer::zeros(DType::U8, MAX_INLINE_BYTES + 1))
            .unwrap();
        assert_eq!(network.longest(), MAX_INLINE_BYTES + 1);
    });
}

#[test]
fn memory_is_reused() {
    let allocated = run(3, 0, |this| {
        let comm = &this.world;
        let pool = pool(this);
        let mut after_two = 0;
        for step in 0..8 {
            for call in [
                Call::AllReduce(ReduceOp::Sum),
                Call::ReduceScatter(ReduceOp::Sum),
                Call::AllGather,
                Call::Broadcast { root: 2 },
            ] {
                let input = pool.take(DType::F32, 60_000);
                pool.give(comm.start(call, input).unwrap().wait().unwrap());
            }
            if step == 1 {
                after_two = pool.allocated();
            }
        }
        (after_two, pool.allocated())
    });
    for (after_two, at_the_end) in allocated {
        assert_eq!(after_two, at_the_end);
    }
}

#[test]
fn rank_0_shares_bytes_with_all() {
    run(4, 1, |this| {
        for round in 0..3 {
            let bytes = format!("10.0.0.1:{round}").into_bytes();
            let own = (this.rank == 0).then_some(&bytes[..]);
            assert_eq!(this.engine.share(own, TIMEOUT).unwrap(), bytes);
        }
        let long = vec![0; MAX_INLINE_BYTES + 1];
        if this.rank == 0 {
            let error = this.engine.share(Some(&long), TIMEOUT).unwrap_err();
            let CommError::Engine { message, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(
                message,
                "cannot share 3969 bytes at the start: expected at most 3968"
            );
            assert!(this.engine.share(None, TIMEOUT).is_err());
        }
    });
}

//! Tests that complete programs have the same results as over the `threads` engine.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::{bf16, f16};

use super::fake_nccl::{v2_17, v2_20, v2_27};
use super::harness::{TIMEOUT, TestRun, TestSetup, over};
use crate::process::Transport;
use crate::{Buffer, Call, CommError, Communicator, DType, ReduceOp, World};
use burn_megatron_test_support::wait_until;

type Comm = Arc<dyn Communicator>;

/// Returns small integers that differ by rank, call and position.
pub fn values(dtype: DType, rank: usize, seed: usize, len: usize) -> Buffer {
    let number = move |i: usize| (i * 7 + seed * 3 + rank * 11) % 23;
    let all = 0..len;
    match dtype {
        DType::F64 => all.map(|i| number(i) as f64).collect::<Vec<_>>().into(),
        DType::F32 => all.map(|i| number(i) as f32).collect::<Vec<_>>().into(),
        DType::BF16 => all
            .map(|i| bf16::from_f32(number(i) as f32))
            .collect::<Vec<_>>()
            .into(),
        DType::F16 => all
            .map(|i| f16::from_f32(number(i) as f32))
            .collect::<Vec<_>>()
            .into(),
        DType::I64 => all.map(|i| number(i) as i64).collect::<Vec<_>>().into(),
        DType::I32 => all.map(|i| number(i) as i32).collect::<Vec<_>>().into(),
        DType::U8 => all.map(|i| number(i) as u8).collect::<Vec<_>>().into(),
    }
}

/// Runs a program on both engines and compares the results on every rank.
pub fn same(ranks: usize, setup: TestSetup, program: impl Fn(Comm) -> Vec<Buffer> + Sync) {
    let run = |rank: crate::Rank| Ok::<_, CommError>(program(rank.communicator()));
    let expected = World::threads(ranks).unwrap().run(run).unwrap();
    let found = over(ranks, setup, |comm| program(comm));
    assert_eq!(found, expected);
}

/// Runs every collective with every type and several lengths.
pub fn collectives(comm: Comm) -> Vec<Buffer> {
    let (size, rank) = (comm.size(), comm.rank());
    let mut results = vec![];
    for dtype in DType::ALL {
        for (seed, len) in [0, 1, 5, 1000].into_iter().enumerate() {
            let input = || values(dtype, rank, seed, len);
            let mut ops = vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
            if dtype.is_float() {
                ops.push(ReduceOp::Average);
            }
            for op in ops {
                results.push(comm.all_reduce(input(), op).unwrap());
                let whole = values(dtype, rank, seed, len * size);
                results.push(comm.reduce_scatter(whole, op).unwrap());
            }
            results.push(comm.all_gather(input()).unwrap());
            results.push(comm.broadcast(input(), seed % size).unwrap());
        }
        comm.barrier().unwrap();
    }
    results
}

/// Runs all-to-alls with uneven counts, including zeros.
pub fn uneven(comm: Comm) -> Vec<Buffer> {
    let (size, rank) = (comm.size(), comm.rank());
    let count = |from: usize, to: usize, seed: usize| match (from + to * 2 + seed) % 4 {
        0 => 0,
        n => n * 3,
    };
    let exchange = |seed: usize| {
        let send: Vec<usize> = (0..size).map(|to| count(rank, to, seed)).collect();
        let receive = (0..size).map(|from| count(from, rank, seed)).collect();
        let input = values(DType::F32, rank, seed, send.iter().sum());
        comm.all_to_all(input, send, receive).unwrap()
    };
    let mut results: Vec<Buffer> = (0..6).map(exchange).collect();
    // All elements go to rank 0, and then no elements at all.
    let to = |rank: usize, to: usize| if to == 0 { rank + 1 } else { 0 };
    let send: Vec<usize> = (0..size).map(|other| to(rank, other)).collect();
    let receive: Vec<usize> = (0..size).map(|other| to(other, rank)).collect();
    let input = values(DType::U8, rank, 0, rank + 1);
    results.push(comm.all_to_all(input, send, receive).unwrap());
    let none = || vec![0; size];
    let empty = Buffer::empty(DType::F64);
    results.push(comm.all_to_all(empty, none(), none()).unwrap());
    results
}

/// Sends messages in both directions at the same time, waits for sends before any receive, and mixes messages with
/// collectives.
pub fn messages(comm: Comm) -> Vec<Buffer> {
    let (size, rank) = (comm.size(), comm.rank());
    if size == 1 {
        // Messages of a rank to itself do not reach an engine.
        return vec![];
    }
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut results = vec![];
    for seed in 0..4 {
        comm.send(values(DType::F32, rank, seed, 10 + seed), next)
            .unwrap();
        comm.send(values(DType::I64, rank, seed, 3), before)
            .unwrap();
    }
    results.push(
        comm.all_reduce(vec![rank as f32].into(), ReduceOp::Sum)
            .unwrap(),
    );
    for seed in 0..4 {
        results.push(comm.receive(before, DType::F32, 10 + seed).unwrap());
        results.push(comm.receive(next, DType::I64, 3).unwrap());
    }
    // Receives that are started before the sends, with a collective in between.
    let wanted = comm.start_receive(next, DType::U8, 4).unwrap();
    let empty = comm.start_receive(next, DType::F32, 0).unwrap();
    let sum = comm.start_all_gather(vec![rank as i32].into()).unwrap();
    comm.send(values(DType::U8, rank, 9, 4), before).unwrap();
    comm.send(Buffer::empty(DType::F32), before).unwrap();
    results.push(wanted.wait().unwrap());
    results.push(empty.wait().unwrap());
    results.push(sum.wait().unwrap());
    results
}

/// Starts several messages together between collectives.
pub fn together(comm: Comm) -> Vec<Buffer> {
    let (size, rank) = (comm.size(), comm.rank());
    if size == 1 {
        return vec![];
    }
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let receive = |from, len| Call::Receive {
        from,
        dtype: DType::F32,
        len,
    };
    let calls = vec![
        (
            Call::AllReduce(ReduceOp::Sum),
            values(DType::F64, rank, 0, 9),
        ),
        (Call::Send { to: next }, values(DType::F32, rank, 1, 5)),
        (receive(before, 5), Buffer::empty(DType::F32)),
        (Call::AllGather, values(DType::I32, rank, 2, 2)),
        (Call::Barrier, Buffer::empty(DType::U8)),
        (Call::AllGather, Buffer::empty(DType::I32)),
    ];
    let started = comm.start_all(calls).unwrap();
    started
        .into_iter()
        .map(|pending| pending.wait().unwrap())
        .collect()
}

/// Uses process groups of several sizes and orders at the same time, and splits them again.
pub fn splits(comm: Comm) -> Vec<Buffer> {
    let (size, rank) = (comm.size(), comm.rank());
    let alone: Vec<Vec<usize>> = (0..size).map(|rank| vec![rank]).collect();
    let backwards = vec![(0..size).rev().collect::<Vec<_>>()];
    let halves: Vec<Vec<usize>> = match size {
        1 => vec![vec![0]],
        _ => vec![(0..size - 1).collect(), vec![size - 1]],
    };
    let split = |groups: &[Vec<usize>]| comm.split("part", groups).unwrap();
    let parts = [
        split(&halves),
        split(&backwards),
        split(&alone),
        split(&halves),
    ];
    let gather = |part: &Comm, seed: usize| {
        let input = values(DType::F32, rank, seed, 3);
        part.start_all_gather(input).unwrap()
    };
    let mut pending: Vec<_> = parts.iter().zip(0..).map(|(p, s)| gather(p, s)).collect();
    pending.push(gather(&comm, 7));
    let again = parts[1].split("again", &halves).unwrap();
    pending.push(gather(&again, 8));
    pending.reverse();
    let mut results: Vec<Buffer> = pending.into_iter().map(|p| p.wait().unwrap()).collect();
    if again.size() > 1 {
        let other = (again.rank() + 1) % again.size();
        again.send(values(DType::F32, rank, 5, 4), other).unwrap();
        let from = (again.rank() + again.size() - 1) % again.size();
        results.push(again.receive(from, DType::F32, 4).unwrap());
    }
    results
}

#[test]
fn collectives_are_those_of_threads() {
    for ranks in 1..=4 {
        same(ranks, TestSetup::default(), collectives);
    }
}

/// Runs a world of one rank over NCCL, as on a machine with one GPU.
#[test]
fn a_rank_alone_may_use_the_library() {
    let setup = TestSetup {
        use_for_one_rank: true,
        ..TestSetup::default()
    };
    same(1, setup, collectives);
    same(1, setup, uneven);
    same(1, setup, splits);
}

#[test]
fn uneven_exchanges_are_those_of_threads() {
    for ranks in 1..=4 {
        same(ranks, TestSetup::default(), uneven);
    }
}

#[test]
fn messages_are_those_of_threads() {
    for ranks in 2..=4 {
        same(ranks, TestSetup::default(), messages);
    }
}

#[test]
fn calls_that_are_started_as_one_are_those_of_threads() {
    for ranks in 2..=4 {
        same(ranks, TestSetup::default(), together);
    }
}

/// Communicators are created in three ways: at the first call, together with the group by `ncclCommSplit`, or together
/// with the group one after the other.
#[test]
fn splits_are_those_of_threads() {
    for (version, eager_init) in [(v2_27 as _, false), (v2_20 as _, true), (v2_17 as _, true)] {
        for ranks in 1..=4 {
            let setup = TestSetup {
                version,
                eager_init,
                ..TestSetup::default()
            };
            same(ranks, setup, splits);
        }
    }
}

/// Starts many calls and waits for them in reverse order.
#[test]
fn calls_may_be_waited_for_in_any_order() {
    same(3, TestSetup::default(), |comm| {
        let start = |seed: usize| {
            let input = values(DType::I32, comm.rank(), seed, 10 + seed);
            comm.start_all_reduce(input, ReduceOp::Sum).unwrap()
        };
        let pending: Vec<_> = (0..200).map(start).collect();
        let results = pending.into_iter().rev().map(|p| p.wait().unwrap());
        results.collect()
    });
}

/// Calls are executed even if their handles are dropped.
#[test]
fn calls_whose_handle_is_dropped_take_place() {
    same(2, TestSetup::default(), |comm| {
        drop(comm.start_all_gather(vec![1u8].into()).unwrap());
        vec![comm.all_reduce(vec![2f32].into(), ReduceOp::Sum).unwrap()]
    });
}

/// Inputs return to the pool, and results are taken from the pool.
#[test]
fn host_memory_is_reused() {
    over(2, TestSetup::default(), |comm| {
        let pool = comm.pool().unwrap().clone();
        for round in 0..5 {
            let input = pool.take(DType::F32, 4096);
            let sum = comm.all_reduce(input, ReduceOp::Sum).unwrap();
            pool.give(sum);
            assert!(
                pool.allocated() <= 2,
                "{} in round {round}",
                pool.allocated()
            );
        }
    });
}

#[test]
fn small_host_collectives_reuse_the_memory_of_earlier_ones() {
    let run = TestRun::new(2, TestSetup::default());
    run.on_all(|transport, comm| {
        let sum = |len: usize| comm.all_reduce(vec![1.5f32; len].into(), ReduceOp::Sum);
        for _ in 0..50 {
            assert_eq!(sum(8).unwrap(), vec![3.0f32; 8].into());
        }
        // 32 KiB fit into the block. For a larger input, input and output are allocated.
        assert_eq!(sum(8 << 10).unwrap().len(), 8 << 10);
        assert_eq!(sum((8 << 10) + 1).unwrap().len(), (8 << 10) + 1);
        transport.close(TIMEOUT).unwrap();
    });
    let allocated = run.device.allocated.load(Ordering::SeqCst);
    assert_eq!(allocated, 2 * (1 + 2));
    wait_until("no memory is left", || run.device.held() == 0);
}

/// Starts more calls than the number of blocks that are kept.
#[test]
fn small_host_collectives_in_flight_together_have_memory_each() {
    let run = TestRun::new(2, TestSetup::default());
    run.on_all(|transport, comm| {
        for _ in 0..2 {
            let start =
                |i: usize| comm.start(Call::AllReduce(ReduceOp::Sum), vec![i as f32].into());
            let started: Vec<_> = (0..20).map(|i| start(i).unwrap()).collect();
            for (i, pending) in started.into_iter().enumerate() {
                assert_eq!(pending.wait().unwrap(), vec![2.0 * i as f32].into());
            }
        }
        transport.close(TIMEOUT).unwrap();
    });
    wait_until("no memory is left", || run.device.held() == 0);
}

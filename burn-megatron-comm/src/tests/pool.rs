//! Tests that reused memory does not change results, and that nothing is allocated after the second round.

use std::sync::Arc;

use super::*;

const LEN: usize = 4 * MIN_POOLED_LEN;

/// Returns `(1 + i mod 7 + round mod 3) * 2^rank`. The sums differ between sets of ranks and between consecutive
/// rounds.
fn pattern(dtype: DType, rank: usize, round: usize, range: std::ops::Range<usize>) -> Buffer {
    let values = range.map(|i| (1 + i % 7 + round % 3) as i64 * (1 << rank));
    buffer(dtype, &values.collect::<Vec<_>>())
}

fn filled(pool: &BufferPool, values: &Buffer) -> Buffer {
    let mut taken = pool.take(values.dtype(), values.len());
    taken.write(0, values, 0..values.len()).unwrap();
    taken
}

/// Returns `(1 + i mod 7 + round mod 3) * factor`.
fn times(dtype: DType, factor: i64, round: usize, range: std::ops::Range<usize>) -> Buffer {
    let values = range.map(|i| (1 + i % 7 + round % 3) as i64 * factor);
    buffer(dtype, &values.collect::<Vec<_>>())
}

/// Runs one round of a training step: reduce_scatter, all_gather, all_reduce, and an all-to-all exchange. Every input
/// is taken from the pool, and every result is given back.
fn round(comm: &dyn Communicator, dtype: DType, round: usize) -> Result<(), CommError> {
    let (own, ranks) = (comm.rank(), comm.size());
    let pool = comm.pool().expect("the engine of threads has pools");
    let part = LEN / ranks;
    let range = own * part..(own + 1) * part;
    let all = (1 << ranks) - 1;

    let input = filled(pool, &pattern(dtype, own, round, 0..LEN));
    let shard = comm.reduce_scatter(input, ReduceOp::Sum)?;
    assert_eq!(shard, times(dtype, all, round, range.clone()));
    let whole = comm.all_gather(filled(pool, &shard))?;
    assert_eq!(whole, times(dtype, all, round, 0..LEN));
    pool.give(shard);
    pool.give(whole);

    let sum = comm.all_reduce(
        filled(pool, &pattern(dtype, own, round, 0..LEN)),
        ReduceOp::Sum,
    )?;
    assert_eq!(sum, times(dtype, all, round, 0..LEN));
    pool.give(sum);

    let counts = vec![part; ranks];
    let input = filled(pool, &pattern(dtype, own, round, 0..LEN));
    let exchanged = comm.all_to_all(input, counts.clone(), counts)?;
    let chunks: Vec<_> = (0..ranks)
        .map(|rank| pattern(dtype, rank, round, range.clone()))
        .collect();
    assert_eq!(exchanged, Buffer::concat(&chunks).unwrap());
    pool.give(exchanged);
    let root = comm.broadcast(
        filled(pool, &pattern(dtype, own, round, 0..LEN)),
        round % ranks,
    )?;
    assert_eq!(root, pattern(dtype, round % ranks, round, 0..LEN));
    pool.give(root);
    Ok(())
}

#[test]
fn nothing_is_allocated_after_the_second_round() {
    for dtype in [DType::F32, DType::F16] {
        World::threads(4)
            .unwrap()
            .compute_threads(1)
            .run(|rank| {
                let comm = rank.communicator();
                let pool = comm.pool().unwrap();
                let mut allocated = (0, 0);
                for number in 0..50 {
                    round(&*comm, dtype, number)?;
                    let now = (pool.allocated(), pool.allocated_bytes());
                    match number {
                        0 | 1 => allocated = now,
                        _ => assert_eq!(now, allocated, "round {number} of {dtype}"),
                    }
                }
                // At most two buffers of each length are in use at once.
                assert_eq!(allocated.0, 4, "{pool:?}");
                Ok::<_, CommError>(())
            })
            .unwrap();
    }
}

#[test]
fn groups_of_a_rank_share_its_pool() {
    World::threads(4)
        .unwrap()
        .run(|rank| {
            let world = rank.communicator();
            let pair = world.split("pair", &[vec![0, 1], vec![2, 3]])?;
            let pool = world.pool().unwrap();
            assert!(Arc::ptr_eq(pool, pair.pool().unwrap()));
            for number in 0..10 {
                round(&*pair, DType::F32, number)?;
                round(&*world, DType::F32, number)?;
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
}

/// Inputs that were not taken from the pool are also kept and used for results.
#[test]
fn buffers_from_elsewhere_are_used_for_results() {
    World::threads(2)
        .unwrap()
        .run(|rank| {
            let comm = rank.communicator();
            let pool = comm.pool().unwrap();
            let mut allocated = 0;
            for number in 0..20 {
                // The results are dropped.
                let own = pattern(DType::F32, comm.rank(), number, 0..LEN);
                comm.all_reduce(own, ReduceOp::Sum)?;
                comm.barrier()?;
                match number {
                    0 | 1 => allocated = pool.allocated(),
                    _ => assert_eq!(pool.allocated(), allocated),
                }
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn a_dropped_handle_gives_the_inputs_back() {
    World::threads(2)
        .unwrap()
        .run(|rank| {
            let comm = rank.communicator();
            let pool = comm.pool().unwrap();
            for call in [
                Call::AllReduce(ReduceOp::Sum),
                Call::AllGather,
                Call::ReduceScatter(ReduceOp::Sum),
            ] {
                for _ in 0..20 {
                    drop(comm.start(call.clone(), pool.take(DType::F32, LEN))?);
                    comm.barrier()?;
                }
            }
            assert_eq!((pool.allocated(), pool.free_bytes()), (1, 4 * LEN as u64));
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn a_mismatch_gives_the_inputs_back() {
    let pools = std::sync::Mutex::new(Vec::new());
    let result = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator();
        let pool = comm.pool().unwrap();
        pools.lock().unwrap().push(Arc::clone(pool));
        let input = pool.take(DType::F32, LEN);
        match rank.rank() {
            0 => comm.all_gather(input).map(drop),
            _ => comm.all_reduce(input, ReduceOp::Sum).map(drop),
        }
    });
    assert!(matches!(
        comm_failure(result.unwrap_err()).1,
        CommError::Mismatch { .. }
    ));
    for pool in pools.into_inner().unwrap() {
        assert_eq!((pool.allocated(), pool.free_bytes()), (1, 4 * LEN as u64));
    }
}

#[test]
fn a_rank_that_fails_leaves_usable_pools() {
    let pools = std::sync::Mutex::new(Vec::new());
    let result = World::threads(3).unwrap().deadline(TIMEOUT).run(|rank| {
        let comm = rank.communicator();
        let pool = comm.pool().unwrap();
        pools.lock().unwrap().push(Arc::clone(pool));
        round(
            &*comm.split("alone", &[vec![0], vec![1], vec![2]])?,
            DType::F32,
            0,
        )?;
        comm.barrier()?;
        let pending = comm.start_all_gather(pool.take(DType::F32, LEN))?;
        if rank.rank() == 1 {
            std::panic::resume_unwind(Box::new("broken"));
        }
        pool.give(pending.wait()?);
        comm.barrier()
    });
    assert!(matches!(
        result,
        Err(WorldError::RankFailed { rank: 1, .. })
    ));
    for pool in pools.into_inner().unwrap() {
        assert_eq!(pool.free_bytes(), pool.allocated_bytes(), "all is back");
        let before = pool.allocated();
        pool.give(pool.take(DType::F32, LEN));
        assert_eq!(pool.allocated(), before);
    }
}

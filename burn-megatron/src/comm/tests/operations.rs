//! Every operation on every type and world size against the reference.

use super::*;

/// Even and different for every rank and place, so that averages of up to 4 ranks are exact enough to
/// compare and no place can stand in for another.
fn input(rank: usize, len: usize) -> Vec<i64> {
    (0..len)
        .map(|i| ((5 * rank + 3 * i) % 11 + rank) as i64 * 2)
        .collect()
}

fn check(size: usize, dtype: DType, len: usize, call: &Call) {
    let inputs: Vec<Vec<i64>> = (0..size).map(|rank| input(rank, len)).collect();
    let results = World::threads(size)
        .unwrap()
        .compute_threads(1)
        .run(|rank| {
            let own = buffer(dtype, &inputs[rank.rank()]);
            rank.communicator().start(call.clone(), own)?.wait()
        })
        .unwrap();
    for (rank, result) in results.into_iter().enumerate() {
        let wanted = buffer(dtype, &expected(call, rank, &inputs));
        assert_eq!(
            result, wanted,
            "{call:?} of {len} {dtype} on rank {rank} of {size}"
        );
    }
}

fn check_all(len: impl Fn(usize) -> usize, call: impl Fn(usize) -> Call) {
    for size in 1..=4 {
        for dtype in DTYPES {
            check(size, dtype, len(size), &call(size));
        }
    }
}

#[test]
fn all_reduce() {
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        check_all(|_| 13, |_| Call::AllReduce(op));
    }
}

#[test]
fn reduce_scatter() {
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        check_all(|size| 5 * size, |_| Call::ReduceScatter(op));
    }
}

#[test]
fn all_gather() {
    check_all(|_| 7, |_| Call::AllGather);
}

#[test]
fn broadcast() {
    check_all(|_| 7, |size| Call::Broadcast { root: size - 1 });
    check_all(|_| 7, |_| Call::Broadcast { root: 0 });
}

#[test]
fn empty_buffers() {
    for call in [
        Call::AllReduce(ReduceOp::Sum),
        Call::AllGather,
        Call::ReduceScatter(ReduceOp::Max),
    ] {
        check_all(|_| 0, |_| call.clone());
    }
    check_all(|_| 0, |_| Call::Broadcast { root: 0 });
}

#[test]
fn long_buffers_cross_the_chunks_of_the_reduction() {
    for dtype in [DType::F32, DType::BF16, DType::I32] {
        check(3, dtype, 3 * 5000, &Call::AllReduce(ReduceOp::Sum));
        check(3, dtype, 3 * 5000, &Call::ReduceScatter(ReduceOp::Min));
    }
}

/// So many that the members share the work; they cannot be shared evenly.
#[test]
fn shared_reductions() {
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        check_all(|_| 20_011, |_| Call::AllReduce(op));
    }
}

#[test]
fn averages_of_every_float() {
    for size in 1..=4 {
        let world = World::threads(size).unwrap();
        let all = world.run(|rank| {
            let comm = rank.communicator();
            let own = rank.rank() as f32 + 1.0;
            let wide = comm.all_reduce(vec![own as f64; 3].into(), ReduceOp::Average)?;
            let single = comm.all_reduce(vec![own; 3].into(), ReduceOp::Average)?;
            let brain = vec![bf16::from_f32(own); 2 * size];
            let brain = comm.reduce_scatter(brain.into(), ReduceOp::Average)?;
            let half = comm.all_reduce(vec![f16::from_f32(own)].into(), ReduceOp::Average)?;
            Ok::<_, CommError>((wide, single, brain, half))
        });
        let mean = (size as f32 + 1.0) / 2.0;
        for (wide, single, brain, half) in all.unwrap() {
            assert_eq!(wide, vec![mean as f64; 3].into());
            assert_eq!(single, vec![mean; 3].into());
            assert_eq!(brain, vec![bf16::from_f32(mean); 2].into());
            assert_eq!(half, vec![f16::from_f32(mean)].into());
        }
    }
}

#[test]
fn halves_accumulate_in_f32_and_round_once() {
    // 256 + 1 is no bf16: adding in bf16 would lose every 1.
    let results = World::threads(4).unwrap().run(|rank| {
        let own = bf16::from_f32(if rank.rank() == 0 { 256.0 } else { 1.0 });
        let comm = rank.communicator();
        let sum = comm.all_reduce(vec![own].into(), ReduceOp::Sum)?;
        Ok::<_, CommError>((sum, comm.all_reduce(vec![own].into(), ReduceOp::Average)?))
    });
    for (sum, average) in results.unwrap() {
        // Ties go to the even neighbour: 259 to 260, and 64.75 to 65.
        assert_eq!(sum, vec![bf16::from_f32(259.0)].into());
        assert_ne!(sum, vec![bf16::from_f32(256.0)].into());
        assert_eq!(average, vec![bf16::from_f32(64.75)].into());
    }
    // A sum beyond the range of f16 has an average within it.
    let results = World::threads(2).unwrap().run(|rank| {
        let own = Buffer::from(vec![f16::from_f32(60000.0)]);
        rank.communicator().all_reduce(own, ReduceOp::Average)
    });
    assert_eq!(results.unwrap()[0], vec![f16::from_f32(60000.0)].into());
}

#[test]
fn inner_groups_first_give_the_bits_of_all_at_once() {
    for (ranks, inner) in [(4, 2), (8, 2), (8, 4)] {
        let parts: Vec<Vec<usize>> = (0..ranks / inner)
            .map(|part| (part * inner..(part + 1) * inner).collect())
            .collect();
        let across: Vec<Vec<usize>> = (0..inner)
            .map(|place| parts.iter().map(|part| part[place]).collect())
            .collect();
        let results = World::threads(ranks).unwrap().run(|rank| {
            let world = rank.communicator();
            let (part, across) = (
                world.split("part", &parts)?,
                world.split("across", &across)?,
            );
            let value = |i: usize| ((7 * rank.rank() + i) as f32 * 1.618).sin() / 3.0;
            let own = || Buffer::from((0..2000).map(value).collect::<Vec<_>>());
            let shard = part.reduce_scatter(own(), ReduceOp::Sum)?;
            let nested = part.all_gather(across.all_reduce(shard, ReduceOp::Sum)?)?;
            Ok::<_, CommError>(nested == world.all_reduce(own(), ReduceOp::Sum)?)
        });
        assert_eq!(results.unwrap(), vec![true; ranks], "{ranks} by {inner}");
    }
}

#[test]
fn a_nan_of_any_rank_wins() {
    for bad in 0..3 {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let results = World::threads(3).unwrap().run(|rank| {
                let own = if rank.rank() == bad {
                    f32::NAN
                } else {
                    rank.rank() as f32
                };
                rank.communicator().all_reduce(vec![own].into(), op)
            });
            for result in results.unwrap() {
                assert!(Vec::<f32>::try_from(result).unwrap()[0].is_nan());
            }
        }
    }
}

#[test]
fn integers_wrap_around() {
    let results = World::threads(2).unwrap().run(|rank| {
        rank.communicator()
            .all_reduce(vec![200u8].into(), ReduceOp::Sum)
    });
    assert_eq!(results.unwrap()[0], vec![144u8].into());
}

#[test]
fn all_to_all_with_uneven_and_zero_counts() {
    for size in 1..=4 {
        for dtype in DTYPES {
            // Rank a sends (2 a + b) % 3 elements to rank b: some counts are zero.
            let count = |from: usize, to: usize| (2 * from + to) % 3;
            let piece = |from: usize, to: usize| vec![(10 * from + to) as i64; count(from, to)];
            let results = World::threads(size).unwrap().run(|rank| {
                let own = rank.rank();
                let input: Vec<i64> = (0..size).flat_map(|to| piece(own, to)).collect();
                let send = (0..size).map(|to| count(own, to)).collect();
                let receive = (0..size).map(|from| count(from, own)).collect();
                rank.communicator()
                    .all_to_all(buffer(dtype, &input), send, receive)
            });
            for (own, result) in results.unwrap().into_iter().enumerate() {
                let wanted: Vec<i64> = (0..size).flat_map(|from| piece(from, own)).collect();
                assert_eq!(result, buffer(dtype, &wanted));
            }
        }
    }
}

#[test]
fn messages_of_every_type() {
    for dtype in DTYPES {
        let results = World::threads(3).unwrap().run(|rank| {
            let (own, comm) = (rank.rank(), rank.communicator());
            comm.send(buffer(dtype, &input(own, 4)), (own + 1) % 3)?;
            comm.receive((own + 2) % 3, dtype, 4)
        });
        for (own, result) in results.unwrap().into_iter().enumerate() {
            assert_eq!(result, buffer(dtype, &input((own + 2) % 3, 4)));
        }
    }
}

#[test]
fn barrier_holds_all_back() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let came = AtomicUsize::new(0);
    World::threads(4)
        .unwrap()
        .run(|rank| {
            std::thread::sleep(std::time::Duration::from_millis(10 * rank.rank() as u64));
            came.fetch_add(1, Ordering::SeqCst);
            rank.communicator().barrier()?;
            assert_eq!(came.load(Ordering::SeqCst), 4);
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn buffers_convert_slice_and_concatenate() {
    for dtype in DTYPES {
        let whole = buffer(dtype, &[1, 2, 3, 4, 5]);
        assert_eq!(
            (whole.dtype(), whole.len(), whole.is_empty()),
            (dtype, 5, false)
        );
        let parts = [whole.slice(0..2), whole.slice(2..2), whole.slice(2..5)];
        assert_eq!(Buffer::concat(&parts).unwrap(), whole);
        assert_eq!(Buffer::zeros(dtype, 3), buffer(dtype, &[0, 0, 0]));
        assert!(Buffer::empty(dtype).is_empty());
    }
    assert_eq!(Buffer::concat(&[]), Err(BufferError::NoParts));
    let error = Vec::<f32>::try_from(Buffer::from(vec![1u8, 2])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the buffer holds 2 u8, but f32 was asked for"
    );
    assert_eq!(
        Buffer::concat(&[vec![1u8, 2].into(), vec![1f32].into()])
            .unwrap_err()
            .to_string(),
        "the buffer holds 1 f32, but u8 was asked for"
    );
    assert_eq!(DTYPES.map(DType::size_of), [8, 4, 2, 2, 8, 4, 1]);
}

//! Tests of the results of calls.

use super::*;

/// Runs each rank on its own thread, with a blocking communicator and a stream.
fn ranks<T: Send>(count: usize, f: impl Fn(usize, usize, usize) -> T + Sync) -> Vec<T> {
    let id = id();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..count)
            .map(|rank| {
                let f = &f;
                scope.spawn(move || {
                    attach();
                    let mut comm = 0;
                    // SAFETY: the pointer is valid.
                    let code =
                        unsafe { ncclCommInitRank(&mut comm, count as c_int, id, rank as c_int) };
                    assert_eq!(code, SUCCESS);
                    let result = f(rank, comm, stream());
                    assert_eq!(ncclCommFinalize(comm), SUCCESS);
                    assert_eq!(ncclCommDestroy(comm), SUCCESS);
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns six numbers of a rank.
fn own(rank: usize) -> Vec<f32> {
    (0..6).map(|at| (10 * rank + at) as f32).collect()
}

fn sum(count: usize) -> Vec<f32> {
    let ranks = (0..count).sum::<usize>();
    (0..6).map(|at| (10 * ranks + at * count) as f32).collect()
}

#[test]
fn every_collective_apart_and_in_place() {
    let _turn = enter();
    let found = ranks(3, |rank, comm, stream| {
        // SAFETY: the memory has the length that the calls use.
        unsafe {
            let input = device(&own(rank));
            let outputs: Vec<u64> = (0..8).map(|_| device(&[f32::NAN; 18])).collect();
            let root = 1;
            let codes = [
                ncclAllReduce(input, outputs[0], 6, F32, SUM, comm, stream),
                ncclReduceScatter(input, outputs[1], 2, F32, SUM, comm, stream),
                ncclAllGather(input, outputs[2], 6, F32, comm, stream),
                ncclBroadcast(input, outputs[3], 6, F32, root, comm, stream),
                ncclReduce(input, outputs[4], 6, F32, 2, root, comm, stream),
            ];
            assert_eq!(codes, [SUCCESS; 5]);
            // In place: each call uses the results of the previous calls.
            let in_place = outputs[5];
            let at = in_place + 4 * 6 * rank as u64;
            (at as *mut f32).copy_from(own(rank).as_ptr(), 6);
            let again = device(&own(rank));
            let codes = [
                ncclAllGather(at, in_place, 6, F32, comm, stream),
                ncclAllReduce(again, again, 6, F32, SUM, comm, stream),
                ncclReduceScatter(again, again + 8 * rank as u64, 2, F32, SUM, comm, stream),
                ncclBcast(outputs[6], 6, F32, root, comm, stream),
            ];
            assert_eq!(codes, [SUCCESS; 4]);
            settle(stream);
            let mut found: Vec<_> = outputs[..6].iter().map(|at| read(*at, 18)).collect();
            found.push(read(again, 6));
            found
        }
    });
    let gathered: Vec<f32> = (0..3).flat_map(own).collect();
    for (rank, found) in found.iter().enumerate() {
        assert_eq!(found[0][..6], sum(3));
        assert!(found[0][6..].iter().all(|x| x.is_nan()));
        assert_eq!(found[1][..2], sum(3)[2 * rank..2 * rank + 2]);
        assert!(found[1][2].is_nan());
        assert_eq!(found[2], gathered);
        assert_eq!(found[3][..6], own(1));
        match rank {
            1 => assert_eq!(found[4][..6], own(2)),
            _ => assert!(found[4][0].is_nan()),
        }
        assert_eq!(found[5], gathered);
        let mut after = sum(3);
        for at in 0..2 {
            after[2 * rank + at] *= 3.0;
        }
        assert_eq!(found[6], after);
    }
}

#[test]
fn one_thread_has_all_ranks() {
    let _turn = enter();
    let comms = all(4);
    let places: Vec<_> = (0..4).map(|rank| (stream(), device(&own(rank)))).collect();
    ncclGroupStart();
    // Nested groups form one group.
    ncclGroupStart();
    for (comm, (stream, place)) in comms.iter().zip(&places) {
        // SAFETY: the memory has 6 numbers.
        let code = unsafe { ncclAllReduce(*place, *place, 6, F32, SUM, *comm, *stream) };
        assert_eq!(code, SUCCESS);
    }
    assert_eq!(ncclGroupEnd(), SUCCESS);
    assert_eq!(read(places[0].1, 6), own(0));
    assert_eq!(ncclGroupEnd(), SUCCESS);
    for (stream, place) in places {
        settle(stream);
        assert_eq!(read(place, 6), sum(4));
    }
    assert_eq!(ncclGroupEnd(), INVALID_USAGE);
}

#[test]
fn all_ranks_send_to_all_at_once() {
    let _turn = enter();
    let found = ranks(3, |rank, comm, stream| {
        let (input, output) = (device(&own(rank)), device(&[f32::NAN; 6]));
        ncclGroupStart();
        for peer in 0..3 {
            let at = 8 * peer as u64;
            // SAFETY: the memory has 6 numbers.
            unsafe {
                ncclSend(input + at, 2, F32, peer, comm, stream);
                ncclRecv(output + at, 2, F32, peer, comm, stream);
            }
        }
        assert_eq!(ncclGroupEnd(), SUCCESS);
        settle(stream);
        read(output, 6)
    });
    for (rank, found) in found.iter().enumerate() {
        let expected = (0..3).flat_map(|peer| own(peer)[2 * rank..2 * rank + 2].to_vec());
        assert_eq!(*found, expected.collect::<Vec<_>>());
    }
}

/// Checks that a message is not delayed by another message of its group whose other side arrives late.
#[test]
fn messages_of_a_group_pass_by_each_other() {
    let _turn = enter();
    let found = ranks(3, |rank, comm, stream| {
        let (input, output) = (device(&own(rank)), device(&[f32::NAN; 12]));
        // SAFETY: the memory has 6 and 12 numbers.
        unsafe {
            match rank {
                0 => {
                    ncclGroupStart();
                    ncclSend(input, 6, F32, 2, comm, stream);
                    ncclSend(input, 6, F32, 1, comm, stream);
                    assert_eq!(ncclGroupEnd(), SUCCESS);
                }
                1 => {
                    ncclRecv(output, 6, F32, 0, comm, stream);
                    ncclSend(output, 6, F32, 2, comm, stream);
                }
                _ => {
                    // The message of rank 1 arrives first. Rank 1 received its data from rank 0.
                    ncclRecv(output, 6, F32, 1, comm, stream);
                    ncclRecv(output + 24, 6, F32, 0, comm, stream);
                }
            }
        }
        settle(stream);
        read(output, 12)
    });
    assert_eq!(found[1][..6], own(0));
    assert_eq!(found[2], [own(0), own(0)].concat());
}

#[test]
fn messages_keep_their_order() {
    let _turn = enter();
    let found = ranks(2, |rank, comm, stream| {
        let place = device(&[1.0, 2.0, 3.0]);
        let to = device(&[0.0; 3]);
        for at in 0..3 {
            // SAFETY: the memory has three numbers.
            unsafe {
                match rank {
                    0 => ncclSend(place + 4 * at, 1, F32, 1, comm, stream),
                    _ => ncclRecv(to + 4 * at, 1, F32, 0, comm, stream),
                };
            }
        }
        settle(stream);
        read(to, 3)
    });
    assert_eq!(found[1], [1.0, 2.0, 3.0]);
}

#[test]
fn streams_stand_until_all_ranks_have_come() {
    let _turn = enter();
    let comms = all_non_blocking(2);
    assert_eq!(progress(comms[0]), SUCCESS);
    let streams = [stream(), stream()];
    let places = [device(&own(0)), device(&own(1))];
    let reduce = |rank: usize| {
        // SAFETY: the memory has 6 numbers.
        unsafe {
            ncclAllReduce(
                places[rank],
                places[rank],
                6,
                F32,
                SUM,
                comms[rank],
                streams[rank],
            )
        }
    };
    let before = mark(streams[0]);
    assert_eq!(reduce(0), IN_PROGRESS);
    // The host continues, but the stream waits.
    assert_eq!(progress(comms[0]), SUCCESS);
    let after = mark(streams[0]);
    jobs::wake();
    let seen = |mark: &AtomicUsize| mark.load(Ordering::SeqCst);
    assert_eq!((seen(&before), seen(&after)), (1, 0));
    assert_eq!(read(places[0], 6), own(0));
    assert_eq!(reduce(1), IN_PROGRESS);
    assert_eq!(seen(&after), 1);
    assert!(places.iter().all(|place| read(*place, 6) == sum(2)));
}

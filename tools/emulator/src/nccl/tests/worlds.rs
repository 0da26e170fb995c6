//! Tests of the creation and the destruction of communicators.

use super::*;

fn numbers(comm: usize) -> [c_int; 3] {
    let [mut size, mut rank, mut device] = [-1; 3];
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!(ncclCommCount(comm, &mut size), SUCCESS);
        assert_eq!(ncclCommUserRank(comm, &mut rank), SUCCESS);
        assert_eq!(ncclCommCuDevice(comm, &mut device), SUCCESS);
    }
    [size, rank, device]
}

#[test]
fn a_world_is_there_when_all_have_come() {
    let _turn = enter();
    let id = id();
    let begin = |rank| {
        let mut comm = 0;
        // SAFETY: the pointer and the config are valid.
        unsafe { ncclCommInitRankConfig(&mut comm, 2, id, rank, &config(0)) };
        comm
    };
    let first = begin(0);
    assert_eq!(progress(first), IN_PROGRESS);
    let place = device(&[0.0]);
    // SAFETY: the memory has one number.
    let early = unsafe { ncclAllReduce(place, place, 1, F32, SUM, first, 1) };
    assert_eq!(early, INVALID_ARGUMENT);
    let second = begin(1);
    assert_eq!([first, second].map(progress), [SUCCESS; 2]);
    assert_eq!([first, second].map(numbers), [[2, 0, 0], [2, 1, 0]]);
    assert_eq!(ncclCommFinalize(first), IN_PROGRESS);
    assert_eq!(progress(first), IN_PROGRESS);
    assert_eq!(ncclCommFinalize(first), INVALID_USAGE);
    assert_eq!(ncclCommFinalize(second), IN_PROGRESS);
    assert_eq!(progress(first), SUCCESS);
    assert_eq!(
        [first, second].map(|comm| ncclCommDestroy(comm)),
        [SUCCESS; 2]
    );
    assert_eq!(ncclCommDestroy(first), INVALID_ARGUMENT);
}

#[test]
fn a_world_ends_when_its_streams_have() {
    let _turn = enter();
    let comms = all_non_blocking(2);
    let place = device(&[1.0]);
    let streams = [stream(), stream()];
    // SAFETY: the memory has one number.
    let send = unsafe { ncclSend(place, 1, F32, 1, comms[0], streams[0]) };
    assert_eq!(send, IN_PROGRESS);
    let to = device(&[0.0]);
    // SAFETY: the same as above.
    let receive = |comm| unsafe { ncclRecv(to, 1, F32, 0, comm, streams[1]) };
    assert_eq!(ncclCommFinalize(comms[0]), IN_PROGRESS);
    let other = comms[1];
    assert_eq!(receive(other), IN_PROGRESS);
    assert_eq!(ncclCommFinalize(other), IN_PROGRESS);
    assert_eq!([comms[0], other].map(progress), [SUCCESS; 2]);
    assert_eq!(read(to, 1), [1.0]);
}

#[test]
fn splits_order_ranks_by_their_keys() {
    let _turn = enter();
    let comms = all_non_blocking(5);
    let mut places = [0xbad; 5];
    // Colours 0 0 1 none 0, with descending keys.
    for (rank, colour) in [0, 0, 1, -1, 0].into_iter().enumerate() {
        let key = if rank == 4 { 3 } else { 5 - rank as c_int };
        let place = &raw mut places[rank];
        // SAFETY: the pointer is valid until the end of the test.
        let code = unsafe { ncclCommSplit(comms[rank], colour, key, place, std::ptr::null()) };
        assert_eq!(code, IN_PROGRESS);
        assert_eq!(
            progress(comms[0]),
            if rank < 4 { IN_PROGRESS } else { SUCCESS }
        );
    }
    assert_eq!(places[3], 0);
    // Keys 5, 4 and 3 of the ranks 0, 1 and 4.
    let found = [0, 1, 2, 4].map(|rank| numbers(places[rank]));
    assert_eq!(found, [[3, 2, 0], [3, 1, 0], [1, 0, 0], [3, 0, 0]]);
    let members = [0, 1, 4].map(|rank| (places[rank], stream(), device(&[rank as f32])));
    for (comm, stream, place) in members {
        // SAFETY: the memory has one number.
        unsafe { ncclAllReduce(place, place, 1, F32, SUM, comm, stream) };
    }
    assert!(members.iter().all(|(.., place)| read(*place, 1) == [5.0]));
}

#[test]
fn an_abort_frees_its_streams_and_is_told_to_the_others() {
    let _turn = enter();
    let comms = all_non_blocking(2);
    let (stream, place) = (stream(), device(&[1.0]));
    // SAFETY: the memory has one number.
    unsafe { ncclAllReduce(place, place, 1, F32, SUM, comms[0], stream) };
    let after = mark(stream);
    assert_eq!(after.load(Ordering::SeqCst), 0);
    assert_eq!(ncclCommAbort(comms[0]), SUCCESS);
    assert_eq!(after.load(Ordering::SeqCst), 1);
    assert_eq!(read(place, 1), [1.0]);
    assert_eq!(progress(comms[1]), REMOTE_ERROR);
    // SAFETY: the same as above.
    let code = unsafe { ncclAllReduce(place, place, 1, F32, SUM, comms[1], stream) };
    assert_eq!(code, REMOTE_ERROR);
    assert_eq!(ncclCommAbort(comms[0]), INVALID_ARGUMENT);
    assert_eq!(ncclCommAbort(comms[1]), SUCCESS);
}

#[test]
fn memory_is_registered_and_given_back() {
    let _turn = enter();
    let comms = all(2);
    let (mut address, mut handle) = (0u64, 0usize);
    // SAFETY: all pointers are valid.
    unsafe {
        assert_eq!(ncclMemAlloc(&mut address, 1024), SUCCESS);
        assert_eq!(
            ncclCommRegister(comms[0], address, 1025, &mut handle),
            INVALID_ARGUMENT
        );
        assert_eq!(
            ncclCommRegister(comms[0], address, 1024, &mut handle),
            SUCCESS
        );
    }
    assert_eq!(ncclMemFree(address), INVALID_USAGE);
    assert_eq!(ncclCommFinalize(comms[0]), INVALID_USAGE);
    assert_eq!(ncclCommDeregister(comms[1], handle), INVALID_ARGUMENT);
    assert_eq!(ncclCommDeregister(comms[0], handle), SUCCESS);
    assert_eq!(ncclCommDeregister(comms[0], handle), INVALID_ARGUMENT);
    assert_eq!(ncclMemFree(address), SUCCESS);
    assert_eq!(ncclMemFree(address), INVALID_ARGUMENT);
}

#[test]
fn windows_are_opened_by_all_ranks() {
    let _turn = enter();
    let comms = all_non_blocking(2);
    let mut windows = [0usize; 2];
    let mut pieces = [0u64; 2];
    for (rank, piece) in pieces.iter_mut().enumerate() {
        // SAFETY: all pointers are valid until the end of the test.
        unsafe {
            assert_eq!(ncclMemAlloc(piece, 4096), SUCCESS);
            let place = &raw mut windows[rank];
            let code = ncclCommWindowRegister(comms[rank], *piece + 4, 4096, place, 1);
            assert_eq!(code, INVALID_ARGUMENT);
            let code = ncclCommWindowRegister(comms[rank], *piece, 4096, place, 1);
            assert_eq!(code, IN_PROGRESS);
        }
        assert_eq!(
            progress(comms[0]),
            if rank == 0 { IN_PROGRESS } else { SUCCESS }
        );
    }
    assert!(windows.iter().all(|window| *window != 0) && windows[0] != windows[1]);
    for rank in 0..2 {
        assert_eq!(ncclMemFree(pieces[rank]), INVALID_USAGE);
        assert_eq!(
            ncclCommWindowDeregister(comms[rank], windows[rank]),
            SUCCESS
        );
        assert_eq!(ncclMemFree(pieces[rank]), SUCCESS);
    }
}

/// The streams wait for a call of another world, so that their calls come late.
#[test]
fn what_comes_late_is_waited_for_or_given_up() {
    let _turn = enter();
    for abort in [false, true] {
        let (first, second) = (all_non_blocking(2), all_non_blocking(2));
        let streams = [stream(), stream()];
        let places = [device(&[1.0]), device(&[2.0])];
        let reduce = |comms: &[usize], rank: usize| {
            let place = places[rank];
            // SAFETY: the memory has one number.
            unsafe { ncclAllReduce(place, place, 1, F32, SUM, comms[rank], streams[rank]) }
        };
        assert_eq!(reduce(&first, 0), IN_PROGRESS);
        assert_eq!([0, 1].map(|rank| reduce(&second, rank)), [IN_PROGRESS; 2]);
        if abort {
            second
                .iter()
                .for_each(|comm| assert_eq!(ncclCommAbort(*comm), SUCCESS))
        } else {
            assert!(
                second
                    .iter()
                    .all(|comm| ncclCommFinalize(*comm) == IN_PROGRESS)
            );
            assert!(second.iter().all(|comm| progress(*comm) == IN_PROGRESS));
        }
        // This call is the only work on the second stream.
        let other = stream();
        let place = places[1];
        // SAFETY: the same as above.
        let code = unsafe { ncclAllReduce(place, place, 1, F32, SUM, first[1], other) };
        assert_eq!(code, IN_PROGRESS);
        streams.into_iter().for_each(settle);
        if abort {
            assert_eq!(places.map(|place| read(place, 1)), [[3.0], [3.0]])
        } else {
            assert_eq!([second[0], second[1]].map(progress), [SUCCESS; 2]);
            assert_eq!(places.map(|place| read(place, 1)), [[6.0], [6.0]]);
        }
    }
}

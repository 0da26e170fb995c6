//! Tests of reported errors.

use super::*;

#[test]
fn versions_and_texts() {
    let _turn = enter();
    let mut version = 0;
    // SAFETY: the pointer is valid, and texts are static.
    unsafe {
        assert_eq!(ncclGetVersion(&mut version), SUCCESS);
        assert_eq!(ncclGetVersion(std::ptr::null_mut()), INVALID_ARGUMENT);
        assert_eq!(
            CStr::from_ptr(ncclGetErrorString(INVALID_USAGE)),
            c"invalid usage"
        );
    }
    assert_eq!(version, 22_703);
    assert_eq!(last_error(0), "the place for a result is null");
}

#[test]
fn ranks_that_do_not_belong_to_a_world() {
    let _turn = enter();
    let id = id();
    let init = |id, size, rank| {
        let mut comm = 0;
        // SAFETY: the pointer and the config are valid.
        unsafe { ncclCommInitRankConfig(&mut comm, size, id, rank, &config(0)) }
    };
    assert_eq!(init(id, 2, 0), IN_PROGRESS);
    assert_eq!(init(id, 3, 1), INVALID_ARGUMENT);
    assert_eq!(
        last_error(0),
        "rank 1 comes to a world of 3, and others to one of 2"
    );
    assert_eq!(init(id, 2, 0), INVALID_ARGUMENT);
    assert_eq!(init(id, 2, 2), INVALID_ARGUMENT);
    assert_eq!(init(id, 2, -1), INVALID_ARGUMENT);
    let mut other = id;
    other.0[8] ^= 1;
    assert_eq!(init(other, 2, 1), INVALID_ARGUMENT);
    assert!(last_error(0).contains("of another process"));
    let mut comm = 0;
    let mut wrong = config(0);
    wrong.magic = 7;
    // SAFETY: the same as above.
    let code = unsafe { ncclCommInitRankConfig(&mut comm, 2, id, 1, &wrong) };
    assert_eq!(code, INVALID_ARGUMENT);
    assert_eq!(init(id, 2, 1), IN_PROGRESS);
    // A config without a value for blocking is blocking.
    let own = super::id();
    // SAFETY: the same as above.
    let code = unsafe { ncclCommInitRankConfig(&mut comm, 1, own, 0, &config(c_int::MIN)) };
    assert_eq!(code, SUCCESS);
}

#[test]
fn arguments_that_one_rank_can_tell() {
    let _turn = enter();
    let comms = all(2);
    let (comm, stream) = (comms[1], stream());
    let place = device(&[0.0; 8]);
    // SAFETY: the calls are refused before any memory is accessed.
    unsafe {
        let reduce = |from, to, count, of, op| ncclAllReduce(from, to, count, of, op, comm, stream);
        let refused = |code, reason: &str| {
            assert_eq!(code, INVALID_ARGUMENT, "{reason}");
            let text = last_error(0);
            assert!(text.contains(reason), "{text} without {reason}");
        };
        refused(reduce(place, place, 1, 12, SUM), "invalid data type 12");
        refused(reduce(place, place, 1, F32, 5), "invalid reduction 5");
        refused(reduce(0, place, 1, F32, SUM), "the input is at 0x0");
        refused(reduce(place, 0, 1, F32, SUM), "the output is at 0x0");
        refused(
            reduce(place + 2, place, 1, F32, SUM),
            "not an address of F32",
        );
        refused(
            reduce(place, place + 4, 2, F32, SUM),
            "input and output overlap",
        );
        refused(reduce(place, place, usize::MAX, F32, SUM), "are too many");
        // In place requires the address of the rank's part. This is rank 1.
        let gather = |from| ncclAllGather(from, place, 2, F32, comm, stream);
        assert_eq!(gather(place), INVALID_ARGUMENT);
        let scatter = |to| ncclReduceScatter(place, to, 2, F32, SUM, comm, stream);
        assert_eq!(scatter(place), INVALID_ARGUMENT);
        for (code, peer) in [
            (ncclSend(place, 1, F32, 2, comm, stream), 2),
            (ncclRecv(place, 1, F32, -1, comm, stream), -1),
            (ncclBroadcast(place, place, 1, F32, 2, comm, stream), 2),
            (ncclReduce(place, place, 1, F32, SUM, 9, comm, stream), 9),
        ] {
            assert_eq!(code, INVALID_ARGUMENT, "{peer}");
        }
        assert_eq!(
            ncclSend(place, 1, F32, 0, comm + 16, stream),
            INVALID_ARGUMENT
        );
    }
    assert!(is_idle(stream));
    assert_eq!(progress(comm), SUCCESS);
}

/// Two ranks make different calls. Both ranks report the error, and their streams continue.
fn at_odds(calls: [&dyn Fn(u64, usize, usize) -> c_int; 2], words: &str) {
    let comms = all_non_blocking(2);
    let streams = [stream(), stream()];
    let places = [device(&[1.0; 8]), device(&[2.0; 8])];
    for rank in 0..2 {
        let code = calls[rank](places[rank], comms[rank], streams[rank]);
        assert_eq!(code, IN_PROGRESS, "{words}");
    }
    for rank in 0..2 {
        assert_eq!(progress(comms[rank]), INVALID_USAGE, "{words}");
        let text = last_error(comms[rank]);
        assert!(text.contains(words), "{text} without {words}");
        settle(streams[rank]);
    }
    assert_eq!(read(places[0], 8), [1.0; 8]);
    assert_eq!(read(places[1], 8), [2.0; 8]);
}

#[test]
fn ranks_at_odds() {
    let _turn = enter();
    // SAFETY: the memory is long enough for all of these calls.
    let reduce = |count, of, op| {
        move |place: u64, comm, stream| unsafe {
            ncclAllReduce(place, place, count, of, op, comm, stream)
        }
    };
    let broadcast = |root| {
        // SAFETY: the same as above.
        move |place: u64, comm, stream| unsafe {
            ncclBroadcast(place, place, 4, F32, root, comm, stream)
        }
    };
    let usual = reduce(4, F32, SUM);
    at_odds(
        [&usual, &reduce(5, F32, SUM)],
        "AllReduce(Sum) of 5 F32 on side 1",
    );
    at_odds([&usual, &reduce(4, 2, SUM)], "AllReduce(Sum) of 4 I32");
    at_odds([&usual, &reduce(4, F32, 2)], "AllReduce(Max) of 4 F32");
    at_odds([&broadcast(0), &broadcast(1)], "Broadcast { root: 1 }");
    at_odds([&usual, &broadcast(1)], "AllReduce(Sum) of 4 F32 on side 0");
    // SAFETY: the same as above.
    let send = |place: u64, comm, stream| unsafe { ncclSend(place, 4, F32, 1, comm, stream) };
    // SAFETY: the same as above.
    let receive = |place: u64, comm, stream| unsafe { ncclRecv(place, 3, F32, 0, comm, stream) };
    at_odds([&send, &receive], "Receive { from: 0 } of 3 F32");
}

#[test]
fn windows_and_splits_at_odds() {
    let _turn = enter();
    let comms = all_non_blocking(2);
    let (mut address, mut places) = (0, [0usize; 2]);
    // SAFETY: the pointers are valid until the end of the test.
    unsafe {
        assert_eq!(ncclMemAlloc(&mut address, 4096), SUCCESS);
        ncclCommWindowRegister(comms[0], address, 4096, &raw mut places[0], 1);
        ncclCommWindowRegister(comms[1], address, 2048, &raw mut places[1], 1);
        assert_eq!(progress(comms[0]), INVALID_USAGE);
        assert!(last_error(comms[1]).contains("{2048, 4096}"));
        let comms = all_non_blocking(2);
        ncclCommWindowRegister(comms[0], address, 4096, &raw mut places[0], 1);
        ncclCommSplit(comms[1], 0, 0, &raw mut places[1], std::ptr::null());
        assert_eq!(progress(comms[0]), INVALID_USAGE);
        let comm = all(1)[0];
        let null = std::ptr::null();
        assert_eq!(
            ncclCommSplit(comm, -2, 0, &mut places[0], null),
            INVALID_ARGUMENT
        );
    }
    assert_eq!(places, [0; 2]);
}

#[test]
fn memory_outside_of_the_device_is_a_fault() {
    let _turn = enter();
    use crate::memory::Memory;
    use crate::nccl::operation::{Call, Kind, execute};
    use crate::nccl::value::Type;
    let memory = Memory::default();
    let (large, small) = (memory.allocate(64, 1 << 20), memory.allocate(32, 1 << 20));
    let (large, small) = (large.unwrap(), small.unwrap());
    let call = |from, to, count| Call {
        kind: Kind::AllGather,
        of: Type::F32,
        count,
        from,
        to,
    };
    let both = |count| [call(small, large, count), call(small, large, count)];
    assert_eq!(execute(&both(8), &memory), Ok(()));
    let reason = execute(&both(9), &memory).unwrap_err();
    assert!(reason.contains("of rank 0 has 36 bytes"), "{reason}");
    let narrow = [call(small, large, 8), call(small, small, 8)];
    let reason = execute(&narrow, &memory).unwrap_err();
    assert!(reason.contains("of rank 1 has 64 bytes"), "{reason}");
}

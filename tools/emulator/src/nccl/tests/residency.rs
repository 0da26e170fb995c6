//! Tests of collectives that do not fit on a device at the same time.

use super::*;

/// Creates communicators of two ranks with this number of CTAs.
fn of_ctas(max_ctas: c_int) -> Vec<usize> {
    let config = Config {
        max_ctas,
        min_ctas: 1,
        ..config(0)
    };
    all_with(2, &config)
}

/// Sums a number on a stream of each rank. `order` gives the order of the calls: the communicators by rank, and the
/// rank.
fn sums(order: [(&[usize], usize); 4], streams: [[usize; 2]; 2]) -> Vec<u64> {
    let call = |(at, (comms, rank)): (usize, (&[usize], usize))| {
        let place = device(&[1.0 + rank as f32]);
        // The first calls of both ranks use their first streams.
        let stream = streams[rank][at / 2];
        // SAFETY: the memory has one number.
        let code = unsafe { ncclAllReduce(place, place, 1, F32, SUM, comms[rank], stream) };
        assert_eq!(code, IN_PROGRESS);
        place
    };
    order.into_iter().enumerate().map(call).collect()
}

#[test]
fn two_that_fit_complete_in_any_order() {
    let _turn = enter();
    let (a, b) = (of_ctas(66), of_ctas(66));
    let streams = [[stream(), stream()], [stream(), stream()]];
    let places = sums([(&a, 0), (&b, 1), (&b, 0), (&a, 1)], streams);
    streams.into_iter().flatten().for_each(settle);
    assert!(places.iter().all(|place| read(*place, 1) == [3.0]));
    assert!(
        [&a, &b]
            .into_iter()
            .flatten()
            .all(|comm| progress(*comm) == SUCCESS)
    );
}

#[test]
fn two_that_do_not_fit_complete_in_one_order() {
    let _turn = enter();
    let (a, b) = (of_ctas(67), of_ctas(66));
    let streams = [[stream(), stream()], [stream(), stream()]];
    let places = sums([(&a, 0), (&a, 1), (&b, 0), (&b, 1)], streams);
    streams.into_iter().flatten().for_each(settle);
    assert!(places.iter().all(|place| read(*place, 1) == [3.0]));
}

#[test]
fn two_that_do_not_fit_deadlock_in_another_order() {
    let _turn = enter();
    let (a, b) = (of_ctas(67), of_ctas(66));
    let streams = [[stream(), stream()], [stream(), stream()]];
    sums([(&a, 0), (&b, 1), (&b, 0), (&a, 1)], streams);
    for comm in a.iter().chain(&b) {
        assert_eq!(progress(*comm), INVALID_USAGE);
        let text = last_error(*comm);
        for part in [
            "deadlock: AllReduce(Sum) of 1 F32 of rank 0 of 2 in world",
            "occupies 67 of 132 multiprocessors",
            "waits for 66 of 132 multiprocessors",
        ] {
            assert!(text.contains(part), "{text} without {part}");
        }
    }
    // The streams continue.
    streams.into_iter().flatten().for_each(settle);
}

#[test]
fn another_order_on_one_stream_deadlocks_too() {
    let _turn = enter();
    let (a, b) = (of_ctas(1), of_ctas(1));
    let [first, second] = [stream(), stream()];
    sums(
        [(&a, 0), (&b, 1), (&b, 0), (&a, 1)],
        [[first; 2], [second; 2]],
    );
    assert_eq!(progress(a[0]), INVALID_USAGE);
    let text = last_error(b[1]);
    assert!(text.contains("waits on its stream"), "{text}");
    [first, second].into_iter().for_each(settle);
}

/// Checks that a message without a receiver occupies no multiprocessors.
#[test]
fn messages_are_not_counted() {
    let _turn = enter();
    let (messages, sums) = (of_ctas(132), of_ctas(132));
    let streams = [stream(), stream()];
    let place = device(&[1.0]);
    // SAFETY: the memory has one number.
    let send = unsafe { ncclSend(place, 1, F32, 1, messages[0], streams[0]) };
    assert_eq!(send, IN_PROGRESS);
    let places = [device(&[1.0]), device(&[2.0])];
    let others = [stream(), stream()];
    for rank in 0..2 {
        let (place, stream) = (places[rank], others[rank]);
        // SAFETY: the same as above.
        unsafe { ncclAllReduce(place, place, 1, F32, SUM, sums[rank], stream) };
    }
    others.into_iter().for_each(settle);
    assert_eq!(places.map(|place| read(place, 1)), [[3.0], [3.0]]);
    let to = device(&[0.0]);
    // SAFETY: the same as above.
    let receive = unsafe { ncclRecv(to, 1, F32, 0, messages[1], streams[1]) };
    assert_eq!(receive, IN_PROGRESS);
    streams.into_iter().for_each(settle);
    assert_eq!(read(to, 1), [1.0]);
}

#[test]
fn ctas_that_cannot_be_are_refused() {
    let _turn = enter();
    for (min_ctas, max_ctas) in [(0, 4), (4, -1), (5, 4), (4, c_int::MIN)] {
        let config = Config {
            min_ctas,
            max_ctas,
            ..config(0)
        };
        let mut comm = 0;
        // SAFETY: the pointer and the config are valid.
        let code = unsafe { ncclCommInitRankConfig(&mut comm, 1, id(), 0, &config) };
        assert_eq!(code, INVALID_ARGUMENT);
        let text = last_error(0);
        assert!(text.contains(&format!("minCTAs is {min_ctas}")), "{text}");
    }
}

//! Tests of mismatches, missing ranks, failing ranks, and ranks that return early.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use super::*;

/// Creates a world whose call log cannot be written, because its folder would be inside a file.
fn world(size: usize) -> World {
    World::threads(size)
        .unwrap()
        .call_log_dir(std::env::current_exe().unwrap().join("none"))
}

type Part = (Call, Buffer);

/// Runs one call per rank, started in rank order. Returns the result of each rank.
fn errors_of(parts: Vec<Part>) -> Vec<Result<Buffer, CommError>> {
    let (turn, results) = (AtomicUsize::new(0), Mutex::new(vec![None; parts.len()]));
    let outcome = world(parts.len()).run(|rank| {
        let own = rank.rank();
        while turn.load(Ordering::SeqCst) < own {
            sleep(Duration::from_millis(1));
        }
        let (call, input) = parts[own].clone();
        let started = rank.communicator().start(call, input);
        turn.fetch_add(1, Ordering::SeqCst);
        let result = started.and_then(Pending::wait);
        results.lock().unwrap()[own] = Some(result.clone());
        result
    });
    assert!(outcome.is_err());
    let results = results.into_inner().unwrap();
    results.into_iter().map(Option::unwrap).collect()
}

/// Checks that all ranks get the same mismatch between the ranks 0 and 1, with the text `wanted`.
fn assert_mismatch(first: Part, second: Part, wanted: &str) {
    // The third rank joins after the mismatch with a matching call, and still gets the error.
    let errors = errors_of(vec![first.clone(), second, first]);
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(
            error,
            CommError::Mismatch {
                first_rank: 0,
                second_rank: 1,
                ..
            }
        ));
        assert_eq!(
            error.to_string(),
            format!("mismatch at call 0 over world [0, 1, 2]: {wanted}")
        );
    }
}

fn sum(len: usize) -> Part {
    (Call::AllReduce(ReduceOp::Sum), vec![0f32; len].into())
}

#[test]
fn mismatch_of_operations() {
    assert_mismatch(
        sum(4),
        (Call::AllGather, vec![0f32; 4].into()),
        "rank 0 is in all_reduce(sum) of 4 f32, rank 1 in all_gather of 4 f32: \
         the operations differ",
    );
}

#[test]
fn mismatch_of_reductions() {
    assert_mismatch(
        sum(4),
        (Call::AllReduce(ReduceOp::Max), vec![0f32; 4].into()),
        "rank 0 is in all_reduce(sum) of 4 f32, rank 1 in all_reduce(max) of 4 f32: \
         the reductions differ",
    );
}

#[test]
fn mismatch_of_lengths() {
    assert_mismatch(
        sum(4),
        sum(5),
        "rank 0 is in all_reduce(sum) of 4 f32, rank 1 in all_reduce(sum) of 5 f32: \
         the lengths differ",
    );
}

#[test]
fn mismatch_of_types() {
    assert_mismatch(
        (Call::AllGather, vec![0f32; 4].into()),
        (Call::AllGather, vec![bf16::ZERO; 4].into()),
        "rank 0 is in all_gather of 4 f32, rank 1 in all_gather of 4 bf16: the types differ",
    );
}

#[test]
fn mismatch_of_roots() {
    assert_mismatch(
        (Call::Broadcast { root: 0 }, vec![0u8; 2].into()),
        (Call::Broadcast { root: 2 }, vec![0u8; 2].into()),
        "rank 0 is in broadcast of 2 u8 from rank 0, rank 1 in broadcast of 2 u8 from rank 2: \
         the roots differ",
    );
}

#[test]
fn mismatch_of_counts() {
    let part = |send: [usize; 3], receive: [usize; 3]| {
        let input = vec![0i64; send.iter().sum()];
        (
            Call::AllToAll {
                send: send.to_vec(),
                receive: receive.to_vec(),
            },
            input.into(),
        )
    };
    // Only ranks 1 and 2 differ. The call of rank 0 matches both.
    let errors = errors_of(vec![
        part([0, 1, 1], [0, 1, 1]),
        part([1, 0, 2], [1, 0, 2]),
        part([1, 2, 0], [1, 3, 0]),
    ]);
    for error in errors {
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("rank 1 is in all_to_all of 3 i64 (sends [1, 0, 2]"),
            "{text}"
        );
        assert!(
            text.ends_with("rank 1 sends 2 elements to rank 2, which expects 3"),
            "{text}"
        );
    }
}

#[test]
fn mismatch_of_splits() {
    let error = world(2).run(|rank| {
        let groups = [vec![vec![0, 1]], vec![vec![0], vec![1]]][rank.rank()].clone();
        rank.communicator().split("part", &groups).map(drop)
    });
    let (_, error) = comm_failure(error.unwrap_err());
    let text = error.to_string();
    assert!(text.contains("split part into [[0, 1]]"), "{text}");
    assert!(text.contains("split part into [[0], [1]]"), "{text}");
    assert!(text.ends_with("the groups differ"), "{text}");
}

#[test]
fn mismatch_of_a_message() {
    for (dtype, len, reason) in [
        (DType::F32, 3, "the lengths differ"),
        (DType::BF16, 2, "the types differ"),
    ] {
        let error = world(2).run(|rank| match rank.rank() {
            0 => rank.communicator().send(vec![0f32; 2].into(), 1),
            _ => rank.communicator().receive(0, dtype, len).map(drop),
        });
        let (rank, error) = comm_failure(error.unwrap_err());
        assert_eq!(rank, 1);
        assert_eq!(
            error.to_string(),
            format!(
                "mismatch at call 0 over world [0, 1]: rank 0 is in send of 2 f32 to rank 1, \
                 rank 1 in receive of {len} {dtype} from rank 0: {reason}"
            )
        );
    }
}

#[test]
fn invalid_calls_are_refused_before_anything_is_sent() {
    world(2)
        .run(|rank| {
            let comm = rank.communicator();
            let reason = |result: Result<Pending, CommError>| match result {
                Err(CommError::InvalidCall { reason, .. }) => reason,
                other => panic!("not refused: {other:?}"),
            };
            let text = reason(comm.start_all_reduce(vec![1i32].into(), ReduceOp::Average));
            assert!(
                text.starts_with("reduction average is not defined for i32"),
                "{text}"
            );
            let text = reason(comm.start_reduce_scatter(vec![0u8; 5].into(), ReduceOp::Sum));
            assert_eq!(
                text,
                "invalid length 5: expected a multiple of the group size 2, such as 4 or 6"
            );
            let text = reason(comm.start_broadcast(vec![0u8].into(), 2));
            assert_eq!(
                text,
                "invalid root index 2: expected 0 to 1 in a group of 2"
            );
            assert!(
                reason(comm.start_send(vec![0u8].into(), 9)).contains("invalid receiver index 9")
            );
            assert!(reason(comm.start_receive(2, DType::U8, 1)).contains("invalid sender index 2"));
            assert!(
                reason(comm.start(Call::Barrier, vec![0u8].into()))
                    .contains("expected an empty input")
            );
            let counts = |send: &[usize], receive: &[usize]| {
                let input = vec![0u8; 3].into();
                reason(comm.start_all_to_all(input, send.to_vec(), receive.to_vec()))
            };
            assert!(counts(&[3], &[1, 2]).contains("number of send counts 1: expected 2"));
            assert!(counts(&[1, 2], &[1]).contains("number of receive counts 1: expected 2"));
            assert!(counts(&[1, 1], &[1, 1]).contains("expected a sum of 3"));
            assert!(counts(&[usize::MAX, 4], &[1, 1]).contains("expected a sum of 3"));
            let own = rank.rank();
            let send = [[1, 2], [2, 1]][own];
            assert!(
                counts(&send, &[2, 2]).contains("it sends 1 elements to itself and receives 2")
            );
            for groups in [
                vec![vec![0]],
                vec![vec![0, 1], vec![1]],
                vec![vec![0, 1, 2]],
            ] {
                let error = comm.split("part", &groups).unwrap_err();
                assert!(matches!(error, CommError::InvalidCall { .. }), "{error}");
            }
            // None of these was counted as a call.
            assert_eq!(
                comm.all_gather(vec![own as u8].into())?,
                vec![0u8, 1].into()
            );
            assert_eq!(rank.recent_calls().len(), 1);
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn a_missing_rank_is_named() {
    let (joined, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let error = world(3).deadline(Duration::from_millis(200)).run(|rank| {
        if rank.rank() == 1 {
            wait_until("both have failed", || failed.load(Ordering::SeqCst) == 2);
            return Ok(());
        }
        let comm = rank.communicator();
        let pending = comm.start_all_reduce(vec![0f32; 8].into(), ReduceOp::Sum)?;
        joined.fetch_add(1, Ordering::SeqCst);
        wait_until("both have joined", || joined.load(Ordering::SeqCst) == 2);
        let result = pending.wait().map(drop);
        failed.fetch_add(1, Ordering::SeqCst);
        result
    });
    let (rank, error) = comm_failure(error.unwrap_err());
    assert_ne!(rank, 1);
    let text = error.to_string();
    let CommError::Deadline {
        missing,
        waiting,
        waited,
        ..
    } = error
    else {
        panic!("{text}")
    };
    assert_eq!((missing, waiting), (vec![1], vec![0, 2]));
    assert!(waited >= Duration::from_millis(200));
    assert_eq!(
        text,
        format!(
            "deadline: after {:.1} s, rank 1 has not joined call 0 all_reduce(sum) of 8 f32 over \
             world [0, 1, 2], where ranks 0, 2 are waiting",
            waited.as_secs_f64()
        )
    );
}

#[test]
fn a_missing_message_is_named() {
    let failed = AtomicBool::new(false);
    let error = world(2).deadline(Duration::from_millis(100)).run(|rank| {
        if rank.rank() == 0 {
            wait_until("the other has failed", || failed.load(Ordering::SeqCst));
            return Ok(());
        }
        let result = rank.communicator().receive(0, DType::F16, 7).map(drop);
        failed.store(true, Ordering::SeqCst);
        result
    });
    let (rank, error) = comm_failure(error.unwrap_err());
    assert_eq!(rank, 1);
    let text = error.to_string();
    assert_eq!(
        text[text.find(',').unwrap()..],
        *", rank 0 has not joined call 0 receive of 7 f16 from rank 0 over \
         world [0, 1], where rank 1 is waiting"
    );
}

/// Rank 2 fails with `fail` while the other ranks wait in various calls with a long timeout.
fn failing(fail: impl Fn() -> Result<(), std::io::Error> + Sync) -> WorldError {
    let seen = Mutex::new(Vec::new());
    let error = world(5).run(|rank| {
        let (own, all) = (rank.rank(), rank.communicator());
        let pair = all
            .split("pair", &[vec![0, 1], vec![2, 3], vec![4]])
            .unwrap();
        let alone = all.split("alone", &[vec![0, 1, 2, 3], vec![4]]).unwrap();
        let result = match own {
            0 => all.barrier(),
            1 => pair.receive(0, DType::U8, 1).map(drop),
            2 => {
                sleep(Duration::from_millis(50));
                return fail();
            }
            3 => pair.all_gather(vec![0u8].into()).map(drop),
            // A rank that does not wait fails at its next call.
            _ => loop {
                if let Err(error) = alone.all_reduce(vec![0f32].into(), ReduceOp::Sum) {
                    break Err(error);
                }
                sleep(Duration::from_millis(1));
            },
        };
        seen.lock().unwrap().push(result.clone().unwrap_err());
        result.map_err(std::io::Error::other)
    });
    let (error, seen) = (error.unwrap_err(), seen.into_inner().unwrap());
    let WorldError::RankFailed { rank, message, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*rank, 2);
    let wanted = CommError::PeerFailed {
        rank: 2,
        message: message.clone(),
    };
    // No rank failed because of its deadline.
    assert_eq!(seen, vec![wanted; 4]);
    error
}

fn source_of(error: WorldError) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        WorldError::RankFailed { source, .. } => source,
        other => panic!("{other}"),
    }
}

#[test]
fn an_error_of_one_rank_ends_all() {
    let error = failing(|| Err(std::io::Error::other("the disk is full")));
    assert!(
        error
            .to_string()
            .starts_with("rank 2 failed: the disk is full\n"),
        "{error}"
    );
    let source = source_of(error)
        .downcast::<std::io::Error>()
        .expect("the original error");
    assert_eq!(source.to_string(), "the disk is full");
}

#[test]
fn a_panic_of_one_rank_ends_all() {
    // The panic is raised without the panic hook, to keep the test output clean.
    let error = failing(|| std::panic::resume_unwind(Box::new("index out of range".to_owned())));
    let source = source_of(error).downcast::<RankPanic>().expect("a panic");
    insta::assert_snapshot!(source, @"panicked: index out of range");
    let error = failing(|| std::panic::resume_unwind(Box::new("static text")));
    assert!(
        error.to_string().contains("panicked: static text"),
        "{error}"
    );
    let error = failing(|| std::panic::resume_unwind(Box::new(17)));
    assert!(
        error
            .to_string()
            .contains("panicked: with a payload that is not text"),
        "{error}"
    );
}

#[test]
fn a_raised_error_of_one_rank_ends_all() {
    let injected = CommError::Engine {
        engine: "test".into(),
        message: "link down".into(),
    };
    let error = failing(|| raise(injected.clone()));
    assert_eq!(comm_failure(error), (2, injected));
}

#[test]
fn a_failure_wakes_a_group_that_is_waited_on_by_a_panicking_layer() {
    // The other ranks raise the error that they get. The reported failure is still the first failure.
    let error = world(4).run(|rank| {
        if rank.rank() == 3 {
            return Err("no more data");
        }
        let result = rank.communicator().all_gather(vec![0u8].into());
        result.map(drop).unwrap_or_else(|error| raise(error));
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("rank 3 failed: no more data\n"),
        "{error}"
    );
}

#[test]
fn a_rank_that_returns_early_is_named() {
    for receive in [false, true] {
        let error = world(3).run(|rank| {
            let comm = rank.communicator();
            comm.barrier()?;
            match (rank.rank(), receive) {
                (1, _) => Ok(()),
                (_, false) => comm.barrier(),
                (_, true) => comm.receive(1, DType::I32, 2).map(drop),
            }
        });
        let (_, error) = comm_failure(error.unwrap_err());
        let CommError::PeerFinished { rank, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*rank, 1);
        let call = if receive {
            "call 0 receive of 2 i32 from rank 1"
        } else {
            "call 1 barrier"
        };
        let wanted = format!("rank 1 has returned without joining {call} over world [0, 1, 2]");
        assert_eq!(error.to_string(), wanted);
    }
}

#[test]
fn a_communicator_that_outlives_its_world_does_not_hang() {
    let left: Mutex<Option<Arc<dyn Communicator>>> = Mutex::new(None);
    world(2)
        .run(|rank| {
            if rank.rank() == 0 {
                *left.lock().unwrap() = Some(rank.communicator());
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
    let left = left.into_inner().unwrap().unwrap();
    assert!(matches!(
        left.barrier(),
        Err(CommError::PeerFinished { .. })
    ));
}

//! Tests that ranks that issue different calls get an error that names both calls.

use super::*;
use crate::{Call, CommError, ReduceOp};

type Part = (Call, Buffer);

fn errors_of(
    parts: &[Part],
    delay: impl Fn(usize) -> u64 + Sync,
) -> Vec<Result<Buffer, CommError>> {
    let network = MemoryNetwork::new(parts.len(), 1);
    run_open(&network, parts.len(), TIMEOUT, |this| {
        thread::sleep(Duration::from_millis(delay(this.rank)));
        let (call, input) = parts[this.rank].clone();
        let result = this.world.start(call, input).unwrap().wait();
        // Payloads that were sent for the call are still received, so nothing blocks the close.
        this.engine.close(TIMEOUT).unwrap();
        result
    })
}

/// Checks that all ranks get a mismatch that names rank 1 and another rank, with their calls.
#[track_caller]
fn assert_mismatch(right: Part, wrong: Part, calls: [&str; 2], wanted: &str) {
    for late in 0..3 {
        let parts = [right.clone(), wrong.clone(), right.clone()];
        for (rank, error) in errors_of(&parts, |rank| if rank == late { 30 } else { 0 })
            .into_iter()
            .enumerate()
        {
            let error = error.unwrap_err();
            let CommError::Mismatch {
                first_rank,
                first_call,
                second_rank,
                second_call,
                reason,
                sequence: 0,
                group,
            } = error
            else {
                panic!("rank {rank}: {error}")
            };
            assert_eq!(group, "world [0, 1, 2]");
            assert_eq!(reason, wanted);
            let (other, pair) = match first_rank {
                1 => (second_rank, [second_call, first_call]),
                _ => (first_rank, [first_call, second_call]),
            };
            assert!([first_rank, second_rank].contains(&1) && other != 1);
            assert_eq!(pair, calls);
        }
    }
}

fn sum(len: usize) -> Part {
    (Call::AllReduce(ReduceOp::Sum), zeros(len))
}

#[test]
fn mismatch_of_operations() {
    let sums = "all_reduce(sum) of 5000 f32";
    assert_mismatch(
        sum(5000),
        (Call::AllGather, zeros(5000)),
        [sums, "all_gather of 5000 f32"],
        "the operations differ",
    );
    assert_mismatch(
        sum(5000),
        (Call::Barrier, Buffer::empty(DType::U8)),
        [sums, "barrier"],
        "the operations differ",
    );
}

#[test]
fn mismatch_of_reductions() {
    assert_mismatch(
        sum(4),
        (Call::AllReduce(ReduceOp::Max), zeros(4)),
        ["all_reduce(sum) of 4 f32", "all_reduce(max) of 4 f32"],
        "the reductions differ",
    );
}

#[test]
fn mismatch_of_types() {
    assert_mismatch(
        sum(4),
        (
            Call::AllReduce(ReduceOp::Sum),
            Buffer::zeros(DType::BF16, 4),
        ),
        ["all_reduce(sum) of 4 f32", "all_reduce(sum) of 4 bf16"],
        "the types differ",
    );
}

#[test]
fn mismatch_of_lengths() {
    assert_mismatch(
        sum(50_000),
        sum(50_001),
        [
            "all_reduce(sum) of 50000 f32",
            "all_reduce(sum) of 50001 f32",
        ],
        "the lengths differ",
    );
}

#[test]
fn mismatch_of_roots() {
    let from = |root| (Call::Broadcast { root }, zeros(100_000));
    assert_mismatch(
        from(0),
        from(2),
        [
            "broadcast of 100000 f32 from rank 0",
            "broadcast of 100000 f32 from rank 2",
        ],
        "the roots differ",
    );
}

#[test]
fn mismatch_of_counts() {
    let part = |send: [usize; 3], receive: [usize; 3]| {
        let call = Call::AllToAll {
            send: send.to_vec(),
            receive: receive.to_vec(),
        };
        (call, zeros(send.iter().sum()))
    };
    let parts = [
        part([2, 2000, 2], [2, 2, 2]),
        part([2, 2, 2], [1999, 2, 2]),
        part([2, 2, 2], [2, 2, 2]),
    ];
    // Rank 1 calls after it has received a message from rank 0, and rank 2 after a message from rank 1. Rank 2 gets the
    // error although its call matches both calls. Control messages of one rank arrive in order, so the message proves
    // that the sender has made its call.
    let results = run(3, 1, |this| {
        let (own, comm) = (this.rank, &this.world);
        if own > 0 {
            comm.receive(own - 1, DType::U8, 0).unwrap();
        }
        let (call, input) = parts[own].clone();
        let pending = comm.start(call, input).unwrap();
        if own < 2 {
            comm.send(Buffer::empty(DType::U8), own + 1).unwrap();
        }
        pending.wait()
    });
    for (rank, error) in results.iter().enumerate() {
        let text = error.as_ref().unwrap_err().to_string();
        let reason = "rank 0 sends 2000 elements to rank 1, which expects 1999";
        assert!(text.ends_with(reason), "rank {rank}: {text}");
    }
    let text = results[1].as_ref().unwrap_err().to_string();
    insta::assert_snapshot!(
        text,
        @"mismatch at call 0 over world [0, 1, 2]: rank 0 is in all_to_all of 2004 f32 (sends 2000 to \
          rank 1, receives 2 from it), rank 1 in all_to_all of 6 f32 (sends [2, 2, 2], receives [1999, 2, \
          2]): rank 0 sends 2000 elements to rank 1, which expects 1999"
    );
}

#[test]
fn mismatch_of_splits() {
    let split =
        |name: &'static str, groups: [&[usize]; 2]| (name, groups.map(<[usize]>::to_vec).to_vec());
    let cases = [
        (split("tensor", [&[0, 1], &[2]]), "the groups differ"),
        (split("data", [&[0], &[1, 2]]), "the names differ"),
    ];
    for ((name, groups), reason) in cases {
        let network = MemoryNetwork::new(3, 1);
        let errors = run_open(&network, 3, TIMEOUT, |this| {
            let right = [vec![0], vec![1, 2]];
            let (name, groups) = match this.rank {
                1 => (name, &groups[..]),
                _ => ("tensor", &right[..]),
            };
            this.world.split(name, groups).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.ends_with(reason), "{error}");
            assert!(error.contains("split tensor into [[0], [1, 2]]"), "{error}");
            assert!(
                error.contains(&format!("split {name} into {groups:?}")),
                "{error}"
            );
        }
    }
}

#[test]
fn the_description_of_a_long_split_is_shortened() {
    let network = MemoryNetwork::new(2, 0);
    let name = "long".repeat(1000);
    let errors = run_open(&network, 2, TIMEOUT, |this| {
        let name = if this.rank == 0 { &name } else { "short" };
        this.world
            .split(name, &[vec![0, 1]])
            .unwrap_err()
            .to_string()
    });
    assert!(errors[1].contains("longlo...") && errors[1].contains("split short"));
}

#[test]
fn a_message_mismatch_fails_the_receiver_alone() {
    for early in [0, 1] {
        for (len, dtype, reason) in [
            (5000, DType::F32, "the lengths differ"),
            (5001, DType::I32, "the types differ"),
        ] {
            let errors = run(2, 0, |this| {
                let comm = &this.world;
                if this.rank != early {
                    thread::sleep(Duration::from_millis(20));
                }
                if this.rank == 0 {
                    comm.send(zeros(5001), 1).unwrap();
                    comm.send(zeros(3), 1).unwrap();
                    return None;
                }
                let error = comm.receive(0, dtype, len).unwrap_err();
                // The next message is not affected.
                assert_eq!(comm.receive(0, DType::F32, 3).unwrap(), zeros(3));
                Some(error.to_string())
            });
            assert_eq!(
                errors[1].as_ref().unwrap(),
                &format!(
                    "mismatch at call 0 over world [0, 1]: rank 0 is in send of 5001 f32 to rank 1, rank 1 \
                     in receive of {len} {dtype} from rank 0: {reason}"
                )
            );
        }
    }
}

#[test]
fn a_mismatch_does_not_affect_other_groups() {
    run(3, 2, |this| {
        let (own, world) = (this.rank, &this.world);
        let twin = world.split("twin", &[vec![0, 1, 2]]).unwrap();
        let bad = world.start_all_gather(zeros(9000 + own)).unwrap();
        let good = twin
            .start_all_gather(vec![own as i64; 9000].into())
            .unwrap();
        let wanted: Vec<i64> = (0..3).flat_map(|rank| vec![rank; 9000]).collect();
        assert_eq!(good.wait().unwrap(), wanted.into());
        assert!(matches!(bad.wait(), Err(CommError::Mismatch { .. })));
    });
}

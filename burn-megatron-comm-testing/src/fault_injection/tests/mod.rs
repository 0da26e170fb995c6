//! Tests of each kind of fault: which ranks get an error, and the error message.

mod plan;
#[cfg(unix)]
mod processes;
mod texts;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use super::*;
use crate::{Link, SimulatedNetwork};
use burn_megatron_comm::{DType, RankPanic, SingleRank, World, WorldError};
use burn_megatron_test_support::{TIMEOUT, wait_until};

/// A timeout that is shorter than the time that any fault takes.
const SHORT: Duration = Duration::from_millis(200);

/// The result of the call on each rank.
type Results = Vec<Option<Result<Buffer, CommError>>>;

/// Runs three calls on three ranks. Rank 1 has a fault at its second call.
fn with_fault(fault: &str, call: &Call, len: usize) -> (Results, Option<WorldError>) {
    within(TIMEOUT, fault, call, len)
}

/// Same as [`with_fault`], with a timeout for the second and the third call. No rank waits before it has started two
/// calls.
fn within(
    deadline: Duration,
    fault: &str,
    call: &Call,
    len: usize,
) -> (Results, Option<WorldError>) {
    let fault: Fault = fault.parse().unwrap();
    let results = Mutex::new(vec![None; 3]);
    let world = World::threads(3)
        .unwrap()
        .deadline(deadline)
        .first_deadline(TIMEOUT)
        .call_log_dir(std::env::current_exe().unwrap().join("none"));
    let come = AtomicUsize::new(0);
    let outcome = world.run(|rank| {
        let plan = FaultPlan::new(vec![fault]).deadline(Duration::from_secs(1));
        let comm = inject(rank.communicator(), Arc::new(plan));
        // The subgroup continues to count the calls of the whole group.
        let part = comm.split("part", &[vec![2, 1, 0]])?;
        part.barrier()?;
        let started = part.start(call.clone(), vec![1f32; len].into());
        come.fetch_add(1, Ordering::SeqCst);
        wait_until("two have started", || come.load(Ordering::SeqCst) > 1);
        let result = started.and_then(Pending::wait);
        results.lock().unwrap()[rank.rank()] = Some(result.clone());
        result?;
        comm.barrier()
    });
    (results.into_inner().unwrap(), outcome.err())
}

fn sum() -> Call {
    Call::AllReduce(ReduceOp::Sum)
}

fn error_of(results: &Results, rank: usize) -> &CommError {
    results[rank].as_ref().unwrap().as_ref().unwrap_err()
}

/// Returns the rank that failed first, with its error.
fn first_failure(error: Option<WorldError>) -> (usize, CommError) {
    match error {
        Some(WorldError::RankFailed { rank, source, .. }) => (rank, *source.downcast().unwrap()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn delay() {
    let began = Instant::now();
    let (results, error) = with_fault("delay:150ms@rank=1,call=1", &sum(), 4);
    assert!(error.is_none(), "{error:?}");
    assert!(began.elapsed() >= Duration::from_millis(150));
    for result in results {
        assert_eq!(result, Some(Ok(vec![3f32; 4].into())));
    }
    // With a delay beyond the deadline, the other ranks name the late rank.
    let (results, _) = within(SHORT, "delay:3s@rank=1,call=1", &sum(), 4);
    for rank in [0, 2] {
        match error_of(&results, rank) {
            CommError::Deadline { missing, .. } => assert_eq!(*missing, [1]),
            CommError::PeerFailed { rank, .. } => assert_ne!(*rank, 1),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn drop_() {
    let (results, error) = within(SHORT, "drop@rank=1,call=1", &sum(), 4);
    let (rank, first) = first_failure(error);
    assert_ne!(rank, 1);
    let CommError::Deadline {
        missing, waiting, ..
    } = first
    else {
        panic!("{first}")
    };
    assert_eq!((missing, waiting), (vec![1], vec![2, 0]));
    assert_snapshot!(
        error_of(&results, 1),
        @"fault injection: drop@rank=1,call=1 triggers on rank 1, call 1: all_reduce(sum) of 4 f32 over \
          part [2, 1, 0]: never started; its wait ended after 1.5 s"
    );
}

#[test]
fn shape() {
    let even = vec![2; 3];
    let exchange = Call::AllToAll {
        send: even.clone(),
        receive: even,
    };
    for (call, wrong) in [
        (sum(), "all_reduce(sum) of 7 f32"),
        (Call::AllGather, "all_gather of 7 f32"),
        (
            Call::ReduceScatter(ReduceOp::Sum),
            "reduce_scatter(sum) of 9 f32",
        ),
        (
            Call::Broadcast { root: 0 },
            "broadcast of 7 f32 from rank 2",
        ),
        (
            exchange,
            "all_to_all of 9 f32 (sends [3, 3, 3], receives [3, 3, 3])",
        ),
    ] {
        let (results, _) = with_fault("shape@rank=1,call=1", &call, 6);
        for rank in 0..3 {
            let error = error_of(&results, rank);
            assert!(
                matches!(error, CommError::Mismatch { sequence: 1, .. }),
                "{error}"
            );
            let text = error.to_string();
            assert!(
                text.contains(&format!("rank 1 is in {wrong}"))
                    || text.contains(&format!("rank 1 in {wrong}")),
                "{text}"
            );
        }
    }
    let world = World::threads(2).unwrap().deadline(Duration::from_secs(2));
    let messages = |fault: &str| {
        let fault: Fault = fault.parse().unwrap();
        let error = world.run(|rank| {
            let comm = inject(rank.communicator(), Arc::new(FaultPlan::new(vec![fault])));
            match rank.rank() {
                0 => comm.send(vec![1f32; 2].into(), 1),
                _ => comm.receive(0, DType::F32, 2).map(drop),
            }
        });
        first_failure(error.err())
    };
    for (fault, sent, expected) in [("shape@rank=0,call=0", 3, 2), ("shape@rank=1,call=0", 2, 3)] {
        let (rank, error) = messages(fault);
        let text = error.to_string();
        assert_eq!(rank, 1);
        assert!(text.contains(&format!("send of {sent} f32")), "{text}");
        assert!(
            text.contains(&format!("receive of {expected} f32")),
            "{text}"
        );
    }
    // A barrier has no elements.
    let (_, error) = with_fault("shape@rank=1,call=0", &sum(), 4);
    let (rank, error) = first_failure(error);
    assert_eq!(rank, 1);
    assert!(
        error
            .to_string()
            .ends_with("a barrier has no elements; choose a call that has some"),
        "{error}"
    );
}

#[test]
fn wrong_call() {
    for (call, wanted) in [
        (sum(), "rank 1 in all_gather of 4 f32"),
        (Call::AllGather, "rank 1 in all_reduce(sum) of 4 f32"),
    ] {
        let (results, _) = with_fault("wrong-call@rank=1,call=1", &call, 4);
        for rank in 0..3 {
            let error = error_of(&results, rank);
            assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.contains(wanted)
                    || text.contains(&wanted.replace("rank 1 in", "rank 1 is in")),
                "{text}"
            );
            assert!(text.ends_with("the operations differ"), "{text}");
        }
    }
    let (results, _) = with_fault("wrong-call@rank=1,call=0", &sum(), 4);
    assert!(
        results.iter().all(Option::is_none),
        "the barrier before fails"
    );
}

#[test]
fn nan() {
    let (results, error) = with_fault("nan@rank=1,call=1", &sum(), 4);
    assert!(error.is_none(), "{error:?}");
    for result in results {
        let sums = Vec::<f32>::try_from(result.unwrap().unwrap()).unwrap();
        assert!(sums[0].is_nan());
        assert_eq!(sums[1..], [3.0; 3]);
    }
    // The input has no elements.
    let (results, error) = with_fault("nan@rank=1,call=1", &sum(), 0);
    assert_eq!(first_failure(error).0, 1);
    assert!(
        error_of(&results, 1)
            .to_string()
            .contains("the input has no float")
    );
    let whole = nan_of(vec![1i64].into()).unwrap_err().to_string();
    assert!(whole.contains("the input has no float"), "{whole}");
    assert!(nan_of(vec![half::bf16::ONE; 2].into()).is_ok());
}

fn nan_of(input: Buffer) -> Result<Buffer, CommError> {
    let solo: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let plan = FaultPlan::new(vec!["nan@rank=0,call=0".parse().unwrap()]);
    inject(solo, Arc::new(plan)).all_gather(input)
}

#[test]
fn error() {
    let (results, error) = with_fault("error@rank=1,call=1", &sum(), 4);
    let (rank, first) = first_failure(error);
    assert_eq!(rank, 1);
    assert_snapshot!(
        first,
        @"fault injection: error@rank=1,call=1 triggers on rank 1, call 1: all_reduce(sum) of 4 f32 over \
          part [2, 1, 0]: the call failed on purpose"
    );
    for rank in [0, 2] {
        assert!(matches!(
            error_of(&results, rank),
            CommError::PeerFailed { rank: 1, .. }
        ));
    }
}

#[test]
fn panic() {
    let (results, error) = with_fault("panic@rank=1,call=1", &sum(), 4);
    let Some(WorldError::RankFailed { rank, source, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((rank, results[1].is_none()), (1, true));
    let text = source.downcast::<RankPanic>().unwrap().to_string();
    assert!(
        text.contains("panic@rank=1,call=1 triggers on rank 1, call 1: all_reduce(sum) of 4 f32"),
        "{text}"
    );
    assert!(matches!(
        error_of(&results, 0),
        CommError::PeerFailed { rank: 1, .. }
    ));
}

#[test]
fn a_call_that_does_not_fit_is_not_counted() {
    let plan = Arc::new(FaultPlan::new(vec!["error@rank=0,call=0".parse().unwrap()]));
    let solo: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let comm = inject(solo, plan);
    let misfit = || (Call::Broadcast { root: 7 }, Buffer::from(vec![1f32]));
    for error in [
        comm.start(misfit().0, misfit().1).map(drop),
        comm.start_all(vec![misfit()]).map(drop),
    ] {
        assert!(matches!(error, Err(CommError::InvalidCall { .. })));
    }
    assert!(matches!(comm.barrier(), Err(CommError::Engine { .. })));
    assert_eq!(comm.barrier(), Ok(()));
    assert!(comm.pool().is_some());
}

#[test]
fn calls_started_as_one_stay_one_where_there_is_no_fault() {
    /// A communicator that records the calls and steps that it receives.
    #[derive(Debug)]
    struct Recorder(SingleRank, Mutex<Vec<String>>);

    impl Communicator for Recorder {
        fn group(&self) -> &Group {
            self.0.group()
        }
        fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
            self.1.lock().unwrap().push(call.name().to_owned());
            self.0.start(call, input)
        }
        fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
            self.1
                .lock()
                .unwrap()
                .push(format!("{} as one", calls.len()));
            self.0.start_all(calls)
        }
        fn split(
            &self,
            name: &str,
            groups: &[Vec<usize>],
        ) -> Result<Arc<dyn Communicator>, CommError> {
            self.0.split(name, groups)
        }
        fn begin_step(&self, step: u64) {
            self.1.lock().unwrap().push(format!("step {step}"));
        }
    }

    let recorder = Arc::new(Recorder(SingleRank::new("world"), Mutex::default()));
    let plan = FaultPlan::new(vec!["delay:1ms@rank=0,call=3".parse().unwrap()]);
    // Another wrapper forwards the step too.
    let link = Link::new(Duration::ZERO, f64::INFINITY).unwrap();
    let comm = SimulatedNetwork::over(inject(recorder.clone(), Arc::new(plan)), &link);
    let calls = || {
        vec![
            (Call::AllGather, vec![1u8].into()),
            (Call::Barrier, Buffer::empty(DType::U8)),
        ]
    };
    comm.begin_step(7);
    for _ in 0..3 {
        assert_eq!(comm.start_all(calls()).unwrap().len(), 2);
    }
    let seen = recorder.1.lock().unwrap().clone();
    assert_eq!(
        seen,
        ["step 7", "2 as one", "all_gather", "barrier", "2 as one"]
    );
}

#[test]
fn a_flipped_bit_is_in_the_result_of_one_rank() {
    let (results, error) = with_fault("bit-flip:collective:2:31@rank=1,call=1", &sum(), 4);
    assert!(error.is_none(), "{error:?}");
    for (rank, result) in results.into_iter().enumerate() {
        let sign = if rank == 1 { -1f32 } else { 1.0 };
        assert_eq!(result, Some(Ok(vec![3.0, 3.0, 3.0 * sign, 3.0].into())));
    }
    let (results, _) = with_fault("bit-flip:collective@rank=1,call=1", &Call::Barrier, 0);
    let text = error_of(&results, 1).to_string();
    assert!(
        text.ends_with("it has no elements; choose a call that has some"),
        "{text}"
    );
}

//! Tests of calls that are started together.

use super::*;

fn own(rank: usize, len: usize) -> Buffer {
    vec![(1 << rank) as f32; len].into()
}

#[test]
fn calls_started_at_once_give_the_results_of_single_calls() {
    World::threads(3)
        .unwrap()
        .run(|rank| {
            let (own_rank, comm) = (rank.rank(), rank.communicator());
            let calls = vec![
                (Call::ReduceScatter(ReduceOp::Sum), own(own_rank, 6)),
                (Call::AllGather, own(own_rank, 1)),
                (Call::AllReduce(ReduceOp::Max), vec![own_rank as i64].into()),
            ];
            let mut pending = comm.start_all(calls)?;
            assert_eq!(pending.remove(2).wait()?, vec![2i64].into());
            assert_eq!(pending.remove(0).wait()?, vec![7f32; 2].into());
            assert_eq!(pending.remove(0).wait()?, vec![1f32, 2.0, 4.0].into());
            assert!(comm.start_all(Vec::new())?.is_empty());
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn nothing_is_sent_if_one_call_is_invalid() {
    World::threads(2)
        .unwrap()
        .run(|rank| {
            let comm = rank.communicator();
            let calls = vec![
                (Call::AllGather, own(rank.rank(), 4)),
                (Call::ReduceScatter(ReduceOp::Sum), own(rank.rank(), 5)),
            ];
            let error = comm.start_all(calls).unwrap_err();
            assert!(matches!(error, CommError::InvalidCall { .. }));
            assert!(error.to_string().contains("such as 4 or 6"), "{error}");
            assert!(rank.recent_calls().is_empty());
            // The group works unchanged.
            comm.barrier()
        })
        .unwrap();
}

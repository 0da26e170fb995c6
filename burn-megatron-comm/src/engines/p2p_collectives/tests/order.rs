//! Tests of calls on several groups in any order, early messages, splits, and dropped handles.

use super::*;
use crate::{Call, CommError, ReduceOp};

#[test]
fn random_programs_agree_with_the_serial_model() {
    for (size, delay_rate) in [(2, 0), (2, 3), (3, 2), (4, 1), (4, 3)] {
        run(size, delay_rate, |this| {
            for seed in 0..10 {
                programs::run(&this.world, seed + 100 * size as u64, 30, 30_000).unwrap();
            }
        });
    }
}

#[test]
fn ranks_may_start_the_calls_of_two_groups_in_different_orders() {
    run(4, 2, |this| {
        let (own, world) = (this.rank, &this.world);
        let pairs = world.split("pair", &[vec![0, 1], vec![3, 2]]).unwrap();
        let outer = world.split("outer", &[vec![0, 2], vec![1, 3]]).unwrap();
        let sum = |comm: &Arc<dyn Communicator>| {
            comm.start_all_reduce(vec![1i64 << own; 3000].into(), ReduceOp::Sum)
                .unwrap()
        };
        // Every rank waits for its second call first.
        let (a, b) = match own % 2 {
            0 => {
                let a = sum(&pairs);
                (a, sum(&outer))
            }
            _ => {
                let b = sum(&outer);
                (sum(&pairs), b)
            }
        };
        let (of_pair, of_outer) = match own % 2 {
            0 => {
                let b = b.wait().unwrap();
                (a.wait().unwrap(), b)
            }
            _ => (a.wait().unwrap(), b.wait().unwrap()),
        };
        assert_eq!(of_pair, vec![if own < 2 { 3i64 } else { 12 }; 3000].into());
        assert_eq!(
            of_outer,
            vec![if own % 2 == 0 { 5i64 } else { 10 }; 3000].into()
        );
    });
}

#[test]
fn a_slow_rank_receives_what_arrived_before_its_calls() {
    run(3, 0, |this| {
        let comm = &this.world;
        let start = |n: usize| {
            comm.start_all_gather(vec![(this.rank * 100 + n) as i32; 2000].into())
                .unwrap()
        };
        // The other ranks started all these calls long before rank 2.
        if this.rank == 2 {
            thread::sleep(Duration::from_millis(100));
        }
        let calls: Vec<_> = (0..10).map(start).collect();
        for (n, call) in calls.into_iter().enumerate() {
            let wanted: Vec<i32> = (0..3)
                .flat_map(|rank| vec![(rank * 100 + n) as i32; 2000])
                .collect();
            assert_eq!(call.wait().unwrap(), wanted.into());
        }
    });
}

#[test]
fn a_part_may_be_used_before_the_others_have_split() {
    run(4, 1, |this| {
        let world = &this.world;
        let half = world.split("half", &[vec![0, 1], vec![2, 3]]).unwrap();
        if this.rank == 3 {
            thread::sleep(Duration::from_millis(30));
        }
        let again = half
            .split("again", &[vec![this.rank / 2 * 2 + 1, this.rank / 2 * 2]])
            .unwrap();
        let order = again.all_gather(vec![this.rank as u8].into()).unwrap();
        let first = this.rank as u8 / 2 * 2;
        assert_eq!(order, vec![first + 1, first].into());
        assert_eq!(
            again.group().to_string(),
            format!("again [{}, {first}]", first + 1)
        );
        // A second split with the same name creates another group.
        let twin = half
            .split("again", &[half.group().ranks().to_vec()])
            .unwrap();
        assert_eq!(
            twin.all_gather(vec![this.rank as u8].into()).unwrap(),
            vec![first, first + 1].into()
        );
    });
}

#[test]
fn calls_whose_handle_is_dropped_take_place() {
    run(3, 2, |this| {
        let comm = &this.world;
        let pool = pool(this);
        for call in 0..12 {
            let input = pool.take(DType::I32, 3000);
            let pending = comm.start_all_gather(input).unwrap();
            if call % 3 == this.rank {
                drop(pending)
            } else {
                pool.give(pending.wait().unwrap())
            }
            drop(comm.start_barrier().unwrap());
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn unwanted_results_return_to_the_pool() {
    let allocated = run(2, 0, |this| {
        let (comm, pool) = (&this.world, pool(this));
        for _ in 0..15 {
            // The handles of rank 0 are dropped before rank 1 calls.
            if this.rank == 1 {
                thread::sleep(Duration::from_millis(5));
            }
            let input = pool.take(DType::I32, 3000);
            drop(comm.start_all_gather(input).unwrap());
            let to = 1 - this.rank;
            comm.send(pool.take(DType::I32, 3000), to).unwrap();
            drop(comm.start_receive(to, DType::I32, 3000).unwrap());
            comm.barrier().unwrap();
        }
        pool.allocated()
    });
    // One input, one outgoing message, one incoming message, one result, and the buffers in flight at a barrier. Not
    // two buffers per round.
    assert!(allocated[0] <= 10, "{allocated:?}");
}

#[test]
fn calls_started_as_one_are_each_complete() {
    run(3, 1, |this| {
        let bit = (1 << this.rank) as f32;
        let calls = vec![
            (Call::ReduceScatter(ReduceOp::Sum), vec![bit; 6000].into()),
            (Call::AllGather, vec![bit; 1].into()),
            (
                Call::AllReduce(ReduceOp::Max),
                vec![this.rank as i64].into(),
            ),
        ];
        let mut pending = this.world.start_all(calls).unwrap();
        assert_eq!(pending.remove(2).wait().unwrap(), vec![2i64].into());
        assert_eq!(pending.remove(0).wait().unwrap(), vec![7f32; 2000].into());
        assert_eq!(
            pending.remove(0).wait().unwrap(),
            vec![1f32, 2.0, 4.0].into()
        );
    });
}

#[test]
fn unreceived_messages_do_not_block_the_close() {
    run(3, 1, |this| {
        let comm = &this.world;
        comm.barrier().unwrap();
        if this.rank == 0 {
            comm.send(zeros(100_000), 1).unwrap();
            comm.send(zeros(1), 2).unwrap();
        }
        Ok::<_, CommError>(())
    });
}

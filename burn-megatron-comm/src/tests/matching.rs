//! Tests of splits, the order of calls, and handles in flight.

use std::thread::sleep;
use std::time::Duration;

use super::*;

#[test]
fn split_groups_hold_the_right_ranks() {
    // A sum of powers of two identifies the ranks that took part.
    let results = World::threads(6).unwrap().run(|rank| {
        let (own, world) = (rank.rank(), rank.communicator());
        let rows = world.split("row", &[vec![0, 1, 2], vec![3, 4, 5]])?;
        let columns = world.split("column", &[vec![3, 0], vec![1, 4], vec![5, 2]])?;
        let bit = || Buffer::from(vec![1i64 << own]);
        let order = columns.all_gather(vec![own as i32].into())?;
        Ok::<_, CommError>((
            rows.all_reduce(bit(), ReduceOp::Sum)?,
            columns.all_reduce(bit(), ReduceOp::Sum)?,
            order,
            (columns.rank(), columns.size(), columns.group().to_string()),
        ))
    });
    let results = results.unwrap();
    for (own, (row, column, order, membership)) in results.into_iter().enumerate() {
        assert_eq!(row, vec![if own < 3 { 0b111i64 } else { 0b111000 }].into());
        assert_eq!(column, vec![(1i64 << own) | (1 << ((own + 3) % 6))].into());
        let members = [[3, 0], [1, 4], [5, 2]][own % 3];
        assert_eq!(order, members.to_vec().into());
        let index = members
            .iter()
            .position(|member| *member == own as i32)
            .unwrap();
        assert_eq!(
            membership,
            (index, 2, format!("column [{}, {}]", members[0], members[1]))
        );
    }
}

#[test]
fn splits_nest_down_to_one_rank() {
    let results = World::threads(4).unwrap().run(|rank| {
        let (own, world) = (rank.rank(), rank.communicator());
        let half = world.split("half", &[vec![0, 1], vec![2, 3]])?;
        let first = own / 2 * 2;
        let single = half.split("single", &[vec![first], vec![first + 1]])?;
        let again = single.split("again", &[vec![own]])?;
        assert_eq!(again.barrier(), Ok(()));
        single.all_reduce(vec![own as f32].into(), ReduceOp::Average)
    });
    let wanted: Vec<Buffer> = (0..4).map(|own| vec![own as f32].into()).collect();
    assert_eq!(results.unwrap(), wanted);
}

#[test]
fn the_order_of_the_sum_is_that_of_the_ranks() {
    let values = [1.0e8f32, 1.0, -1.0e8, 0.3, 1.0e-3];
    // The tree adds neighbors first, and then pairs of sums. The last value moves up a level.
    let tree = |v: &[f32]| ((v[0] + v[1]) + (v[2] + v[3])) + v[4];
    let in_order = tree(&values);
    let from_left = values.iter().copied().reduce(|a, b| a + b).unwrap();
    let reversed = tree(&values.iter().rev().copied().collect::<Vec<_>>());
    assert_ne!(in_order.to_bits(), from_left.to_bits());
    assert_ne!(in_order.to_bits(), reversed.to_bits());
    World::threads(5)
        .unwrap()
        .run(|rank| {
            let (own, comm) = (rank.rank(), rank.communicator());
            let mut state = own as u64 + 1;
            for round in 0..100 {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                sleep(Duration::from_micros(state >> 55));
                let sum = comm.all_reduce(vec![values[own]; 9].into(), ReduceOp::Sum)?;
                assert_eq!(sum, vec![in_order; 9].into(), "round {round}");
                let chunk = comm.reduce_scatter(vec![values[own]; 10].into(), ReduceOp::Sum)?;
                assert_eq!(chunk, vec![in_order; 2].into(), "round {round}");
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn handles_are_waited_on_in_any_order() {
    World::threads(3)
        .unwrap()
        .run(|rank| {
            let (own, comm) = (rank.rank(), rank.communicator());
            let start = |call: i64| {
                comm.start_all_reduce(vec![call * 10 + own as i64].into(), ReduceOp::Sum)
            };
            let mut handles: Vec<_> = (0..6)
                .map(|call| Ok((call, start(call)?)))
                .collect::<Result<_, CommError>>()?;
            // Each rank waits in a different order.
            handles.rotate_left(2 * own);
            if own == 1 {
                handles.reverse();
            }
            for (call, handle) in handles {
                assert_eq!(handle.wait()?, vec![30 * call + 3].into());
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn dropped_handles_do_not_hold_others_back() {
    World::threads(3)
        .unwrap()
        .deadline(TIMEOUT)
        .run(|rank| {
            let (own, comm) = (rank.rank(), rank.communicator());
            for call in 0..9 {
                let handle = comm.start_all_gather(vec![(call + own) as i32].into())?;
                if call % 3 == own {
                    drop(handle);
                } else {
                    let call = call as i32;
                    assert_eq!(handle.wait()?, vec![call, call + 1, call + 2].into());
                }
            }
            comm.barrier()
        })
        .unwrap();
}

#[test]
fn a_rank_may_return_before_the_others_take_its_input() {
    let results = World::threads(3).unwrap().run(|rank| {
        let handle = rank
            .communicator()
            .start_all_gather(vec![rank.rank() as u8].into())?;
        if rank.rank() == 0 {
            return Ok(None);
        }
        sleep(Duration::from_millis(50));
        handle.wait().map(Some)
    });
    assert_eq!(
        results.unwrap()[1..],
        [Some(vec![0u8, 1, 2].into()), Some(vec![0u8, 1, 2].into())]
    );
}

#[test]
fn messages_keep_their_order_and_leave_collectives_alone() {
    World::threads(2)
        .unwrap()
        .run(|rank| {
            let comm = rank.communicator();
            if rank.rank() == 0 {
                for value in 0..20i64 {
                    comm.send(vec![value].into(), 1)?;
                }
                comm.barrier()?;
                comm.send(vec![1u8, 2].into(), 0)?;
                assert_eq!(comm.receive(0, DType::U8, 2)?, vec![1u8, 2].into());
            } else {
                let first = comm.start_receive(0, DType::I64, 1)?;
                let second = comm.start_receive(0, DType::I64, 1)?;
                assert_eq!(second.wait()?, vec![1i64].into());
                comm.barrier()?;
                assert_eq!(first.wait()?, vec![0i64].into());
                for value in 2..20i64 {
                    assert_eq!(comm.receive(0, DType::I64, 1)?, vec![value].into());
                }
            }
            comm.barrier()
        })
        .unwrap();
}

#[test]
fn a_handle_may_be_waited_on_in_another_thread() {
    let results = World::threads(2).unwrap().run(|rank| {
        let handle = rank
            .communicator()
            .start_all_gather(vec![rank.rank() as u8].into())?;
        std::thread::spawn(move || handle.wait())
            .join()
            .expect("the wait does not panic")
    });
    assert_eq!(results.unwrap()[0], vec![0u8, 1].into());
}

//! Tests of the simulated network. Tests that depend on time use a link with a virtual clock, because a busy machine
//! suspends threads.

use std::time::Instant;

use super::link::MAX_TRANSFER_TIME;
use super::*;
use burn_megatron_comm::{DType, ReduceOp, SingleRank, World};

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Runs `f` on two ranks. `link` creates the link of each rank. Returns the transfers of each rank.
fn on(
    link: impl Fn() -> Result<Arc<Link>, LinkError> + Sync,
    f: impl Fn(Arc<dyn Communicator>, &Link) -> Result<(), CommError> + Sync,
) -> Vec<Vec<Transfer>> {
    let run = World::threads(2).unwrap().compute_threads(1).run(|rank| {
        let link = link().unwrap();
        f(SimulatedNetwork::over(rank.communicator(), &link), &link)?;
        Ok::<_, CommError>(link.take_transfers())
    });
    run.unwrap()
}

fn over(
    latency: Duration,
    bytes_per_second: f64,
    f: impl Fn(Arc<dyn Communicator>) -> Result<(), CommError> + Sync,
) -> Vec<Vec<Transfer>> {
    on(|| Link::new(latency, bytes_per_second), |comm, _| f(comm))
}

fn ones(len: usize) -> Buffer {
    vec![1f32; len].into()
}

#[test]
fn transfers_follow_one_another_over_all_groups_of_a_rank() {
    // Each transfer has 16 kB at 1 MB/s, so it takes 16 ms after the latency.
    let all = over(ms(4), 1e6, |comm| {
        let other = comm.split("other", &[vec![1, 0]])?;
        let start =
            |comm: &Arc<dyn Communicator>| comm.start_reduce_scatter(ones(8000), ReduceOp::Sum);
        let began = Instant::now();
        let started = [start(&comm)?, start(&other)?, start(&comm)?];
        for pending in started.into_iter().rev() {
            assert_eq!(pending.wait()?, vec![2f32; 4000].into());
            assert!(began.elapsed() >= ms(60), "the last was waited for first");
        }
        Ok(())
    });
    for transfers in all {
        let names: Vec<&str> = transfers.iter().map(|t| t.group.as_str()).collect();
        assert_eq!(names, ["world", "other", "world"]);
        for transfer in &transfers {
            assert_eq!((transfer.op, transfer.bytes), ("reduce_scatter", 16_000));
            assert_eq!(transfer.duration(), ms(20));
            assert!(transfer.asked <= transfer.started);
        }
        let starts: Vec<_> = transfers[1..].iter().map(|t| t.started).collect();
        let ends: Vec<_> = transfers[..2].iter().map(|t| t.done).collect();
        // A transfer starts as soon as the link is free and the call has started.
        for ((start, end), transfer) in starts.iter().zip(&ends).zip(&transfers[1..]) {
            assert_eq!(*start, (*end).max(transfer.asked));
        }
    }
}

#[test]
fn work_between_start_and_wait_hides_a_transfer() {
    for (work, hidden) in [(40, 0.4), (100, 1.0), (200, 1.0)] {
        let link = || Link::with_virtual_clock(ms(100), f64::INFINITY);
        let all = on(link, |comm, link| {
            let pending = comm.start_all_reduce(ones(10), ReduceOp::Sum)?;
            link.advance(ms(work));
            assert_eq!(pending.wait()?, vec![2f32; 10].into());
            Ok(())
        });
        for transfers in all {
            assert_eq!(hidden_share(&transfers), hidden, "{transfers:?}");
            assert_eq!(transfers[0].begin_wait, Some(ms(work)));
        }
    }
}

#[test]
fn an_immediate_wait_hides_nothing() {
    let link = || Link::with_virtual_clock(ms(100), f64::INFINITY);
    for transfers in on(link, |comm, _| comm.barrier()) {
        assert_eq!(hidden_share(&transfers), 0.0, "{transfers:?}");
        assert_eq!(transfers[0].waited, ms(100));
    }
    // By wall time, a rank waits at least as long as the transfer takes.
    for transfers in over(ms(20), f64::INFINITY, |comm| comm.barrier()) {
        let transfer = &transfers[0];
        assert!(transfer.begin_wait.unwrap() + transfer.waited >= transfer.done);
    }
}

#[test]
fn calls_started_as_one_pay_the_latency_once() {
    let all = over(ms(10), 1e6, |comm| {
        let calls = [4000, 2000].map(|len| (Call::ReduceScatter(ReduceOp::Sum), ones(len)));
        for (pending, len) in comm.start_all(calls.into())?.into_iter().zip([2000, 1000]) {
            assert_eq!(pending.wait()?, vec![2f32; len].into());
        }
        Ok(())
    });
    for transfers in all {
        let times: Vec<_> = transfers.iter().map(Transfer::duration).collect();
        assert_eq!(times, [ms(18), ms(4)]);
        // Each message is received as soon as it has arrived.
        assert!(transfers[1].started >= transfers[0].done);
    }
}

#[test]
fn the_bytes_are_those_that_a_rank_sends() {
    let group = Group::new("data", vec![0, 1, 2, 3], 1);
    let bytes =
        |call: Call, len: usize| TransferSize::of(&call, &group, &ones(len), usize::MAX).bytes;
    assert_eq!(bytes(Call::AllReduce(ReduceOp::Sum), 100), 600);
    assert_eq!(bytes(Call::ReduceScatter(ReduceOp::Sum), 100), 300);
    // The input is a quarter of the whole buffer.
    assert_eq!(bytes(Call::AllGather, 25), 300);
    assert_eq!(bytes(Call::Broadcast { root: 0 }, 100), 400);
    assert_eq!(bytes(Call::Send { to: 0 }, 100), 400);
    let receive = Call::Receive {
        from: 0,
        dtype: DType::BF16,
        len: 30,
    };
    assert_eq!(bytes(receive, 0), 60);
    let counts = vec![10, 20, 30, 40];
    let exchange = Call::AllToAll {
        send: counts.clone(),
        receive: counts,
    };
    assert_eq!(bytes(exchange, 100), 320);
    assert_eq!(bytes(Call::Barrier, 0), 0);
}

fn transfer(started: u64, done: u64, waited: u64) -> Transfer {
    Transfer {
        op: "all_gather",
        group: "data".into(),
        bytes: 1,
        between: 0,
        asked: ms(started),
        started: ms(started),
        done: ms(done),
        begin_wait: Some(ms(done)),
        waited: ms(waited),
    }
}

#[test]
fn the_hidden_share_of_a_trace() {
    let trace = [
        transfer(0, 1000, 250),
        transfer(1000, 2000, 0),
        transfer(3000, 5000, 750),
    ];
    assert_eq!(hidden_share(&trace), 0.75);
    assert_eq!(hidden_share(&[]), 1.0);
    // The other ranks were late.
    assert_eq!(hidden_share(&[transfer(0, 10, 50)]), 0.0);
}

#[test]
fn transfers_are_handed_out_once() {
    World::threads(2)
        .unwrap()
        .run(|rank| {
            let link = Link::new(Duration::ZERO, 1e9).unwrap();
            let comm = SimulatedNetwork::over(rank.communicator(), &link);
            let early = comm.start_barrier()?;
            assert_eq!(link.take_transfers()[0].begin_wait, None);
            comm.all_gather(ones(3))?;
            early.wait()?;
            let transfers = link.take_transfers();
            assert_eq!(transfers.len(), 1);
            assert_eq!(transfers[0].op, "all_gather");
            assert!(transfers[0].begin_wait.is_some());
            assert!(link.take_transfers().is_empty());
            Ok::<_, CommError>(())
        })
        .unwrap();
}

#[test]
fn a_group_of_one_has_no_link() {
    let link = Link::new(MAX_TRANSFER_TIME, 1.0).unwrap();
    let comm = SimulatedNetwork::over(Arc::new(SingleRank::new("world")), &link);
    assert_eq!(comm.all_gather(ones(5000)).unwrap(), ones(5000));
    assert!(link.take_transfers().is_empty());
    assert!(comm.pool().is_some());
}

#[test]
fn invalid_links_and_transfers_are_refused() {
    for bytes_per_second in [0.0, -1.0, f64::NAN] {
        let error = Link::new(Duration::ZERO, bytes_per_second).unwrap_err();
        assert!(
            error.to_string().contains("expected more than 0"),
            "{error}"
        );
    }
    let error = Link::new(ms(601_000), 1.0).unwrap_err();
    insta::assert_snapshot!(error, @"invalid latency 601s: expected at most 600s");
    for bytes_per_second in [1.0, 1e-300] {
        over(Duration::ZERO, bytes_per_second, |comm| {
            let calls = vec![
                (Call::Barrier, Buffer::empty(DType::U8)),
                (Call::AllReduce(ReduceOp::Sum), ones(1000)),
            ];
            for refused in [
                comm.start_all_reduce(ones(1000), ReduceOp::Sum).map(drop),
                comm.start_all(calls).map(drop),
            ] {
                let message = refused.unwrap_err().to_string();
                assert!(
                    message.contains("all_reduce of 4000 bytes would take"),
                    "{message}"
                );
            }
            Ok(())
        });
    }
}

/// A receive that waits for its message does not occupy the link. The transfer time starts when the message has been
/// sent.
#[test]
fn a_message_arrives_a_transfer_after_its_send() {
    let all = over(ms(30), f64::INFINITY, |comm| {
        let from = 1 - comm.rank();
        let posted = [
            comm.start_receive(from, DType::F32, 3)?,
            comm.start_receive(from, DType::F32, 2)?,
        ];
        std::thread::sleep(ms(40));
        comm.barrier()?;
        let sent = [
            comm.start_send(ones(3), from)?,
            comm.start_send(ones(2), from)?,
        ];
        for (pending, len) in posted.into_iter().zip([3, 2]) {
            assert_eq!(pending.wait()?, ones(len));
        }
        sent.into_iter()
            .try_for_each(|pending| pending.wait().map(drop))
    });
    for transfers in all {
        let received = transfers.iter().filter(|transfer| transfer.op == "receive");
        let received: Vec<_> = received.collect();
        assert_eq!(received.len(), 2);
        for receive in &received {
            assert_eq!(receive.duration(), ms(30));
            assert!(
                receive.started >= receive.asked + ms(40),
                "it began with its send"
            );
        }
        assert!(received[1].started >= received[0].done);
        // Sends do not wait for arriving messages.
        let sent = transfers.iter().find(|transfer| transfer.op == "send");
        assert!(sent.is_some_and(|sent| sent.started < received[0].done));
    }
}

/// There are four ranks on two nodes. An all-to-all uses the links inside and between the nodes, each for its own
/// transfer time. A ring is as slow as the slower link.
#[test]
fn a_link_between_nodes_and_one_inside() {
    let run = World::threads(4).unwrap().compute_threads(1).run(|rank| {
        let link = Link::with_nodes(Duration::ZERO, 1e6, 2, 4e6).unwrap();
        let world = SimulatedNetwork::over(rank.communicator(), &link);
        let inside = world.split("inside", &[vec![0, 1], vec![2, 3]])?;
        world
            .start_all_to_all(ones(400), vec![100; 4], vec![100; 4])?
            .wait()?;
        world.start_all_reduce(ones(400), ReduceOp::Sum)?.wait()?;
        inside.start_all_reduce(ones(400), ReduceOp::Sum)?.wait()?;
        Ok::<_, CommError>(link.take_transfers())
    });
    for (rank, transfers) in run.unwrap().iter().enumerate() {
        // Every second rank sends to the next node in the ring.
        let between = if rank % 2 == 1 { 2400 } else { 0 };
        let found = transfers.iter().map(|it| (it.bytes, it.between));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [(1200, 800), (2400, between), (1600, 0)]
        );
        let micros: Vec<_> = transfers
            .iter()
            .map(|it| it.duration().as_micros())
            .collect();
        assert_eq!(micros, [800, 2400, 400]);
    }
    assert_eq!(
        Link::with_nodes(ms(0), 1.0, 0, 1.0).unwrap_err(),
        LinkError::Nodes
    );
    assert!(matches!(
        Link::with_nodes(ms(0), 1.0, 1, 0.0),
        Err(LinkError::Bandwidth(_))
    ));
}

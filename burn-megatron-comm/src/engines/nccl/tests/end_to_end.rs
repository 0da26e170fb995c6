//! Tests of the engine together with the rendezvous, communicators and the conformance suite.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};

use super::collectives::{start_all_gather, start_all_reduce, start_reduce_scatter_coalesced};
use super::harness::{TIMEOUT, TestRun, TestSetup};
use crate::conformance::{self, ConformanceOptions};
use crate::process::{CallTracker, ProcessCommunicator, ProcessWorld, Transport};
use crate::report::flight_recorder::{Deadlines, FlightRecorder};
use crate::{Communicator, DType, Token};
use burn_megatron_rendezvous::{Coordinator, JoinRequest, RendezvousClient};

/// Runs `f` on `size` ranks that connect to a rendezvous. Each rank has its own transport.
fn over_all<T: Send>(
    size: usize,
    deadline: Duration,
    f: impl Fn(Arc<dyn Communicator>, Arc<ProcessWorld>) -> T + Sync,
) -> Vec<T> {
    let run = TestRun::new(size, TestSetup::default());
    let token = Token::random().unwrap();
    let anywhere = (Ipv4Addr::LOCALHOST, 0).into();
    let held = Coordinator::host(anywhere, size, None, &token, TIMEOUT, TIMEOUT).unwrap();
    let deadlines = Deadlines {
        first: deadline,
        later: deadline,
    };
    let rank = |rank: usize| {
        let tracker = CallTracker::new(FlightRecorder::new(Instant::now(), deadlines));
        let request = JoinRequest {
            rank,
            size,
            world: 0,
            token: Some(token.clone()),
            join_timeout: TIMEOUT,
            heartbeat_timeout: TIMEOUT,
        };
        let member = RendezvousClient::join(&[held.address()], request, tracker.clone()).unwrap();
        let transport = run.start(rank).unwrap();
        let world = ProcessWorld::new(member.clone(), transport.clone(), &tracker).unwrap();
        let comm = ProcessCommunicator::world(&world, rank, size);
        let result = f(comm, world.clone());
        if member.failure().is_none() {
            member.return_with_all(tracker.calls()).unwrap();
            transport.close(TIMEOUT).unwrap();
        }
        transport.abort();
        member.leave();
        result
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|number| scope.spawn(move || rank(number)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn the_engine_conforms() {
    for size in [2, 3] {
        let options = ConformanceOptions {
            programs: 20,
            long: 1 << 12,
            sizes: vec![0, 1, 7, 1000],
            dtypes: vec![DType::F32, DType::BF16, DType::I64],
            fixed_order: false,
            nan_wins: false,
            ..ConformanceOptions::default()
        };
        let reports = over_all(size, TIMEOUT, |comm, _| {
            conformance::run(&comm, &options, &mut |_| {})
        });
        for report in reports {
            assert!(report.unwrap().checks() > 1000);
        }
    }
}

/// Calls on tensors run on the device. They are numbered together with the calls on host buffers, and they are logged.
#[test]
fn tensors_and_buffers_share_one_order() {
    let size = 3;
    let sums = over_all(size, TIMEOUT, |comm, world| {
        let x = |seed: usize| {
            let values: Vec<f32> = (0..6).map(|i| (i + seed + comm.rank()) as f32).collect();
            Tensor::<1>::from_data(values.as_slice(), &Device::flex())
        };
        assert!(
            comm.on_device()
                .is_some_and(|engine| engine.takes(&Device::flex()))
        );
        let sum = start_all_reduce(x(0), &*comm);
        comm.barrier().unwrap();
        let parts = start_reduce_scatter_coalesced(vec![x(1), x(2)], &*comm);
        let parts: Vec<_> = parts.into_iter().map(|part| part.wait().unwrap()).collect();
        let whole = start_all_gather(parts[1].clone(), &*comm).wait().unwrap();
        let records = world.tracker.recorder().records();
        let calls: Vec<_> = records.iter().map(|record| record.operation).collect();
        let all = [
            "all_reduce",
            "barrier",
            "reduce_scatter",
            "reduce_scatter",
            "all_gather",
        ];
        assert_eq!(calls, all);
        let values = |x: Tensor<1>| x.into_data().try_into_vec::<f32>().unwrap();
        (values(sum.wait().unwrap()), values(whole))
    });
    let sum = |seed: usize| {
        let of = |i: usize| (0..size).map(|rank| (i + seed + rank) as f32).sum::<f32>();
        (0..6).map(of).collect::<Vec<_>>()
    };
    for (first, whole) in sums {
        assert_eq!((first, whole), (sum(0), sum(2)));
    }
}

/// No thread waits on the host for a call on the device, but its deadline is still checked.
#[test]
fn a_rank_that_stays_away_is_found_though_nobody_waits() {
    let failures = over_all(2, Duration::from_secs(1), |comm, world| {
        if comm.rank() == 0 {
            let x = Tensor::<1>::ones([4], &Device::flex());
            let _pending = start_all_reduce(x, &*comm);
            return world.rendezvous.await_failure(TIMEOUT);
        }
        world.rendezvous.await_failure(TIMEOUT)
    });
    for failure in failures {
        let message = failure.expect("the deadline is watched").message;
        assert!(
            message.starts_with("deadline: after ")
                && message.contains("rank 1 has not joined call 0"),
            "{message}"
        );
    }
}

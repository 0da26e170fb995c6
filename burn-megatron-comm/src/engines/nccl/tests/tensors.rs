//! Tests of tensors that stay on the device.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::super::registered::MIN_REGISTERED_BYTES;
use super::super::stream_order::StreamOrder;
use super::collectives::{
    receives_ahead, reduce_scatter_in_f32, start_all_gather, start_all_reduce, start_each,
    start_reduce_scatter_coalesced,
};
use super::fake_nccl::{live_allocations, live_registrations, v2_17, v2_20, v2_27};
use super::harness::{TestRun, TestSetup, over};
use crate::nccl_config::RegisteredBuffers;
use crate::process::Transport;
use crate::{Call, Communicator, ReduceOp};

fn flat(rank: usize, seed: usize, len: usize) -> Tensor<1> {
    let values: Vec<f32> = (0..len)
        .map(|i| ((i * 7 + seed * 3 + rank * 11) % 23) as f32)
        .collect();
    Tensor::from_data(values.as_slice(), &Device::flex())
}

fn floats(x: Tensor<1>) -> Vec<f32> {
    x.cast(DType::F32).into_data().try_into_vec().unwrap()
}

/// Returns the sum of the tensors of all ranks.
fn sum(ranks: usize, seed: usize, len: usize) -> Vec<f32> {
    let all = (0..ranks).map(|rank| flat(rank, seed, len));
    floats(all.reduce(|a, b| a + b).unwrap())
}

fn part(whole: &[f32], rank: usize, ranks: usize) -> Vec<f32> {
    let len = whole.len() / ranks;
    whole[rank * len..(rank + 1) * len].to_vec()
}

/// Runs several collectives one after the other. Each collective uses the result of the previous collective.
fn chains(comm: Arc<dyn Communicator>, len: usize) {
    let (rank, ranks): (usize, usize) = (comm.rank(), comm.size());
    let comm = &*comm;
    for seed in 0..5 {
        let summed = start_all_reduce(flat(rank, seed, len), comm)
            .wait()
            .unwrap();
        assert_eq!(floats(summed.clone()), sum(ranks, seed, len));
        // A host buffer between two tensors keeps its place in the order.
        comm.barrier().unwrap();
        let parts =
            start_reduce_scatter_coalesced(vec![summed.clone(), flat(rank, seed, len)], comm);
        let parts: Vec<_> = parts
            .into_iter()
            .map(|pending| pending.wait().unwrap())
            .collect();
        let expected: Vec<f32> = sum(ranks, seed, len)
            .iter()
            .map(|x| x * ranks as f32)
            .collect();
        assert_eq!(floats(parts[0].clone()), part(&expected, rank, ranks));
        let expected = sum(ranks, seed, len);
        assert_eq!(floats(parts[1].clone()), part(&expected, rank, ranks));
        let whole = start_all_gather(parts[1].clone(), comm);
        assert_eq!(floats(whole.wait().unwrap()), expected);
    }
}

#[test]
fn tensors_are_summed_where_they_are() {
    for order in [StreamOrder::Stream, StreamOrder::Context, StreamOrder::Host] {
        for ranks in 1..=4 {
            let setup = TestSetup {
                order,
                ..TestSetup::default()
            };
            over(ranks, setup, |comm| chains(comm, 24));
        }
    }
}

#[test]
fn wide_sums_and_messages_stay_there_too() {
    over(4, TestSetup::default(), |comm| {
        let (rank, ranks) = (comm.rank(), comm.size());
        let x = flat(rank, 3, 40).cast(DType::BF16);
        let wide = reduce_scatter_in_f32(x, &*comm);
        assert_eq!(floats(wide), part(&sum(ranks, 3, 40), rank, ranks));

        let engine = comm.on_device().unwrap();
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let receive = Call::Receive {
            from: before,
            dtype: crate::DType::F32,
            len: 6,
        };
        let empty = Tensor::<1>::empty([0], &Device::flex());
        let calls = vec![
            (Call::Send { to: next }, flat(rank, 1, 6)),
            (receive, empty),
        ];
        let mut pending = engine.start(calls).unwrap();
        let received = pending.remove(1).wait().unwrap();
        assert_eq!(floats(received), floats(flat(before, 1, 6)));
        assert_eq!(pending.remove(0).wait().unwrap().dims(), [0]);
    });
}

#[test]
fn receives_are_posted_ahead_by_both_neighbours() {
    for (order, most) in [
        (StreamOrder::Stream, 3),
        (StreamOrder::Context, 0),
        (StreamOrder::Host, 3),
    ] {
        for ranks in 1..=4 {
            for ahead in 0..=most {
                let setup = TestSetup {
                    order,
                    ..TestSetup::default()
                };
                let device = Device::flex();
                over(ranks, setup, |comm| receives_ahead(&*comm, &device, ahead));
            }
        }
    }
}

/// Dropped results release their device memory.
#[test]
fn dropped_results_hold_no_memory() {
    over(2, TestSetup::default(), |comm| {
        for seed in 0..20 {
            let xs = vec![flat(comm.rank(), seed, 8), flat(comm.rank(), seed, 4)];
            drop(start_each(xs, &Call::AllReduce(ReduceOp::Max), &*comm));
        }
        comm.barrier().unwrap();
    });
}

/// Large tensors use registered memory, and the memory is released correctly.
#[test]
fn registered_memory_gives_the_same() {
    use RegisteredBuffers::{Allocations, Windows};
    for (version, registered, line) in [
        (
            v2_27 as _,
            Windows,
            // Two groups with five chains each. Each chain has four calls of 2, 1.5, 1.5 and 1.5 MiB.
            "on (symmetric windows; 2 copies on the device for each collective on a tensor of at least 1 MiB: 80 so \
             far, of 65.0 MiB)",
        ),
        (v2_27 as _, Allocations, "on (allocations; 0 copies)"),
        (v2_20 as _, Allocations, "on (allocations; 0 copies)"),
        (
            v2_20 as _,
            Windows,
            "requested, but not available: NCCL 2.20.3 does not support them; expected at least 2.27.3",
        ),
        (
            v2_17 as _,
            Allocations,
            "requested, but not available: NCCL 2.17.1 does not support them; expected at least 2.19.1",
        ),
    ] {
        let setup = TestSetup {
            version,
            registered: Some(registered),
            ..TestSetup::default()
        };
        let ranks = 2;
        let run = TestRun::new(ranks, setup);
        let used = run.on_all(|transport, comm| {
            // Below and above the minimum size of registered memory.
            chains(comm.clone(), 24);
            chains(comm.clone(), MIN_REGISTERED_BYTES / 4);
            let part = comm.split("back", &[vec![1, 0]]).unwrap();
            chains(part, MIN_REGISTERED_BYTES / 4);
            let line_is = transport.description();
            assert!(line_is.contains(line), "{line_is}");
            comm.barrier().unwrap();
            let (windows, all) = (live_allocations(), live_registrations());
            comm.barrier().unwrap();
            transport.close(super::harness::TIMEOUT).unwrap();
            (windows, all)
        });
        for (windows, all) in used {
            match (registered, line.contains("on (")) {
                // Two groups of two ranks with two windows at a time, which are reused.
                (Windows, true) => assert_eq!((windows, all), (8, 8)),
                (Allocations, true) => assert!(windows == 0 && all > 0),
                (_, false) => assert_eq!((windows, all), (0, 0)),
            }
        }
        assert_eq!((live_allocations(), live_registrations()), (0, 0));
        assert_eq!(
            super::fake_nccl::ALIVE.load(std::sync::atomic::Ordering::SeqCst),
            0
        );
    }
}

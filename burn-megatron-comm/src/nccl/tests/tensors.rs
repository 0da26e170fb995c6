//! Tensors that stay on the device.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::super::order::Order;
use super::super::registered::LEAST_BYTES;
use super::fake_nccl::{v2_17, v2_20};
use super::harness::{Run, Setup, over};
use crate::collective::{
    Comm, start_all_gathers, start_all_reduce, start_all_reduces, start_reduce_scatter_wide,
    start_reduce_scatters,
};
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

/// The sum of what all ranks give.
fn sum(ranks: usize, seed: usize, len: usize) -> Vec<f32> {
    let all = (0..ranks).map(|rank| flat(rank, seed, len));
    floats(all.reduce(|a, b| a + b).unwrap())
}

fn part(whole: &[f32], rank: usize, ranks: usize) -> Vec<f32> {
    let len = whole.len() / ranks;
    whole[rank * len..(rank + 1) * len].to_vec()
}

/// Some collectives after each other, each on what the one before gave.
fn chains(comm: Arc<dyn Communicator>, len: usize) {
    let (rank, ranks): (usize, usize) = (comm.rank(), comm.size());
    let comm: Comm = comm;
    for seed in 0..5 {
        let summed = start_all_reduce(flat(rank, seed, len), ReduceOp::Sum, &comm).wait();
        assert_eq!(floats(summed.clone()), sum(ranks, seed, len));
        // A host buffer between two tensors keeps its place.
        comm.barrier().unwrap();
        let parts = start_reduce_scatters(vec![summed.clone(), flat(rank, seed, len)], &comm);
        let parts: Vec<_> = parts.into_iter().map(|pending| pending.wait()).collect();
        let expected: Vec<f32> = sum(ranks, seed, len)
            .iter()
            .map(|x| x * ranks as f32)
            .collect();
        assert_eq!(floats(parts[0].clone()), part(&expected, rank, ranks));
        let expected = sum(ranks, seed, len);
        assert_eq!(floats(parts[1].clone()), part(&expected, rank, ranks));
        let mut whole = start_all_gathers(vec![parts[1].clone()], &comm);
        assert_eq!(floats(whole.remove(0).wait()), expected);
    }
}

#[test]
fn tensors_are_summed_where_they_are() {
    for order in [Order::Stream, Order::Context, Order::Host] {
        for ranks in 1..=4 {
            let setup = Setup {
                order,
                ..Setup::default()
            };
            over(ranks, setup, |comm| chains(comm, 24));
        }
    }
}

#[test]
fn wide_sums_and_messages_stay_there_too() {
    over(4, Setup::default(), |comm| {
        let (rank, ranks) = (comm.rank(), comm.size());
        let dynamic: Comm = comm.clone();
        let x = flat(rank, 3, 40).cast(DType::BF16);
        let wide = start_reduce_scatter_wide(x, &dynamic).wait();
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

/// Results that nobody asks for give their memory back all the same.
#[test]
fn dropped_results_hold_no_memory() {
    over(2, Setup::default(), |comm| {
        let dynamic: Comm = comm.clone();
        for seed in 0..20 {
            let xs = vec![flat(comm.rank(), seed, 8), flat(comm.rank(), seed, 4)];
            drop(start_all_reduces(xs, ReduceOp::Max, &dynamic));
        }
        comm.barrier().unwrap();
    });
}

/// Large tensors go through memory that is registered, and is given back in order.
#[test]
fn registered_memory_gives_the_same() {
    for (version, line) in [
        (
            super::fake_nccl::v2_27 as _,
            "on (symmetric windows, staged)",
        ),
        (v2_20 as _, "on (staged)"),
        (
            v2_17 as _,
            "asked for, but not used: NCCL 2.17.1 has none; 2.19.1",
        ),
    ] {
        let setup = Setup {
            version,
            registered: true,
            ..Setup::default()
        };
        let ranks = 2;
        let run = Run::new(ranks, setup);
        let pieces = run.on_all(|transport, comm| {
            // Below and above the least that is staged.
            chains(comm.clone(), 24);
            chains(comm.clone(), LEAST_BYTES / 4);
            let part = comm.split("back", &[vec![1, 0]]).unwrap();
            chains(part, LEAST_BYTES / 4);
            let line_is = transport.description();
            assert!(line_is.contains(line), "{line_is}");
            comm.barrier().unwrap();
            let pieces = super::fake_nccl::pieces();
            comm.barrier().unwrap();
            transport.close(super::harness::LONG).unwrap();
            pieces
        });
        // Two groups of two ranks with two pieces at a time, used again and again.
        let expected = if line.contains("on (") { 8 } else { 0 };
        assert_eq!(pieces, [expected; 2]);
        assert_eq!(super::fake_nccl::pieces(), 0);
        assert_eq!(
            super::fake_nccl::ALIVE.load(std::sync::atomic::Ordering::SeqCst),
            0
        );
    }
}

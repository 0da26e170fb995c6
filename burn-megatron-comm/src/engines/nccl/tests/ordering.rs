//! Tests of the order of calls: which calls wait for other calls.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use super::collectives::to_buffer;
use super::fake_device::delay_at_random;
use super::fake_nccl::{self, v2_17, v2_20, v2_27};
use super::harness::{TIMEOUT, TestRun, TestSetup, over};
use super::random::Rng;
use crate::nccl_config::{NcclGroup, NcclGroupConfig};
use crate::process::Transport;
use crate::{Buffer, Call, Communicator, DType, DevicePending, ReduceOp};
use burn_megatron_test_support::wait_until;

/// A message that no rank has received yet does not block the sender or the sender's collectives.
#[test]
fn a_send_blocks_nothing() {
    over(2, TestSetup::default(), |comm| {
        let (own, other) = (comm.rank(), 1 - comm.rank());
        let big: Buffer = vec![own as f32; 100_000].into();
        comm.send(big, other).unwrap();
        for _ in 0..3 {
            comm.barrier().unwrap();
        }
        let received = comm.receive(other, DType::F32, 100_000).unwrap();
        assert_eq!(received, vec![other as f32; 100_000].into());
    });
}

/// The launch of the first message between two ranks connects the ranks, and waits until the other rank launches it
/// too. Before NCCL 2.27.3, a thread cannot launch other calls during this time.
#[test]
fn ranks_that_send_before_they_receive_do_not_wait_for_each_other() {
    let versions: [extern "C" fn(*mut c_int) -> c_int; 3] = [v2_17, v2_20, v2_27];
    for version in versions {
        let setup = TestSetup {
            version,
            ..TestSetup::default()
        };
        over(3, setup, |comm| {
            let (own, size) = (comm.rank(), comm.size());
            let (next, before) = ((own + 1) % size, (own + size - 1) % size);
            for _ in 0..3 {
                comm.send(vec![own as f32].into(), next).unwrap();
                let received = comm.receive(before, DType::F32, 1).unwrap();
                assert_eq!(received, vec![before as f32].into());
            }
        });
    }
}

/// A collective that waits for a rank does not block messages between the other ranks.
#[test]
fn messages_pass_a_collective_that_waits() {
    over(3, TestSetup::default(), |comm| {
        let rank = comm.rank();
        let sum = match rank {
            2 => {
                // Calls the collective after the other ranks have exchanged their messages.
                comm.receive(0, DType::U8, 1).unwrap();
                comm.start_all_reduce(vec![1f32].into(), ReduceOp::Sum)
            }
            _ => {
                let sum = comm.start_all_reduce(vec![1f32].into(), ReduceOp::Sum);
                let other = 1 - rank;
                comm.send(vec![rank as i32].into(), other).unwrap();
                let received = comm.receive(other, DType::I32, 1).unwrap();
                assert_eq!(received, vec![other as i32].into());
                if rank == 0 {
                    comm.send(vec![1u8].into(), 2).unwrap();
                }
                sum
            }
        };
        assert_eq!(sum.unwrap().wait().unwrap(), vec![3f32].into());
    });
}

#[test]
fn all_ranks_get_what_rank_0_shares() {
    let run = TestRun::new(3, TestSetup::default());
    let shared = run.on_all(|transport, comm| {
        let own = (comm.rank() == 0).then_some(&b"127.0.0.1:15000"[..]);
        let shared = transport.share(own, TIMEOUT).unwrap();
        transport.close(TIMEOUT).unwrap();
        shared
    });
    assert_eq!(shared, vec![b"127.0.0.1:15000".to_vec(); 3]);
}

/// Starting a call returns immediately, even if another rank is late.
#[test]
fn a_start_does_not_wait() {
    let started = AtomicBool::new(false);
    over(2, TestSetup::default(), |comm| {
        if comm.rank() == 1 {
            wait_until("the other has started its calls", || {
                started.load(Ordering::SeqCst)
            });
        }
        let pending: Vec<_> = (0..20)
            .map(|_| comm.start_all_gather(vec![1u8; 10].into()).unwrap())
            .collect();
        started.store(true, Ordering::SeqCst);
        for pending in pending {
            assert_eq!(pending.wait().unwrap().len(), 20);
        }
    });
}

/// Calls that are started together are launched together. The launches are in the order of the program, even if ids,
/// inputs, ranks or the device are late.
#[test]
fn calls_are_coalesced_in_program_order_under_random_delays() {
    // The calls of each launch with the lengths of their inputs. Launches alternate between tensors and host buffers.
    const PROGRAM: [&[(Call, usize)]; 6] = [
        &[(Call::AllReduce(ReduceOp::Sum), 6), (Call::AllGather, 4)],
        &[(Call::AllReduce(ReduceOp::Sum), 2)],
        &[
            (Call::ReduceScatter(ReduceOp::Sum), 8),
            (Call::ReduceScatter(ReduceOp::Sum), 10),
        ],
        &[
            (Call::AllGather, 3),
            (Call::AllReduce(ReduceOp::Max), 5),
            (Call::AllGather, 1),
        ],
        &[(Call::AllReduce(ReduceOp::Sum), 12)],
        &[(Call::AllGather, 7)],
    ];
    let device = Device::flex();
    let values = |rank: usize, at: usize, len: usize| -> Vec<f32> {
        (0..len)
            .map(|i| (i * 7 + at * 3 + rank * 11) as f32)
            .collect()
    };
    for seed in 1..=100 {
        let run = TestRun::new(2, TestSetup::default());
        delay_at_random(Some(seed));
        let results = run.on_all(|transport, comm| {
            let mut rng = Rng(2 * seed + comm.rank() as u64);
            let mut tensors = vec![];
            let mut buffers = vec![];
            for (at, calls) in PROGRAM.iter().enumerate() {
                thread::sleep(Duration::from_micros(rng.below(300) as u64));
                let calls = calls.iter().cloned();
                if at % 2 == 0 {
                    let tensor = |(call, len)| {
                        let values = values(comm.rank(), at, len);
                        (call, Tensor::<1>::from_data(values.as_slice(), &device))
                    };
                    let engine = comm.on_device().unwrap();
                    tensors.extend(engine.start(calls.map(tensor).collect()).unwrap());
                } else {
                    let buffer = |(call, len)| (call, Buffer::from(values(comm.rank(), at, len)));
                    buffers.extend(comm.start_all(calls.map(buffer).collect()).unwrap());
                }
            }
            let of_tensor = |pending: DevicePending| to_buffer(pending.wait().unwrap());
            let mut results: Vec<Buffer> = tensors.into_iter().map(of_tensor).collect();
            results.extend(buffers.into_iter().map(|pending| pending.wait().unwrap()));
            transport.close(TIMEOUT).unwrap();
            results
        });
        // The first result is the sum over both ranks.
        let sums: Vec<f32> = values(0, 0, 6)
            .iter()
            .zip(values(1, 0, 6))
            .map(|(a, b)| a + b)
            .collect();
        assert_eq!(results[0][0], sums.into(), "seed {seed}");
        let launch = |calls: &&[(Call, usize)]| {
            let call = |(call, len): &(Call, usize)| match call {
                Call::ReduceScatter(_) => (call.name(), len / 2),
                _ => (call.name(), *len),
            };
            calls.iter().map(call).collect::<Vec<_>>()
        };
        let expected: Vec<_> = PROGRAM.iter().map(launch).collect();
        for rank in 0..2 {
            let found = fake_nccl::launches(&run.world(), rank);
            assert_eq!(found, expected, "rank {rank}, seed {seed}");
        }
    }
}

/// Collectives of a tensor group run while a collective of a data group waits for a rank, although the collective of
/// the data group was started earlier.
#[test]
fn tensor_groups_pass_buckets() {
    let run = TestRun::new(2, TestSetup::default());
    run.on_all(|transport, comm| {
        let groups = ["data", "tensor"].map(|name| comm.split(name, &[vec![0, 1]]).unwrap());
        let [data, tensor] = &groups;
        let bucket = || {
            data.start_all_reduce(vec![2f32; 1000].into(), ReduceOp::Sum)
                .unwrap()
        };
        let first = (comm.rank() == 0).then(bucket);
        let sum = tensor.all_reduce(vec![1f32].into(), ReduceOp::Sum).unwrap();
        assert_eq!(sum, vec![2f32].into());
        let bucket = first.unwrap_or_else(bucket);
        assert_eq!(bucket.wait().unwrap(), vec![4f32; 1000].into());
        let line = transport.description();
        assert!(
            line.contains("of tensor, expert on a high-priority stream"),
            "{line}"
        );
        transport.close(TIMEOUT).unwrap();
    });
    assert_eq!(run.device.high_priority.load(Ordering::SeqCst), 2);
}

/// The communicators of calls that are started together are created in one NCCL group. Each communicator has the
/// settings of its group. No communicator is created for a group without calls.
#[test]
fn communicators_are_created_at_the_first_call() {
    const GROUPS: [(NcclGroup, NcclGroupConfig); 2] = [
        (NcclGroup::Messages, ctas(Some(2), None)),
        (NcclGroup::Tensor, ctas(Some(4), Some(16))),
    ];
    let undefined = [i32::MIN; 2];
    for eager_init in [false, true] {
        let setup = TestSetup {
            eager_init,
            groups: &GROUPS,
            ..TestSetup::default()
        };
        let run = TestRun::new(3, setup);
        run.on_all(|transport, comm| {
            let tensor = comm.split("tensor", &[vec![0, 1], vec![2]]).unwrap();
            let unused = comm.split("pipeline", &[vec![0, 1, 2]]).unwrap();
            if comm.rank() < 2 {
                tensor.barrier().unwrap();
            }
            let (next, before) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let receive = |from| {
                let (dtype, len) = (DType::F32, 1);
                (
                    Call::Receive { from, dtype, len },
                    Buffer::empty(DType::F32),
                )
            };
            let send = |to| (Call::Send { to }, Buffer::from(vec![1f32]));
            let calls = vec![send(next), send(before), receive(next), receive(before)];
            for pending in comm.start_all(calls).unwrap() {
                pending.wait().unwrap();
            }
            comm.barrier().unwrap();
            drop(unused);
            transport.close(TIMEOUT).unwrap();
        });
        let mut opened = fake_nccl::OPENED.lock().unwrap().clone();
        opened.sort();
        // Six directions with both ends, the tensor group, and the groups of all ranks.
        let mut expected = vec![(2, [2, 64]); 12];
        expected.extend([(2, [4, 16]); 2]);
        let of_all = if eager_init { 6 } else { 3 };
        expected.extend(vec![(3, undefined); of_all]);
        expected.sort();
        assert_eq!(opened, expected);
        // Each rank has four directions.
        assert_eq!(fake_nccl::IN_GROUPS.load(Ordering::SeqCst), 12);
    }
}

const fn ctas(min_ctas: Option<u32>, max_ctas: Option<u32>) -> NcclGroupConfig {
    NcclGroupConfig {
        min_ctas,
        max_ctas,
        high_priority_stream: None,
    }
}

//! Collectives on tensors that an engine supports on their device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::{integers, over, own, tensor};
use crate::comm::{
    Buffer, BufferPool, Call, CommError, Communicator, DeviceCommunicator, DevicePending, Group,
    Pending, ReduceOp,
};

/// An engine that treats the CPU as its device, and supports no buffers.
#[derive(Debug)]
struct Device0 {
    inner: Comm,
    takes: bool,
    starts: AtomicUsize,
}

impl Communicator for Device0 {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        assert!(!self.takes, "a tensor of the device went through the host");
        self.inner.start(call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        self.inner.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }

    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        Some(self)
    }
}

impl DeviceCommunicator for Device0 {
    fn takes(&self, device: &Device) -> bool {
        self.takes && *device == Device::flex()
    }

    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError> {
        self.starts.fetch_add(1, Ordering::Relaxed);
        let start = |(call, x): (Call, Tensor<1>)| {
            let (device, dtype) = (x.device(), x.dtype());
            let pending = self.inner.start(call, to_buffer(x))?;
            Ok(DevicePending::new(move || {
                let result = pending.wait()?;
                let len = result.len();
                Ok(from_buffer(result, [len], &device, dtype))
            }))
        };
        calls.into_iter().map(start).collect()
    }
}

fn device(inner: Comm, takes: bool) -> (Arc<Device0>, Comm) {
    let device = Arc::new(Device0 {
        inner,
        takes,
        starts: AtomicUsize::new(0),
    });
    (device.clone(), device)
}

/// Runs every collective of the module on `comm`. Returns each result as integers.
fn everything(comm: &Comm) -> Vec<Vec<i64>> {
    let (ranks, flex) = (comm.size(), Device::flex());
    let x = |rows: usize| {
        let values = own(comm.rank(), rows * ranks * 2);
        tensor(&values, [rows, ranks * 2], &flex, DType::F32)
    };
    let flat = |len: usize| tensor(&own(comm.rank(), len), [len], &flex, DType::F32);
    let mut results = vec![
        integers(start_all_reduce(x(3), ReduceOp::Max, comm).wait()),
        integers(start_all_gather(x(3), 0, comm).wait()),
        integers(start_all_gather(x(3), 1, comm).wait()),
        integers(start_reduce_scatter(x(ranks), 0, comm).wait()),
        integers(start_reduce_scatter(x(3), 1, comm).wait()),
        integers(all_to_all(x(ranks), vec![1; ranks], vec![1; ranks], comm)),
        integers(gather(x(2), 1, comm)),
    ];
    let several = start_all_reduce_coalesced(vec![flat(6), flat(4)], ReduceOp::Sum, comm);
    results.extend(several.into_iter().map(|pending| integers(pending.wait())));
    let several = start_all_gather_coalesced(vec![flat(3)], comm);
    results.extend(several.into_iter().map(|pending| integers(pending.wait())));
    let words = super::packed::own(comm.rank(), 5);
    let words = start_all_gather_packed_coalesced(vec![words], comm).remove(0);
    results.push(super::packed::integers(words.wait()));
    let words = super::packed::own(comm.rank(), 6 * ranks);
    let rows = vec![2; ranks];
    let words = start_all_to_all_packed(words, 3, [&rows, &rows], comm);
    results.push(super::packed::integers(words.wait()));
    let wide = flat(5 * ranks).cast(DType::BF16);
    results.push(integers(start_reduce_scatter_in_f32(wide, comm).wait()));
    results
}

#[test]
fn tensors_that_are_taken_give_what_others_give() {
    for ranks in [2, 3, 4] {
        over(ranks, |comm| {
            let expected = everything(&comm);
            for takes in [true, false] {
                let (engine, comm) = device(comm.clone(), takes);
                assert_eq!(everything(&comm), expected);
                let starts = engine.starts.load(Ordering::Relaxed);
                assert_eq!(starts, if takes { 12 } else { 0 });
            }
        });
    }
}

/// Sums of 16-bit parts on the device have the same order as in the engine that sums on the host.
#[test]
fn wide_sums_have_one_order() {
    for ranks in [2, 3, 5, 8] {
        over(ranks, |comm| {
            let x = |rank: usize| {
                // The magnitudes differ so much that the order of a sum is visible in its last bits.
                let value = |i: usize| {
                    let size = 4f64.powi(((i * 5 + rank * 11) % 14) as i32);
                    let sign = if (i * 3 + rank * rank) % 7 < 3 {
                        -1.0
                    } else {
                        1.0
                    };
                    sign * size * (1.0 + ((i * 7919 + rank * 104_729) % 128) as f64 / 128.0)
                };
                let values: Vec<f64> = (0..ranks * 1000).map(value).collect();
                Tensor::<1>::from_data(values.as_slice(), (&Device::flex(), DType::BF16))
            };
            let sum = |comm: &Comm| start_reduce_scatter_in_f32(x(comm.rank()), comm).wait();
            let (host, taken) = (sum(&comm), sum(&device(comm.clone(), true).1));
            assert_eq!(taken.dtype(), DType::F32);
            taken.into_data().assert_eq(&host.clone().into_data(), true);
            // A sum from left to right would have different bits.
            let wide = (0..ranks).map(|rank| x(rank).cast(DType::F32));
            let in_turn = wide.reduce(|a, b| a + b).unwrap();
            let own = in_turn.narrow(0, comm.rank() * 1000, 1000);
            let same = own.equal(host).all().into_scalar::<bool>();
            assert!(!(same && ranks == 8), "every order would do");
        });
    }
}

//! Collectives and messages on one-dimensional tensors through the device interface of a communicator, and conversions
//! between tensors and buffers.

use std::collections::VecDeque;

use burn::tensor::{DType, Device, Tensor, TensorData};
use half::{bf16, f16};

use crate::buffer::Buffer;
use crate::call::{Call, ReduceOp};
use crate::communicator::Communicator;
use crate::device::DevicePending;

/// Starts `call` on each tensor in `xs`. All calls are started in one launch.
pub fn start_each(xs: Vec<Tensor<1>>, call: &Call, comm: &dyn Communicator) -> Vec<DevicePending> {
    let calls = xs.into_iter().map(|x| (call.clone(), x)).collect();
    let device = comm.on_device().expect("the engine takes tensors");
    device.start(calls).unwrap()
}

pub fn start_all_reduce(x: Tensor<1>, comm: &dyn Communicator) -> DevicePending {
    start_each(vec![x], &Call::AllReduce(ReduceOp::Sum), comm).remove(0)
}

pub fn start_all_gather(x: Tensor<1>, comm: &dyn Communicator) -> DevicePending {
    start_each(vec![x], &Call::AllGather, comm).remove(0)
}

pub fn start_reduce_scatter_coalesced(
    xs: Vec<Tensor<1>>,
    comm: &dyn Communicator,
) -> Vec<DevicePending> {
    start_each(xs, &Call::ReduceScatter(ReduceOp::Sum), comm)
}

/// Returns an all-to-all call with even counts.
pub fn even_all_to_all(len: usize, ranks: usize) -> Call {
    let counts = vec![len / ranks; ranks];
    Call::AllToAll {
        send: counts.clone(),
        receive: counts,
    }
}

/// Runs the reduce-scatter of a 16-bit tensor with all additions in f32. It consists of an all-to-all and a sum of the
/// received parts on the device. Adjacent parts are added first.
pub fn reduce_scatter_in_f32(x: Tensor<1>, comm: &dyn Communicator) -> Tensor<1> {
    let ranks = comm.size();
    let call = even_all_to_all(x.dims()[0], ranks);
    let received = start_each(vec![x], &call, comm).remove(0).wait().unwrap();
    let mut sums = received.cast(DType::F32).chunk(ranks, 0);
    while sums.len() > 1 {
        let add = |pair: &[Tensor<1>]| match pair {
            [first, second] => first.clone() + second.clone(),
            _ => pair[0].clone(),
        };
        sums = sums.chunks(2).map(add).collect();
    }
    sums.remove(0)
}

/// Converts a float tensor into a buffer.
pub fn to_buffer(x: Tensor<1>) -> Buffer {
    let dtype = x.dtype();
    let data = x.into_data();
    match dtype {
        DType::F64 => data.try_into_vec::<f64>().unwrap().into(),
        DType::F32 => data.try_into_vec::<f32>().unwrap().into(),
        DType::BF16 => data.try_into_vec::<bf16>().unwrap().into(),
        DType::F16 => data.try_into_vec::<f16>().unwrap().into(),
        other => unreachable!("{other:?} is not a float type"),
    }
}

/// Converts a buffer into a float tensor on `device`.
pub fn from_buffer(buffer: Buffer, device: &Device, dtype: DType) -> Tensor<1> {
    let shape = [buffer.len()];
    let data = match buffer {
        Buffer::F64(values) => TensorData::new(values, shape),
        Buffer::F32(values) => TensorData::new(values, shape),
        Buffer::BF16(values) => TensorData::new(values, shape),
        Buffer::F16(values) => TensorData::new(values, shape),
        other => unreachable!("{} is not a float type", other.dtype()),
    };
    Tensor::from_data(data, (device, dtype))
}

/// Sends tensors to both neighbors in a ring of ranks. Each rank posts `ahead` receives before the receive for which it
/// waits. All ranks post receives before any rank sends, and send before they wait. Runs with a collective between the
/// messages, and with separate launches of the messages.
pub fn receives_ahead(comm: &dyn Communicator, device: &Device, ahead: usize) {
    const MESSAGES: usize = 8;
    let (rank, ranks) = (comm.rank(), comm.size());
    let mut peers = vec![(rank + 1) % ranks, (rank + ranks - 1) % ranks];
    peers.dedup();
    peers.retain(|peer| *peer != rank);
    let message = |from: usize, number: usize| {
        let values = (0..5).map(|i| (100 * from + 10 * number + i) as f32);
        Tensor::<1>::from_data(values.collect::<Vec<_>>().as_slice(), device)
    };
    let engine = comm.on_device().expect("the engine takes tensors");
    assert!(engine.allows_early_receives() || ahead == 0);
    let post = |from| {
        let dtype = crate::DType::F32;
        let call = Call::Receive {
            from,
            dtype,
            len: 5,
        };
        let empty = Tensor::<1>::empty([0], device);
        engine.start(vec![(call, empty)]).unwrap().remove(0)
    };
    let mut posted: Vec<VecDeque<DevicePending>> = peers.iter().map(|_| VecDeque::new()).collect();
    let mut sent = vec![];
    for number in 0..MESSAGES {
        for (peer, posted) in peers.iter().zip(&mut posted) {
            while posted.len() < ahead.min(MESSAGES - number) {
                posted.push_back(post(*peer));
            }
        }
        for peer in &peers {
            let call = Call::Send { to: *peer };
            sent.extend(engine.start(vec![(call, message(rank, number))]).unwrap());
        }
        let sum = (number % 3 == 1).then(|| start_all_reduce(message(rank, 0), comm));
        for (peer, posted) in peers.iter().zip(&mut posted) {
            let pending = posted.pop_front().unwrap_or_else(|| post(*peer));
            let received = pending.wait().unwrap();
            assert_eq!(to_buffer(received), to_buffer(message(*peer, number)));
        }
        if let Some(sum) = sum {
            let all = (0..ranks).map(|rank| message(rank, 0));
            let expected = all.reduce(|a, b| a + b).unwrap();
            assert_eq!(to_buffer(sum.wait().unwrap()), to_buffer(expected));
        }
    }
    for pending in sent {
        pending.wait().unwrap();
    }
}

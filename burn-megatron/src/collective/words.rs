//! Collectives on packed words, such as the codes of 8-bit floats.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron_kernels::bits;

use super::Comm;
use super::flat::start_all_gathers;
use super::flight::taker;
use super::host::{invalid, or_raise};
use super::plain::PendingTensor;
use crate::comm::{Buffer, Call, Pending};

/// A gather of packed words under way.
#[must_use = "a collective that is not waited for has no result"]
pub struct PendingWords(State);

enum State {
    Ready(Tensor<1, Int>),
    Host { pending: Pending, device: Device },
    Device(Box<PendingTensor<1>>),
}

/// Starts gathering the parts of all ranks of each of `xs`, `[n]` of u32: `[n] -> [ranks * n]`.
///
/// No bit is changed, whatever is packed in the words; 4 bytes travel for each. They are started as one
/// call ([`start_all`](crate::comm::Communicator::start_all)), in device memory where the engine takes
/// tensors of the device; the handles are in the order of `xs`. Unwinds with
/// [`raise`](crate::comm::raise), with nothing sent, for integers of another type.
pub fn start_all_gathers_of_words(xs: Vec<Tensor<1, Int>>, comm: &Comm) -> Vec<PendingWords> {
    for x in &xs {
        check(x, comm);
    }
    let Some(device) = xs.first().map(Tensor::device) else {
        return vec![];
    };
    if comm.size() == 1 {
        return xs.into_iter().map(PendingWords::ready).collect();
    }
    if taker(comm, &device).is_some() {
        // Engines take floats of 32 bits, and a gather does not look at what it moves.
        let floats = xs.into_iter().map(bits::as_f32).collect();
        let started = start_all_gathers(floats, comm).into_iter();
        let flying = |pending| PendingWords(State::Device(Box::new(pending)));
        return started.map(flying).collect();
    }
    let calls = xs.into_iter().map(|x| (Call::AllGather, to_buffer(x)));
    let started = or_raise(comm.start_all(calls.collect())).into_iter();
    let flying = |pending| {
        let device = device.clone();
        PendingWords(State::Host { pending, device })
    };
    started.map(flying).collect()
}

impl PendingWords {
    /// A result that is there already.
    pub fn ready(words: Tensor<1, Int>) -> Self {
        Self(State::Ready(words))
    }

    /// The words of all ranks in rank order, `[ranks * n]` of u32; waits for the other ranks.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) when the collective fails.
    pub fn wait(self) -> Tensor<1, Int> {
        match self.0 {
            State::Ready(words) => words,
            State::Host { pending, device } => from_buffer(or_raise(pending.wait()), &device),
            State::Device(pending) => bits::as_u32(pending.wait()),
        }
    }
}

fn check(x: &Tensor<1, Int>, comm: &Comm) {
    if x.dtype() != DType::U32 {
        invalid(format!(
            "packed words are of u32, but the tensor {:?} for {} is of {:?}",
            x.dims(),
            comm.group(),
            x.dtype(),
        ));
    }
}

/// The words as integers of their width, which travel as they are.
fn to_buffer(x: Tensor<1, Int>) -> Buffer {
    let words = x.try_into_data().map(TensorData::try_into_vec::<u32>);
    match words {
        Ok(Ok(words)) => {
            let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
            words.into()
        }
        Ok(Err(error)) => invalid(format!("packed words cannot be read: {error}")),
        Err(error) => invalid(format!(
            "packed words cannot be read from their device: {error}"
        )),
    }
}

fn from_buffer(buffer: Buffer, device: &Device) -> Tensor<1, Int> {
    let words: Vec<u32> = match buffer {
        Buffer::I32(words) => words.into_iter().map(i32::cast_unsigned).collect(),
        other => unreachable!("i32 went in, {} came out", other.dtype()),
    };
    let len = words.len();
    Tensor::from_data(TensorData::new(words, [len]), (device, DType::U32))
}

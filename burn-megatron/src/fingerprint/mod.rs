//! 64-bit fingerprints (xxHash3) of the values that a training step computes: the inputs and outputs of each operation
//! of a module, the gradients, and the inputs and outputs of each collective. If a step is run twice from the same
//! state, the fingerprints are equal.
//!
//! A [`Recorder`] records everything that runs in [`Recorder::watch`] on this thread. The recorder observes operations
//! through [`CallObserver`](burn_megatron_kernels::function::CallObserver), communicated tensors in the tensor
//! collectives, and gradients in their buckets. To compute a fingerprint, a tensor is read from its device. A
//! [`Corruption`] changes the tensors that operations return, to simulate hardware faults.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::comm::{Buffer, CommError, raise};

mod recorder;

pub use recorder::{CallKey, Corruption, Event, ObservedCall, Recorder, Site};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Recorder>>> = const { RefCell::new(None) };
}

/// Returns the recorder of this thread, or `None` if this thread has no recorder.
pub(crate) fn recording() -> Option<Arc<Recorder>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Records that a layer reads this parameter. The operations that follow are attributed to this layer.
pub(crate) fn note_parameter(path: impl FnOnce() -> Option<String>) {
    if let Some(recorder) = recording()
        && let Some(path) = path()
    {
        recorder.begin_layer(&path);
    }
}

/// Records that the forward of a micro-batch begins.
pub fn note_micro_batch(micro_batch: usize) {
    if let Some(recorder) = recording() {
        recorder.begin_micro_batch(micro_batch);
    }
}

/// Waits for the device and returns the fingerprint of a tensor with any number of dimensions and any dtype.
pub fn of_tensor<const D: usize>(x: Tensor<D>) -> u64 {
    xxh3_64(host_data(x).as_bytes())
}

/// Returns the fingerprint of several concatenated tensors.
fn of_tensors(tensors: &[&DispatchTensor]) -> u64 {
    let mut all = Xxh3Default::new();
    for tensor in tensors {
        // The number of dimensions has no effect on reading.
        let data = host_data(Tensor::<1>::from_dispatch((*tensor).clone()));
        all.update(data.as_bytes());
    }
    all.digest()
}

/// Combines several fingerprints into one fingerprint, which depends on their order.
pub fn folded(sums: impl Iterator<Item = u64>) -> u64 {
    let mut all = Xxh3Default::new();
    sums.for_each(|sum| all.update(&sum.to_le_bytes()));
    all.digest()
}

/// Returns the fingerprint of a buffer.
pub(crate) fn of_buffer(buffer: &Buffer) -> u64 {
    fn of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> u64 {
        let mut all = Xxh3Default::new();
        for values in values.chunks(1024) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| bytes(*value)).collect();
            all.update(&bytes);
        }
        all.digest()
    }
    match buffer {
        Buffer::F64(x) => of(x, f64::to_le_bytes),
        Buffer::F32(x) => of(x, f32::to_le_bytes),
        Buffer::BF16(x) => of(x, half::bf16::to_le_bytes),
        Buffer::F16(x) => of(x, half::f16::to_le_bytes),
        Buffer::I64(x) => of(x, i64::to_le_bytes),
        Buffer::I32(x) => of(x, i32::to_le_bytes),
        Buffer::U8(x) => xxh3_64(x),
    }
}

/// Reads the elements of a tensor from its device.
///
/// Panics (see [`raise`]) if the device cannot be read.
pub fn host_data<const D: usize>(x: Tensor<D>) -> TensorData {
    x.try_into_data().unwrap_or_else(|error| {
        raise(CommError::Engine {
            engine: "fingerprint".into(),
            message: format!("a tensor cannot be read from its device: {error}"),
        })
    })
}

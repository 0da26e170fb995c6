//! Counts the kernel launches of CubeCL.

use std::cell::Cell;
use std::sync::Once;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron::kernels::{Function, apply};
use burn_megatron_tests::gpu;
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

thread_local! {
    static LAUNCHED: Cell<usize> = const { Cell::new(0) };
}

/// Counts the spans of CubeCL's launches, separately for each thread.
struct Launches;

impl<S: tracing::Subscriber> Layer<S> for Launches {
    fn on_new_span(&self, span: &Attributes<'_>, _id: &Id, _context: Context<'_, S>) {
        if span.metadata().name() == "launch_inner" {
            LAUNCHED.set(LAUNCHED.get() + 1);
        }
    }
}

/// Returns the result of some work, and the number of its launches. Waits for the device: a process that exits while
/// its driver compiles a kernel may be killed by a signal.
pub fn count<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LAUNCHED.get();
    let result = work();
    let launched = LAUNCHED.get() - before;
    device().sync().expect("the device has no error");
    (result, launched)
}

/// Returns the device. A global subscriber is set before the first launch. tracing caches at the first use of a span
/// whether it is enabled, so a subscriber per test would race with other threads.
pub fn device() -> Device {
    static LISTENING: Once = Once::new();
    LISTENING.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(Launches);
        tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
    });
    gpu()
}

/// Passes a given gradient to its input.
#[derive(Debug)]
struct Seed(Tensor<1>);

impl Function for Seed {
    fn forward(&self, _inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (
            Tensor::<1>::zeros([1], &self.0.device()).into_dispatch(),
            vec![],
        )
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.0.clone().into_dispatch())]
    }
}

pub fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}

/// Returns the numbers of launches of the forward and backward pass of an operation on leaves of these sizes.
pub fn launches(sizes: &[usize], operation: impl Fn(&[Tensor<1>]) -> Tensor<1>) -> [usize; 2] {
    launches_in(DType::F32, sizes, operation)
}

pub fn launches_in(
    dtype: DType,
    sizes: &[usize],
    operation: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) -> [usize; 2] {
    let device = self::device().autodiff();
    let leaf = |size: &usize| Tensor::<1>::ones([*size], (&device, dtype)).require_grad();
    let leaves: Vec<_> = sizes.iter().map(leaf).collect();
    let (output, forward) = count(|| operation(&leaves));
    let seed = Seed(output.clone().inner().ones_like());
    let loss: Tensor<1> = apply(vec![output.into_dispatch()], seed);
    let (_, backward) = count(|| loss.backward());
    // Burn starts every backward pass with a scalar of 1.
    [forward, backward - 1]
}

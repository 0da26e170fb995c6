//! The work split of element-wise kernels, measured with the autotuner of CubeCL.
//!
//! A launch that writes at least [`MIN_TUNED_ELEMENTS`] elements is tuned, on every CubeCL device.
//! The first launch of each [`TuneKey`] runs each of [`SPLITS`] a few times on the tensors of that
//! call; it and later ones use the fastest. CubeCL caches the result as for matrix products: in the
//! process, and on disk with its feature `persistence`. Smaller launches use the default split of
//! the kernel, and so does a key that is not measured yet while a graph is captured (measuring
//! waits for the device) or while another thread measures it.
//!
//! A split only assigns vectors to units: the code of a vector is the same in all of them, and no
//! unit reads the results of another. So processes with different measurements compute the same
//! bits. What determines the order of a sum is not tuned here: the units of a row, the rows that a
//! cube sums. Nor is the vector size: it is the largest that the sizes allow.

use core::fmt::{Display, Formatter};

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::{AutotuneKey, CubeTuneId};
use serde::{Deserialize, Serialize};

use crate::activation::kind::Curve;
use crate::dropout::kernel::alignment::MaskAlignment;

/// Launches that write fewer elements take a few microseconds whatever their split.
const MIN_TUNED_ELEMENTS: usize = 1 << 20;

/// The division of work among units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    /// Units of a cube.
    pub units: u32,
    /// Portions per unit; the kernel defines what a portion is.
    pub each: usize,
}

impl Split {
    /// `each` portions for each of `units` units.
    pub(crate) const fn new(units: u32, each: usize) -> Self {
        Self { units, each }
    }

    /// Portions of a cube.
    pub(crate) fn portions(self) -> usize {
        self.units as usize * self.each
    }
}

impl Display for Split {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}x{}", self.units, self.each)
    }
}

/// The measured splits: more loads in flight per unit, or more units. With more than two portions,
/// a unit of some kernels runs out of registers.
pub(crate) const SPLITS: [Split; 5] = [
    Split::new(128, 2),
    Split::new(256, 1),
    Split::new(256, 2),
    Split::new(512, 1),
    Split::new(512, 2),
];

/// A tuned kernel, with the compile-time parameters that matter for its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// An activation, or the gradient of its input.
    Activation {
        curve: Curve,
        gated: bool,
        backward: bool,
    },
    /// Bias, dropout and residual addition; the input can have a type of its own.
    Dropout {
        input: DType,
        bias: bool,
        residual: bool,
        draws: MaskAlignment,
    },
    /// Rotary positions; `copies`: whether features and heads that are not rotated are copied.
    Rope { copies: bool },
    /// The kernel of the tests.
    #[cfg(all(test, feature = "wgpu"))]
    Counted,
}

/// The key of launches that share a measurement. The number of elements is rounded to a power of
/// two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, AutotuneKey)]
pub(crate) struct TuneKey {
    operation: Operation,
    /// The element type of the output.
    dtype: DType,
    /// Elements of one load.
    vector: usize,
    #[autotune(anchor)]
    elements: usize,
}

/// One launch of a kernel that takes any [`Split`] and gives the same bits in each.
pub(crate) trait Elementwise: Clone + Send + Sync + 'static {
    /// The default split, used without a measurement; every device must support this many units.
    const STATIC: Split;

    /// The kernel's part of the key.
    fn operation(&self) -> Operation;

    /// Elements of one load.
    fn vector(&self) -> usize;

    /// The output, with the type and size of the key.
    fn output(&self) -> &CubeTensor;

    /// A launch to measure, repeated many times. It may write to an output that nothing else reads,
    /// as this default does; a kernel that works in place must override it.
    fn trial(&self) -> Self {
        self.clone()
    }

    /// Launches the kernel.
    fn launch(self, split: Split);
}

/// Launches `kernel` in the split that is fastest for it, or in its own where it is not tuned.
pub(crate) fn launch_tuned<K: Elementwise>(kernel: K) {
    #[cfg(test)]
    if let Some(split) = FORCED_SPLIT.get() {
        return kernel.launch(split);
    }
    if kernel.output().shape().num_elements() < MIN_TUNED_ELEMENTS {
        kernel.launch(K::STATIC)
    } else {
        launch_measured(kernel)
    }
}

fn launch_measured<K: Elementwise>(kernel: K) {
    static TUNER: LocalTuner<TuneKey, CubeTuneId> = local_tuner!("elementwise");

    let output = kernel.output();
    let client = output.client.clone();
    let id = CubeTuneId::new(&client, &output.device);
    let most = client.properties().hardware.max_units_per_cube;
    let candidates = TUNER.init(&id, move || candidates::<K>(most));
    if client.is_capturing() {
        let settled = TUNER.fastest_identity(&id, &candidates, &key(&kernel));
        kernel.launch(settled.unwrap_or(K::STATIC));
    } else {
        TUNER.execute(&id, &client, candidates, kernel)
    }
}

/// The candidate splits for a device whose cubes have up to `most` units.
///
/// The kernel's default comes first: it is used while another thread measures.
fn candidates<K: Elementwise>(most: u32) -> TunableSet<TuneKey, K, (), Split> {
    let others = SPLITS
        .into_iter()
        .filter(|split| *split != K::STATIC && split.units <= most);
    let set = TunableSet::new(key::<K>, |_: &TuneKey, kernel: &K| kernel.trial());
    core::iter::once(K::STATIC)
        .chain(others)
        .fold(set, |set, split| {
            set.with(Tunable::identified(split, move |kernel: K| {
                kernel.launch(split);
                Ok::<_, String>(())
            }))
        })
}

fn key<K: Elementwise>(kernel: &K) -> TuneKey {
    let output = kernel.output();
    TuneKey::new(
        kernel.operation(),
        output.dtype,
        kernel.vector(),
        output.shape().num_elements(),
    )
}

#[cfg(test)]
thread_local! {
    static FORCED_SPLIT: std::cell::Cell<Option<Split>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` with the tuned kernels of this thread in `split`, or in their own.
#[cfg(all(test, feature = "wgpu"))]
fn with_split<T>(split: Option<Split>, work: impl FnOnce() -> T) -> T {
    FORCED_SPLIT.set(split);
    let result = work();
    FORCED_SPLIT.set(None);
    result
}

#[cfg(all(test, feature = "wgpu"))]
mod bits;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

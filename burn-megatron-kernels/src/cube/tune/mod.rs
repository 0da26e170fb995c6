//! The work split of element-wise kernels, measured with the autotuner of CubeCL.
//!
//! A launch that writes at least [`MIN_TUNED_ELEMENTS`] elements is tuned on every CubeCL device. The first launch with
//! a new [`TuneKey`] runs each split of [`SPLITS`] a few times on the tensors of this launch. The first launch and all
//! later launches then use the fastest split. CubeCL caches the result as it does for matrix multiplications: in the
//! process, and on disk with its feature `persistence`.
//!
//! The default split of the kernel is used in three cases:
//! - for smaller launches,
//! - for a key without a measurement during the capture of a graph, because a measurement waits for the device,
//! - while another thread measures the key.
//!
//! A split only assigns vectors to units. All splits run the same code per vector, and no unit reads the results of
//! another unit. Therefore processes with different measurements compute the same bits. Settings that determine the
//! order of a sum are not tuned: the number of units per row and the number of rows that a cube sums. The vector size
//! is not tuned either. It is the largest size that the tensor allows.

use core::fmt::{Display, Formatter};

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::{AutotuneKey, CubeTuneId};
use serde::{Deserialize, Serialize};

use crate::activation::kind::Curve;
use crate::dropout::kernel::alignment::MaskAlignment;

/// The minimum number of written elements for which a launch is tuned. Smaller launches take a few microseconds with
/// any split.
const MIN_TUNED_ELEMENTS: usize = 1 << 20;

/// A division of work among units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    /// The number of units per cube.
    pub units: u32,
    /// The number of portions per unit. The kernel defines a portion.
    pub each: usize,
}

impl Split {
    /// Creates a split with `each` portions for each of `units` units.
    pub(crate) const fn new(units: u32, each: usize) -> Self {
        Self { units, each }
    }

    /// Returns the number of portions per cube.
    pub(crate) fn portions(self) -> usize {
        self.units as usize * self.each
    }
}

impl Display for Split {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}x{}", self.units, self.each)
    }
}

/// The splits that are measured. They have more loads in flight per unit, or more units. With more than two portions, a
/// unit of some kernels would run out of registers.
pub(crate) const SPLITS: [Split; 5] = [
    Split::new(128, 2),
    Split::new(256, 1),
    Split::new(256, 2),
    Split::new(512, 1),
    Split::new(512, 2),
];

/// A kernel that is tuned, with the compile-time parameters that affect its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// An activation, or the gradient of its input.
    Activation {
        curve: Curve,
        gated: bool,
        backward: bool,
    },
    /// Bias, dropout and residual addition. The input may have a different type than the output.
    Dropout {
        input: DType,
        bias: bool,
        residual: bool,
        draws: MaskAlignment,
    },
    /// Rotary position embedding. `copies` is true if features and heads that are not rotated are copied.
    Rope { copies: bool },
    /// The kernel that the tests use.
    #[cfg(all(test, feature = "wgpu"))]
    Counted,
}

/// The key of a measurement. All launches with the same key share the measurement. The number of elements is rounded to
/// a power of two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, AutotuneKey)]
pub(crate) struct TuneKey {
    operation: Operation,
    /// The element type of the output.
    dtype: DType,
    /// The number of elements per load.
    vector: usize,
    #[autotune(anchor)]
    elements: usize,
}

/// A launch of an element-wise kernel that accepts any [`Split`] and computes the same bits with each split.
pub(crate) trait Elementwise: Clone + Send + Sync + 'static {
    /// The split that is used without a measurement. Every device must support its number of units.
    const STATIC: Split;

    /// Returns the part of the key that describes the kernel.
    fn operation(&self) -> Operation;

    /// Returns the number of elements per load.
    fn vector(&self) -> usize;

    /// Returns the output, whose type and size are part of the key.
    fn output(&self) -> &CubeTensor;

    /// Returns a launch for the measurement, which repeats it many times. It may write to an output that no other
    /// operation reads, as this default implementation does. A kernel that works in place must override this function.
    fn trial(&self) -> Self {
        self.clone()
    }

    /// Launches the kernel.
    fn launch(self, split: Split);
}

/// Launches `kernel` with its fastest split, or with its default split if it is not tuned.
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

/// Returns the candidate splits for a device whose cubes have at most `most` units.
///
/// The default split of the kernel comes first, because it is used while another thread measures.
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

/// Runs `work` with the tuned kernels of this thread in `split`, or in their default split if `split` is `None`.
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

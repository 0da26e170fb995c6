//! The work split of element-wise kernels, measured with the autotuner of CubeCL.
//!
//! A launch that writes at least [`MIN_TUNED_ELEMENTS`] elements is tuned on every CubeCL device.
//! The first launch of each [`TuneKey`] runs each of [`SPLITS`] a few times on the tensors of that
//! call. The first launch and all later ones then use the fastest split. CubeCL caches the result
//! as it does for matrix products: in the process, and on disk with its feature `persistence`.
//!
//! The kernel's default split is used for smaller launches. It is also used for a key without a measurement while a
//! graph is captured, because measuring waits for the device. The same holds while another thread measures the key.
//!
//! A split only assigns vectors to units. The code per vector is the same in all splits, and no unit reads the results
//! of another unit. Therefore processes with different measurements compute the same bits. Settings that determine the
//! order of a sum are not tuned here: the units of a row and the rows that a cube sums. The vector size is not tuned
//! either: it is the largest that the sizes allow.

use core::fmt::{Display, Formatter};

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::{AutotuneKey, CubeTuneId};
use serde::{Deserialize, Serialize};

use crate::activation::kind::Curve;
use crate::dropout::kernel::alignment::MaskAlignment;

/// The number of written elements from which a launch is tuned. Smaller launches take a few
/// microseconds with any split.
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

/// The measured splits: more loads in flight per unit, or more units. With more than two portions,
/// a unit of some kernels runs out of registers.
pub(crate) const SPLITS: [Split; 5] = [
    Split::new(128, 2),
    Split::new(256, 1),
    Split::new(256, 2),
    Split::new(512, 1),
    Split::new(512, 2),
];

/// A tuned kernel, with the compile-time parameters that affect its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// An activation, or the gradient of its input.
    Activation {
        curve: Curve,
        gated: bool,
        backward: bool,
    },
    /// Bias, dropout and residual addition. The input may have its own type.
    Dropout {
        input: DType,
        bias: bool,
        residual: bool,
        draws: MaskAlignment,
    },
    /// Rotary positions. `copies`: whether features and heads that are not rotated are copied.
    Rope { copies: bool },
    /// The kernel of the tests.
    #[cfg(all(test, feature = "wgpu"))]
    Counted,
}

/// The key shared by launches with the same measurement. The number of elements is rounded to a
/// power of two.
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

/// A launch of a kernel that accepts any [`Split`] and gives the same bits with each.
pub(crate) trait Elementwise: Clone + Send + Sync + 'static {
    /// The default split, used without a measurement. Every device must support its number of
    /// units.
    const STATIC: Split;

    /// Returns the kernel's part of the key.
    fn operation(&self) -> Operation;

    /// Returns the number of elements per load.
    fn vector(&self) -> usize;

    /// Returns the output, whose type and size are part of the key.
    fn output(&self) -> &CubeTensor;

    /// Returns a launch to measure, which is repeated many times. It may write to an output that no other operation
    /// reads, as this default does. A kernel that works in place must override it.
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

/// Returns the candidate splits for a device whose cubes have up to `most` units.
///
/// The kernel's default comes first, because it is used while another thread measures.
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

/// Runs `work` with the tuned kernels of this thread in `split`, or in their default split.
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

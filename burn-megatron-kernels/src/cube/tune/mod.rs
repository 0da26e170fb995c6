//! How the work of an element-wise kernel is split, measured with CubeCL's tuner.
//!
//! A launch that writes at least [`LEAST`] elements is tuned, on every CubeCL device. The first one
//! of a kind, which is a [`Key`], runs each of [`SPLITS`] a few times on the tensors of that call;
//! it and later ones take the fastest. CubeCL keeps the result as it keeps those of matrix products:
//! for the process, and on disk if its feature `persistence` is on. Smaller launches take the
//! kernel's own split, and so does a kind that is not measured yet while a graph is captured (measuring
//! waits for the device) or while another thread measures it.
//!
//! A split says which unit makes which vectors, and nothing else: the code of a vector is the same in
//! all of them, and no unit reads what another has made. So processes that measured differently hold
//! the same bits. What is part of the order of a sum is not tuned here: the units of a row, the rows
//! that a cube adds up. The length of a vector is not either: it is the longest that the sizes allow.

use core::fmt::{Display, Formatter};

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::{AutotuneKey, CubeTuneId};
use serde::{Deserialize, Serialize};

use crate::activation::Curve;
use crate::dropout::kernel::Draws;

/// Launches that write fewer elements take a few microseconds whatever their split.
const LEAST: usize = 1 << 20;

/// Which of the work a unit takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    /// Units of a cube.
    pub units: u32,
    /// Portions of a unit; the kernel says what a portion is.
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

/// What is measured: more loads under way in one unit, or more units beside each other.
/// With more than two portions a unit of some kernels runs out of registers.
pub(crate) const SPLITS: [Split; 5] = [
    Split::new(128, 2),
    Split::new(256, 1),
    Split::new(256, 2),
    Split::new(512, 1),
    Split::new(512, 2),
];

/// A kernel that is tuned, with what it is compiled for as far as it matters to its speed.
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
        draws: Draws,
    },
    /// Rotary positions; `copies` says whether what does not turn is copied.
    Rope { copies: bool },
    /// That of the tests.
    #[cfg(all(test, feature = "wgpu"))]
    Counted,
}

/// The launches that share a result. The elements are rounded to a power of two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, AutotuneKey)]
pub(crate) struct Key {
    operation: Operation,
    /// Of the output.
    dtype: DType,
    /// Elements of one load.
    vector: usize,
    #[autotune(anchor)]
    elements: usize,
}

/// One launch of a kernel that takes any [`Split`] and gives the same bits in each.
pub(crate) trait Elementwise: Clone + Send + Sync + 'static {
    /// The split where nothing is measured; every device must have as many units.
    const STATIC: Split;

    /// The kernel's part of the key.
    fn operation(&self) -> Operation;

    /// Elements of one load.
    fn vector(&self) -> usize;

    /// What is written: of the type and the size that the key names.
    fn output(&self) -> &CubeTensor;

    /// The launch that is measured for this one, many times over. It may write to an output that
    /// nothing else reads, as this does; one that writes over its input must not.
    fn trial(&self) -> Self {
        self.clone()
    }

    /// Launches the kernel.
    fn launch(self, split: Split);
}

/// Launches `kernel` in the split that is fastest for it, or in its own where it is not tuned.
pub(crate) fn launch_tuned<K: Elementwise>(kernel: K) {
    #[cfg(test)]
    if let Some(split) = FORCED.get() {
        return kernel.launch(split);
    }
    match kernel.output().shape().num_elements() < LEAST {
        true => kernel.launch(K::STATIC),
        false => launch_measured(kernel),
    }
}

fn launch_measured<K: Elementwise>(kernel: K) {
    static TUNER: LocalTuner<Key, CubeTuneId> = local_tuner!("elementwise");

    let output = kernel.output();
    let client = output.client.clone();
    let id = CubeTuneId::new(&client, &output.device);
    let most = client.properties().hardware.max_units_per_cube;
    let candidates = TUNER.init(&id, move || candidates::<K>(most));
    match client.is_capturing() {
        true => {
            let settled = TUNER.fastest_identity(&id, &candidates, &key(&kernel));
            kernel.launch(settled.unwrap_or(K::STATIC));
        }
        false => TUNER.execute(&id, &client, candidates, kernel),
    }
}

/// The ways to launch a kernel on a device whose cubes have up to `most` units.
///
/// The kernel's own comes first: it is what runs while another thread measures.
fn candidates<K: Elementwise>(most: u32) -> TunableSet<Key, K, (), Split> {
    let others = SPLITS
        .into_iter()
        .filter(|split| *split != K::STATIC && split.units <= most);
    let set = TunableSet::new(key::<K>, |_: &Key, kernel: &K| kernel.trial());
    core::iter::once(K::STATIC)
        .chain(others)
        .fold(set, |set, split| {
            set.with(Tunable::identified(split, move |kernel: K| {
                kernel.launch(split);
                Ok::<_, String>(())
            }))
        })
}

fn key<K: Elementwise>(kernel: &K) -> Key {
    let output = kernel.output();
    Key::new(
        kernel.operation(),
        output.dtype,
        kernel.vector(),
        output.shape().num_elements(),
    )
}

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<Option<Split>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` with the tuned kernels of this thread in `split`, or in their own.
#[cfg(all(test, feature = "wgpu"))]
fn with_split<T>(split: Option<Split>, work: impl FnOnce() -> T) -> T {
    FORCED.set(split);
    let result = work();
    FORCED.set(None);
    result
}

#[cfg(all(test, feature = "wgpu"))]
mod bits;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

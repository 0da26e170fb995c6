//! The launches of the large kernels, by scalar units and by matrix units.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::super::ops::HeadStrides;
use super::tile::{AttentionSizesLaunch, AttentionStridesLaunch, DeviceStridesLaunch};

/// The arguments that the kernels of a problem share.
pub(super) struct LaunchArgs<T> {
    pub client: Client,
    pub cubes: usize,
    pub tiles: T,
    /// Elements of a load.
    pub vector: usize,
    /// Queries, keys and values.
    pub projections: [BufferArg; 3],
    /// The range of columns that each row may see.
    pub bounds: ComptimeOptionArgs<OwnedTensor<i32>>,
    pub strides: AttentionStridesLaunch,
    pub sizes: AttentionSizesLaunch,
    pub dtype: ElemType,
}

/// Where the gradients of keys and values go.
pub(super) struct KeyTarget {
    pub buffer: BufferArg,
    pub dtype: ElemType,
    /// Of keys and of values, in elements.
    pub strides: [HeadStrides; 2],
    /// Whether to add to what is there.
    pub add: [bool; 2],
    /// Whether it is a flat buffer of sums, not in the type of the inputs.
    pub is_flat: bool,
}

impl KeyTarget {
    /// The strides of keys and of values, in vectors.
    pub fn strides(&self, vector: usize) -> [DeviceStridesLaunch; 2] {
        self.strides.map(|strides| in_vectors(strides, vector))
    }
}

/// Strides in vectors of so many elements.
pub(super) fn in_vectors(strides: HeadStrides, vector: usize) -> DeviceStridesLaunch {
    let vectors = |elements: usize| (elements / vector) as u32;
    DeviceStridesLaunch::new(
        vectors(strides.offset),
        vectors(strides.batch),
        vectors(strides.row),
        vectors(strides.head),
    )
}

/// The sizes of tiles, and the kernels that work on them.
pub(super) trait Tiles: Copy {
    /// Rows of the resident tile.
    fn rows(&self) -> usize;

    /// Writes `[out, lse]`, with the largest score of each query behind the log-sum-exps if `with_max`.
    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        outputs: [BufferArg; 2],
        with_max: bool,
    );

    /// Writes the gradient of the queries. `statistics` are `[dout, lse, delta]`.
    fn queries(
        args: LaunchArgs<Self>,
        statistics: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    );

    /// Writes the gradients of keys and values.
    fn keys(args: LaunchArgs<Self>, statistics: [BufferArg; 3], target: KeyTarget);
}

/// Launches a kernel with arguments of its own before the ranges, before the strides, before the sizes and
/// at the end, and sizes of vectors beside that of the inputs.
macro_rules! launch {
    (
        $kernel:ident, $args:ident, [$($vector:expr),*], [$($first:expr),*], [$($output:expr),*],
        [$($strides:expr),*], [$($last:expr),*]
    ) => {{
        let [q, k, v] = $args.projections;
        // SAFETY: kernels access only rows that there are, and the places in a flat buffer were checked.
        unsafe {
            $kernel::launch_unchecked(
                &$args.client,
                $crate::cube::grid(&$args.client, $args.cubes),
                cubecl::prelude::CubeDim::new_1d($args.tiles.units() as u32),
                $args.vector,
                $($vector,)*
                q,
                k,
                v,
                $($first,)*
                $args.bounds,
                $($output,)*
                $args.strides,
                $($strides,)*
                $args.sizes,
                $args.tiles,
                $($last,)*
            )
        }
    }};
}
pub(super) use launch;

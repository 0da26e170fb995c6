//! The launches of the large kernels, by scalar units and by matrix units.

use cubecl::client::Client;
use cubecl::prelude::*;

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
    /// The bounds of the documents.
    pub bounds: ComptimeOptionArgs<OwnedTensor<i32>>,
    pub strides: AttentionStridesLaunch,
    pub sizes: AttentionSizesLaunch,
    pub dtype: ElemType,
}

/// The sizes of tiles, and the kernels that work on them.
pub(super) trait Tiles: Copy {
    /// Rows of the resident tile.
    fn rows(&self) -> usize;

    /// Writes `[out, lse]`.
    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        outputs: [BufferArg; 2],
    );

    /// Writes the gradient of the queries. `statistics` are `[dout, lse, delta]`.
    fn queries(
        args: LaunchArgs<Self>,
        statistics: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    );

    /// Writes the gradients of keys and values, which have these `strides`.
    fn keys(
        args: LaunchArgs<Self>,
        statistics: [BufferArg; 3],
        gradients: BufferArg,
        strides: [DeviceStridesLaunch; 2],
    );
}

/// Launches a kernel with arguments of its own before the document bounds, before the strides and
/// before the sizes.
macro_rules! launch {
    ($kernel:ident, $args:expr, [$($first:expr),*], [$($output:expr),*], [$($strides:expr),*]) => {{
        let args = $args;
        let [q, k, v] = args.projections;
        unsafe {
            $kernel::launch_unchecked(
                &args.client,
                $crate::cube::grid(&args.client, args.cubes),
                cubecl::prelude::CubeDim::new_1d(args.tiles.units() as u32),
                args.vector,
                q,
                k,
                v,
                $($first,)*
                args.bounds,
                $($output,)*
                args.strides,
                $($strides,)*
                args.sizes,
                args.tiles,
                args.dtype,
            )
        }
    }};
}
pub(super) use launch;

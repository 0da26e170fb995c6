//! The launches of the large attention kernels, for scalar units and for tensor cores.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::super::ops::HeadStrides;
use super::tile::{AttentionSizesLaunch, AttentionStridesLaunch, DeviceStridesLaunch};

/// The arguments shared by the kernels of a problem.
pub(super) struct LaunchArgs<T> {
    pub client: Client,
    pub cubes: usize,
    pub units: u32,
    pub tiles: T,
    /// The number of elements per load.
    pub vector: usize,
    /// Queries, keys and values.
    pub projections: [BufferArg; 3],
    /// The range of visible columns of each row.
    pub bounds: ComptimeOptionArgs<OwnedTensor<i32>>,
    pub strides: AttentionStridesLaunch,
    pub sizes: AttentionSizesLaunch,
    pub dtype: ElemType,
}

/// The destination of the gradients of keys and values.
pub(super) struct KeyTarget {
    pub buffer: BufferArg,
    pub dtype: ElemType,
    /// The number of elements per vector.
    pub vector: usize,
    /// The strides of keys and of values.
    pub strides: [DeviceStridesLaunch; 2],
    /// Whether the kernel adds to the existing gradients of keys and of values.
    pub add: [bool; 2],
    /// Whether the destination is a flat gradient buffer, whose type may differ from the type of the inputs.
    pub is_flat: bool,
}

/// Converts strides in elements to strides in vectors of `vector` elements.
pub(super) fn in_vectors(strides: HeadStrides, vector: usize) -> DeviceStridesLaunch {
    let strides = [strides.offset, strides.batch, strides.row, strides.head];
    let [offset, batch, row, head] = strides.map(|elements| (elements / vector) as u32);
    DeviceStridesLaunch::new(offset, batch, row, head)
}

/// The sizes of the tiles, and the kernels that use them.
pub(super) trait Tiles: Copy {
    /// Returns the number of rows of the resident tile and the number of units per cube.
    fn sizes(&self) -> [usize; 2];

    /// Launches the forward kernel, which writes `[out, lse]`. With `with_max`, the largest score of each query follows
    /// the log-sum-exps.
    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        outputs: [BufferArg; 2],
        with_max: bool,
    );

    /// Launches the kernel that writes the gradient of the queries. `statistics` holds `[dout, lse, delta]`.
    fn queries(
        args: LaunchArgs<Self>,
        statistics: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    );

    /// Launches the kernel that writes the gradients of keys and values.
    fn keys(args: LaunchArgs<Self>, statistics: [BufferArg; 3], target: KeyTarget);
}

/// Implements [`Tiles`] with three kernels. The names in brackets are two optional arguments of the kernel for keys:
/// the vector type of its gradients, and whether the gradients go to a flat buffer.
macro_rules! tiles {
    (
        $tiles:ident, $sizes:expr, $forward:ident, $queries:ident, $keys:ident,
        [$($vector:ident, $is_flat:ident)?]
    ) => {
        impl Tiles for $tiles {
            fn sizes(&self) -> [usize; 2] {
                $sizes(self)
            }

            fn forward(
                args: LaunchArgs<Self>,
                sink: ComptimeOptionArgs<OwnedTensor<f32>>,
                [out, lse]: [BufferArg; 2],
                with_max: bool,
            ) {
                let [q, k, v] = args.projections;
                // SAFETY: kernels access only existing rows.
                unsafe {
                    launch!(
                        $forward,
                        [args.client, args.cubes, args.units],
                        [args.vector],
                        [q, k, v, sink, args.bounds, out, lse],
                        (args.strides, args.sizes),
                        (args.tiles, with_max, args.dtype)
                    )
                }
            }

            fn queries(
                args: LaunchArgs<Self>,
                [dout, lse, delta]: [BufferArg; 3],
                dq: BufferArg,
                strides: DeviceStridesLaunch,
            ) {
                let [q, k, v] = args.projections;
                // SAFETY: as above.
                unsafe {
                    launch!(
                        $queries,
                        [args.client, args.cubes, args.units],
                        [args.vector],
                        [q, k, v, dout, lse, delta, args.bounds, dq],
                        (args.strides, strides, args.sizes),
                        (args.tiles, args.dtype)
                    )
                }
            }

            fn keys(args: LaunchArgs<Self>, [dout, lse, delta]: [BufferArg; 3], target: KeyTarget) {
                let [q, k, v] = args.projections;
                let [dk, dv] = target.strides;
                $(let ($vector, $is_flat) = (target.vector, target.is_flat);)?
                // SAFETY: as above, and the places in a flat buffer were checked.
                unsafe {
                    launch!(
                        $keys,
                        [args.client, args.cubes, args.units],
                        [args.vector $(, $vector)?],
                        [q, k, v, dout, lse, delta, args.bounds, target.buffer],
                        (args.strides, dk, dv, args.sizes),
                        (args.tiles $(, $is_flat)?, target.add, [args.dtype, target.dtype])
                    )
                }
            }
        }
    };
}
pub(super) use tiles;

//! The launches of the large kernels, by scalar units and by matrix units.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::super::ops::HeadStrides;
use super::tile::{AttentionSizesLaunch, AttentionStridesLaunch, DeviceStridesLaunch};

/// The arguments that the kernels of a problem share.
pub(super) struct LaunchArgs<T> {
    pub client: Client,
    pub cubes: usize,
    pub units: u32,
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
    /// Elements of a vector.
    pub vector: usize,
    /// Of keys and of values.
    pub strides: [DeviceStridesLaunch; 2],
    /// Whether to add to what is there.
    pub add: [bool; 2],
    /// Whether it is a flat buffer of sums, not in the type of the inputs.
    pub is_flat: bool,
}

/// Converts strides in elements to strides in vectors of `vector` elements.
pub(super) fn in_vectors(strides: HeadStrides, vector: usize) -> DeviceStridesLaunch {
    let strides = [strides.offset, strides.batch, strides.row, strides.head];
    let [offset, batch, row, head] = strides.map(|elements| (elements / vector) as u32);
    DeviceStridesLaunch::new(offset, batch, row, head)
}

/// The sizes of tiles, and the kernels that work on them.
pub(super) trait Tiles: Copy {
    /// Rows of the resident tile, and units of a cube.
    fn sizes(&self) -> [usize; 2];

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

/// Implements [`Tiles`] by three kernels. The brackets name two more arguments of the kernel of the keys, where it has
/// them: the vectors of its gradients, and whether these are in a flat buffer.
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
                // SAFETY: kernels access only rows that there are.
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

//! Reorders scales for cuBLASLt, as in "Scaling factors layouts" of its documentation.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

/// The number of rows per tile of E8M0 scales. It is also the number of words per tile, which hold four scales each.
const TILE: usize = 128;

/// Returns the scales of a matrix `[rows, depth]` in the order in which cuBLASLt reads them:
///
/// - Single scale: `[1]` in f32, unchanged.
/// - 1 x 128 blocks: `[ceil(depth / 128) * rows]` in f32, column by column. A column contains the scales of all rows
///   for one block along `depth`.
/// - 128 x 128 blocks: `[ceil(rows / 128) * 4 * ceil(depth / 512)]` in f32, row by row. Each row of blocks is padded
///   with zeros to a multiple of 4.
/// - MXFP8: `[128 * ceil(rows / 128) * ceil(depth / 128)]` in u32. The scales are stored in tiles of 128 rows and 4
///   blocks along `depth`, one row of tiles after the other. In a tile (512 bytes), the scale of block `j` of row `i`
///   is the byte with index `16 * (i mod 32) + 4 * floor(i / 32) + j`. Bytes outside the matrix are zero.
pub fn library_scales(matrix: &Fp8Matrix) -> DispatchTensor {
    let order = match &matrix.scales {
        Scales::Tensor(scale) => return scale.clone().into_dispatch(),
        Scales::Blocks { height: BLOCK, .. } => ScaleOrder::Filled,
        Scales::Blocks { .. } => ScaleOrder::Transposed,
        Scales::Mx(_) => ScaleOrder::Tiled,
    };
    let [_, scales] = matrix.tensors();
    let shape = scales.shape();
    let dtype = match scales.dtype() {
        DType::F32 => DType::F32,
        _ => DType::U32,
    };
    let op = SimpleOp {
        name: "library_scales",
        parameters: order,
        outputs: vec![Spec::new([order.len([shape[0], shape[1]])], dtype)],
        cpu: |order, inputs| vec![cpu::arrange(*order, &inputs[0])],
        #[cfg(feature = "cubecl")]
        cube: |order, mut inputs| vec![kernel::arrange(*order, inputs.remove(0))],
    };
    launch_one(op, vec![scales])
}

/// The order in which scales are written. The scales are handled as words of 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScaleOrder {
    /// Column by column.
    Transposed,
    /// Row by row, with each row padded by zeros to a multiple of 4.
    Filled,
    /// In tiles of 128 rows and one word of four scales.
    Tiled,
}

impl ScaleOrder {
    /// Returns the number of words in the result for scales `[rows, columns]`.
    fn len(self, [rows, columns]: [usize; 2]) -> usize {
        match self {
            Self::Transposed => rows * columns,
            Self::Filled => rows * columns.next_multiple_of(4),
            Self::Tiled => rows.next_multiple_of(TILE) * columns,
        }
    }
}

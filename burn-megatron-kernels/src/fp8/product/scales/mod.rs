//! Scales in the order in which cuBLASLt reads them ("Scaling factors layouts" in its documentation).

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

/// Rows of a tile of E8M0 scales; a tile has as many words of four scales.
const TILE: usize = 128;

/// The scales of a matrix `[rows, depth]` in the order in which cuBLASLt reads them:
///
/// - one scale: as it is, `[1]` in f32;
/// - 1 x 128 blocks: those of all rows for the first block of the depth, then for the second,
///   `[ceil(depth / 128) rows]` in f32;
/// - 128 x 128 blocks: row by row, each row of blocks filled up with zeros to a multiple of 4,
///   `[ceil(rows / 128) 4 ceil(depth / 512)]` in f32;
/// - MXFP8: tiles of 128 rows and 4 blocks of the depth, one row of tiles after the other. In a tile
///   (512 bytes) block `j` of row `i` is byte `16 (i mod 32) + 4 floor(i / 32) + j`, and what lies
///   beyond the matrix is zeros: `[128 ceil(rows / 128) ceil(depth / 128)]` in u32.
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

/// The order of a matrix of scales, each element a word of 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScaleOrder {
    /// Column by column.
    Transposed,
    /// Row by row, with zeros up to a multiple of 4.
    Filled,
    /// In tiles of 128 rows and one word.
    Tiled,
}

impl ScaleOrder {
    /// The words of `[rows, columns]` in this order.
    fn len(self, [rows, columns]: [usize; 2]) -> usize {
        match self {
            Self::Transposed => rows * columns,
            Self::Filled => rows * columns.next_multiple_of(4),
            Self::Tiled => rows.next_multiple_of(TILE) * columns,
        }
    }
}

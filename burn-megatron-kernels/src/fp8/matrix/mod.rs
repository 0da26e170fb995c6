//! A matrix of 8-bit codes with its scales.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Int, Shape, Tensor};

use super::check;
use super::format::Format;
use crate::KernelError;
use crate::cpu::{slice, tensor};
use crate::error::{F32, U32, accept, check_option, check_shape, check_size, check_type};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

pub(super) use cpu::transposed_codes;

/// The alignment of rows in bytes. Rows are padded to a multiple of this size, because FP8 matrix multiplication on
/// GPUs requires it.
pub const ROW_BYTES: usize = 16;

/// The block size of blockwise scales: the number of elements along the summed dimension that share a scale.
pub const BLOCK: usize = 128;

/// The number of elements that share a scale in MXFP8.
pub const MX_BLOCK: usize = 32;

/// The name of the element type of codes in error messages.
const CODES: &str = "type of the codes";

/// A quantized matrix, `[rows, depth]` of 8-bit codes, as an operand of a matrix multiplication. The multiplication
/// sums over `depth`, the last dimension.
///
/// The value of an element is its decoded code times its scale. Rows are padded with zeros to a multiple of
/// [`ROW_BYTES`]. The zeros do not change the result of a multiplication.
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// The codes, `[rows, words]` in u32 with `words = 4 ceil(depth / 16)`. A word holds four codes. The first code is
    /// in the lowest bits.
    pub codes: Tensor<2, Int>,
    /// The scales, which multiply the codes.
    pub scales: Scales,
    /// The format of the codes: E4M3 or E5M2.
    pub format: Format,
    /// The number of elements per row, without the padding. This is the size of the summed dimension.
    pub depth: usize,
}

/// The scales of a quantized matrix.
#[derive(Clone, Debug)]
pub enum Scales {
    /// One scale for the complete matrix, `[1]` in f32.
    Tensor(Tensor<1>),
    /// One scale per block, `[ceil(rows / height), ceil(depth / 128)]` in f32.
    Blocks {
        /// The scales of the blocks.
        scales: Tensor<2>,
        /// The number of rows that share a scale: 1 or [`BLOCK`].
        height: usize,
    },
    /// One E8M0 scale per [`MX_BLOCK`] elements of a row. A u32 word holds four scales: `[rows, words]` with
    /// `words = ceil(ceil(depth / 32) / 4)`.
    Mx(Tensor<2, Int>),
}

impl Fp8Matrix {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.codes.dims()[0]
    }

    /// Returns the codes and the scales, for example to save them for a backward pass.
    /// [`with_tensors`](Self::with_tensors) is the inverse.
    pub fn tensors(&self) -> [DispatchTensor; 2] {
        [
            self.codes.clone().into_dispatch(),
            self.scales.to_dispatch(),
        ]
    }

    /// Returns a copy of this matrix with the given codes and scales. They must have the same types and sizes as the
    /// tensors that [`tensors`](Self::tensors) returns.
    pub fn with_tensors(&self, [codes, scales]: [DispatchTensor; 2]) -> Self {
        let scales = match &self.scales {
            Scales::Tensor(_) => Scales::Tensor(Tensor::from_dispatch(scales)),
            Scales::Blocks { height, .. } => Scales::Blocks {
                scales: Tensor::from_dispatch(scales),
                height: *height,
            },
            Scales::Mx(_) => Scales::Mx(Tensor::from_dispatch(scales)),
        };
        Self {
            codes: Tensor::from_dispatch(codes),
            scales,
            ..self.clone()
        }
    }

    /// Returns the transposed matrix, `[depth, rows]`, with the same values. With a single scale and with blocks of 128
    /// x 128, the transposed rowwise copy of [`quantize`](fn@super::quantize) equals its columnwise copy.
    ///
    /// On CubeCL devices, the function launches one kernel. Blockwise scales require a second kernel.
    ///
    /// # Panics
    ///
    /// Panics with a [`KernelError`] if the sizes of codes and scales do not match. Also panics for blocks of 1 x 128
    /// and for MX, because each of their scales belongs to elements of a single row.
    pub fn transposed(&self) -> Self {
        accept(self.check("transposed", "the matrix"));
        let scales = match &self.scales {
            Scales::Tensor(scale) => Scales::Tensor(scale.clone()),
            Scales::Blocks { scales, height } if *height == BLOCK => Scales::Blocks {
                scales: scales.clone().transpose(),
                height: *height,
            },
            other => {
                let fits = "one for all, or one for 128 x 128 elements";
                let kind = other.describe();
                accept(Err(KernelError::option("transposed", "scales", kind, fits)))
            }
        };
        let (rows, depth) = (self.rows(), self.depth);
        let op = SimpleOp {
            name: "transposed",
            parameters: [rows, depth],
            outputs: vec![Spec::new([depth, words(rows)], DType::U32)],
            cpu: |&[rows, depth], inputs| {
                let codes = cpu::transposed_codes(slice(&inputs[0]), [rows, depth]);
                vec![tensor(codes, [depth, words(rows)])]
            },
            #[cfg(feature = "cubecl")]
            cube: |&[_, depth], mut inputs| vec![kernel::transpose(inputs.remove(0), depth)],
        };
        let codes = launch_one(op, vec![self.codes.clone().into_dispatch()]);
        Self {
            codes: Tensor::from_dispatch(codes),
            scales,
            format: self.format,
            depth: rows,
        }
    }

    /// Creates a matrix `[rows, depth]` from contiguous codes without padding.
    ///
    /// `codes` is `[words]` in u32, as returned by [`encode`](super::encode). A word holds four codes, with the first
    /// code in the lowest bits. Only the first `rows * depth` codes are used. `descale`, `[1]` in f32, is the scale of
    /// the matrix. If `depth` is a multiple of [`ROW_BYTES`], nothing is copied. Otherwise the codes are padded, which
    /// takes one kernel launch on CubeCL devices.
    ///
    /// # Panics
    ///
    /// Panics with a [`KernelError`] for [`Format::E2M1`], if there are too few codes, if the codes are not u32, or if
    /// `descale` is not `[1]` in f32.
    pub fn from_flat(
        codes: Tensor<1, Int>,
        [rows, depth]: [usize; 2],
        descale: Tensor<1>,
        format: Format,
    ) -> Self {
        const NAME: &str = "from_flat";
        accept(check::format(NAME, format));
        accept(check::one(NAME, "descale", &descale));
        accept(check_size(NAME, &[rows, depth]));
        accept(check_type(NAME, CODES, codes.dtype(), U32));
        let (given, needed) = (codes.dims()[0], (rows * depth).div_ceil(4));
        accept(check_shape(NAME, given >= needed, || {
            let (held, codes) = (given * 4, rows * depth);
            format!(
                "{given} words hold {held} codes, and [{rows}, {depth}] has {codes}: expected {needed} words"
            )
        }));
        // Burn has no view of an empty tensor.
        let codes = if needed > 0 && depth.is_multiple_of(ROW_BYTES) {
            codes.narrow(0, 0, needed).reshape([rows, words(depth)])
        } else {
            let op = SimpleOp {
                name: NAME,
                parameters: [rows, depth],
                outputs: vec![Spec::new([rows, words(depth)], DType::U32)],
                cpu: |&[rows, depth], inputs| {
                    let codes = cpu::padded(slice(&inputs[0]), [rows, depth]);
                    vec![tensor(codes, [rows, words(depth)])]
                },
                #[cfg(feature = "cubecl")]
                cube: |sizes, mut inputs| vec![kernel::pad(inputs.remove(0), *sizes)],
            };
            Tensor::from_dispatch(launch_one(op, vec![codes.into_dispatch()]))
        };
        Self {
            codes,
            scales: Scales::Tensor(descale),
            format,
            depth,
        }
    }

    /// Checks that the format has 8 bits, and that codes and scales match. `name` is the name of the matrix in error
    /// messages.
    ///
    /// The fields of a matrix are public. With mismatched sizes, kernels would read past the end of the memory.
    pub(super) fn check(
        &self,
        operation: &'static str,
        name: &'static str,
    ) -> Result<(), KernelError> {
        let ([rows, _], depth) = (self.codes.dims(), self.depth);
        let (fits, value) = (self.format != Format::E2M1, format_args!("E2M1 of {name}"));
        check_option(operation, fits, "format", value, "E4M3 or E5M2")?;
        if let Scales::Blocks { height, .. } = &self.scales {
            let (option, value) = (
                "rows that share a scale",
                format_args!("{height} of {name}"),
            );
            let fits = [1, BLOCK].contains(height);
            check_option(operation, fits, option, value, "1 or 128")?;
        }
        check_type(operation, CODES, self.codes.dtype(), U32)?;
        let scales = self.scales.to_dispatch();
        let fits = self.scales.fits([rows, depth]);
        for (what, given, fits) in [
            (
                "codes",
                self.codes.dims().to_vec(),
                vec![rows, words(depth)],
            ),
            ("scales", scales.shape().to_vec(), fits),
        ] {
            check_shape(operation, given == fits, || {
                format!(
                    "{name} is [{rows}, {depth}] and its {what} {given:?}: expected {fits:?} (see Fp8Matrix)"
                )
            })?;
        }
        let wanted = match &self.scales {
            Scales::Mx(_) => U32,
            _ => F32,
        };
        check_type(operation, "type of the scales", scales.dtype(), wanted)
    }

    /// Returns the size of the matrix in bytes, including its scales and the padding.
    pub fn bytes(&self) -> usize {
        let words = |shape: Shape| 4 * shape.num_elements();
        words(self.codes.shape()) + words(self.scales.to_dispatch().shape())
    }
}

impl Scales {
    fn to_dispatch(&self) -> DispatchTensor {
        match self {
            Self::Tensor(scale) => scale.clone().into_dispatch(),
            Self::Blocks { scales, .. } => scales.clone().into_dispatch(),
            Self::Mx(scales) => scales.clone().into_dispatch(),
        }
    }

    /// Returns the shape that scales of this kind have for a matrix `[rows, depth]`.
    fn fits(&self, [rows, depth]: [usize; 2]) -> Vec<usize> {
        match self {
            Self::Tensor(_) => vec![1],
            Self::Blocks { height, .. } => vec![rows.div_ceil(*height), depth.div_ceil(BLOCK)],
            Self::Mx(_) => vec![rows, mx_words(depth)],
        }
    }

    fn describe(&self) -> &'static str {
        match self {
            Self::Tensor(_) => "one for all",
            Self::Blocks { height: 1, .. } => "one for 1 x 128 elements",
            Self::Blocks { .. } => "one for 128 x 128 elements",
            Self::Mx(_) => "one for 1 x 32 elements",
        }
    }
}

/// Returns the number of u32 words in a row of `depth` codes.
pub(crate) const fn words(depth: usize) -> usize {
    depth.div_ceil(ROW_BYTES) * (ROW_BYTES / 4)
}

/// Returns the number of u32 words with the E8M0 scales of a row of `depth` codes.
pub(crate) const fn mx_words(depth: usize) -> usize {
    depth.div_ceil(MX_BLOCK).div_ceil(4)
}

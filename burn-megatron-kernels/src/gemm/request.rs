//! A request to cuBLASLt, in types that need no CUDA.

use std::fmt::{self, Display};

use burn::tensor::DType;

use super::engine::{ColumnMajor, Epilogue, GemmProblem};
use crate::fp8::Format;

/// A product of column-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    /// Sizes, and the layout of the factors.
    pub layout: ColumnMajor,
    /// The types of the elements of `A` and `B`.
    pub factors: [Element; 2],
    /// The type of `D`, and of a bias.
    pub result: DType,
    /// The epilogue.
    pub epilogue: Epilogue,
    /// How 8-bit factors are scaled.
    pub scaled: Option<Scaled>,
}

/// The type of the elements of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    /// A type of Burn's.
    Plain(DType),
    /// A type that Burn has not.
    Fp8(Format),
}

/// How 8-bit factors are scaled, and how their products are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scaled {
    /// The scale modes of `A` and of `B`.
    pub modes: [ScaleMode; 2],
    /// Whether sums may be kept in the registers of the tensor cores all along.
    pub fast: bool,
}

/// What shares a scale, with the values of `cublasLtMatmulMatrixScale_t`: bindings for older
/// versions of CUDA lack some of the names, while the library that is opened may know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(crate) enum ScaleMode {
    /// The whole matrix: `SCALAR_32F`.
    Tensor = 0,
    /// 32 elements of a row, as E8M0: `VEC32_UE8M0`.
    Mx = 2,
    /// 128 elements of a row: `VEC128_32F`.
    Rows = 4,
    /// 128 elements of 128 rows: `BLK128x128_32F`.
    Squares = 5,
}

impl From<&GemmProblem> for Request {
    fn from(problem: &GemmProblem) -> Self {
        Self {
            layout: problem.column_major(),
            factors: [Element::Plain(problem.factors); 2],
            result: problem.result,
            epilogue: problem.epilogue,
            scaled: None,
        }
    }
}

/// A GPU and the version of cuBLASLt that works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chip {
    /// The compute capability: 9.0 is Hopper.
    pub capability: (i32, i32),
    /// As the library gives it: 120901 is 12.9.1.
    pub version: usize,
}

impl Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        let [first, second, third] = [
            self.version / 10_000,
            self.version / 100 % 100,
            self.version % 100,
        ];
        write!(
            f,
            "cuBLASLt {first}.{second}.{third} on compute capability {major}.{minor}"
        )
    }
}

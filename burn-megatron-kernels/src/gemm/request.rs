//! A request for a cuBLASLt matrix multiplication, in types that do not require CUDA.

use std::fmt::{self, Display};

use burn::tensor::DType;

use super::engine::{ColumnMajor, Epilogue, GemmProblem, Operand};
use crate::fp8::Format;

/// A matrix multiplication of column-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    /// The sizes, and the layouts of the operands.
    pub layout: ColumnMajor,
    /// The element types of `A` and `B`.
    pub factors: [Element; 2],
    /// The type of `D` and of a bias.
    pub result: DType,
    /// The epilogue.
    pub epilogue: Epilogue,
    /// The GELU epilogue, applied after the other epilogue.
    pub gelu: Option<Gelu>,
    /// The scaling of FP8 operands.
    pub scaled: Option<Scaled>,
}

/// A GELU epilogue (tanh approximation). The auxiliary matrix has the sizes, the type and the layout of `D`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Gelu {
    /// `D` is GELU of the result with its bias. The result with its bias is stored in the auxiliary matrix.
    Forward,
    /// `D` is the result times the derivative of GELU at the auxiliary matrix. The epilogue does not add a bias, but
    /// computes the gradient of the bias.
    Gradient,
}

/// The element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    /// An element type that exists in Burn.
    Plain(DType),
    /// An FP8 type, which does not exist in Burn.
    Fp8(Format),
}

/// The scaling of FP8 operands, and the precision of the accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scaled {
    /// The scale modes of `A` and of `B`.
    pub modes: [ScaleMode; 2],
    /// Whether sums may stay in the accumulators of the tensor cores.
    pub fast: bool,
}

/// The part of a matrix that shares a scale, with the values of `cublasLtMatmulMatrixScale_t`. Bindings for older CUDA
/// versions lack some of the names, even if the opened library supports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(crate) enum ScaleMode {
    /// One scale for the complete matrix: `SCALAR_32F`.
    Tensor = 0,
    /// One E8M0 scale for 32 elements of a row: `VEC32_UE8M0`.
    Mx = 2,
    /// One scale for 128 elements of a row: `VEC128_32F`.
    Rows = 4,
    /// One scale for 128 elements of 128 rows: `BLK128x128_32F`.
    Squares = 5,
}

impl From<&GemmProblem> for Request {
    fn from(problem: &GemmProblem) -> Self {
        Self {
            layout: problem.column_major(),
            factors: [Element::Plain(problem.factors); 2],
            result: problem.result,
            epilogue: problem.epilogue,
            gelu: None,
            scaled: None,
        }
    }
}

/// Formats the complete request as the key for stored algorithms. The key consists of `m x n x k`, the types, each
/// matrix with its leading dimension and `T` if it is transposed, and the epilogues.
impl Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ColumnMajor {
            m,
            n,
            k,
            a,
            b,
            leading,
        } = self.layout;
        let turn = |operand: Operand| if operand.transpose { "T" } else { "N" };
        let [of_a, of_b] = self.factors.map(|element| match element {
            Element::Plain(dtype) => format!("{dtype:?}"),
            Element::Fp8(format) => format!("{format:?}"),
        });
        write!(
            f,
            "{m}x{n}x{k} {of_a}*{of_b}={:?} {}{} {}{} {leading}",
            self.result,
            turn(a),
            a.leading,
            turn(b),
            b.leading
        )?;
        match self.epilogue {
            Epilogue::Nothing => {}
            Epilogue::Bias => write!(f, " bias")?,
            Epilogue::Flat { add: true } => write!(f, " flat+=")?,
            Epilogue::Flat { add: false } => write!(f, " flat=")?,
        }
        match self.gelu {
            None => {}
            Some(Gelu::Forward) => write!(f, " gelu")?,
            Some(Gelu::Gradient) => write!(f, " dgelu")?,
        }
        match self.scaled {
            None => Ok(()),
            Some(Scaled {
                modes: [a, b],
                fast,
            }) => write!(f, " {a:?}*{b:?}{}", if fast { " fast" } else { "" }),
        }
    }
}

/// A GPU and its version of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chip {
    /// The compute capability, for example 9.0 for Hopper.
    pub capability: (i32, i32),
    /// The version number of cuBLASLt, for example 120901 for version 12.9.1.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::engine::Matrix;

    #[test]
    fn each_request_has_a_name_of_its_own() {
        let stored = Matrix::contiguous;
        let plain = Request {
            layout: ColumnMajor::of(stored(24, 32), stored(32, 40)),
            factors: [Element::Plain(DType::BF16); 2],
            result: DType::BF16,
            epilogue: Epilogue::Nothing,
            gelu: None,
            scaled: None,
        };
        let with = |epilogue, gelu| Request {
            epilogue,
            gelu,
            ..plain
        };
        let turned = Request {
            layout: ColumnMajor::of(stored(24, 32), stored(40, 32).transpose()),
            ..plain
        };
        let scaled = Request {
            factors: [Element::Fp8(Format::E4M3), Element::Fp8(Format::E5M2)],
            scaled: Some(Scaled {
                modes: [ScaleMode::Rows, ScaleMode::Squares],
                fast: true,
            }),
            ..plain
        };
        let sizes = "40x24x32 BF16*BF16=BF16 N40 N32 40";
        for (request, name) in [
            (plain, ""),
            (with(Epilogue::Bias, None), " bias"),
            (with(Epilogue::Flat { add: true }, None), " flat+="),
            (with(Epilogue::Flat { add: false }, None), " flat="),
            (with(Epilogue::Nothing, Some(Gelu::Forward)), " gelu"),
            (with(Epilogue::Bias, Some(Gelu::Gradient)), " bias dgelu"),
        ] {
            assert_eq!(request.to_string(), format!("{sizes}{name}"));
        }
        assert_eq!(turned.to_string(), "40x24x32 BF16*BF16=BF16 T32 N32 40");
        assert_eq!(
            scaled.to_string(),
            "40x24x32 E4M3*E5M2=BF16 N40 N32 40 Rows*Squares fast"
        );
    }
}

//! A multiplication of FP8 matrices with cuBLASLt: checks whether it is supported, and creates the request.

use burn::tensor::DType;

use super::Accumulation;
use super::engine::DECODED;
use crate::fp8::format::Format;
use crate::fp8::matrix::words;
use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales};
use crate::gemm::request::{Chip, Element, Request, ScaleMode, Scaled};
use crate::gemm::{ColumnMajor, Epilogue, Matrix};

/// The multiplication `a b^T` with an epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fp8Problem {
    /// The number of rows of `a` and of the result.
    pub rows: usize,
    /// The number of rows of `b`, which is the number of columns of the result.
    pub columns: usize,
    /// The number of codes per row, including the zeros at the end of the row.
    pub depth: usize,
    /// The operand `a`.
    pub a: Fp8Factor,
    /// The operand `b`.
    pub b: Fp8Factor,
    /// The type of the result.
    pub result: DType,
    /// The operation after the multiplication.
    pub epilogue: Epilogue,
    /// The precision of the accumulation.
    pub accumulation: Accumulation,
}

/// Format and scales of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fp8Factor {
    pub format: Format,
    pub scales: ScaleMode,
}

impl From<&Fp8Matrix> for Fp8Factor {
    fn from(matrix: &Fp8Matrix) -> Self {
        Self {
            format: matrix.format,
            scales: match &matrix.scales {
                Scales::Tensor(_) => ScaleMode::Tensor,
                Scales::Blocks { height: BLOCK, .. } => ScaleMode::Squares,
                Scales::Blocks { .. } => ScaleMode::Rows,
                Scales::Mx(_) => ScaleMode::Mx,
            },
        }
    }
}

/// The required alignment of the number of rows of both operands, and of the number of codes per row.
const ALIGNED: usize = 16;

impl Fp8Problem {
    pub(super) fn new(
        a: &Fp8Matrix,
        b: &Fp8Matrix,
        result: DType,
        epilogue: Epilogue,
        accumulation: Accumulation,
    ) -> Self {
        Self {
            rows: a.rows(),
            columns: b.rows(),
            depth: 4 * words(a.depth),
            a: a.into(),
            b: b.into(),
            result,
            epilogue,
            accumulation,
        }
    }

    /// Checks whether this GPU and this library support the multiplication according to the documentation of cuBLASLt.
    /// The library may still reject it.
    pub(super) fn accept(&self, chip: Chip) -> Result<(), String> {
        let sizes = [self.rows, self.columns, self.depth];
        if sizes.contains(&0) {
            return Err("the matrices are empty".to_string());
        }
        if !(self.rows.is_multiple_of(ALIGNED) && self.columns.is_multiple_of(ALIGNED)) {
            return Err(format!(
                "the factors have {} and {} rows: expected multiples of {ALIGNED}",
                self.rows, self.columns
            ));
        }
        if [self.a.format, self.b.format] == [Format::E5M2; 2] {
            return Err("both factors are E5M2: expected at least one in E4M3".to_string());
        }
        on_chip(self.pair()?, chip)
    }

    /// Returns the scale mode of both operands if the operands can be combined.
    fn pair(&self) -> Result<ScaleMode, String> {
        use ScaleMode::{Mx, Rows, Squares, Tensor};
        match (self.a.scales, self.b.scales) {
            (Tensor, Tensor) => Ok(Tensor),
            (Mx, Mx) => Ok(Mx),
            (Rows, Rows | Squares) | (Squares, Rows) => Ok(Rows),
            (Squares, Squares) => Err(
                "both factors have scales of 128 x 128: expected 1 x 128 for one of them"
                    .to_string(),
            ),
            (a, b) => Err(format!(
                "a has scales of {a:?}, b has scales of {b:?}: expected scales of the same kind"
            )),
        }
    }

    /// Returns the same multiplication in the column-major form that the library expects, with `b` as the first
    /// operand. See [`ColumnMajor::of`].
    pub(super) fn request(&self) -> Request {
        let rows = |rows| Matrix::contiguous(rows, self.depth);
        let one_scale = self.pair() == Ok(ScaleMode::Tensor);
        Request {
            layout: ColumnMajor::of(rows(self.rows), rows(self.columns).transpose()),
            factors: [self.b, self.a].map(|factor| Element::Fp8(factor.format)),
            result: self.result,
            epilogue: self.epilogue,
            gelu: None,
            scaled: Some(Scaled {
                modes: [self.b.scales, self.a.scales],
                fast: one_scale && self.accumulation == Accumulation::Fast,
            }),
        }
    }
}

/// Checks whether the tensor cores of this GPU and this library support a kind of scales. The two kinds of blocks count
/// as one kind.
pub(super) fn on_chip(scales: ScaleMode, chip: Chip) -> Result<(), String> {
    let (capabilities, has, least) = match scales {
        ScaleMode::Tensor => ("8.9 and later support", chip.capability >= (8, 9), 120_000),
        ScaleMode::Rows | ScaleMode::Squares => {
            ("9.0 alone supports", chip.capability == (9, 0), 120_900)
        }
        ScaleMode::Mx => (
            "10.0 and later support",
            chip.capability >= (10, 0),
            120_800,
        ),
    };
    let kind = match scales {
        ScaleMode::Tensor => "one scale",
        ScaleMode::Rows | ScaleMode::Squares => "scales of blocks of 128",
        ScaleMode::Mx => "MXFP8",
    };
    if !has {
        return Err(format!("{chip}: compute capability {capabilities} {kind}"));
    }
    if chip.version >= least {
        Ok(())
    } else {
        Err(format!(
            "{chip}: cuBLASLt {}.{} and later support {kind}",
            least / 10_000,
            least / 100 % 100
        ))
    }
}

/// Returns a description, in one line, of the scales that a GPU supports, and of the handling of unsupported scales.
pub(super) fn describe(chip: Chip) -> String {
    let kinds = [
        ("one scale", ScaleMode::Tensor),
        ("blocks of 128", ScaleMode::Rows),
        ("MXFP8", ScaleMode::Mx),
    ];
    let (has, lacks): (Vec<_>, Vec<_>) = kinds
        .into_iter()
        .partition(|(_, kind)| on_chip(*kind, chip).is_ok());
    let names = |kinds: Vec<(&'static str, ScaleMode)>| {
        let names: Vec<_> = kinds.into_iter().map(|(name, _)| name).collect();
        names.join(", ")
    };
    match (has.is_empty(), lacks.is_empty()) {
        (_, true) => chip.to_string(),
        (true, _) => format!("{}: {chip} does not support FP8 matrix products", DECODED),
        _ => format!(
            "{chip} for {}; {} for {}",
            names(has),
            DECODED,
            names(lacks)
        ),
    }
}

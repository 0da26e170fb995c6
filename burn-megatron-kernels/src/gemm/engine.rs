//! The problem and operands of an engine, and the mapping of a row-major product to a column-major
//! library.

use std::fmt::Debug;

use burn::tensor::DType;

/// An engine for matrix products on tensors `T` of Flex or CubeCL.
pub trait GemmEngine<T>: Debug + Send + Sync {
    /// Returns the name used in messages.
    fn name(&self) -> &'static str;

    /// Checks whether the engine supports `problem`.
    ///
    /// # Errors
    ///
    /// Returns the reason if the engine does not support it.
    fn supports(&self, problem: &GemmProblem) -> Result<(), String>;

    /// Computes a problem that it [supports](Self::supports).
    fn multiply(&self, problem: &GemmProblem, operands: Operands<T>) -> T;
}

/// A product `result = left right` with an epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// The left factor, `[m, k]`.
    pub left: Matrix,
    /// The right factor, `[k, n]`.
    pub right: Matrix,
    /// The type of both factors.
    pub factors: DType,
    /// The type of the result, which is a row-major matrix without gaps, or a flat buffer.
    pub result: DType,
    /// The epilogue.
    pub epilogue: Epilogue,
}

/// The epilogue of a product: an addition to it, or the buffer to which it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// No epilogue.
    Nothing,
    /// Adds a row of `n` elements in the type of the result to each row.
    Bias,
    /// Stores the product row by row in a flat buffer of the type of the result. Other elements of
    /// the buffer stay unchanged.
    Flat {
        /// Whether to add to the existing elements. Otherwise they are overwritten.
        add: bool,
    },
}

/// The tensors of a [`GemmProblem`].
#[derive(Debug)]
pub struct Operands<T> {
    /// The left factor, `[m, k]`.
    pub left: T,
    /// The right factor, `[k, n]`.
    pub right: T,
    /// The tensor of [`GemmProblem::epilogue`]: a bias `[n]`, or a flat buffer, which is copied
    /// unless it is uniquely owned.
    pub epilogue: Option<T>,
    /// The element of the flat buffer at which the product begins; 0 without a buffer.
    pub offset: usize,
}

/// The memory layout of a matrix: row-major, or column-major if `transposed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// The number of elements between the starts of two rows, or of two columns if `transposed`.
    pub leading: usize,
    /// Whether columns are contiguous in memory instead of rows.
    pub transposed: bool,
}

impl Matrix {
    /// Returns the layout of a row-major matrix without gaps.
    pub fn contiguous(rows: usize, columns: usize) -> Self {
        Self {
            rows,
            columns,
            leading: columns,
            transposed: false,
        }
    }

    /// Returns the layout of a matrix `[rows, columns]` with these strides in elements. Returns
    /// `None` if neither its rows nor its columns are contiguous, or if they overlap.
    pub fn of([rows, columns]: [usize; 2], strides: [isize; 2]) -> Option<Self> {
        let [row, column] = strides;
        // An empty matrix has every layout. Its strides may be 0.
        let nothing = rows == 0 || columns == 0;
        // The stride of a dimension of size 1 is irrelevant.
        let leading = |count: usize, stride: isize, least: usize| match count {
            _ if nothing => Some(least.max(1)),
            0 | 1 => Some(least.max(1)),
            _ => usize::try_from(stride)
                .ok()
                .filter(|stride| *stride >= least.max(1)),
        };
        let unit = |count: usize, stride: isize| nothing || count <= 1 || stride == 1;
        let matrix_of = |transposed, leading| Self {
            rows,
            columns,
            leading,
            transposed,
        };
        let by_rows = leading(rows, row, columns).filter(|_| unit(columns, column));
        let by_columns = leading(columns, column, rows).filter(|_| unit(rows, row));
        by_rows
            .map(|leading| matrix_of(false, leading))
            .or(by_columns.map(|leading| matrix_of(true, leading)))
    }

    /// Returns the transposed matrix in the same memory.
    pub fn transpose(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            leading: self.leading,
            transposed: !self.transposed,
        }
    }
}

impl GemmProblem {
    /// Returns the rows of the result, the columns of the result, and the size of the summed
    /// dimension.
    pub fn sizes(&self) -> [usize; 3] {
        [self.left.rows, self.right.columns, self.left.columns]
    }

    /// Returns the same product for a column-major library.
    pub fn column_major(&self) -> ColumnMajor {
        ColumnMajor::of(self.left, self.right)
    }
}

/// A product `D = op(A) op(B)` of column-major matrices, as in BLAS: `D` is `m x n`, `op(A)` is
/// `m x k` and `op(B)` is `k x n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnMajor {
    /// The number of rows of `D`.
    pub m: usize,
    /// The number of columns of `D`.
    pub n: usize,
    /// The size of the summed dimension.
    pub k: usize,
    /// The first factor, before its transposition.
    pub a: Operand,
    /// The second factor, before its transposition.
    pub b: Operand,
    /// The number of elements between the starts of two columns of `D`.
    pub leading: usize,
}

/// The memory layout of a column-major factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The number of rows in memory.
    pub rows: usize,
    /// The number of columns in memory.
    pub columns: usize,
    /// The number of elements between the starts of two columns.
    pub leading: usize,
    /// Whether the library has to transpose the factor.
    pub transpose: bool,
}

impl ColumnMajor {
    /// Returns `left right` for a column-major library.
    ///
    /// A row-major matrix is a transposed column-major matrix, and `(left right)^T` is `right^T left^T`. Therefore
    /// `right` is the library's first factor and `left` its second, and the library writes the row-major result. A bias
    /// per column of the row-major result is a bias per row for the library.
    pub fn of(left: Matrix, right: Matrix) -> Self {
        Self {
            m: right.columns,
            n: left.rows,
            k: left.columns,
            a: Operand::of(right),
            b: Operand::of(left),
            leading: right.columns.max(1),
        }
    }

    /// Returns the memory layout of `D`.
    pub fn result(&self) -> Operand {
        Operand {
            rows: self.m,
            columns: self.n,
            leading: self.leading,
            transpose: false,
        }
    }
}

impl Operand {
    /// Returns a row-major matrix as a transposed column-major matrix.
    fn of(matrix: Matrix) -> Self {
        let Matrix {
            rows,
            columns,
            leading,
            transposed,
        } = matrix;
        let (rows, columns) = if transposed {
            (rows, columns)
        } else {
            (columns, rows)
        };
        Self {
            rows,
            columns,
            leading,
            transpose: transposed,
        }
    }
}

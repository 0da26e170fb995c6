//! The description of a matrix multiplication for an engine, and its conversion from row-major to column-major
//! matrices.

use std::fmt::Debug;

use burn::tensor::DType;

/// An engine for matrix multiplications. `T` is the tensor type of the Flex or CubeCL backend.
pub trait GemmEngine<T>: Debug + Send + Sync {
    /// Returns the name of the engine for messages.
    fn name(&self) -> &'static str;

    /// Checks whether the engine supports `problem`.
    ///
    /// # Errors
    ///
    /// Returns a message with the reason if the engine does not support the problem.
    fn supports(&self, problem: &GemmProblem) -> Result<(), String>;

    /// Computes a matrix multiplication that the engine [supports](Self::supports).
    fn multiply(&self, problem: &GemmProblem, operands: Operands<T>) -> T;
}

/// A matrix multiplication `result = left right` with an optional epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// The layout of the left operand, `[m, k]`.
    pub left: Matrix,
    /// The layout of the right operand, `[k, n]`.
    pub right: Matrix,
    /// The type of both operands.
    pub factors: DType,
    /// The type of the result. The result is a row-major contiguous matrix, or a range of a flat buffer.
    pub result: DType,
    /// The operation after the multiplication.
    pub epilogue: Epilogue,
}

/// The operation that is fused with a matrix multiplication: adding a bias, or writing to a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// No epilogue: the result is stored unchanged.
    Nothing,
    /// Adds a bias of `n` elements to each row. The bias has the type of the result.
    Bias,
    /// Stores the result row by row in a flat buffer of the same type. The other elements of the buffer do not change.
    Flat {
        /// Whether the result is added to the existing elements. Otherwise it overwrites them.
        add: bool,
    },
}

/// The tensors of a [`GemmProblem`].
#[derive(Debug)]
pub struct Operands<T> {
    /// The left operand, `[m, k]`.
    pub left: T,
    /// The right operand, `[k, n]`.
    pub right: T,
    /// The tensor for [`GemmProblem::epilogue`]: a bias `[n]`, or a flat buffer. The flat buffer is copied if another
    /// tensor shares its memory.
    pub epilogue: Option<T>,
    /// The index of the first element of the result in the flat buffer. It is 0 without a flat buffer.
    pub offset: usize,
}

/// The memory layout of a matrix: row-major, or column-major if `transposed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// The number of elements between the starts of two rows, or between the starts of two columns if `transposed`.
    pub leading: usize,
    /// Whether columns are contiguous in memory instead of rows.
    pub transposed: bool,
}

impl Matrix {
    /// Returns the layout of a contiguous row-major matrix.
    pub fn contiguous(rows: usize, columns: usize) -> Self {
        Self {
            rows,
            columns,
            leading: columns,
            transposed: false,
        }
    }

    /// Returns the layout of a matrix `[rows, columns]` with these strides in elements. Returns `None` if neither the
    /// rows nor the columns are contiguous, or if rows or columns overlap in memory.
    pub fn of([rows, columns]: [usize; 2], strides: [isize; 2]) -> Option<Self> {
        let [row, column] = strides;
        // An empty matrix fits every layout. Its strides may be 0.
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

    /// Returns the layout of the transposed matrix in the same memory.
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
    /// Returns the number of rows of the result, the number of columns of the result, and the size of the summed
    /// dimension.
    pub fn sizes(&self) -> [usize; 3] {
        [self.left.rows, self.right.columns, self.left.columns]
    }

    /// Returns the same matrix multiplication for a column-major library, such as BLAS.
    pub fn column_major(&self) -> ColumnMajor {
        ColumnMajor::of(self.left, self.right)
    }
}

/// A matrix multiplication `D = op(A) op(B)` of column-major matrices, as in BLAS. `D` is `m x n`, `op(A)` is `m x k`
/// and `op(B)` is `k x n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnMajor {
    /// The number of rows of `D`.
    pub m: usize,
    /// The number of columns of `D`.
    pub n: usize,
    /// The size of the summed dimension.
    pub k: usize,
    /// The first operand, before its transposition.
    pub a: Operand,
    /// The second operand, before its transposition.
    pub b: Operand,
    /// The number of elements between the starts of two columns of `D`.
    pub leading: usize,
}

/// The memory layout of an operand in a column-major library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The number of rows in memory.
    pub rows: usize,
    /// The number of columns in memory.
    pub columns: usize,
    /// The number of elements between the starts of two columns.
    pub leading: usize,
    /// Whether the library transposes the operand.
    pub transpose: bool,
}

impl ColumnMajor {
    /// Converts the row-major multiplication `left right` for a column-major library, such as BLAS.
    ///
    /// A row-major matrix is a transposed column-major matrix, and `(left right)^T` is `right^T left^T`. Therefore
    /// `right` is the first operand of the library and `left` is the second operand, and the library writes the
    /// row-major result. A bias per column of the row-major result is a bias per row of the column-major result.
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

//! The problem and operands of an engine, and the mapping of a row-major product to a column-major
//! library.

use std::fmt::Debug;

use burn::tensor::DType;

/// An engine for matrix products on tensors `T`: of Flex or of CubeCL.
pub trait GemmEngine<T>: Debug + Send + Sync {
    /// The name used in messages.
    fn name(&self) -> &'static str;

    /// Checks whether the engine supports `problem`.
    ///
    /// # Errors
    ///
    /// The reason why not, in words.
    fn supports(&self, problem: &GemmProblem) -> Result<(), String>;

    /// Computes a problem that it [supports](Self::supports).
    fn multiply(&self, problem: &GemmProblem, operands: Operands<T>) -> T;
}

/// `result = left right`, with an epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// `[m, k]`.
    pub left: Matrix,
    /// `[k, n]`.
    pub right: Matrix,
    /// The type of both factors.
    pub factors: DType,
    /// The type of the result, which is row-major without gaps, or a flat buffer.
    pub result: DType,
    /// The epilogue.
    pub epilogue: Epilogue,
}

/// The epilogue of a product: an addition to it, or the buffer into which it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    Nothing,
    /// A row of `n` elements in the type of the result, to each row.
    Bias,
    /// The product is stored row by row in a flat buffer of the type of the result, whose other
    /// elements stay.
    Flat {
        /// Whether it is added to what is there, or written over it.
        add: bool,
    },
}

/// The tensors of a [`GemmProblem`].
#[derive(Debug)]
pub struct Operands<T> {
    /// `[m, k]`.
    pub left: T,
    /// `[k, n]`.
    pub right: T,
    /// See [`GemmProblem::epilogue`]: a bias `[n]`, or a flat buffer, which is copied unless
    /// uniquely owned.
    pub epilogue: Option<T>,
    /// The element of the flat buffer that the product begins at; 0 if there is none.
    pub offset: usize,
}

/// The memory layout of a matrix: row by row, or transposed column by column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
    /// Elements from one row to the next, or if `transposed` from one column to the next.
    pub leading: usize,
    /// Whether the elements of a column are contiguous, not those of a row.
    pub transposed: bool,
}

impl Matrix {
    /// A matrix without gaps, row by row.
    pub fn contiguous(rows: usize, columns: usize) -> Self {
        Self {
            rows,
            columns,
            leading: columns,
            transposed: false,
        }
    }

    /// The matrix `[rows, columns]` with these strides in elements; `None` if neither its rows nor
    /// its columns are contiguous, or if they overlap.
    pub fn of([rows, columns]: [usize; 2], strides: [isize; 2]) -> Option<Self> {
        let [row, column] = strides;
        // An empty matrix has every layout; its strides may be 0.
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

    /// The transposed matrix, in the same memory.
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
    /// Rows of the result, columns of the result, and what is summed over.
    pub fn sizes(&self) -> [usize; 3] {
        [self.left.rows, self.right.columns, self.left.columns]
    }

    /// The same product for a library that takes matrices column by column.
    pub fn column_major(&self) -> ColumnMajor {
        ColumnMajor::of(self.left, self.right)
    }
}

/// `D = op(A) op(B)` with column-major matrices, in the terms of BLAS: `D` is `m x n`, `op(A)`
/// `m x k`, `op(B)` `k x n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnMajor {
    /// Rows of `D`.
    pub m: usize,
    /// Columns of `D`.
    pub n: usize,
    /// The size of the summed dimension.
    pub k: usize,
    /// The first factor, before its transposition.
    pub a: Operand,
    /// The second factor, before its transposition.
    pub b: Operand,
    /// Elements from one column of `D` to the next.
    pub leading: usize,
}

/// The memory layout of a factor, column by column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Rows in memory.
    pub rows: usize,
    /// Columns in memory.
    pub columns: usize,
    /// Elements from one column to the next.
    pub leading: usize,
    /// Whether the library is to transpose it.
    pub transpose: bool,
}

impl ColumnMajor {
    /// `left right` for a library that takes matrices column by column.
    ///
    /// A row-major matrix is a column-major transposed one, and `(left right)^T` is
    /// `right^T left^T`. So the library's first factor is `right`, its second `left`, and what it
    /// writes is the row-major result; a bias for each column here is one for each row there.
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

    /// The memory layout of `D`.
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
    /// The transposed of a row-major matrix.
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

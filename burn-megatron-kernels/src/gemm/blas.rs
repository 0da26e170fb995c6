//! Matrix multiplication on the CPU with a BLAS library that is opened at run time: Intel MKL, OpenBLAS or BLIS.
//!
//! The library computes on the thread that calls it. This module splits the result along its longer side and computes
//! the parts on several threads. The parts depend only on the sizes and the number of threads. Therefore a result is
//! bitwise identical in every run with the same number of threads. The result of a row may depend on the other rows.
//! With the `gemm` crate, it does not.

use std::ffi::{c_int, c_void};
use std::fmt::{self, Debug, Display};
use std::str::FromStr;
use std::sync::OnceLock;

use libloading::Library;
use serde::{Deserialize, Serialize};

use super::engine::Matrix;
use crate::cpu::{Real, for_each_task};

/// The library that multiplies matrices on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuGemm {
    /// The `gemm` crate, which is always available. Each row of the result is bitwise independent of the other rows.
    #[default]
    #[serde(rename = "gemm")]
    Crate,
    /// Intel oneMKL: `libmkl_rt`, for example from the Python package `mkl`.
    Mkl,
    /// OpenBLAS: `libopenblas`, for example from the package `libopenblas0-pthread`.
    OpenBlas,
    /// BLIS: `libblis`, for example from the package `libblis4-pthread`.
    Blis,
}

impl CpuGemm {
    /// All values of [`CpuGemm`].
    pub const ALL: [Self; 4] = [Self::Crate, Self::Mkl, Self::OpenBlas, Self::Blis];

    /// Returns the name of the library in recipes and command-line flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crate => "gemm",
            Self::Mkl => "mkl",
            Self::OpenBlas => "openblas",
            Self::Blis => "blis",
        }
    }

    /// Returns the file names that are tried in this order on the library search path.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Crate => &[],
            Self::Mkl => &["libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so"],
            Self::OpenBlas => &["libopenblas.so.0", "libopenblas.so"],
            Self::Blis => &["libblis.so.4", "libblis.so.3", "libblis.so"],
        }
    }

    /// Returns instructions to install the library.
    fn install(self) -> &'static str {
        match self {
            Self::Crate => "",
            Self::Mkl => "`pip install mkl` and LD_LIBRARY_PATH set to the folder of its libmkl_rt",
            Self::OpenBlas => "`apt-get install libopenblas0-pthread`",
            Self::Blis => "`apt-get install libblis4-pthread`",
        }
    }

    /// Returns the name of the library function that disables multithreading if it is called with 1. Each multiplication
    /// then runs on its calling thread.
    fn sequential(self) -> &'static str {
        match self {
            Self::Crate => "",
            // The value 1 selects the sequential threading layer.
            Self::Mkl => "MKL_Set_Threading_Layer",
            Self::OpenBlas => "openblas_set_num_threads",
            Self::Blis => "bli_thread_set_num_threads",
        }
    }

    fn cell(self) -> &'static OnceLock<Result<Functions, BlasError>> {
        static MKL: OnceLock<Result<Functions, BlasError>> = OnceLock::new();
        static OPENBLAS: OnceLock<Result<Functions, BlasError>> = OnceLock::new();
        static BLIS: OnceLock<Result<Functions, BlasError>> = OnceLock::new();
        match self {
            Self::Mkl => &MKL,
            Self::OpenBlas => &OPENBLAS,
            _ => &BLIS,
        }
    }

    /// Opens the library once per process. Returns `None` for the `gemm` [crate](Self::Crate), which needs no library.
    ///
    /// # Errors
    ///
    /// Returns [`BlasError`] if the library is missing, or if the file is a different library.
    pub fn open(self) -> Result<Option<Blas>, BlasError> {
        if self == Self::Crate {
            return Ok(None);
        }
        match self.cell().get_or_init(|| Functions::open(self)) {
            Ok(functions) => Ok(Some(Blas { functions })),
            Err(error) => Err(error.clone()),
        }
    }
}

impl Display for CpuGemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CpuGemm {
    type Err = UnknownCpuGemm;

    fn from_str(text: &str) -> Result<Self, UnknownCpuGemm> {
        let mut all = Self::ALL.into_iter();
        all.find(|kind| kind.name() == text)
            .ok_or_else(|| UnknownCpuGemm(text.into()))
    }
}

/// The error of parsing an unknown [`CpuGemm`] name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid gemm \"{0}\": expected gemm, mkl, openblas or blis")]
pub struct UnknownCpuGemm(pub String);

/// The reason why a BLAS library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlasError {
    /// The library file was not found.
    #[error("cannot open {}: {cause}; to install it: {}", .kind.files().join(" or "), .kind.install())]
    Missing {
        /// The library that is missing.
        kind: CpuGemm,
        /// The error message of opening the last file name that was tried.
        cause: String,
    },
    /// The library does not have a required function.
    #[error("{file} has no function {function}; to install {kind}: {}", .kind.install())]
    Function {
        /// The library that lacks the function.
        kind: CpuGemm,
        /// The name of the opened file.
        file: &'static str,
        /// The name of the missing function.
        function: &'static str,
    },
}

/// The C type of `cblas_sgemm` and `cblas_dgemm`.
type Gemm<W> = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    W,
    *const W,
    c_int,
    *const W,
    c_int,
    W,
    *mut W,
    c_int,
);

const ROW_MAJOR: c_int = 101;
const NOT_TRANSPOSED: c_int = 111;
const TRANSPOSED: c_int = 112;

/// The value of `MKL_CBWR_AUTO`, which selects one code path for all calls. With this code path, results do not depend
/// on the alignment of memory.
const MKL_CBWR_AUTO: c_int = 2;

/// An opened library and its functions.
struct Functions {
    kind: CpuGemm,
    file: &'static str,
    single: Gemm<f32>,
    double: Gemm<f64>,
    #[cfg(test)]
    calls: std::sync::atomic::AtomicUsize,
    /// Keeps the library open.
    _library: Library,
}

impl Functions {
    fn open(kind: CpuGemm) -> Result<Self, BlasError> {
        let mut cause = String::new();
        for file in kind.files() {
            // SAFETY: the initializers of these libraries have no requirements.
            match unsafe { Library::new(file) } {
                Ok(library) => return Self::of(kind, file, library),
                Err(error) => cause = error.to_string(),
            }
        }
        Err(BlasError::Missing { kind, cause })
    }

    fn of(kind: CpuGemm, file: &'static str, library: Library) -> Result<Self, BlasError> {
        // SAFETY: the functions have these signatures in all versions with 32-bit integers, to
        // which these file names belong.
        unsafe {
            let missing = |function| BlasError::Function {
                kind,
                file,
                function,
            };
            let name = kind.sequential();
            // The argument is an `int` or an `int64_t`. Both are passed in one register.
            let set = library.get::<unsafe extern "C" fn(i64) -> c_int>(name.as_bytes());
            set.map_err(|_| missing(name))?(1);
            if kind == CpuGemm::Mkl {
                let name = "MKL_CBWR_Set";
                let set = library.get::<unsafe extern "C" fn(c_int) -> c_int>(name.as_bytes());
                set.map_err(|_| missing(name))?(MKL_CBWR_AUTO);
            }
            let name = "cblas_sgemm";
            let single = library.get::<Gemm<f32>>(name.as_bytes());
            let single = *single.map_err(|_| missing(name))?;
            let name = "cblas_dgemm";
            let double = library.get::<Gemm<f64>>(name.as_bytes());
            let double = *double.map_err(|_| missing(name))?;
            Ok(Self {
                kind,
                file,
                single,
                double,
                #[cfg(test)]
                calls: Default::default(),
                _library: library,
            })
        }
    }
}

/// A BLAS library that has been opened. See [`CpuGemm::open`].
#[derive(Clone, Copy)]
pub struct Blas {
    functions: &'static Functions,
}

impl PartialEq for Blas {
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind()
    }
}

impl Eq for Blas {}

impl Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Formats the library as `openblas (libopenblas.so.0)`.
impl Display for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind(), self.functions.file)
    }
}

/// A slice, and the layout of the matrix at its beginning.
type Factor<'a, W> = (&'a [W], Matrix);

impl Blas {
    /// Returns the kind of the library.
    pub fn kind(self) -> CpuGemm {
        self.functions.kind
    }

    /// Returns the number of calls of the library so far.
    #[cfg(test)]
    pub(super) fn calls(self) -> usize {
        self.functions
            .calls
            .load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Computes `result = left right`, or `result += left right` if `add` is true. The matrices must lie inside their
    /// slices. The result is row-major.
    pub(super) fn multiply<W: Real>(
        self,
        left: Factor<'_, W>,
        right: Factor<'_, W>,
        result: &mut [W],
        add: bool,
        parallel: bool,
    ) {
        let [rows, columns] = [left.1.rows, right.1.columns];
        if result.is_empty() {
            return;
        }
        let threads = if parallel {
            rayon::current_num_threads()
        } else {
            1
        };
        let out = Out(result.as_mut_ptr());
        let part = |size: usize| size.div_ceil(threads).next_multiple_of(PART).min(size);
        if rows >= columns {
            let size = part(rows);
            for_each_task(0..rows.div_ceil(size), |i| {
                let (first, count) = (i * size, size.min(rows - i * size));
                let left = rows_of(left, first, count);
                // SAFETY: the parts have disjoint rows.
                unsafe { self.call(left, right, out.at(first * columns), columns, add) };
            });
        } else {
            let size = part(columns);
            for_each_task(0..columns.div_ceil(size), |i| {
                let (first, count) = (i * size, size.min(columns - i * size));
                let (values, transposed) = rows_of((right.0, right.1.transpose()), first, count);
                let right = (values, transposed.transpose());
                // SAFETY: the parts have disjoint columns.
                unsafe { self.call(left, right, out.at(first), columns, add) };
            });
        }
    }

    /// Calls the library function on this thread.
    ///
    /// # Safety
    ///
    /// `result` must be valid for a matrix with the rows of `left` and the columns of `right`, whose rows are `leading`
    /// elements apart. Nothing else may read or write these elements.
    unsafe fn call<W: Real>(
        self,
        (left, left_matrix): Factor<'_, W>,
        (right, right_matrix): Factor<'_, W>,
        result: *mut W,
        leading: usize,
        add: bool,
    ) {
        #[cfg(test)]
        self.functions
            .calls
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let depth = left_matrix.columns;
        let transposed = |matrix: Matrix| match matrix.transposed {
            true => TRANSPOSED,
            false => NOT_TRANSPOSED,
        };
        let size = |size: usize| size as c_int;
        let beta = if add { W::ONE } else { W::ZERO };
        // SAFETY: `W` is the type of the function that is called; the matrices are inside their
        // slices.
        unsafe {
            macro_rules! call {
                ($function:expr) => {
                    $function(
                        ROW_MAJOR,
                        transposed(left_matrix),
                        transposed(right_matrix),
                        size(left_matrix.rows),
                        size(right_matrix.columns),
                        size(depth),
                        bytemuck::cast(W::ONE),
                        left.as_ptr().cast(),
                        size(left_matrix.leading),
                        right.as_ptr().cast(),
                        size(right_matrix.leading),
                        bytemuck::cast(beta),
                        result.cast(),
                        size(leading),
                    )
                };
            }
            match size_of::<W>() {
                4 => call!((self.functions.single)),
                _ => call!((self.functions.double)),
            }
        }
    }
}

/// The granularity with which a result is split into parts, in rows or columns.
const PART: usize = 16;

/// Returns `count` rows of a matrix, starting at row `first`.
fn rows_of<W>((values, matrix): Factor<'_, W>, first: usize, count: usize) -> Factor<'_, W> {
    let offset = match matrix.transposed {
        true => first,
        false => first * matrix.leading,
    };
    let matrix = Matrix {
        rows: count,
        ..matrix
    };
    (&values[offset.min(values.len())..], matrix)
}

/// A result that is written by several threads. Each thread writes a different part.
#[derive(Clone, Copy)]
struct Out<W>(*mut W);

// SAFETY: each thread writes only its own elements.
unsafe impl<W: Send> Send for Out<W> {}
unsafe impl<W: Send> Sync for Out<W> {}

impl<W> Out<W> {
    /// # Safety
    ///
    /// The index must be inside the result.
    unsafe fn at(&self, element: usize) -> *mut W {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.add(element) }
    }
}

const _: () = assert!(size_of::<c_int>() == 4 && size_of::<*const c_void>() == 8);

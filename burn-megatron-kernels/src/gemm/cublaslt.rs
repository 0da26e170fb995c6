//! cuBLASLt, opened at run time.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaDevice;
use cudarc::cublaslt::{result as lt, sys};

use super::cube::FLAT_ALIGNMENT;
use super::cuda_stream::Submitter;
use super::engine::{Added, GemmEngine, Operand, Operands, Problem};
use crate::cube::empty;

/// The most memory that an algorithm may ask for beside the matrices: NVIDIA's advice for Hopper.
const WORKSPACE: usize = 32 << 20;

/// cuBLASLt on one device.
#[derive(Debug)]
pub(super) struct CublasLt {
    submitter: Submitter,
    library: Library,
    plans: Mutex<HashMap<Problem, Result<Arc<Plan>, String>>>,
}

/// The handle of the library, which every thread may use.
#[derive(Clone, Copy, Debug)]
struct Library(sys::cublasLtHandle_t);

// SAFETY: "the cuBLASLt handle can be used from several threads at once" (cuBLAS documentation).
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

type Engines = HashMap<usize, Result<Arc<CublasLt>, String>>;
static ENGINES: LazyLock<Mutex<Engines>> = LazyLock::new(Mutex::default);

impl CublasLt {
    /// The engine of `device`, made when it is asked for the first time.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub(super) fn of(device: &CudaDevice) -> Result<Arc<Self>, String> {
        let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || Self::open(device).map(Arc::new);
        engines.entry(device.index).or_insert_with(open).clone()
    }

    fn open(device: &CudaDevice) -> Result<Self, String> {
        // SAFETY: opens a library of NVIDIA's, which does nothing harmful when it is opened.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found on the search path of libraries".to_string());
        }
        let submitter = Submitter::of(device)?;
        let library = submitter.wait(|| told(lt::create_handle()).map(Library))?;
        Ok(Self {
            submitter,
            library,
            plans: Mutex::default(),
        })
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<Plan>, String> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let library = self.library;
        let make = || {
            let make = move || Plan::new(library, problem).map(Arc::new);
            self.submitter.wait(make)
        };
        plans.entry(*problem).or_insert_with(make).clone()
    }
}

impl GemmEngine<CubeTensor> for CublasLt {
    fn name(&self) -> &'static str {
        "cuBLASLt"
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        self.plan(problem).map(|_| ())
    }

    fn multiply(&self, problem: &Problem, operands: Operands<CubeTensor>) -> CubeTensor {
        let plan = match self.plan(problem) {
            Ok(plan) => plan,
            Err(reason) => panic!("cuBLASLt was given {problem:?}, which it refuses: {reason}"),
        };
        let Operands {
            left,
            right,
            added,
            offset,
        } = operands;
        let client = left.client.clone();
        let [rows, columns, _] = problem.sizes();
        let new = || empty(&left, Shape::from([rows, columns]), problem.result);
        let (result, bias) = match (added, problem.added) {
            (Some(flat), Added::Flat { .. }) => (flat, None),
            (bias, _) => (new(), bias),
        };
        // The last one is new, so its stream is the one that this thread launches on; after the
        // work is queued, the memory may only be reused by what is queued behind it.
        let workspace = client.empty(plan.workspace.max(1));
        let mut buffers = vec![right.handle, left.handle, result.handle.clone()];
        let bias = bias.map(|bias| {
            buffers.push(bias.handle);
            buffers.len() - 1
        });
        buffers.push(workspace);
        let library = self.library;
        let start = (offset * problem.result.size()) as u64;
        self.submitter.submit(buffers, move |addresses, stream| {
            let &[a, b, d, .., workspace] = addresses else {
                return Err("a product has three matrices".to_string());
            };
            let bias = bias.map(|index| addresses[index]);
            plan.run(
                library,
                [a, b, d + start],
                bias,
                workspace,
                stream as sys::cudaStream_t,
            )
        });
        result
    }
}

/// A problem as the library describes it, and the algorithm that it advises.
///
/// It is only used on the thread that submits the work of its device.
#[derive(Debug)]
struct Plan {
    description: Description,
    a: Layout,
    b: Layout,
    d: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
    /// 0 or 1: what the old result is multiplied with.
    beta: f32,
}

// SAFETY: the descriptions are plain memory of the library, and only one thread works with them:
// the one that `Submitter` runs both `new` and `run` on.
unsafe impl Send for Plan {}
unsafe impl Sync for Plan {}

#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

#[derive(Debug)]
struct Preference(sys::cublasLtMatmulPreference_t);

impl Description {
    fn new() -> Result<Self, String> {
        // f32 sums; f32 factors stay f32, not TF32.
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        told(lt::create_matmul_desc(sums, sys::cudaDataType::CUDA_R_32F)).map(Self)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), String> {
        let (value, size) = (&raw const value, size_of::<T>());
        // SAFETY: the description lives, and `value` has `size` bytes that are read at once.
        told(unsafe { lt::set_matmul_desc_attribute(self.0, attribute, value.cast(), size) })
    }
}

impl Layout {
    fn new(dtype: DType, operand: Operand) -> Result<Self, String> {
        let (rows, columns) = (operand.rows as u64, operand.columns as u64);
        let leading = operand.leading as i64;
        told(lt::create_matrix_layout(
            data_type(dtype)?,
            rows,
            columns,
            leading,
        ))
        .map(Self)
    }
}

impl Preference {
    fn new(added: Added) -> Result<Self, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = told(lt::create_matmul_pref()).map(Self)?;
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        preference.set(workspace, WORKSPACE as u64)?;
        if let Added::Flat { .. } = added {
            let alignment = FLAT_ALIGNMENT as u32;
            for attribute in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                preference.set(attribute, alignment)?;
            }
        }
        Ok(preference)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<(), String> {
        let (value, size) = (&raw const value, size_of::<T>());
        // SAFETY: the preference lives, and `value` has `size` bytes that are read at once.
        told(unsafe { lt::set_matmul_pref_attribute(self.0, attribute, value.cast(), size) })
    }
}

macro_rules! dropped {
    ($type:ident, $destroy:path) => {
        impl Drop for $type {
            fn drop(&mut self) {
                // SAFETY: made by the library and destroyed once. A failure leaks some bytes.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

dropped!(Description, lt::destroy_matmul_desc);
dropped!(Layout, lt::destroy_matrix_layout);
dropped!(Preference, lt::destroy_matmul_pref);

impl Plan {
    fn new(library: Library, problem: &Problem) -> Result<Self, String> {
        use sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let column = problem.column_major();
        let description = Description::new()?;
        let transpose = |operand: Operand| i32::from(operand.transpose);
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose(column.a))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose(column.b))?;
        if problem.added == Added::Bias {
            let epilogue = CUBLASLT_EPILOGUE_BIAS;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        }
        let a = Layout::new(problem.factors, column.a)?;
        let b = Layout::new(problem.factors, column.b)?;
        let d = Layout::new(problem.result, column.result())?;
        let preference = Preference::new(problem.added)?;
        // SAFETY: every description was made above and lives.
        let advice = told(unsafe {
            lt::get_matmul_algo_heuristic(
                library.0,
                description.0,
                a.0,
                b.0,
                d.0,
                d.0,
                preference.0,
            )
        })?;
        Ok(Self {
            description,
            a,
            b,
            d,
            algorithm: advice.algo,
            workspace: advice.workspaceSize,
            beta: match problem.added {
                Added::Flat { add: true } => 1.0,
                _ => 0.0,
            },
        })
    }

    fn run(
        &self,
        library: Library,
        [a, b, d]: [u64; 3],
        bias: Option<u64>,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        if let Some(bias) = bias {
            self.description
                .set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        let alpha = 1.0f32;
        // SAFETY: the addresses are of live buffers of the sizes that the plan was made for, which
        // `Submitter` keeps until the stream has passed; the scalars are read at once.
        told(unsafe {
            lt::matmul(
                library.0,
                self.description.0,
                (&raw const alpha).cast(),
                (&raw const self.beta).cast(),
                a as *const c_void,
                self.a.0,
                b as *const c_void,
                self.b.0,
                d as *const c_void,
                self.d.0,
                d as *mut c_void,
                self.d.0,
                &raw const self.algorithm,
                workspace as *mut c_void,
                self.workspace,
                stream,
            )
        })
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType, String> {
    match dtype {
        DType::F32 | DType::Flex32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        other => Err(format!("no products of {other:?} here")),
    }
}

fn told<T>(result: Result<T, lt::CublasError>) -> Result<T, String> {
    result.map_err(|error| format!("{error:?}"))
}

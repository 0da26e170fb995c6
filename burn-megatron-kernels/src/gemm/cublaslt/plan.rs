//! The cuBLASLt descriptors of one matrix multiplication.

use std::ffi::c_void;

use burn::tensor::DType;
use cudarc::cublaslt::{result as lt, sys};

use super::Library;
use super::workspaces::WORKSPACE;
use crate::fp8::Format;
use crate::gemm::cube::{FLAT_ALIGNMENT, warn_once};
use crate::gemm::engine::{Epilogue, Operand};
use crate::gemm::request::{Element, Gelu, Request, ScaleMode, Scaled};

/// The cuBLASLt descriptors of a request, and the selected algorithm.
///
/// A plan is used only on the thread that submits the work of its device.
#[derive(Debug)]
pub(super) struct MatmulPlan {
    description: Description,
    a: Layout,
    b: Layout,
    d: Layout,
    /// The algorithm that [`run`](Self::run) uses.
    pub(super) algorithm: Algorithm,
    /// The algorithms to time, in the order of the heuristic.
    pub(super) candidates: Vec<Algorithm>,
    /// The factor of the existing result: 0 or 1.
    beta: f32,
}

/// An algorithm of cuBLASLt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Algorithm {
    own: sys::cublasLtMatmulAlgo_t,
    /// The size of the workspace in bytes.
    pub(super) workspace: usize,
}

/// The source of a plan's algorithm.
#[derive(Clone, Copy, Debug)]
pub(super) enum AlgorithmSource {
    /// The first algorithm of the heuristic.
    Heuristic,
    /// The first algorithms of the heuristic for timing, at most this number.
    Candidates(usize),
    /// A given algorithm.
    Chosen([u64; 8]),
}

impl Algorithm {
    /// Returns the algorithm as the words in which it is stored.
    pub(super) fn words(&self) -> [u64; 8] {
        self.own.data
    }
}

// SAFETY: the descriptors are plain memory of the library. Only one thread uses them, because `Submitter` runs both
// `new` and `run` on it.
unsafe impl Send for MatmulPlan {}
unsafe impl Sync for MatmulPlan {}

#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

#[derive(Debug)]
struct Preference(sys::cublasLtMatmulPreference_t);

impl Description {
    fn new() -> Result<Self, String> {
        // The sums are in f32. Operands in f32 stay f32 and are not converted to TF32.
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        check_status(lt::create_matmul_desc(sums, sys::cudaDataType::CUDA_R_32F)).map(Self)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), String> {
        let (value, size) = (&raw const value, size_of::<T>());
        // SAFETY: the descriptor is alive, and `value` has `size` bytes, which are read
        // immediately.
        check_status(unsafe {
            lt::set_matmul_desc_attribute(self.0, attribute, value.cast(), size)
        })
    }

    /// Sets an attribute by its number. Bindings for CUDA before 12.8 have no name for this attribute.
    fn set_by_number(&self, attribute: u32, value: i32) -> Result<(), String> {
        type Set = unsafe extern "C" fn(
            sys::cublasLtMatmulDesc_t,
            u32,
            *const c_void,
            usize,
        ) -> sys::cublasStatus_t;
        // SAFETY: this is the type of the C function, in which an enumerator is an unsigned number.
        let set = unsafe { sys::culib().get::<Set>(b"cublasLtMatmulDescSetAttribute\0") };
        let set = set.map_err(|error| error.to_string())?;
        // SAFETY: the descriptor is alive, and the value is read immediately.
        let status = unsafe {
            set(
                self.0,
                attribute,
                (&raw const value).cast(),
                size_of::<i32>(),
            )
        };
        check_status(status.result())
    }

    /// Sets the scale modes of FP8 operands. The addresses of the scales are set later.
    fn set_scaled(&self, scaled: Scaled) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let fast = i8::from(scaled.fast);
        self.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast)?;
        for (attribute, mode) in [A_SCALE_MODE, B_SCALE_MODE].into_iter().zip(scaled.modes) {
            // A single scale is the default of the library, and the only mode of versions without
            // scale modes.
            if mode != ScaleMode::Tensor {
                self.set_by_number(attribute, mode as i32)?;
            }
        }
        // The heuristic accepts scales only if an address is set, which it does not dereference.
        // Each run sets its own addresses.
        self.set_scales([ALIGNED; 2])
    }

    /// Sets the auxiliary matrix, which has the layout of `D`. Its address is set later, as in
    /// [`set_scaled`](Self::set_scaled).
    fn set_auxiliary(&self, d: Operand) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let leading = d.leading as i64;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, leading)?;
        self.set(
            Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
            ALIGNED,
        )
    }

    fn set_scales(&self, [a, b]: [u64; 2]) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b)
    }
}

/// The number of `CUBLASLT_MATMUL_DESC_A_SCALE_MODE`. The attribute for `B` has the next number.
const A_SCALE_MODE: u32 = 31;
const B_SCALE_MODE: u32 = 32;

/// A placeholder for an address, with the largest alignment.
const ALIGNED: u64 = 256;

impl Layout {
    fn new(element: Element, operand: Operand) -> Result<Self, String> {
        let (rows, columns) = (operand.rows as u64, operand.columns as u64);
        let leading = operand.leading as i64;
        check_status(lt::create_matrix_layout(
            data_type(element)?,
            rows,
            columns,
            leading,
        ))
        .map(Self)
    }
}

impl Preference {
    fn new(epilogue: Epilogue) -> Result<Self, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = check_status(lt::create_matmul_pref()).map(Self)?;
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        preference.set(workspace, WORKSPACE as u64)?;
        if let Epilogue::Flat { .. } = epilogue {
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
        // SAFETY: the preference is alive, and `value` has `size` bytes, which are read
        // immediately.
        check_status(unsafe {
            lt::set_matmul_pref_attribute(self.0, attribute, value.cast(), size)
        })
    }
}

macro_rules! dropped {
    ($type:ident, $destroy:path) => {
        impl Drop for $type {
            fn drop(&mut self) {
                // SAFETY: the library created it, and it is destroyed once. A failure leaks some
                // bytes.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

dropped!(Description, lt::destroy_matmul_desc);
dropped!(Layout, lt::destroy_matrix_layout);
dropped!(Preference, lt::destroy_matmul_pref);

/// The addresses of the buffers of a multiplication.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    pub bias: Option<u64>,
    pub auxiliary: Option<u64>,
    pub scales: Option<[u64; 2]>,
    pub workspace: u64,
}

impl MatmulPlan {
    pub(super) fn new(
        library: Library,
        request: &Request,
        source: AlgorithmSource,
    ) -> Result<Self, String> {
        let layout = request.layout;
        let description = describe(request)?;
        let [of_a, of_b] = request.factors;
        let a = Layout::new(of_a, layout.a)?;
        let b = Layout::new(of_b, layout.b)?;
        let d = Layout::new(Element::Plain(request.result), layout.result())?;
        let preference = Preference::new(request.epilogue)?;
        let search = Search {
            library,
            description: &description,
            layouts: [&a, &b, &d],
        };
        let (algorithm, candidates) = match source {
            AlgorithmSource::Heuristic => (search.advised(&preference, 1)?[0], vec![]),
            AlgorithmSource::Candidates(most) => {
                let candidates = search.advised(&preference, most)?;
                (candidates[0], candidates)
            }
            AlgorithmSource::Chosen(words) => match search.checked(words) {
                Ok(algorithm) => (algorithm, vec![]),
                Err(error) => {
                    warn_once(format!(
                        "cannot use the algorithm that was chosen for {request}, so the heuristic's algorithm is used: \
                         {error}"
                    ));
                    (search.advised(&preference, 1)?[0], vec![])
                }
            },
        };
        Ok(Self {
            description,
            a,
            b,
            d,
            algorithm,
            candidates,
            beta: match request.epilogue {
                Epilogue::Flat { add: true } => 1.0,
                _ => 0.0,
            },
        })
    }

    /// Queues the multiplication with one of the algorithms of the plan.
    pub(super) fn run(
        &self,
        library: Library,
        algorithm: &Algorithm,
        addresses: Addresses,
        stream: sys::cudaStream_t,
    ) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Addresses {
            a,
            b,
            d,
            bias,
            auxiliary,
            scales,
            workspace,
        } = addresses;
        if let Some(bias) = bias {
            self.description
                .set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        if let Some(auxiliary) = auxiliary {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            self.description.set(attribute, auxiliary)?;
        }
        if let Some(scales) = scales {
            self.description.set_scales(scales)?;
        }
        let alpha = 1.0f32;
        // SAFETY: the addresses belong to live buffers of the sizes of the plan. `Submitter` keeps the buffers until
        // the stream has run the work. The scalars are read immediately.
        check_status(unsafe {
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
                &raw const algorithm.own,
                workspace as *mut c_void,
                algorithm.workspace,
                stream,
            )
        })
    }
}

/// A search for the algorithms of a multiplication.
struct Search<'a> {
    library: Library,
    description: &'a Description,
    /// The layouts of `A`, `B` and `D`.
    layouts: [&'a Layout; 3],
}

impl Search<'_> {
    /// Returns the candidates of the heuristic. There is at least one candidate and at most `most`.
    fn advised(&self, preference: &Preference, most: usize) -> Result<Vec<Algorithm>, String> {
        let [a, b, d] = self.layouts.map(|layout| layout.0);
        // SAFETY: plain numbers, for which 0 is valid.
        let mut results: Vec<sys::cublasLtMatmulHeuristicResult_t> =
            vec![unsafe { std::mem::zeroed() }; most];
        let mut found = 0;
        // SAFETY: every descriptor is alive, and there is space for the requested number of
        // results.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.library.0,
                self.description.0,
                a,
                b,
                d,
                d,
                preference.0,
                most as i32,
                results.as_mut_ptr(),
                &raw mut found,
            )
        };
        check_status(status.result())?;
        results.truncate(usize::try_from(found).unwrap_or(0));
        let usable = |result: &sys::cublasLtMatmulHeuristicResult_t| {
            result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        let usable = results.iter().filter(|result| usable(result));
        let candidates: Vec<_> = usable.map(Algorithm::of).collect();
        if candidates.is_empty() {
            return Err("the heuristic of cuBLASLt returned no algorithm".to_string());
        }
        Ok(candidates)
    }

    /// Returns a stored algorithm, or an error if it is not valid for this multiplication.
    fn checked(&self, words: [u64; 8]) -> Result<Algorithm, String> {
        let [a, b, d] = self.layouts.map(|layout| layout.0);
        let own = sys::cublasLtMatmulAlgo_t { data: words };
        // SAFETY: plain numbers, for which 0 is valid.
        let mut result: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: every descriptor, the algorithm and the space for the result are alive.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.library.0,
                self.description.0,
                a,
                b,
                d,
                d,
                &raw const own,
                &raw mut result,
            )
        };
        check_status(status.result())?;
        if result.workspaceSize > WORKSPACE {
            return Err(format!(
                "the algorithm requires a workspace of {} bytes; the limit is {WORKSPACE}",
                result.workspaceSize
            ));
        }
        let workspace = result.workspaceSize;
        Ok(Algorithm { own, workspace })
    }
}

impl Algorithm {
    fn of(result: &sys::cublasLtMatmulHeuristicResult_t) -> Self {
        Self {
            own: result.algo,
            workspace: result.workspaceSize,
        }
    }
}

fn describe(request: &Request) -> Result<Description, String> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let layout = request.layout;
    let description = Description::new()?;
    let transpose = |operand: Operand| i32::from(operand.transpose);
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose(layout.a))?;
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose(layout.b))?;
    description.set(
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
        epilogue_of(request),
    )?;
    if request.gelu.is_some() {
        description.set_auxiliary(layout.result())?;
    }
    if let Some(scaled) = request.scaled {
        description.set_scaled(scaled)?;
    }
    Ok(description)
}

fn epilogue_of(request: &Request) -> sys::cublasLtEpilogue_t {
    use sys::cublasLtEpilogue_t as E;
    match (request.gelu, request.epilogue == Epilogue::Bias) {
        (None, false) => E::CUBLASLT_EPILOGUE_DEFAULT,
        (None, true) => E::CUBLASLT_EPILOGUE_BIAS,
        (Some(Gelu::Forward), false) => E::CUBLASLT_EPILOGUE_GELU_AUX,
        (Some(Gelu::Forward), true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        (Some(Gelu::Gradient), false) => E::CUBLASLT_EPILOGUE_DGELU,
        (Some(Gelu::Gradient), true) => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
    }
}

fn data_type(element: Element) -> Result<sys::cudaDataType, String> {
    match element {
        Element::Plain(DType::F32 | DType::Flex32) => Ok(sys::cudaDataType::CUDA_R_32F),
        Element::Plain(DType::F16) => Ok(sys::cudaDataType::CUDA_R_16F),
        Element::Plain(DType::BF16) => Ok(sys::cudaDataType::CUDA_R_16BF),
        Element::Fp8(Format::E4M3) => Ok(sys::cudaDataType::CUDA_R_8F_E4M3),
        Element::Fp8(Format::E5M2) => Ok(sys::cudaDataType::CUDA_R_8F_E5M2),
        other => Err(format!(
            "cuBLASLt does not support matrix products of {other:?}"
        )),
    }
}

pub(super) fn check_status<T>(result: Result<T, lt::CublasError>) -> Result<T, String> {
    result.map_err(|error| format!("{error:?}"))
}

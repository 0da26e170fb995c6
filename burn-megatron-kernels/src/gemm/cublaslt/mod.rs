//! Calls of cuBLASLt, which is opened at run time.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn::tensor::{Device, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::server::Handle;
use cudarc::cublaslt::{result as lt, sys};

use super::cuda_stream::Submitter;
use super::engine::{Epilogue, GemmEngine, GemmProblem, Operands};
use super::request::{Chip, Gelu, Request};
use crate::cube::{cube_device, empty};

pub(super) mod algorithms;
mod plan;
mod workspaces;

use algorithms::Choices;
use plan::{Addresses, Algorithm, MatmulPlan, check_status};
use workspaces::Workspaces;

/// The cuBLASLt library for one device.
#[derive(Debug)]
pub(crate) struct CublasLt {
    submitter: Submitter,
    library: Library,
    chip: Chip,
    plans: Mutex<HashMap<Request, Result<Arc<MatmulPlan>, String>>>,
    choices: Choices,
    workspaces: Arc<Workspaces>,
}

/// The handle of the library. Several threads may use it at the same time.
#[derive(Clone, Copy, Debug)]
struct Library(sys::cublasLtHandle_t);

// SAFETY: "the cuBLASLt handle can be used from several threads at once" (cuBLAS documentation).
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

type Engines = HashMap<usize, Result<Arc<CublasLt>, String>>;
static ENGINES: LazyLock<Mutex<Engines>> = LazyLock::new(Mutex::default);

/// The buffers of a matrix multiplication. Each operand is at the beginning of its buffer. The result may be at an
/// offset.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// The matrix `A` of the request.
    pub a: Handle,
    /// The matrix `B` of the request.
    pub b: Handle,
    /// The matrix `D` of the request. It is also read if the result is added to it.
    pub d: Handle,
    /// The offset of the result in `d`, in bytes.
    pub start: u64,
    /// The bias that is added to each column of `D`, or the gradient of the bias.
    pub bias: Option<Handle>,
    /// The auxiliary matrix of the GELU epilogue.
    pub auxiliary: Option<Handle>,
    /// The scales of the FP8 matrices `A` and `B`.
    pub scales: Option<[Handle; 2]>,
}

impl Buffers {
    /// Returns the buffers that a multiplication with this GELU epilogue writes.
    fn written(&self, gelu: Option<Gelu>) -> Vec<Handle> {
        let also = match gelu {
            None => None,
            Some(Gelu::Forward) => self.auxiliary.clone(),
            Some(Gelu::Gradient) => self.bias.clone(),
        };
        [Some(self.d.clone()), also].into_iter().flatten().collect()
    }
}

impl CublasLt {
    /// Returns the cuBLASLt engine of `device`. The engine is created when it is first used.
    ///
    /// # Errors
    ///
    /// Returns an error message with the reason if cuBLASLt is not available.
    pub(crate) fn of(device: &CudaDevice) -> Result<Arc<Self>, String> {
        let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || Self::open(device).map(Arc::new);
        engines.entry(device.index).or_insert_with(open).clone()
    }

    /// Returns the cuBLASLt engine of a Burn device, with or without autodiff. Returns `None` for devices other than
    /// CUDA devices.
    pub(crate) fn on(device: &Device) -> Option<Result<Arc<Self>, String>> {
        let CubeDevice::Cuda(device) = cube_device(device.as_dispatch())? else {
            return None;
        };
        Some(Self::of(device))
    }

    fn open(device: &CudaDevice) -> Result<Self, String> {
        // SAFETY: opens a library of NVIDIA whose initializer does no harm.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found on the search path of libraries".to_string());
        }
        let submitter = Submitter::of(device)?;
        let library = submitter.wait(|| check_status(lt::create_handle()).map(Library))?;
        let chip = Chip {
            capability: submitter.capability()?,
            // SAFETY: the call only returns a number.
            version: unsafe { sys::cublasLtGetVersion() },
        };
        Ok(Self {
            submitter,
            library,
            chip,
            plans: Mutex::default(),
            choices: Choices::default(),
            workspaces: Arc::default(),
        })
    }

    /// Returns the GPU and the version of the library.
    pub(crate) fn chip(&self) -> Chip {
        self.chip
    }

    /// Checks whether cuBLASLt supports this request.
    ///
    /// # Errors
    ///
    /// Returns the error of cuBLASLt.
    pub(crate) fn supports_request(&self, request: &Request) -> Result<(), String> {
        self.plan(request).map(|_| ())
    }

    fn plan(&self, request: &Request) -> Result<Arc<MatmulPlan>, String> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let library = self.library;
        let make = || {
            let source = self.choices.source(request);
            let make = move || MatmulPlan::new(library, request, source).map(Arc::new);
            self.submitter.wait(make)
        };
        plans.entry(*request).or_insert_with(make).clone()
    }

    /// Queues a matrix multiplication that cuBLASLt [supports](Self::supports_request).
    pub(crate) fn launch(&self, request: &Request, client: &Client, buffers: Buffers) {
        let plan = match self.plan(request) {
            Ok(plan) => plan,
            Err(reason) => {
                panic!("cuBLASLt was given {request:?}, which it does not support: {reason}")
            }
        };
        let written = buffers.written(request.gelu);
        let Buffers {
            a,
            b,
            d,
            start,
            bias,
            auxiliary,
            scales,
        } = buffers;
        let mut handles = vec![a, b, d];
        let (biased, scaled) = (bias.is_some(), scales.is_some());
        let has_auxiliary = auxiliary.is_some();
        handles.extend(bias);
        handles.extend(auxiliary);
        handles.extend(scales.into_iter().flatten());
        // The last buffer is new, so its stream is the stream on which this thread launches.
        handles.push(client.empty(1));
        let (library, workspaces) = (self.library, self.workspaces.clone());
        let timed = self.choices.timing_of(request);
        self.submitter
            .submit(handles, written, move |addresses, stream| {
                let mut addresses = addresses.iter().copied();
                let mut next = || {
                    let address = addresses.next();
                    address.ok_or("a product was given too few buffers".to_string())
                };
                let addresses = Addresses {
                    a: next()?,
                    b: next()?,
                    d: next()? + start,
                    bias: biased.then(&mut next).transpose()?,
                    auxiliary: has_auxiliary.then(&mut next).transpose()?,
                    scales: if scaled {
                        Some([next()?, next()?])
                    } else {
                        None
                    },
                    workspace: 0,
                };
                let run = |algorithm: &Algorithm| {
                    let workspace = workspaces.of_stream(stream, algorithm.workspace)?;
                    let addresses = Addresses {
                        workspace,
                        ..addresses
                    };
                    plan.run(library, algorithm, addresses, stream as sys::cudaStream_t)
                };
                match timed {
                    Some(timed) if !plan.candidates.is_empty() => {
                        timed.run(&plan.candidates, stream, run)
                    }
                    _ => run(&plan.algorithm),
                }
            });
    }
}

impl GemmEngine<CubeTensor> for CublasLt {
    fn name(&self) -> &'static str {
        "cuBLASLt"
    }

    fn supports(&self, problem: &GemmProblem) -> Result<(), String> {
        self.supports_request(&problem.into())
    }

    fn multiply(&self, problem: &GemmProblem, operands: Operands<CubeTensor>) -> CubeTensor {
        let Operands {
            left,
            right,
            epilogue,
            offset,
        } = operands;
        let client = left.client.clone();
        let [rows, columns, _] = problem.sizes();
        let new = || empty(&left, Shape::from([rows, columns]), problem.result);
        let (result, bias) = match (epilogue, problem.epilogue) {
            (Some(flat), Epilogue::Flat { .. }) => (flat, None),
            (bias, _) => (new(), bias),
        };
        let buffers = Buffers {
            a: right.handle,
            b: left.handle,
            d: result.handle.clone(),
            start: (offset * problem.result.size()) as u64,
            bias: bias.map(|bias| bias.handle),
            auxiliary: None,
            scales: None,
        };
        self.launch(&problem.into(), &client, buffers);
        result
    }
}

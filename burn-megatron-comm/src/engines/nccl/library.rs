//! The NCCL library, which is loaded at run time. Its error codes are converted into messages.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::api::{Api, Config, IN_PROGRESS, RawComm, SUCCESS, SYMMETRIC, UniqueId};
use super::driver::Stream;
use super::plan::{NcclOp, NcclPlan};
use super::types::{NcclType, reduction};
use super::version::Version;
use crate::nccl_config::NcclGroupConfig;
use burn_megatron_probe::NCCL_NAMES as NAMES;

/// A description of how to install the library.
const INSTALL_HINT: &str = "`pip install nvidia-nccl-cu13` and LD_LIBRARY_PATH set to the folder of its \
                    libnccl.so.2, or `apt-get install libnccl2` with NVIDIA's package source";

/// The reason why NCCL cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LibraryError {
    /// The NCCL library was not found.
    #[error("cannot open {NAMES:?} ({cause}); to install NCCL: {INSTALL_HINT}")]
    Missing {
        /// The error for the last file name that was tried.
        cause: String,
    },
    /// The library is not NCCL or is damaged, because a function is missing.
    #[error("{name} has no function {function}; to install NCCL: {INSTALL_HINT}")]
    Function {
        /// The file name of the library.
        name: String,
        /// The function that is missing.
        function: &'static str,
    },
    /// The version of the library is too old.
    #[error(
        "{name} is NCCL {found}: expected at least {}, the first version that can abort a communicator while a rank is \
         missing; to install NCCL: {INSTALL_HINT}",
        Version::MIN
    )]
    TooOld {
        /// The file name of the library.
        name: String,
        /// The version of the library.
        found: Version,
    },
    /// The library does not return its version.
    #[error("{name} does not report its version: {message}")]
    Broken {
        /// The file name of the library.
        name: String,
        /// The error of the library.
        message: String,
    },
}

/// A loaded NCCL library.
pub(crate) struct Library {
    api: Api,
    name: String,
    version: Version,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", self.version, self.name)
    }
}

/// The handle of a communicator (`ncclComm_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Comm(pub RawComm);

// SAFETY: NCCL allows any thread to use a handle, one thread at a time. The worker is this thread. `abort` may be
// called from another thread.
unsafe impl Send for Comm {}
unsafe impl Sync for Comm {}

/// The progress of a non-blocking call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Running,
}

/// The parameters to initialize one communicator.
#[derive(Clone, Copy)]
pub(super) struct InitRequest<'a> {
    pub id: UniqueId,
    pub rank: usize,
    pub size: usize,
    pub config: NcclGroupConfig,
    /// The slot to which NCCL writes the communicator. The slot must live until the communicator is ready.
    pub slot: &'a AtomicPtr<c_void>,
}

/// The device addresses of the input and the output of a call.
pub(super) type Addresses = [u64; 2];

impl Library {
    /// Opens the NCCL library.
    ///
    /// # Errors
    /// [`LibraryError`] if no usable NCCL library is found.
    pub fn open() -> Result<Arc<Self>, LibraryError> {
        Self::open_first(&NAMES)
    }

    pub(super) fn open_first(names: &[&str]) -> Result<Arc<Self>, LibraryError> {
        let mut cause = String::new();
        for name in names {
            // SAFETY: opening NCCL runs its initializers, which start no thread and use no device.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => {
                    // SAFETY: the library is never closed.
                    let api = unsafe { Api::load(&library) };
                    // NCCL has its own threads, which may outlive every communicator.
                    std::mem::forget(library);
                    let name = (*name).to_string();
                    return match api {
                        Ok(api) => Self::from_api(api, name),
                        Err(function) => Err(LibraryError::Function { name, function }),
                    };
                }
                Err(error) => cause = error.to_string(),
            }
        }
        Err(LibraryError::Missing { cause })
    }

    pub(super) fn from_api(api: Api, name: String) -> Result<Arc<Self>, LibraryError> {
        let mut code = 0;
        // SAFETY: the version is written before the call returns.
        let code_ = unsafe { (api.get_version)(&mut code) };
        if code_ != SUCCESS {
            let message = format!("ncclGetVersion returned {code_}");
            return Err(LibraryError::Broken { name, message });
        }
        let version = Version::from_code(code);
        if version < Version::MIN {
            Err(LibraryError::TooOld {
                name,
                found: version,
            })
        } else {
            Ok(Arc::new(Self { api, name, version }))
        }
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// Returns whether this NCCL version can split communicators.
    pub(super) fn can_split(&self) -> bool {
        self.api.comm_split.is_some()
    }

    /// Creates a unique id. The ranks that use the id connect to this process.
    pub(super) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the id is written before the call returns.
        let code = unsafe { (self.api.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", None, code).map(|_| id)
    }

    /// Returns whether one thread may have several non-blocking NCCL groups in progress.
    pub(super) fn has_concurrent_groups(&self) -> bool {
        self.version >= Version::CONCURRENT_GROUPS
    }

    /// Starts the initialization of communicators. Several communicators are initialized as one NCCL group. The caller
    /// must [poll](Self::poll) each communicator.
    ///
    /// # Errors
    /// The first error. Communicators whose initialization was already started are aborted.
    pub(super) fn init(&self, requests: &[InitRequest<'_>]) -> Result<Vec<Comm>, String> {
        let as_group = requests.len() > 1;
        if as_group {
            self.group_start()?;
        }
        let mut started = Ok(());
        for request in requests {
            started = started.and_then(|()| self.init_one(request));
        }
        if as_group {
            let ended = self.group_end();
            started = started.and(ended.map(drop));
        }
        let begun = |request: &InitRequest<'_>| Comm(request.slot.load(Ordering::Acquire));
        let comms: Vec<_> = requests.iter().map(begun).collect();
        if started.is_ok() && comms.iter().any(|comm| comm.0.is_null()) {
            started = Err("ncclCommInitRankConfig returned no communicator".into());
        }
        if let Err(reason) = started {
            for comm in comms.into_iter().filter(|comm| !comm.0.is_null()) {
                // The first error is reported instead.
                let _ = self.abort(comm);
            }
            return Err(reason);
        }
        Ok(comms)
    }

    fn init_one(&self, request: &InitRequest<'_>) -> Result<(), String> {
        let InitRequest {
            id,
            rank,
            size,
            config,
            slot,
        } = *request;
        let mut config = Config::non_blocking(config);
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: the config is accessed only during the call. The slot lives until the communicator is ready.
        let code = unsafe { (self.api.comm_init)(slot.as_ptr(), size, id, rank, &mut config) };
        self.check("ncclCommInitRankConfig", None, code).map(drop)
    }

    /// Ends the initialization of a communicator that is ready. Must be called on the thread that started the
    /// initialization. In older NCCL versions, this thread keeps the state of an NCCL group until the next call that
    /// uses the communicator.
    pub(super) fn end_init(&self, comm: Comm) -> Result<(), String> {
        let mut rank = 0;
        // SAFETY: the communicator is alive, and the rank is written before the call returns.
        let code = unsafe { (self.api.comm_user_rank)(comm.0, &mut rank) };
        self.check("ncclCommUserRank", Some(comm), code).map(drop)
    }

    /// Starts to split the communicator `parent`. NCCL writes the new communicator to `slot`. The slot must live until
    /// [`poll`](Self::poll) returns `Done` for `parent`.
    pub(super) fn split(
        &self,
        parent: Comm,
        colour: c_int,
        key: c_int,
        config: NcclGroupConfig,
        slot: &AtomicPtr<c_void>,
    ) -> Result<(), String> {
        let split = self.require("ncclCommSplit", self.api.comm_split)?;
        let mut config = Config::non_blocking(config);
        // SAFETY: the slot lives as long as the library may write to it, and is read atomically. The config is accessed
        // only during the call.
        let code = unsafe { split(parent.0, colour, key, slot.as_ptr(), &mut config) };
        self.check("ncclCommSplit", Some(parent), code).map(drop)
    }

    /// Returns the progress of the last operation on `comm`.
    ///
    /// # Errors
    /// An error of the communicator, which may be an asynchronous error on the device.
    pub(super) fn poll(&self, comm: Comm) -> Result<Progress, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, and the state is written before the call returns.
        let code = unsafe { (self.api.comm_async_error)(comm.0, &mut state) };
        self.check("ncclCommGetAsyncError", Some(comm), code)?;
        self.check("a communicator", Some(comm), state)
    }

    /// Starts to finalize several communicators as one NCCL group. Therefore, the ranks do not need to use the same
    /// order of the communicators.
    pub(super) fn finalize(&self, comms: &[Comm]) -> Result<(), String> {
        self.group_start()?;
        let finalized = comms.iter().try_for_each(|comm| {
            // SAFETY: the communicator is alive and is finalized once.
            let code = unsafe { (self.api.comm_finalize)(comm.0) };
            self.check("ncclCommFinalize", Some(*comm), code).map(drop)
        });
        let ended = self.group_end();
        finalized.and(ended.map(drop))
    }

    pub(super) fn destroy(&self, comm: Comm) -> Result<Progress, String> {
        // SAFETY: the communicator is finalized and not used anymore.
        let code = unsafe { (self.api.comm_destroy)(comm.0) };
        self.check("ncclCommDestroy", None, code)
    }

    pub(super) fn abort(&self, comm: Comm) -> Result<Progress, String> {
        // SAFETY: the communicator is alive. It was removed from the list of live communicators.
        let code = unsafe { (self.api.comm_abort)(comm.0) };
        self.check("ncclCommAbort", None, code)
    }

    pub(super) fn group_start(&self) -> Result<(), String> {
        // SAFETY: the calls of this thread until `group_end` form one group. `group_end` always follows.
        let code = unsafe { (self.api.group_start)() };
        self.check("ncclGroupStart", None, code).map(drop)
    }

    pub(super) fn group_end(&self) -> Result<Progress, String> {
        // SAFETY: `group_start` was called before.
        let code = unsafe { (self.api.group_end)() };
        self.check("ncclGroupEnd", None, code)
    }

    /// Enqueues one operation of a plan on the stream.
    ///
    /// # Safety
    /// The addresses must point to memory with the lengths of the plan. The memory must live until the stream has
    /// executed the operation.
    pub(super) unsafe fn run(
        &self,
        step: NcclOp,
        plan: &NcclPlan,
        addresses: Addresses,
        comm: Comm,
        stream: Stream,
    ) -> Result<(), String> {
        let (api, width) = (&self.api, plan.dtype.size_of() as u64);
        let dtype = NcclType::Plain(plan.dtype).number();
        let [input, output] = addresses;
        let from = |at: usize| (input + at as u64 * width) as *const _;
        let to = |at: usize| (output + at as u64 * width) as *mut _;
        let (raw, stream) = (comm.0, stream.0 as *mut _);
        let (first, result, count) = (from(0), to(0), plan.input);
        // SAFETY: guaranteed by the caller.
        let code = unsafe {
            match step {
                NcclOp::AllReduce(op) => {
                    (api.all_reduce)(first, result, count, dtype, reduction(op), raw, stream)
                }
                NcclOp::AllGather => (api.all_gather)(first, result, count, dtype, raw, stream),
                NcclOp::ReduceScatter(op) => {
                    let (count, op) = (plan.output, reduction(op));
                    (api.reduce_scatter)(first, result, count, dtype, op, raw, stream)
                }
                NcclOp::Broadcast { root } => {
                    (api.broadcast)(first, result, count, dtype, root as c_int, raw, stream)
                }
                NcclOp::Send { to, at, count } => {
                    (api.send)(from(at), count, dtype, to as c_int, raw, stream)
                }
                NcclOp::Receive {
                    from: peer,
                    at,
                    count,
                } => (api.receive)(to(at), count, dtype, peer as c_int, raw, stream),
            }
        };
        self.check(step.into(), Some(comm), code).map(drop)
    }

    /// Allocates device memory that can be registered with NCCL.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, String> {
        let allocate = self.require("ncclMemAlloc", self.api.mem_alloc)?;
        let mut address = ptr::null_mut();
        // SAFETY: the address is written before the call returns.
        let code = unsafe { allocate(&mut address, bytes) };
        let checked = self.check("ncclMemAlloc", None, code);
        checked.map(|_| address as u64)
    }

    /// Frees memory that was allocated with [`allocate`](Self::allocate).
    ///
    /// # Safety
    /// The memory must not be registered, and nothing may use it.
    pub(super) unsafe fn free(&self, address: u64) -> Result<(), String> {
        let free = self.require("ncclMemFree", self.api.mem_free)?;
        // SAFETY: guaranteed by the caller.
        let code = unsafe { free(address as *mut _) };
        self.check("ncclMemFree", None, code).map(drop)
    }

    /// Registers memory of this rank with a communicator. This is a local operation: other ranks need not call it.
    pub(super) fn register(&self, comm: Comm, address: u64, bytes: usize) -> Result<usize, String> {
        let register = self.require("ncclCommRegister", self.api.comm_register)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the memory has this length. The handle is written before the call returns.
        let code = unsafe { register(comm.0, address as *mut _, bytes, &mut handle) };
        let checked = self.check("ncclCommRegister", Some(comm), code);
        checked.map(|_| handle as usize)
    }

    pub(super) fn deregister(&self, comm: Comm, handle: usize) -> Result<(), String> {
        let deregister = self.require("ncclCommDeregister", self.api.comm_deregister)?;
        // SAFETY: the handle was returned by `register` and is released once.
        let code = unsafe { deregister(comm.0, handle as *mut _) };
        self.check("ncclCommDeregister", Some(comm), code).map(drop)
    }

    /// Starts to register a window. NCCL writes the window to `slot`. The slot must live until [`poll`](Self::poll)
    /// returns `Done` for `comm`. The window is null if windows are not supported.
    ///
    /// Collective: call on all ranks of `comm` with the same length.
    pub(super) fn window(
        &self,
        comm: Comm,
        address: u64,
        bytes: usize,
        slot: &AtomicPtr<c_void>,
    ) -> Result<(), String> {
        let register = self.require("ncclCommWindowRegister", self.api.window_register)?;
        let address = address as *mut _;
        // SAFETY: as in `split` and `register`.
        let code = unsafe { register(comm.0, address, bytes, slot.as_ptr(), SYMMETRIC) };
        let checked = self.check("ncclCommWindowRegister", Some(comm), code);
        checked.map(drop)
    }

    pub(super) fn close_window(&self, comm: Comm, window: usize) -> Result<(), String> {
        let deregister = self.require("ncclCommWindowDeregister", self.api.window_deregister)?;
        // SAFETY: the window was returned by `window` and is closed once.
        let code = unsafe { deregister(comm.0, window as *mut _) };
        self.check("ncclCommWindowDeregister", Some(comm), code)
            .map(drop)
    }

    /// Returns whether the library supports windows, and whether it supports the registration of allocations.
    pub(super) fn registration(&self) -> (bool, bool) {
        let Api {
            mem_alloc,
            mem_free,
            comm_register,
            comm_deregister,
            window_register,
            window_deregister,
            ..
        } = self.api;
        let memory = mem_alloc.is_some() && mem_free.is_some();
        (
            memory && window_register.is_some() && window_deregister.is_some(),
            comm_register.is_some() && comm_deregister.is_some(),
        )
    }

    fn require<F>(&self, name: &str, function: Option<F>) -> Result<F, String> {
        function.ok_or_else(|| format!("NCCL {} has no {name}", self.version))
    }

    fn check(&self, what: &str, comm: Option<Comm>, code: c_int) -> Result<Progress, String> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Running),
            code => {
                let comm = comm.map_or(ptr::null_mut(), |comm| comm.0);
                // SAFETY: the texts are static, or live until the next call of this thread.
                let (text, last) = unsafe {
                    (
                        text((self.api.get_error_string)(code)),
                        text((self.api.get_last_error)(comm)),
                    )
                };
                // The message is reduced to one line.
                let last = last.split_whitespace().collect::<Vec<_>>().join(" ");
                Err(if last.is_empty() {
                    format!("{what}: {text} ({code})")
                } else {
                    format!("{what}: {text} ({code}): {last}")
                })
            }
        }
    }
}

/// Copies a C string.
///
/// # Safety
/// `text` must be null or a valid C string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        String::new()
    } else {
        // SAFETY: guaranteed by the caller.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

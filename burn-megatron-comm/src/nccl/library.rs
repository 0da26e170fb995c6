//! NCCL, opened at run time, with errors for codes.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicPtr;

use super::api::{Api, Config, IN_PROGRESS, RawComm, SUCCESS, SYMMETRIC, UniqueId};
use super::driver::Stream;
use super::plan::{Plan, Step};
use super::types::{Wire, reduction};
use super::version::Version;

/// Where it is looked for, in order, on the search path of libraries.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// What installs it.
const CURE: &str = "`pip install nvidia-nccl-cu13` and LD_LIBRARY_PATH set to the folder of its \
                    libnccl.so.2, or `apt-get install libnccl2` with NVIDIA's package source";

/// Why there is no NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LibraryError {
    /// It was not found.
    #[error("{NAMES:?} cannot be opened ({cause}); what helps: {CURE}")]
    Missing {
        /// What was said about the last name.
        cause: String,
    },
    /// Something of that name that is not NCCL, or a damaged one.
    #[error("{name} has no function {function}; what helps: {CURE}")]
    Function {
        /// The file, as it was asked for.
        name: String,
        /// The function that is missing.
        function: &'static str,
    },
    /// An NCCL that cannot be used.
    #[error(
        "{name} is NCCL {found}, but {} is the least: older ones have no communicators that can be \
         given up while a rank is missing; what helps: {CURE}",
        Version::LEAST
    )]
    TooOld {
        /// The file, as it was asked for.
        name: String,
        /// Its version.
        found: Version,
    },
    /// It does not work at all.
    #[error("{name} does not tell its version: {message}")]
    Broken {
        /// The file, as it was asked for.
        name: String,
        /// What it says.
        message: String,
    },
}

/// An open NCCL.
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

/// A communicator of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Comm(pub RawComm);

// SAFETY: a handle. NCCL lets any thread use it, one at a time, and the worker is that one; `abort` may
// come from another.
unsafe impl Send for Comm {}
unsafe impl Sync for Comm {}

/// How far a call has come that does not block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Running,
}

/// The addresses of a call's input and output on the device.
pub(super) type Addresses = [u64; 2];

impl Library {
    /// Opens it.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn open() -> Result<Arc<Self>, LibraryError> {
        Self::find(&NAMES)
    }

    pub(super) fn find(names: &[&str]) -> Result<Arc<Self>, LibraryError> {
        let mut cause = String::new();
        for name in names {
            // SAFETY: opening NCCL runs its initialisers, which start nothing.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => {
                    // SAFETY: it is never closed.
                    let api = unsafe { Api::load(&library) };
                    // It has threads of its own, which may outlive every communicator.
                    std::mem::forget(library);
                    let name = (*name).to_string();
                    return match api {
                        Ok(api) => Self::of(api, name),
                        Err(function) => Err(LibraryError::Function { name, function }),
                    };
                }
                Err(error) => cause = error.to_string(),
            }
        }
        Err(LibraryError::Missing { cause })
    }

    pub(super) fn of(api: Api, name: String) -> Result<Arc<Self>, LibraryError> {
        let mut code = 0;
        // SAFETY: the number is written at once.
        let told = unsafe { (api.get_version)(&mut code) };
        if told != SUCCESS {
            let message = format!("ncclGetVersion gave {told}");
            return Err(LibraryError::Broken { name, message });
        }
        let version = Version::from_code(code);
        match version < Version::LEAST {
            true => Err(LibraryError::TooOld {
                name,
                found: version,
            }),
            false => Ok(Arc::new(Self { api, name, version })),
        }
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// Whether communicators can be made out of others.
    pub(super) fn splits(&self) -> bool {
        self.api.comm_split.is_some()
    }

    /// A new id for a communicator; this process answers those who ask for it.
    pub(super) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the id is written at once.
        let code = unsafe { (self.api.get_unique_id)(&mut id) };
        self.told("ncclGetUniqueId", None, code).map(|_| id)
    }

    /// Begins the rank `rank` of a communicator of `size`; to be [polled](Self::poll).
    pub(super) fn init(&self, id: &UniqueId, rank: usize, size: usize) -> Result<Comm, String> {
        let (mut comm, mut config) = (ptr::null_mut(), Config::non_blocking());
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: the communicator is written at once, and the config is read at once.
        let code = unsafe { (self.api.comm_init)(&mut comm, size, *id, rank, &mut config) };
        self.told("ncclCommInitRankConfig", None, code)?;
        match comm.is_null() {
            true => Err("ncclCommInitRankConfig gave no communicator".into()),
            false => Ok(Comm(comm)),
        }
    }

    /// Begins to split `parent`. The new communicator appears in `place`, which must live until `parent`
    /// is [done](Self::poll).
    pub(super) fn split(
        &self,
        parent: Comm,
        colour: c_int,
        key: c_int,
        place: &AtomicPtr<std::ffi::c_void>,
    ) -> Result<(), String> {
        let Some(split) = self.api.comm_split else {
            return Err(format!("NCCL {} has no ncclCommSplit", self.version));
        };
        // SAFETY: the place lives as long as the library may write to it, and is read atomically. No
        // config is the config of the parent.
        let code = unsafe { split(parent.0, colour, key, place.as_ptr(), ptr::null_mut()) };
        self.told("ncclCommSplit", Some(parent), code).map(drop)
    }

    /// How far the last call on `comm` has come.
    ///
    /// # Errors
    /// What went wrong on it, also in what runs on the device.
    pub(super) fn poll(&self, comm: Comm) -> Result<Progress, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, and the state is written at once.
        let code = unsafe { (self.api.comm_async_error)(comm.0, &mut state) };
        self.told("ncclCommGetAsyncError", Some(comm), code)?;
        self.told("a communicator", Some(comm), state)
    }

    pub(super) fn finalize(&self, comm: Comm) -> Result<Progress, String> {
        // SAFETY: the communicator is alive and is finalised once.
        let code = unsafe { (self.api.comm_finalize)(comm.0) };
        self.told("ncclCommFinalize", Some(comm), code)
    }

    pub(super) fn destroy(&self, comm: Comm) -> Result<Progress, String> {
        // SAFETY: the communicator is finalised, and nobody uses it any more.
        let code = unsafe { (self.api.comm_destroy)(comm.0) };
        self.told("ncclCommDestroy", None, code)
    }

    pub(super) fn abort(&self, comm: Comm) -> Result<Progress, String> {
        // SAFETY: the communicator is alive; it was taken off the list of those that are.
        let code = unsafe { (self.api.comm_abort)(comm.0) };
        self.told("ncclCommAbort", None, code)
    }

    pub(super) fn group_start(&self) -> Result<(), String> {
        // SAFETY: the calls of this thread up to `group_end`, which always follows, are one.
        let code = unsafe { (self.api.group_start)() };
        self.told("ncclGroupStart", None, code).map(drop)
    }

    pub(super) fn group_end(&self) -> Result<Progress, String> {
        // SAFETY: `group_start` came before.
        let code = unsafe { (self.api.group_end)() };
        self.told("ncclGroupEnd", None, code)
    }

    /// Enqueues one step of a plan.
    ///
    /// # Safety
    /// The addresses are of memory of the lengths that the plan says, which lives until the stream has
    /// passed.
    pub(super) unsafe fn run(
        &self,
        step: Step,
        plan: &Plan,
        addresses: Addresses,
        comm: Comm,
        stream: Stream,
    ) -> Result<(), String> {
        let (api, width) = (&self.api, plan.dtype.size_of() as u64);
        let dtype = Wire::Plain(plan.dtype).number();
        let [input, output] = addresses;
        let from = |at: usize| (input + at as u64 * width) as *const _;
        let to = |at: usize| (output + at as u64 * width) as *mut _;
        let (comm_, stream) = (comm.0, stream.0 as *mut _);
        // SAFETY: as of this function.
        let (name, code) = unsafe {
            match step {
                Step::AllReduce(op) => (
                    "ncclAllReduce",
                    (api.all_reduce)(
                        from(0),
                        to(0),
                        plan.input,
                        dtype,
                        reduction(op),
                        comm_,
                        stream,
                    ),
                ),
                Step::AllGather => (
                    "ncclAllGather",
                    (api.all_gather)(from(0), to(0), plan.input, dtype, comm_, stream),
                ),
                Step::ReduceScatter(op) => (
                    "ncclReduceScatter",
                    (api.reduce_scatter)(
                        from(0),
                        to(0),
                        plan.output,
                        dtype,
                        reduction(op),
                        comm_,
                        stream,
                    ),
                ),
                Step::Broadcast { root } => (
                    "ncclBroadcast",
                    (api.broadcast)(
                        from(0),
                        to(0),
                        plan.input,
                        dtype,
                        root as c_int,
                        comm_,
                        stream,
                    ),
                ),
                Step::Send { to, at, count } => (
                    "ncclSend",
                    (api.send)(from(at), count, dtype, to as c_int, comm_, stream),
                ),
                Step::Receive {
                    from: peer,
                    at,
                    count,
                } => (
                    "ncclRecv",
                    (api.receive)(to(at), count, dtype, peer as c_int, comm_, stream),
                ),
            }
        };
        self.told(name, Some(comm), code).map(drop)
    }

    /// Memory of the device that can be registered.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, String> {
        let allocate = self.newer("ncclMemAlloc", self.api.mem_alloc)?;
        let mut address = ptr::null_mut();
        // SAFETY: the address is written at once.
        let code = unsafe { allocate(&mut address, bytes) };
        let told = self.told("ncclMemAlloc", None, code);
        told.map(|_| address as u64)
    }

    /// Frees what [`allocate`](Self::allocate) gave.
    ///
    /// # Safety
    /// It is registered nowhere, and nothing uses it.
    pub(super) unsafe fn free(&self, address: u64) -> Result<(), String> {
        let free = self.newer("ncclMemFree", self.api.mem_free)?;
        // SAFETY: as of this function.
        let code = unsafe { free(address as *mut _) };
        self.told("ncclMemFree", None, code).map(drop)
    }

    /// Registers memory of this rank; no other rank has to come.
    pub(super) fn register(&self, comm: Comm, address: u64, bytes: usize) -> Result<usize, String> {
        let register = self.newer("ncclCommRegister", self.api.comm_register)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the memory is of `allocate` and so long; the handle is written at once.
        let code = unsafe { register(comm.0, address as *mut _, bytes, &mut handle) };
        let told = self.told("ncclCommRegister", Some(comm), code);
        told.map(|_| handle as usize)
    }

    pub(super) fn deregister(&self, comm: Comm, handle: usize) -> Result<(), String> {
        let deregister = self.newer("ncclCommDeregister", self.api.comm_deregister)?;
        // SAFETY: the handle is of `register`, and given back once.
        let code = unsafe { deregister(comm.0, handle as *mut _) };
        self.told("ncclCommDeregister", Some(comm), code).map(drop)
    }

    /// Begins to register memory that every rank of `comm` registers, of one length. The window appears in
    /// `place`, which must live until `comm` is [done](Self::poll); none appears where there are none.
    pub(super) fn window(
        &self,
        comm: Comm,
        address: u64,
        bytes: usize,
        place: &AtomicPtr<std::ffi::c_void>,
    ) -> Result<(), String> {
        let register = self.newer("ncclCommWindowRegister", self.api.window_register)?;
        let address = address as *mut _;
        // SAFETY: as of `split` and `register`.
        let code = unsafe { register(comm.0, address, bytes, place.as_ptr(), SYMMETRIC) };
        let told = self.told("ncclCommWindowRegister", Some(comm), code);
        told.map(drop)
    }

    pub(super) fn close_window(&self, comm: Comm, window: usize) -> Result<(), String> {
        let deregister = self.newer("ncclCommWindowDeregister", self.api.window_deregister)?;
        // SAFETY: the window is of `window`, and closed once.
        let code = unsafe { deregister(comm.0, window as *mut _) };
        self.told("ncclCommWindowDeregister", Some(comm), code)
            .map(drop)
    }

    /// Whether windows are there, and whether registration is.
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
            memory && comm_register.is_some() && comm_deregister.is_some(),
        )
    }

    fn newer<F>(&self, name: &str, function: Option<F>) -> Result<F, String> {
        function.ok_or_else(|| format!("NCCL {} has no {name}", self.version))
    }

    fn told(&self, what: &str, comm: Option<Comm>, code: c_int) -> Result<Progress, String> {
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
                let last = last.trim();
                Err(match last.is_empty() {
                    true => format!("{what}: {text} ({code})"),
                    false => format!("{what}: {text} ({code}): {last}"),
                })
            }
        }
    }
}

/// # Safety
/// Null, or a C string.
unsafe fn text(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: as of this function.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}

//! The functions of NCCL, by name.
//!
//! The signatures are those of `nccl.h` (NVIDIA/nccl). Codes are plain numbers, not the enums of a binding:
//! a library that is newer than the binding may answer with a code that such an enum does not have.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use super::version::Version;

/// `ncclSuccess` and `ncclInProgress`; everything else is an error.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// The colour of a rank that is in no part of a split (`NCCL_SPLIT_NOCOLOR`).
pub(super) const NO_COLOUR: c_int = -1;

/// A window at the same offset on all ranks (`NCCL_WIN_COLL_SYMMETRIC`).
pub(super) const SYMMETRIC: c_int = 1;

/// `ncclUniqueId`: identifies a new communicator to its ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UniqueId(pub [u8; 128]);

/// The first fields of `ncclConfig_t`, as of NCCL 2.17 to 2.26. A library reads the fields that it knows, and
/// uses defaults for those that are newer than `version`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// A non-blocking communicator; everything else is the library's default.
    pub fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: Version::new(2, 17, 0).code(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;
/// `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

macro_rules! api {
    (
        always { $($name:ident = $symbol:literal($($arg:ty),*) -> $result:ty;)* }
        newer { $($option:ident = $option_symbol:literal($($option_arg:ty),*) -> $option_result:ty;)* }
    ) => {
        /// The functions that the engine calls. Those of newer libraries may be missing.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            $(pub $option: Option<unsafe extern "C" fn($($option_arg),*) -> $option_result>,)*
        }

        impl Api {
            /// # Errors
            /// The name of a function that the library lacks.
            ///
            /// # Safety
            /// The library is NCCL, and outlives what is returned.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                // SAFETY: the types are those of `nccl.h`.
                unsafe {
                    Ok(Self {
                        $($name: *library.get($symbol.as_bytes()).map_err(|_| $symbol)?,)*
                        $($option: library.get($option_symbol.as_bytes()).ok().map(|f| *f),)*
                    })
                }
            }
        }
    };
}

api! {
    always {
        get_version = "ncclGetVersion"(*mut c_int) -> c_int;
        get_error_string = "ncclGetErrorString"(c_int) -> *const c_char;
        get_last_error = "ncclGetLastError"(RawComm) -> *const c_char;
        get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> c_int;
        comm_init = "ncclCommInitRankConfig"(
            *mut RawComm, c_int, UniqueId, c_int, *mut Config
        ) -> c_int;
        comm_async_error = "ncclCommGetAsyncError"(RawComm, *mut c_int) -> c_int;
        comm_finalize = "ncclCommFinalize"(RawComm) -> c_int;
        comm_destroy = "ncclCommDestroy"(RawComm) -> c_int;
        comm_abort = "ncclCommAbort"(RawComm) -> c_int;
        group_start = "ncclGroupStart"() -> c_int;
        group_end = "ncclGroupEnd"() -> c_int;
        all_reduce = "ncclAllReduce"(
            *const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream
        ) -> c_int;
        all_gather = "ncclAllGather"(
            *const c_void, *mut c_void, usize, c_int, RawComm, RawStream
        ) -> c_int;
        reduce_scatter = "ncclReduceScatter"(
            *const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream
        ) -> c_int;
        broadcast = "ncclBroadcast"(
            *const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream
        ) -> c_int;
        send = "ncclSend"(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int;
        receive = "ncclRecv"(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int;
    }
    newer {
        comm_split = "ncclCommSplit"(
            RawComm, c_int, c_int, *mut RawComm, *mut Config
        ) -> c_int;
        mem_alloc = "ncclMemAlloc"(*mut *mut c_void, usize) -> c_int;
        mem_free = "ncclMemFree"(*mut c_void) -> c_int;
        comm_register = "ncclCommRegister"(
            RawComm, *mut c_void, usize, *mut *mut c_void
        ) -> c_int;
        comm_deregister = "ncclCommDeregister"(RawComm, *mut c_void) -> c_int;
        window_register = "ncclCommWindowRegister"(
            RawComm, *mut c_void, usize, *mut *mut c_void, c_int
        ) -> c_int;
        window_deregister = "ncclCommWindowDeregister"(RawComm, *mut c_void) -> c_int;
    }
}

/// The fields have the layout of the binding that CubeCL is built with.
#[cfg(feature = "cuda")]
const _: () = {
    use cudarc::nccl::sys::{ncclConfig_t as Whole, ncclResult_t as Code, ncclUniqueId};
    use std::mem::offset_of;
    assert!(offset_of!(Config, magic) == offset_of!(Whole, magic));
    assert!(offset_of!(Config, blocking) == offset_of!(Whole, blocking));
    assert!(offset_of!(Config, net_name) == offset_of!(Whole, netName));
    assert!(offset_of!(Config, split_share) == offset_of!(Whole, splitShare));
    assert!(offset_of!(Config, traffic_class) == offset_of!(Whole, trafficClass));
    assert!(size_of::<UniqueId>() == size_of::<ncclUniqueId>());
    assert!(Code::ncclSuccess as u32 == 0 && Code::ncclInProgress as u32 == 7);
};

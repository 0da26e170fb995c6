//! The functions of NCCL, which are loaded by name.
//!
//! The signatures are declared in `nccl.h` (NVIDIA/nccl). Return codes are plain numbers instead of the enums of a
//! binding, because a library that is newer than the binding may return a code that the enum does not have.

#[cfg(test)]
mod header;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use super::version::Version;
use crate::nccl_config::{MAX_CTAS, NcclGroupConfig};

/// The codes `ncclSuccess` and `ncclInProgress`. All other codes are errors.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// The color of a rank that is not in any part of a split (`NCCL_SPLIT_NOCOLOR`).
pub(super) const NO_COLOUR: c_int = -1;

/// The flag of a window that has the same offset on all ranks (`NCCL_WIN_COLL_SYMMETRIC`).
pub(super) const SYMMETRIC: c_int = 1;

/// The type `ncclUniqueId`, which identifies a new communicator. All ranks of the communicator use the same id.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UniqueId(pub [u8; 128]);

/// The first fields of `ncclConfig_t`, as in NCCL 2.17 to 2.26. The library reads only the fields that its version
/// defines. It uses defaults for fields that are newer than `version`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_API_MAGIC`.
const MAGIC: c_uint = 0xcafe_beef;

impl Config {
    /// Creates the config of a non-blocking communicator with the numbers of CTAs in `group`. All other fields have the
    /// default values of the library.
    pub fn non_blocking(group: NcclGroupConfig) -> Self {
        // The library compares the minimum with the maximum before it fills in missing values.
        let ctas = match (group.min_ctas, group.max_ctas) {
            (Some(min), None) => (Some(min), Some(MAX_CTAS)),
            both => both,
        };
        let number = |ctas: Option<u32>| ctas.map_or(UNDEFINED, |ctas| ctas as c_int);
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: Version::new(2, 17, 0).code(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: number(ctas.0),
            max_ctas: number(ctas.1),
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

// Types of `nccl.h`. They make the signatures below comparable with the header.

/// `ncclResult_t`.
pub(super) type Code = c_int;
/// `ncclDataType_t`.
pub(super) type DataType = c_int;
/// `ncclRedOp_t`.
pub(super) type RedOp = c_int;
/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;
/// `ncclWindow_t`.
pub(super) type Window = *mut c_void;
/// `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

/// The signature of an NCCL function, as declared in this module.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct Signature {
    pub symbol: &'static str,
    /// The first NCCL version that has this function.
    pub since: Version,
    pub arguments: &'static [&'static str],
    pub result: &'static str,
}

macro_rules! api {
    (
        always { $($name:ident = $symbol:literal($($arg:ty),*) -> $result:ty;)* }
        newer {
            $($option:ident since $since:ident = $option_symbol:literal($($option_arg:ty),*) -> $option_result:ty;)*
        }
    ) => {
        /// The NCCL functions that the engine calls. A function that only newer versions have may be missing.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            $(pub $option: Option<unsafe extern "C" fn($($option_arg),*) -> $option_result>,)*
        }

        impl Api {
            /// Loads the functions of a library.
            ///
            /// # Errors
            /// The name of a required function that is missing in the library.
            ///
            /// # Safety
            /// The library must be NCCL and must outlive the returned value.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                // SAFETY: the types are declared in `nccl.h`.
                unsafe {
                    Ok(Self {
                        $($name: *library.get($symbol.as_bytes()).map_err(|_| $symbol)?,)*
                        $($option: library.get($option_symbol.as_bytes()).ok().map(|f| *f),)*
                    })
                }
            }

            /// The signatures of all functions.
            #[cfg(test)]
            pub const SIGNATURES: &[Signature] = &[
                $(Signature {
                    symbol: $symbol,
                    since: Version::MIN,
                    arguments: &[$(stringify!($arg)),*],
                    result: stringify!($result),
                },)*
                $(Signature {
                    symbol: $option_symbol,
                    since: Version::$since,
                    arguments: &[$(stringify!($option_arg)),*],
                    result: stringify!($option_result),
                },)*
            ];
        }
    };
}

api! {
    always {
        get_version = "ncclGetVersion"(*mut c_int) -> Code;
        get_error_string = "ncclGetErrorString"(Code) -> *const c_char;
        get_last_error = "ncclGetLastError"(RawComm) -> *const c_char;
        get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> Code;
        comm_init = "ncclCommInitRankConfig"(
            *mut RawComm, c_int, UniqueId, c_int, *mut Config
        ) -> Code;
        comm_async_error = "ncclCommGetAsyncError"(RawComm, *mut Code) -> Code;
        comm_user_rank = "ncclCommUserRank"(RawComm, *mut c_int) -> Code;
        comm_finalize = "ncclCommFinalize"(RawComm) -> Code;
        comm_destroy = "ncclCommDestroy"(RawComm) -> Code;
        comm_abort = "ncclCommAbort"(RawComm) -> Code;
        group_start = "ncclGroupStart"() -> Code;
        group_end = "ncclGroupEnd"() -> Code;
        all_reduce = "ncclAllReduce"(
            *const c_void, *mut c_void, usize, DataType, RedOp, RawComm, RawStream
        ) -> Code;
        all_gather = "ncclAllGather"(
            *const c_void, *mut c_void, usize, DataType, RawComm, RawStream
        ) -> Code;
        reduce_scatter = "ncclReduceScatter"(
            *const c_void, *mut c_void, usize, DataType, RedOp, RawComm, RawStream
        ) -> Code;
        broadcast = "ncclBroadcast"(
            *const c_void, *mut c_void, usize, DataType, c_int, RawComm, RawStream
        ) -> Code;
        send = "ncclSend"(*const c_void, usize, DataType, c_int, RawComm, RawStream) -> Code;
        receive = "ncclRecv"(*mut c_void, usize, DataType, c_int, RawComm, RawStream) -> Code;
    }
    newer {
        comm_split since SPLIT = "ncclCommSplit"(
            RawComm, c_int, c_int, *mut RawComm, *mut Config
        ) -> Code;
        mem_alloc since REGISTER = "ncclMemAlloc"(*mut *mut c_void, usize) -> Code;
        mem_free since REGISTER = "ncclMemFree"(*mut c_void) -> Code;
        comm_register since REGISTER = "ncclCommRegister"(
            RawComm, *mut c_void, usize, *mut *mut c_void
        ) -> Code;
        comm_deregister since REGISTER = "ncclCommDeregister"(RawComm, *mut c_void) -> Code;
        window_register since WINDOWS = "ncclCommWindowRegister"(
            RawComm, *mut c_void, usize, *mut Window, c_int
        ) -> Code;
        window_deregister since WINDOWS = "ncclCommWindowDeregister"(RawComm, Window) -> Code;
    }
}

/// Checks that the fields have the same layout as in the binding that CubeCL is built with.
#[cfg(feature = "cuda")]
const _: () = {
    use cudarc::nccl::sys::{ncclConfig_t as Whole, ncclResult_t as Code, ncclUniqueId};
    use std::mem::offset_of;
    assert!(offset_of!(Config, magic) == offset_of!(Whole, magic));
    assert!(offset_of!(Config, blocking) == offset_of!(Whole, blocking));
    assert!(offset_of!(Config, min_ctas) == offset_of!(Whole, minCTAs));
    assert!(offset_of!(Config, max_ctas) == offset_of!(Whole, maxCTAs));
    assert!(offset_of!(Config, net_name) == offset_of!(Whole, netName));
    assert!(offset_of!(Config, split_share) == offset_of!(Whole, splitShare));
    assert!(offset_of!(Config, traffic_class) == offset_of!(Whole, trafficClass));
    assert!(size_of::<UniqueId>() == size_of::<ncclUniqueId>());
    assert!(Code::ncclSuccess as u32 == 0 && Code::ncclInProgress as u32 == 7);
};

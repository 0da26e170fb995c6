//! Libraries that cannot be used, and a real one.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use burn_megatron_test_skip::skipped;

use super::super::library::{Library, LibraryError};
use super::super::version::Version;
use super::fake_nccl::{api, v2_13, v2_27};

fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} does not name {part:?}");
    }
}

#[test]
fn a_library_that_is_missing_says_where_to_get_it() {
    let error = Library::open_first(&["libnccl-that-is-not-there.so.2"]).unwrap_err();
    names(
        &error.to_string(),
        &[
            "libnccl.so.2",
            "pip install nvidia-nccl-cu13",
            "apt-get install libnccl2",
            "LD_LIBRARY_PATH",
        ],
    );
}

/// The C library exists wherever this runs, and is not NCCL.
#[cfg(target_os = "linux")]
#[test]
fn a_library_without_a_function_names_it() {
    let error = Library::open_first(&["libc.so.6"]).unwrap_err();
    names(&error.to_string(), &["libc.so.6", "ncclGetVersion"]);
}

#[test]
fn a_library_that_is_too_old_names_both_versions() {
    let error = Library::from_api(api(v2_13), "libnccl.so.2".into()).unwrap_err();
    names(
        &error.to_string(),
        &["NCCL 2.13.4", "expected at least 2.14.0", "aborted"],
    );
    let library = Library::from_api(api(v2_27), "x".into()).unwrap();
    assert_eq!(library.version(), Version::new(2, 27, 3));
    assert_eq!(format!("{library:?}"), "NCCL 2.27.3 (x)");
}

/// A real NCCL, whose path is in the variable: opening needs no GPU.
#[test]
fn the_real_library_has_all_functions() {
    let Ok(path) = env::var("BURN_MEGATRON_TEST_LIBNCCL") else {
        skipped("BURN_MEGATRON_TEST_LIBNCCL does not name a libnccl.so.2");
        return;
    };
    let library = match Library::open_first(&[&path]) {
        Ok(library) => library,
        Err(error @ LibraryError::TooOld { .. }) => panic!("{error}; name a newer one"),
        Err(error) => panic!("{error}"),
    };
    println!("{library:?}");
    assert_eq!(library.can_split(), library.version() >= Version::SPLIT);
    let (windows, plain) = library.registration();
    assert_eq!(windows, library.version() >= Version::WINDOWS);
    assert_eq!(plain, library.version() >= Version::REGISTER);
}

/// The layouts and numbers are those of a real header, whose path is in the variable.
#[test]
fn the_header_agrees() {
    let Ok(header) = env::var("BURN_MEGATRON_TEST_NCCL_H") else {
        skipped("BURN_MEGATRON_TEST_NCCL_H does not name an nccl.h");
        return;
    };
    let folder = env::temp_dir().join(format!("burn-megatron-nccl-h-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    // The header includes CUDA's own, of which it needs a few types.
    fs::write(folder.join("cuda_runtime.h"), CUDA).unwrap();
    for name in ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        fs::write(folder.join(name), "").unwrap();
    }
    let source = folder.join("check.c");
    fs::write(&source, CHECK).unwrap();
    let status = Command::new("cc")
        .args(["-fsyntax-only", "-I"])
        .arg(&folder)
        .arg("-I")
        .arg(Path::new(&header).parent().unwrap())
        .arg(&source)
        .status()
        .unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(status.success());
}

const CUDA: &str = "#include <stddef.h>\n#include <limits.h>\n#define CUDART_VERSION 12080\n#define __CUDA_BF16_TYPES_EXIST__\n\
                    typedef struct CUstream_st* cudaStream_t;\n\
                    typedef struct CUevent_st* cudaEvent_t;\n";

const CHECK: &str = r#"
#include "nccl.h"
#define IS(a, b) _Static_assert((a) == (b), #a)
IS(ncclUint8, 1); IS(ncclInt32, 2); IS(ncclInt64, 4); IS(ncclFloat16, 6);
IS(ncclFloat32, 7); IS(ncclFloat64, 8); IS(ncclBfloat16, 9);
IS(ncclSum, 0); IS(ncclMax, 2); IS(ncclMin, 3); IS(ncclAvg, 4);
IS(ncclSuccess, 0); IS(ncclInProgress, 7); IS(NCCL_SPLIT_NOCOLOR, -1);
IS(sizeof(ncclUniqueId), 128);
IS(offsetof(ncclConfig_t, magic), 8); IS(offsetof(ncclConfig_t, blocking), 16);
IS(offsetof(ncclConfig_t, cgaClusterSize), 20); IS(offsetof(ncclConfig_t, netName), 32);
IS(offsetof(ncclConfig_t, splitShare), 40);
IS(NCCL_CONFIG_UNDEF_INT, INT_MIN);
#ifdef NCCL_API_MAGIC
IS(NCCL_API_MAGIC, 0xcafebeef);
#endif
ncclResult_t (*split)(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) = ncclCommSplit;
ncclResult_t (*init)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) = ncclCommInitRankConfig;
ncclResult_t (*state)(ncclComm_t, ncclResult_t*) = ncclCommGetAsyncError;
ncclResult_t (*scatter)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
    cudaStream_t) = ncclReduceScatter;
ncclResult_t (*gather)(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t)
    = ncclAllGather;
ncclResult_t (*reduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
    cudaStream_t) = ncclAllReduce;
ncclResult_t (*cast)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
    = ncclBroadcast;
ncclResult_t (*give)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = ncclSend;
ncclResult_t (*get)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = ncclRecv;
"#;

//! Tests that the functions, layouts and numbers of this engine match `nccl.h`. The tests are C assertions that a
//! compiler checks.

use std::fmt::Write;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use burn_megatron_test_support::skipped;

use super::super::types::{NcclType, reduction};
use super::*;
use crate::buffer::DType;
use crate::call::ReduceOp;

/// The environment variable with the path of the header. `cargo xtask check-nccl` sets it.
const VARIABLE: &str = "BURN_MEGATRON_TEST_NCCL_H";

/// The parts of the CUDA headers that `nccl.h` needs.
const CUDA: &str = "#include <stddef.h>\n#include <limits.h>\n#define CUDART_VERSION 12080\n\
                    #define __CUDA_BF16_TYPES_EXIST__\ntypedef struct CUstream_st* cudaStream_t;\n\
                    typedef struct CUevent_st* cudaEvent_t;\n";

#[test]
fn the_header_agrees() {
    let Ok(header) = env::var(VARIABLE) else {
        skipped(format!("{VARIABLE} does not name an nccl.h"));
        return;
    };
    let (agrees, message) = compile(&header, &assertions());
    assert!(agrees, "{message}");
    let text = fs::read_to_string(&header).unwrap();
    assert!(
        text.contains(&format!("{MAGIC:#x}")),
        "another magic number"
    );
    // The compiler reports wrong declarations.
    let wrong = [
        equal("offsetof(ncclConfig_t, maxCTAs)", 24, Version::MIN),
        prototype("ncclCommDestroy", &["*mut RawComm"], "Code", Version::MIN),
        prototype("ncclSend", &["*const c_void"], "Code", Version::MIN),
    ];
    for wrong in wrong {
        assert!(!compile(&header, &wrong).0, "compiled: {wrong}");
    }
}

/// Compiles C code after the header. Returns whether it compiles, and the output of the compiler.
fn compile(header: &str, c: &str) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("cuda_runtime.h", CUDA);
    for name in ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        write(name, "");
    }
    write("check.c", &format!("#include \"nccl.h\"\n{c}"));
    let compiled = Command::new("cc")
        .args(["-fsyntax-only", "-Werror", "-I"])
        .arg(folder.path())
        .arg("-I")
        .arg(Path::new(header).parent().unwrap())
        .arg(folder.path().join("check.c"))
        .output()
        .expect("the system has a C compiler, cc");
    let message = String::from_utf8_lossy(&compiled.stderr).into_owned();
    (compiled.status.success(), message)
}

fn assertions() -> String {
    let (always, int) = (Version::MIN, |value: usize| value as i64);
    let mut c = vec![
        equal("ncclSuccess", SUCCESS.into(), always),
        equal("ncclInProgress", IN_PROGRESS.into(), always),
        equal("NCCL_SPLIT_NOCOLOR", NO_COLOUR.into(), Version::SPLIT),
        equal("NCCL_CONFIG_UNDEF_INT", UNDEFINED.into(), always),
        equal(
            "NCCL_WIN_COLL_SYMMETRIC",
            SYMMETRIC.into(),
            Version::WINDOWS,
        ),
        equal("sizeof(ncclUniqueId)", int(size_of::<UniqueId>()), always),
    ];
    for (field, offset, bytes, since) in [
        ("size", offset_of!(Config, size), size_of::<usize>(), always),
        ("magic", offset_of!(Config, magic), 4, always),
        ("version", offset_of!(Config, version), 4, always),
        ("blocking", offset_of!(Config, blocking), 4, always),
        (
            "cgaClusterSize",
            offset_of!(Config, cga_cluster_size),
            4,
            Version::CTAS,
        ),
        ("minCTAs", offset_of!(Config, min_ctas), 4, Version::CTAS),
        ("maxCTAs", offset_of!(Config, max_ctas), 4, Version::CTAS),
        (
            "netName",
            offset_of!(Config, net_name),
            size_of::<*const c_char>(),
            Version::CTAS,
        ),
        (
            "splitShare",
            offset_of!(Config, split_share),
            4,
            Version::SPLIT,
        ),
        (
            "trafficClass",
            offset_of!(Config, traffic_class),
            4,
            Version::TRAFFIC_CLASS,
        ),
    ] {
        c.push(equal(
            &format!("offsetof(ncclConfig_t, {field})"),
            int(offset),
            since,
        ));
        c.push(equal(
            &format!("sizeof(((ncclConfig_t*)0)->{field})"),
            int(bytes),
            since,
        ));
    }
    for wire in NcclType::ALL {
        c.push(equal(
            type_name(wire),
            wire.number().into(),
            wire.min_version(),
        ));
    }
    for op in ReduceOp::ALL {
        let name = match op {
            ReduceOp::Sum => "ncclSum",
            ReduceOp::Max => "ncclMax",
            ReduceOp::Min => "ncclMin",
            ReduceOp::Average => "ncclAvg",
        };
        c.push(equal(name, reduction(op).into(), always));
    }
    let prototypes = Api::SIGNATURES.iter();
    c.extend(prototypes.map(|f| prototype(f.symbol, f.arguments, f.result, f.since)));
    c.concat()
}

/// Asserts that a constant of the header has this value, in versions that have the constant.
fn equal(constant: &str, value: i64, since: Version) -> String {
    let assertion = format!("_Static_assert(({constant}) == ({value}), \"{constant}\");");
    with(&assertion, since)
}

/// Asserts that a function has this type.
fn prototype(symbol: &str, arguments: &[&str], result: &str, since: Version) -> String {
    let arguments: Vec<_> = arguments.iter().map(|name| c_type(name)).collect();
    let arguments = match arguments.as_slice() {
        [] => "void".to_string(),
        some => some.join(", "),
    };
    let result = c_type(result);
    with(
        &format!("{result} (*check_{symbol})({arguments}) = {symbol};"),
        since,
    )
}

fn with(line: &str, since: Version) -> String {
    let mut c = String::new();
    let since = since.code();
    let _ = writeln!(c, "#if NCCL_VERSION_CODE >= {since}\n{line}\n#endif");
    c
}

/// Converts a type of [`Api`] to C.
fn c_type(name: &str) -> String {
    if let Some(target) = name.strip_prefix("*mut ") {
        return format!("{}*", c_type(target));
    }
    if let Some(target) = name.strip_prefix("*const ") {
        return format!("const {}*", c_type(target));
    }
    let known = match name {
        "c_void" => "void",
        "c_char" => "char",
        "c_int" => "int",
        "usize" => "size_t",
        "Code" => "ncclResult_t",
        "DataType" => "ncclDataType_t",
        "RedOp" => "ncclRedOp_t",
        "RawComm" => "ncclComm_t",
        "RawStream" => "cudaStream_t",
        "UniqueId" => "ncclUniqueId",
        "Config" => "ncclConfig_t",
        "Window" => "ncclWindow_t",
        other => unreachable!("{other} has no type in C"),
    };
    known.into()
}

fn type_name(wire: NcclType) -> &'static str {
    match wire {
        NcclType::Plain(DType::F64) => "ncclFloat64",
        NcclType::Plain(DType::F32) => "ncclFloat32",
        NcclType::Plain(DType::BF16) => "ncclBfloat16",
        NcclType::Plain(DType::F16) => "ncclFloat16",
        NcclType::Plain(DType::I64) => "ncclInt64",
        NcclType::Plain(DType::I32) => "ncclInt32",
        NcclType::Plain(DType::U8) => "ncclUint8",
        NcclType::E4M3 => "ncclFloat8e4m3",
        NcclType::E5M2 => "ncclFloat8e5m2",
    }
}

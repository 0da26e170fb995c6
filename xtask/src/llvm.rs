//! The CUDA build without LLVM.
//!
//! CubeCL links a second compiler, which makes PTX by way of LLVM, into every program for CUDA. Its
//! build scripts download LLVM for it, all but those for documentation, which link nothing. The
//! feature `cuda-cpp` chooses the other compiler, by way of CUDA C++: nothing of LLVM is ever
//! called. So the build is that for documentation, and a linker is told that each of LLVM's functions
//! lies at address 0.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The variable that a build script takes for a build of documentation.
pub const DOCUMENTATION: (&str, &str) = ("DOCS_RS", "1");

/// The crates that call LLVM.
const CALLERS: [&str; 2] = ["cubecl_llvm", "pliron_llvm"];

/// What names of functions begin with that only LLVM, or C++ beside it, would have.
const PREFIXES: [&str; 2] = ["LLVM", "cubecl_"];

/// The library that one of cargo's messages says was built of a crate that calls LLVM.
pub fn caller(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let name = message["target"]["name"].as_str()?;
    let files = message["filenames"].as_array()?;
    let mut files = files.iter().filter_map(Value::as_str);
    let library = files.find(|file| file.ends_with(".rlib"))?;
    CALLERS.contains(&name).then(|| library.into())
}

/// Writes a file of arguments for the linker that stands in for LLVM: the functions of it that the
/// libraries of its callers lack.
pub fn stand_in(callers: &[PathBuf], file: &Path) -> Result<(), String> {
    if callers.len() != CALLERS.len() {
        return Err(format!(
            "cargo built {callers:?}, not one of each of {CALLERS:?}"
        ));
    }
    let mut nm = Command::new("nm");
    nm.args(["--undefined-only", "--format=just-symbols"])
        .args(callers);
    let output = nm
        .output()
        .map_err(|error| format!("nm, which comes with a linker, could not start: {error}"))?;
    // It may find fault with what of a library is no object file.
    let arguments = arguments(&String::from_utf8_lossy(&output.stdout));
    if arguments.is_empty() {
        return Err("nm finds nothing of LLVM in what calls it".into());
    }
    fs::write(file, arguments).map_err(|error| format!("{}: {error}", file.display()))
}

fn arguments(symbols: &str) -> String {
    let ours = |name: &&str| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let mut names: Vec<_> = symbols.lines().map(str::trim).filter(ours).collect();
    names.sort_unstable();
    names.dedup();
    let defined = |name| format!("-Wl,--defsym={name}=0\n");
    names.into_iter().map(defined).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_functions_of_llvm_are_stood_in_for() {
        let symbols = "\nlib.rlib:a.o:\nmemcpy\nLLVMAddAlias2\n_ZN4core3fmtE\nLLVMAddAlias2\n\
                       cubecl_free_message\n";
        let expected = "-Wl,--defsym=LLVMAddAlias2=0\n-Wl,--defsym=cubecl_free_message=0\n";
        assert_eq!(arguments(symbols), expected);
    }

    #[test]
    fn the_callers_are_read_from_cargos_messages() {
        let built = |name: &str| {
            format!(r#"{{"target":{{"name":"{name}"}},"filenames":["/a.rmeta","/a.rlib"]}}"#)
        };
        assert_eq!(caller(&built("cubecl_llvm")), Some("/a.rlib".into()));
        assert_eq!(caller(&built("cubecl_core")), None);
        assert_eq!(caller("{}"), None);
        let missing = stand_in(&["/a.rlib".into()], Path::new("/none")).unwrap_err();
        assert!(missing.contains("pliron_llvm"), "{missing}");
    }
}

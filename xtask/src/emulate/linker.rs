//! Builds programs for CUDA without LLVM.
//!
//! CubeCL links a second compiler, which generates PTX through LLVM, into every program for CUDA. Its build scripts
//! download LLVM, except in documentation builds, which link nothing. The feature `cuda-cpp` selects the compiler
//! through CUDA C++, so no LLVM function is ever called. The build therefore uses the settings of a documentation
//! build, and the linker resolves each LLVM function to address 0.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The variable that marks a documentation build for build scripts.
const DOCUMENTATION: (&str, &str) = ("DOCS_RS", "1");

const LINKER: &str = include_str!("link.sh");

/// The name of the linker script. rustc passes the arguments of a C compiler to a linker of this name.
const NAME: &str = "cc";

/// Makes a cargo build link without LLVM, with scripts in `folder`.
///
/// Only the crates of this repository get the other linker. A cargo setting would rebuild all dependencies.
pub fn without_llvm(build: &mut Command, folder: &Path) -> Result<(), String> {
    let (linker, wrapper) = (folder.join(NAME), folder.join("rustc"));
    // The script uses bash: sh may drop variables with a hyphen in their names, and cargo sets such variables.
    let compiler = format!(
        "#!/usr/bin/env bash\nexec \"$@\" '-Clinker={}'\n",
        linker.display()
    );
    write_script(&linker, LINKER)?;
    write_script(&wrapper, &compiler)?;
    let (name, value) = DOCUMENTATION;
    build
        .env(name, value)
        .env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    Ok(())
}

/// Writes a script unless it is unchanged. A changed file would make cargo rebuild.
fn write_script(file: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(file).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let folder = file.parent().unwrap_or(file);
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(file, text))
        .and_then(|()| make_executable(file));
    written.map_err(|error| format!("{}: {error}", file.display()))
}

#[cfg(unix)]
fn make_executable(file: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_executable(_file: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::Write;
    use std::process::Stdio;

    use super::*;
    use crate::temp::TempDir;

    fn cc(folder: &Path, arguments: &[&str], source: &str) -> bool {
        let mut cc = Command::new("cc");
        cc.current_dir(folder).args(arguments).stdin(Stdio::piped());
        let mut child = cc.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(source.as_bytes()).unwrap();
        drop(input);
        child.wait().unwrap().success()
    }

    /// Returns whether the script links a library that calls a missing function. A missing LLVM function must not be
    /// an error.
    fn links(name: &str, missing: &str) -> bool {
        let folder = TempDir::new("link").unwrap();
        let path = folder.path();
        let library = format!("lib{name}-1.rlib");
        let source = format!("void {missing}(void); void f(void) {{ {missing}(); }}");
        assert!(cc(path, &["-xc", "-c", "-o", "f.o", "-"], &source));
        let archived = Command::new("ar")
            .current_dir(path)
            .args(["rc", &library, "f.o"])
            .status();
        assert!(archived.unwrap().success());
        let main = "void f(void); int main(int n, char **x) { if (n > 9) f(); return 0; }";
        assert!(cc(path, &["-xc", "-c", "-o", "main.o", "-"], main));
        let mut cargo = Command::new("cargo");
        without_llvm(&mut cargo, path).unwrap();
        let program = path.join("program");
        let mut link = Command::new(path.join(NAME));
        link.arg(path.join("main.o"))
            .arg(path.join(&library))
            .arg("-o")
            .arg(&program)
            .stderr(Stdio::null());
        link.status().unwrap().success() && Command::new(program).status().unwrap().success()
    }

    #[test]
    fn only_functions_of_llvm_may_be_missing() {
        assert!(links("cubecl_llvm", "LLVMAddAlias2"));
        assert!(links("pliron_llvm", "cubecl_free_message"));
        assert!(!links("cubecl_llvm", "other"));
        assert!(!links("another", "LLVMAddAlias2"));
    }

    #[test]
    fn a_compiler_is_called_with_the_linker() {
        let folder = TempDir::new("linker").unwrap();
        let mut cargo = Command::new("cargo");
        without_llvm(&mut cargo, folder.path()).unwrap();
        let variables: Vec<_> = cargo.get_envs().collect();
        let wrapper = variables
            .iter()
            .find(|(name, _)| *name == "RUSTC_WORKSPACE_WRAPPER");
        let wrapper = wrapper.and_then(|(_, value)| *value).unwrap();
        let mut compile = Command::new(wrapper);
        let script = "printf '%s ' \"$@\" $(env | grep BIN)";
        compile
            .env("BIN_burn-megatron", "kept")
            .args(["bash", "-c", script, "rustc", "-O"]);
        let said = compile.output().unwrap().stdout;
        let linker = folder.path().join("cc");
        let expected = format!("-O -Clinker={} BIN_burn-megatron=kept ", linker.display());
        assert_eq!(String::from_utf8_lossy(&said), expected);
        assert!(variables.iter().any(|(name, _)| *name == "DOCS_RS"));
    }
}

//! Runs NVIDIA's compilers from a folder of Python wheels.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::arch::Arch;
use crate::bound::MachineCode;
use crate::nvrtc::Nvrtc;
use crate::sass::{self, Accesses};
use crate::usage::{self, Usage};

/// The compilers of a folder.
pub struct Toolchain {
    nvrtc: Nvrtc,
    includes: [PathBuf; 2],
    ptxas: PathBuf,
    nvdisasm: PathBuf,
}

/// The reason why a kernel was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// NVRTC refused the source.
    #[error("NVRTC: {0}")]
    Compile(String),
    /// A program failed. The fields are its name and its output.
    #[error("{0}: {1}")]
    Failed(&'static str, String),
    /// The output of a program could not be parsed. The fields are the name of the program and its output.
    #[error("unexpected output of {0}: {1}")]
    UnexpectedOutput(&'static str, String),
    /// A file could not be written, or a program could not be started.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
}

/// A kernel as machine code.
#[derive(Debug)]
pub struct CompiledKernel {
    /// The resource usage. The shared memory is the static part only.
    pub usage: Usage,
    /// The accesses to global memory.
    pub accesses: Accesses,
    /// The number of tensor core instructions.
    pub products: usize,
    /// The instructions.
    pub code: MachineCode,
}

impl Toolchain {
    /// Opens the compilers in a folder that `pip install --target` filled. The error names the missing files.
    pub fn open(wheels: &Path) -> Result<Self, String> {
        let file = |path: &str| {
            let path = wheels.join("nvidia").join(path);
            if path.exists() {
                Ok(path)
            } else {
                Err(format!("{} is missing", path.display()))
            }
        };
        file("cuda_runtime/include/cuda_bf16.h")?;
        // `mma.h` of the first folder includes this file, which is part of the compiler.
        file("cuda_nvcc/include/crt/mma.h")?;
        Ok(Self {
            nvrtc: Nvrtc::load(&file("cuda_nvrtc/lib/libnvrtc.so.12")?)?,
            includes: [file("cuda_runtime/include")?, file("cuda_nvcc/include")?],
            ptxas: file("cuda_nvcc/bin/ptxas")?,
            nvdisasm: file("cu13/bin/nvdisasm")?,
        })
    }

    /// Compiles a source for an architecture. Every step writes a file: `stem` with the extension `cu`, `ptx`,
    /// `cubin` or `sass`.
    pub fn build(
        &self,
        source: &str,
        arch: Arch,
        stem: &Path,
    ) -> Result<CompiledKernel, BuildError> {
        let file = |ending: &str| stem.with_added_extension(ending);
        let write = |ending: &str, text: &str| {
            fs::write(file(ending), text).map_err(|e| BuildError::File(file(ending), e))
        };
        write("cu", source)?;
        // CubeCL uses these options on a device.
        let includes = self.includes.iter();
        let mut options: Vec<_> = includes
            .map(|folder| format!("--include-path={}", folder.display()))
            .collect();
        options.push(format!("--gpu-architecture={}", arch.name));
        options.push("-lineinfo".into());
        let ptx = self
            .nvrtc
            .compile(source, &options)
            .map_err(BuildError::Compile)?;
        write("ptx", &ptx)?;
        let mut ptxas = Command::new(&self.ptxas);
        ptxas.arg("-v").arg(format!("-arch={}", arch.name));
        ptxas.arg(file("ptx")).arg("-o").arg(file("cubin"));
        let report = output("ptxas", &mut ptxas)?;
        let usage = usage::parse(&report).ok_or(BuildError::UnexpectedOutput("ptxas", report))?;
        let listing = output(
            "nvdisasm",
            Command::new(&self.nvdisasm)
                .args(["-c", "-ndf"])
                .arg(file("cubin")),
        )?;
        write("sass", &listing)?;
        Ok(CompiledKernel {
            usage,
            accesses: sass::parse(&listing),
            products: sass::products(&listing),
            code: MachineCode::parse(&listing),
        })
    }
}

/// Runs a program and returns its standard output and standard error.
fn output(name: &'static str, command: &mut Command) -> Result<String, BuildError> {
    let output = command
        .output()
        .map_err(|e| BuildError::File(command.get_program().into(), e))?;
    let bytes = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(BuildError::Failed(name, text))
    }
}

//! NVIDIA's compilers, where the wheels of the Python index put them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::arch::Arch;
use crate::bound::Code;
use crate::nvrtc::Nvrtc;
use crate::sass::{self, Accesses};
use crate::usage::{self, Usage};

/// The compilers of one folder.
pub struct Toolchain {
    nvrtc: Nvrtc,
    includes: [PathBuf; 2],
    ptxas: PathBuf,
    nvdisasm: PathBuf,
}

/// Why a kernel has no machine code.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// NVRTC refused the source.
    #[error("NVRTC: {0}")]
    Compile(String),
    /// A program refused its input; its name and its words.
    #[error("{0}: {1}")]
    Refused(&'static str, String),
    /// A program said nothing that could be read; its name and its words.
    #[error("{0} said nothing of use: {1}")]
    Unread(&'static str, String),
    /// A file could not be written, or a program not started.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
}

/// A kernel as machine code.
#[derive(Debug)]
pub struct Built {
    /// What it uses; of shared memory, what the code fixes.
    pub usage: Usage,
    /// Its accesses to global memory.
    pub accesses: Accesses,
    /// Its instructions that multiply by matrix units.
    pub products: usize,
    /// Its instructions.
    pub code: Code,
}

impl Toolchain {
    /// The compilers in a folder that `pip install --target` filled. The error names what is
    /// missing.
    pub fn open(wheels: &Path) -> Result<Self, String> {
        let file = |path: &str| {
            let path = wheels.join("nvidia").join(path);
            match path.exists() {
                true => Ok(path),
                false => Err(format!("{} is missing", path.display())),
            }
        };
        file("cuda_runtime/include/cuda_bf16.h")?;
        // What `mma.h` of the first folder includes comes with the compiler.
        file("cuda_nvcc/include/crt/mma.h")?;
        Ok(Self {
            nvrtc: Nvrtc::load(&file("cuda_nvrtc/lib/libnvrtc.so.12")?)?,
            includes: [file("cuda_runtime/include")?, file("cuda_nvcc/include")?],
            ptxas: file("cuda_nvcc/bin/ptxas")?,
            nvdisasm: file("cu13/bin/nvdisasm")?,
        })
    }

    /// Compiles a source for an architecture. Every stage leaves its file: `stem` with the endings
    /// `cu`, `ptx`, `cubin` and `sass`.
    pub fn build(&self, source: &str, arch: Arch, stem: &Path) -> Result<Built, BuildError> {
        let file = |ending: &str| stem.with_added_extension(ending);
        let write = |ending: &str, text: &str| {
            fs::write(file(ending), text).map_err(|e| BuildError::File(file(ending), e))
        };
        write("cu", source)?;
        // The options with which CubeCL compiles for a device.
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
        let usage = usage::parse(&report).ok_or(BuildError::Unread("ptxas", report))?;
        let listing = output(
            "nvdisasm",
            Command::new(&self.nvdisasm)
                .args(["-c", "-ndf"])
                .arg(file("cubin")),
        )?;
        write("sass", &listing)?;
        Ok(Built {
            usage,
            accesses: sass::parse(&listing),
            products: sass::products(&listing),
            code: Code::parse(&listing),
        })
    }
}

/// What a program says, on both outputs.
fn output(name: &'static str, command: &mut Command) -> Result<String, BuildError> {
    let output = command
        .output()
        .map_err(|e| BuildError::File(command.get_program().into(), e))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    match output.status.success() {
        true => Ok(said),
        false => Err(BuildError::Refused(name, said)),
    }
}

//! Implements `burn-megatron env`, which shows the resources of this machine and this process.

mod text;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use burn::tensor::DType;
use burn_megatron::comm::launch::{Launch, Origins, env_var};
use burn_megatron::comm::mpi_library_version;
use burn_megatron::comm::probe::{
    self, CudaDriverInfo, CudaToolkit, MpirunProgram, NcclLibrary, SharedLibrary,
};
use burn_megatron::device::{DeviceError, DeviceKind, is_unchecked};
use burn_megatron::kernels::attention::{EngineKind, Heads, select_engine};
use burn_megatron::kernels::gemm::engine_of;
use clap::Args;
use serde::Serialize;

use crate::error::Error;
use crate::terminal;

/// Flags of `env`.
#[derive(Args)]
pub struct EnvArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Environment that is printed.
#[derive(Serialize)]
pub struct Environment {
    /// The version of burn-megatron.
    pub version: &'static str,
    /// The version of Burn.
    pub burn: &'static str,
    /// The machine.
    pub host: Host,
    /// The launcher of this process.
    pub launch: LaunchInfo,
    /// The communication engines.
    pub engines: Engines,
    /// The devices.
    pub devices: Vec<DeviceInfo>,
    /// NVIDIA's driver, and the libraries that compile kernels and multiply matrices.
    pub cuda: Cuda,
}

/// Components of CUDA.
#[derive(Serialize)]
pub struct Cuda {
    /// NVIDIA's driver.
    pub driver: Found<CudaDriverInfo>,
    /// NVRTC, which compiles kernels.
    pub nvrtc: Found<SharedLibrary>,
    /// The folder of the headers that kernels include.
    pub headers: Found<PathBuf>,
    /// cuBLASLt, which multiplies matrices.
    pub cublas_lt: Found<SharedLibrary>,
    /// The reason why kernels cannot be compiled, if there is a driver.
    pub problem: Option<String>,
    /// The engines and libraries of the first GPU, if this binary can use the GPU.
    pub gpu: Option<Found<Gpu>>,
}

/// Engines and libraries of a GPU.
#[derive(Serialize)]
pub struct Gpu {
    /// The name of the GPU.
    pub name: String,
    /// The engine for matrix multiplications.
    pub products: String,
    /// The engine for fused attention in bf16, with heads of 64 features.
    pub attention: String,
    /// Whether the result of the first kernel was not compared with the host.
    pub unchecked: bool,
}

/// Machine on which the process runs.
#[derive(Serialize)]
pub struct Host {
    /// The name of the machine.
    pub name: String,
    /// The number of cores that this process may use.
    pub cores: usize,
    /// The memory, if the system reports it.
    pub memory: Option<Memory>,
}

/// Memory in bytes.
#[derive(Debug, PartialEq, Serialize)]
pub struct Memory {
    /// The total number of bytes.
    pub total: u64,
    /// The number of bytes that are available to programs.
    pub available: u64,
}

/// Launcher of this process.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LaunchInfo {
    /// No launcher: ranks are threads.
    Threads {
        /// The Slurm job that contains this process, if the process is not one of its tasks.
        slurm_job: Option<String>,
    },
    /// A rank of a launcher.
    Rank {
        /// The launch parameters.
        launch: Launch,
        /// The variables from which the parameters were read.
        origins: Origins,
    },
    /// The variables of the launcher contradict each other. The text is the error.
    Error(String),
}

/// A found item, or the reason why it cannot be used.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found<T> {
    /// The item was found.
    Found(T),
    /// The item was not found, for this reason.
    Missing(String),
}

/// Communication engines in addition to threads, which are always available.
#[derive(Serialize)]
pub struct Engines {
    /// The NCCL engine.
    pub nccl: Nccl,
    /// The MPI engine.
    pub mpi: Mpi,
}

/// NCCL engine.
#[derive(Serialize)]
pub struct Nccl {
    /// Whether this binary contains the engine.
    pub compiled: bool,
    /// The library, which is opened at run time.
    pub library: Found<NcclLibrary>,
}

/// MPI engine.
#[derive(Serialize)]
pub struct Mpi {
    /// The library that this binary was built with.
    pub library: Option<String>,
    /// mpirun.
    pub mpirun: Found<MpirunProgram>,
}

/// Devices of one kind.
#[derive(Serialize)]
pub struct DeviceInfo {
    /// The name of the devices for `--device`.
    pub kind: String,
    /// Whether this binary supports the devices.
    pub compiled: bool,
    /// The number of usable devices of this machine.
    pub count: usize,
    /// The reason why there are no usable devices.
    pub problem: Option<String>,
}

/// Prints the environment. The exit code is 1 if the launcher's variables contradict each other.
pub fn run(args: &EnvArgs) -> Result<ExitCode, Error> {
    let environment = Environment::gather();
    let text = if args.json {
        serde_json::to_string_pretty(&environment)? + "\n"
    } else {
        terminal::wrapped(&environment.to_string()) + "\n"
    };
    // Print with one write, so that the lines of several ranks do not mix.
    print!("{text}");
    Ok(environment.exit_code())
}

impl<T> From<Result<T, String>> for Found<T> {
    fn from(result: Result<T, String>) -> Self {
        match result {
            Ok(found) => Found::Found(found),
            Err(reason) => Found::Missing(reason),
        }
    }
}

impl Environment {
    fn gather() -> Environment {
        let kinds = [
            (DeviceKind::Cpu, true),
            (DeviceKind::Wgpu, cfg!(feature = "wgpu")),
            (DeviceKind::Cuda, cfg!(feature = "cuda")),
        ];
        Environment {
            version: env!("CARGO_PKG_VERSION"),
            burn: env!("BURN_VERSION"),
            host: Host::gather(),
            launch: launched(&env_var),
            engines: Engines {
                nccl: Nccl {
                    compiled: cfg!(feature = "cuda"),
                    library: probe::nccl().into(),
                },
                mpi: Mpi {
                    library: mpi_library_version(),
                    mpirun: probe::mpirun().into(),
                },
            },
            devices: kinds.into_iter().map(DeviceInfo::gather).collect(),
            cuda: Cuda::gather(),
        }
    }

    fn exit_code(&self) -> ExitCode {
        match self.launch {
            LaunchInfo::Error(_) => ExitCode::FAILURE,
            LaunchInfo::Threads { .. } | LaunchInfo::Rank { .. } => ExitCode::SUCCESS,
        }
    }
}

impl Host {
    fn gather() -> Host {
        let name = fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let known = ["HOSTNAME", "COMPUTERNAME"];
        let name = name.or_else(|| known.iter().find_map(|name| std::env::var(name).ok()));
        let memory = fs::read_to_string("/proc/meminfo").ok();
        Host {
            name: name.map_or("unknown".into(), |name| name.trim().into()),
            cores: thread::available_parallelism().map_or(1, |cores| cores.get()),
            memory: memory.and_then(|text| Memory::parse(&text)),
        }
    }
}

impl Cuda {
    fn gather() -> Self {
        let toolkit = CudaToolkit::find();
        let problem = toolkit.check().err().filter(|_| toolkit.driver.is_ok());
        Self {
            problem: problem.map(|problem| problem.to_string()),
            gpu: (cfg!(feature = "cuda") && toolkit.driver.is_ok())
                .then(|| Gpu::gather().map_err(|error| error.to_string()).into()),
            driver: toolkit.driver.into(),
            nvrtc: toolkit.nvrtc.into(),
            headers: toolkit.headers.into(),
            cublas_lt: toolkit.cublas_lt.into(),
        }
    }
}

impl Gpu {
    /// Runs the first kernel, and returns the engines of the GPU.
    fn gather() -> Result<Self, DeviceError> {
        let device = DeviceKind::Cuda.checked()?;
        let heads = Heads {
            heads: 12,
            groups: 12,
            width: 64,
        };
        let engine = select_engine(&EngineKind::ALL, &device, DType::BF16, (heads, 64), None);
        let skipped = |skipped: Vec<String>| match skipped.is_empty() {
            true => String::new(),
            false => format!(" ({})", skipped.join("; ")),
        };
        Ok(Self {
            name: DeviceKind::Cuda.name(),
            products: engine_of(&device),
            attention: match engine {
                Ok(selected) => format!("{}{}", selected.kind, skipped(selected.skipped)),
                Err(reason) => format!("none: {reason}"),
            },
            unchecked: is_unchecked(),
        })
    }
}

impl Memory {
    /// Parses Linux's `/proc/meminfo`, which counts in KiB.
    fn parse(text: &str) -> Option<Memory> {
        let bytes = |name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            let number: u64 = rest.split_whitespace().next()?.parse().ok()?;
            Some(number << 10)
        };
        Some(Memory {
            total: bytes("MemTotal:")?,
            available: bytes("MemAvailable:")?,
        })
    }
}

impl DeviceInfo {
    fn gather((kind, compiled): (DeviceKind, bool)) -> DeviceInfo {
        let devices = kind.devices();
        DeviceInfo {
            kind: kind.to_string(),
            compiled,
            count: devices.as_ref().map_or(0, Vec::len),
            problem: devices.err().map(|error| error.to_string()),
        }
    }
}

fn launched(vars: &dyn Fn(&str) -> Option<String>) -> LaunchInfo {
    match Launch::with_origins(vars) {
        Ok(Some((launch, origins))) => LaunchInfo::Rank { launch, origins },
        Ok(None) => LaunchInfo::Threads {
            slurm_job: vars("SLURM_JOB_ID"),
        },
        Err(error) => LaunchInfo::Error(error.to_string()),
    }
}

#[cfg(test)]
mod tests;

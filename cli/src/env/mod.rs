//! `burn-megatron env`: what this machine and this process offer.

mod text;

use std::fs;
use std::process::ExitCode;
use std::thread;

use burn_megatron::comm::installed::{self, CudaDriver, MpirunProgram, NcclLibrary};
use burn_megatron::comm::launch::{Launch, Origins, env_var};
use burn_megatron::device::DeviceKind;
use serde::Serialize;

use crate::cli::EnvArgs;
use crate::recipe::Error;

/// All that is printed.
#[derive(Serialize)]
pub struct Facts {
    /// The version of burn-megatron.
    pub version: &'static str,
    /// The version of Burn.
    pub burn: &'static str,
    /// The machine.
    pub host: Host,
    /// How this process was started.
    pub launch: Launched,
    /// What carries the collectives.
    pub engines: Engines,
    /// What the model can run on.
    pub devices: Vec<DeviceFacts>,
    /// NVIDIA's driver.
    pub cuda_driver: Found<CudaDriver>,
}

/// The machine.
#[derive(Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// The cores that this process may use.
    pub cores: usize,
    /// Its memory, where the system tells.
    pub memory: Option<Memory>,
}

/// Memory in bytes.
#[derive(Debug, PartialEq, Serialize)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What programs can still have.
    pub available: u64,
}

/// How this process was started.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Launched {
    /// By no launcher: ranks are threads.
    Threads {
        /// The Slurm job that this process is in without being a task of it.
        slurm_job: Option<String>,
    },
    /// As a rank.
    Rank {
        /// Which one.
        launch: Launch,
        /// The variables that say so.
        origins: Origins,
    },
    /// By variables that contradict each other.
    Error(String),
}

/// What was looked for, or why it cannot be used.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found<T> {
    /// It is there.
    Found(T),
    /// It is not.
    Missing(String),
}

/// What carries the collectives, besides threads, which are always there.
#[derive(Serialize)]
pub struct Engines {
    /// NVIDIA's NCCL.
    pub nccl: Nccl,
    /// MPI.
    pub mpi: Mpi,
}

/// NVIDIA's NCCL.
#[derive(Serialize)]
pub struct Nccl {
    /// Whether this binary has the engine.
    pub compiled: bool,
    /// The library, which is opened at run time.
    pub library: Found<NcclLibrary>,
}

/// MPI.
#[derive(Serialize)]
pub struct Mpi {
    /// The library that this binary was built with.
    pub library: Option<String>,
    /// What starts ranks.
    pub mpirun: Found<MpirunProgram>,
}

/// Devices of one kind.
#[derive(Serialize)]
pub struct DeviceFacts {
    /// Their name for `--device`.
    pub kind: String,
    /// Whether this binary has them.
    pub compiled: bool,
    /// How many this machine has that can be used.
    pub count: usize,
    /// Why there are none.
    pub problem: Option<String>,
}

/// Prints the facts; fails where the launcher's variables contradict each other.
pub fn run(args: &EnvArgs) -> Result<ExitCode, Error> {
    let facts = Facts::gather();
    let text = match args.json {
        true => serde_json::to_string_pretty(&facts)? + "\n",
        false => facts.to_string(),
    };
    // Whole, so that the ranks of a launcher do not mix their lines.
    print!("{text}");
    Ok(facts.exit_code())
}

impl<T> From<Result<T, String>> for Found<T> {
    fn from(result: Result<T, String>) -> Self {
        match result {
            Ok(found) => Found::Found(found),
            Err(reason) => Found::Missing(reason),
        }
    }
}

impl Facts {
    fn gather() -> Facts {
        let kinds = [
            (DeviceKind::Cpu, true),
            (DeviceKind::Wgpu, cfg!(feature = "wgpu")),
            (DeviceKind::Cuda, cfg!(feature = "cuda")),
        ];
        Facts {
            version: env!("CARGO_PKG_VERSION"),
            burn: locked_version(include_str!("../../../Cargo.lock"), "burn"),
            host: Host::gather(),
            launch: launched(&env_var),
            engines: Engines {
                nccl: Nccl {
                    compiled: cfg!(feature = "cuda"),
                    library: installed::nccl().into(),
                },
                mpi: Mpi {
                    library: installed::mpi_library_version(),
                    mpirun: installed::mpirun().into(),
                },
            },
            devices: kinds.into_iter().map(DeviceFacts::gather).collect(),
            cuda_driver: installed::cuda_driver().into(),
        }
    }

    fn exit_code(&self) -> ExitCode {
        match self.launch {
            Launched::Error(_) => ExitCode::FAILURE,
            Launched::Threads { .. } | Launched::Rank { .. } => ExitCode::SUCCESS,
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
            name: name.map_or("a host without a name".into(), |name| name.trim().into()),
            cores: thread::available_parallelism().map_or(1, |cores| cores.get()),
            memory: memory.and_then(|text| Memory::parse(&text)),
        }
    }
}

impl Memory {
    /// From Linux's `/proc/meminfo`, which counts in KiB.
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

impl DeviceFacts {
    fn gather((kind, compiled): (DeviceKind, bool)) -> DeviceFacts {
        let devices = kind.devices();
        DeviceFacts {
            kind: kind.to_string(),
            compiled,
            count: devices.as_ref().map_or(0, Vec::len),
            problem: devices.err().map(|error| error.to_string()),
        }
    }
}

fn launched(vars: &dyn Fn(&str) -> Option<String>) -> Launched {
    match Launch::with_origins(vars) {
        Ok(Some((launch, origins))) => Launched::Rank { launch, origins },
        Ok(None) => Launched::Threads {
            slurm_job: vars("SLURM_JOB_ID"),
        },
        Err(error) => Launched::Error(error.to_string()),
    }
}

/// The version of a package in the lock file that this binary was built with.
fn locked_version<'a>(lock: &'a str, package: &str) -> &'a str {
    let line = format!("name = \"{package}\"\nversion = \"");
    let after = lock.split_once(&line).map(|(_, after)| after);
    let version = after.and_then(|after| after.split_once('"'));
    version.map_or("unknown", |(version, _)| version)
}

#[cfg(test)]
mod tests;

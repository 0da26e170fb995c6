//! Formats the environment as text.

use std::fmt::{self, Display, Formatter};

use burn_megatron::comm::probe::SharedLibrary;

use super::{Cuda, DeviceInfo, Environment, Found, Host, LaunchInfo, Mpi, Nccl};
use crate::numbers::count;

/// The width of the first column.
const LABEL: usize = 16;

impl Display for Environment {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        row(
            f,
            "burn-megatron",
            format!("{}, on Burn {}", self.version, self.burn),
        )?;
        self.host.write(f)?;
        writeln!(f)?;
        self.launch.write(f)?;
        writeln!(f)?;
        row(
            f,
            "engine threads",
            "always available: each rank is a thread of this process",
        )?;
        self.engines.nccl.write(f, self.nccl_package())?;
        self.engines.mpi.write(f)?;
        writeln!(f)?;
        for device in &self.devices {
            device.write(f)?;
        }
        self.write_cuda(f)
    }
}

fn row(f: &mut Formatter<'_>, label: &str, text: impl Display) -> fmt::Result {
    writeln!(f, "{label:LABEL$}{text}")
}

fn to_install(f: &mut Formatter<'_>, what: impl Display) -> fmt::Result {
    row(f, "", format!("to install: {what}"))
}

impl Environment {
    /// Returns the NCCL package for the major version of CUDA.
    fn nccl_package(&self) -> &'static str {
        match &self.cuda.driver {
            Found::Found(driver) if driver.version.0 <= 12 => "nvidia-nccl-cu12",
            _ => "nvidia-nccl-cu13",
        }
    }

    fn write_cuda(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Cuda {
            driver,
            nvrtc,
            headers,
            cublas_lt,
            problem,
            gpu,
        } = &self.cuda;
        match driver {
            Found::Found(driver) => {
                let (major, minor) = driver.version;
                let gpus = count(driver.devices, "GPU");
                row(
                    f,
                    "CUDA driver",
                    format!("up to CUDA {major}.{minor}, {gpus}"),
                )?;
            }
            Found::Missing(reason) => {
                row(f, "CUDA driver", reason)?;
                to_install(
                    f,
                    "apt-get install nvidia-driver, R570 or newer, on a machine with an NVIDIA GPU",
                )?;
            }
        }
        let library = |found: &Found<SharedLibrary>| match found {
            Found::Found(SharedLibrary {
                version: (major, minor),
                path,
            }) => format!("{major}.{minor}, {}", path.display()),
            Found::Missing(reason) => reason.clone(),
        };
        row(f, "NVRTC", library(nvrtc))?;
        match headers {
            Found::Found(folder) => row(f, "CUDA headers", folder.display())?,
            Found::Missing(reason) => row(f, "CUDA headers", reason)?,
        }
        row(f, "cuBLASLt", library(cublas_lt))?;
        if let Some(problem) = problem {
            row(f, "", format!("kernels cannot be compiled: {problem}"))?;
        }
        match gpu {
            None => Ok(()),
            Some(Found::Missing(reason)) => row(f, "GPU", reason),
            Some(Found::Found(gpu)) => {
                let checked = match gpu.unchecked {
                    true => "UNCHECKED: results may be wrong",
                    false => "the first kernel is right",
                };
                row(f, "GPU", format!("{}; {checked}", gpu.name))?;
                row(f, "matmul", &gpu.products)?;
                row(f, "attention", format!("{}, in bf16", gpu.attention))
            }
        }
    }
}

impl Host {
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let cores = count(self.cores, "core");
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let memory = self.memory.as_ref().map_or(String::new(), |memory| {
            let (total, available) = (gib(memory.total), gib(memory.available));
            format!(", {total:.1} GiB of memory ({available:.1} GiB available)")
        });
        row(f, "host", format!("{}, {cores}{memory}", self.name))
    }
}

impl LaunchInfo {
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (launch, origins) = match self {
            LaunchInfo::Error(error) => return row(f, "launcher", format!("error: {error}")),
            LaunchInfo::Threads { slurm_job } => {
                row(f, "launcher", "none: each rank is a thread")?;
                return match slurm_job {
                    None => Ok(()),
                    Some(job) => row(
                        f,
                        "",
                        format!(
                            "inside Slurm job {job}, but not one of its tasks: start the ranks with srun"
                        ),
                    ),
                };
            }
            LaunchInfo::Rank { launch, origins } => (launch, origins),
        };
        let of = |index, size| format!("{index} of {size}");
        let both = |first: &str, second: &str| format!("{first}, {second}");
        let place = launch.rendezvous.as_ref();
        let none = || "none".to_string();
        let table = [
            (
                "rank",
                of(launch.rank, launch.world_size),
                both(&origins.rank, &origins.world_size),
            ),
            (
                "local rank",
                of(launch.local_rank, launch.local_world_size),
                both(&origins.local_rank, &origins.local_world_size),
            ),
            (
                "rendezvous",
                place.map_or_else(none, ToString::to_string),
                origins
                    .rendezvous
                    .clone()
                    .unwrap_or_else(|| "set by MASTER_ADDR and MASTER_PORT".into()),
            ),
            (
                "job",
                launch.job.clone().unwrap_or_else(none),
                origins.job.clone().unwrap_or_default(),
            ),
            // Whether there is a token. The value is never printed.
            (
                "token",
                origins.token.as_ref().map_or_else(none, |_| "given".into()),
                match (&origins.token, launch.is_multi_node()) {
                    (Some(from), _) => from.clone(),
                    (None, true) => {
                        "needed on several machines, except with mpi: BURN_MEGATRON_TOKEN or --token-file".into()
                    }
                    (None, false) => "not needed on one machine".into(),
                },
            ),
        ];
        row(f, "launcher", launch.launcher)?;
        let width = table
            .iter()
            .map(|(_, value, _)| value.len())
            .max()
            .unwrap_or(0);
        for (label, value, from) in &table {
            row(f, label, format!("{value:width$}  {from}").trim_end())?;
        }
        Ok(())
    }
}

impl Nccl {
    fn write(&self, f: &mut Formatter<'_>, package: &str) -> fmt::Result {
        let library = match &self.library {
            Found::Missing(reason) => format!("no library ({reason})"),
            Found::Found(library) => {
                let (major, minor, patch) = library.version;
                format!("{major}.{minor}.{patch} in {}", library.path.display())
            }
        };
        row(
            f,
            "engine nccl",
            format!("{}; {library}", compiled(self.compiled)),
        )?;
        if !self.compiled {
            to_install(f, "build this program with --features cuda")?;
        }
        match self.library {
            Found::Found(_) => Ok(()),
            Found::Missing(_) => {
                to_install(f, format!("pip install {package}, and then"))?;
                let folder =
                    "$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])')/lib";
                row(
                    f,
                    "",
                    format!("export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH"),
                )?;
                row(
                    f,
                    "",
                    "or, with NVIDIA's package source, apt-get install libnccl2",
                )
            }
        }
    }
}

impl Mpi {
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let library = match &self.library {
            None => compiled(false).to_string(),
            Some(version) => format!("{}; {version}", compiled(true)),
        };
        let mpirun = match &self.mpirun {
            Found::Missing(reason) => reason.clone(),
            Found::Found(mpirun) => format!("{}, {}", mpirun.path.display(), mpirun.version),
        };
        row(f, "engine mpi", format!("{library}; {mpirun}"))?;
        match (&self.library, &self.mpirun) {
            (None, _) => to_install(
                f,
                "apt-get install libopenmpi-dev openmpi-bin libclang-dev, and build this program with \
                 --features mpi",
            ),
            (Some(_), Found::Missing(_)) => to_install(f, "apt-get install openmpi-bin"),
            (Some(_), Found::Found(_)) => Ok(()),
        }
    }
}

impl DeviceInfo {
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let label = format!("device {}", self.kind);
        match (self.compiled, &self.problem) {
            (false, _) => {
                row(f, &label, compiled(false))?;
                to_install(
                    f,
                    format!("build this program with --features {}", self.kind),
                )
            }
            (true, None) => row(f, &label, count(self.count, "device")),
            (true, Some(problem)) => {
                row(f, &label, format!("none; {problem}"))?;
                match self.kind.as_str() {
                    "wgpu" => to_install(f, "apt-get install mesa-vulkan-drivers"),
                    // The lines of the driver already contain the problem.
                    _ => Ok(()),
                }
            }
        }
    }
}

fn compiled(compiled: bool) -> &'static str {
    if compiled {
        "compiled in"
    } else {
        "not compiled in"
    }
}

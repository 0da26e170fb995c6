use std::path::PathBuf;

use super::*;
use serde_json::Value;

fn vars(vars: &'static [(&'static str, &'static str)]) -> LaunchInfo {
    launched(&|name| {
        let found = vars.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

const TORCHRUN: &[(&str, &str)] = &[
    ("TORCHELASTIC_RUN_ID", "job7"),
    ("RANK", "3"),
    ("WORLD_SIZE", "16"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
];

/// Returns the environment of a laptop.
fn bare() -> Environment {
    let missing = || String::from("not there");
    let device = |kind: &str, compiled: bool| DeviceInfo {
        kind: kind.into(),
        compiled,
        count: usize::from(compiled),
        problem: (!compiled).then(|| "left out".into()),
    };
    Environment {
        version: "0.1.0",
        burn: "0.22.1",
        host: Host {
            name: "laptop".into(),
            cores: 1,
            memory: None,
        },
        launch: vars(&[]),
        engines: Engines {
            nccl: Nccl {
                compiled: false,
                library: Found::Missing(missing()),
            },
            mpi: Mpi {
                library: None,
                mpirun: Found::Missing(missing()),
            },
        },
        devices: vec![
            device("cpu", true),
            device("wgpu", false),
            device("cuda", false),
        ],
        cuda: Cuda {
            driver: Found::Missing(missing()),
            nvrtc: Found::Missing(missing()),
            headers: Found::Missing(missing()),
            cublas_lt: Found::Missing(missing()),
            problem: None,
            gpu: None,
        },
    }
}

/// Returns the environment of a cluster node.
fn full() -> Environment {
    let mut environment = bare();
    environment.host = Host {
        name: "node1".into(),
        cores: 96,
        memory: Some(Memory {
            total: 512 << 30,
            available: 300 << 30,
        }),
    };
    environment.launch = vars(TORCHRUN);
    environment.engines.nccl = Nccl {
        compiled: true,
        library: Found::Found(NcclLibrary {
            version: (2, 23, 3),
            path: PathBuf::from("/opt/libnccl.so.2"),
        }),
    };
    environment.engines.mpi = Mpi {
        library: Some("Open MPI v4.1.4".into()),
        mpirun: Found::Found(MpirunProgram {
            path: PathBuf::from("/usr/bin/mpirun"),
            version: "mpirun (Open MPI) 4.1.4".into(),
        }),
    };
    environment.devices[1] = DeviceInfo {
        kind: "wgpu".into(),
        compiled: true,
        count: 0,
        problem: Some("no wgpu device was found".into()),
    };
    environment.devices[2] = DeviceInfo {
        kind: "cuda".into(),
        compiled: true,
        count: 8,
        problem: None,
    };
    let library = |path: &str| {
        Found::Found(SharedLibrary {
            version: (12, 8),
            path: path.into(),
        })
    };
    environment.cuda = Cuda {
        driver: Found::Found(CudaDriverInfo {
            version: (12, 8),
            devices: 8,
        }),
        nvrtc: library("/opt/libnvrtc.so.12"),
        headers: Found::Found("/opt/cuda/include".into()),
        cublas_lt: library("/opt/libcublasLt.so.12"),
        problem: None,
        gpu: Some(Found::Found(Gpu {
            name: "NVIDIA H100".into(),
            products: "cuBLASLt".into(),
            attention: "mma".into(),
            unchecked: false,
        })),
    };
    environment
}

const BARE: &str = "\
burn-megatron   0.1.0, on Burn 0.22.1
host            laptop, 1 core

launcher        none: each rank is a thread

engine threads  always available: each rank is a thread of this process
engine nccl     not compiled in; no library (not there)
                to install: build this program with --features cuda
                to install: pip install nvidia-nccl-cu13, and then
                export LD_LIBRARY_PATH=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])')/lib:$LD_LIBRARY_PATH
                or, with NVIDIA's package source, apt-get install libnccl2
engine mpi      not compiled in; not there
                to install: apt-get install libopenmpi-dev openmpi-bin libclang-dev, and build this program with --features mpi

device cpu      1 device
device wgpu     not compiled in
                to install: build this program with --features wgpu
device cuda     not compiled in
                to install: build this program with --features cuda
CUDA driver     not there
                to install: apt-get install nvidia-driver, R570 or newer, on a machine with an NVIDIA GPU
NVRTC           not there
CUDA headers    not there
cuBLASLt        not there
";

const FULL: &str = "\
burn-megatron   0.1.0, on Burn 0.22.1
host            node1, 96 cores, 512.0 GiB of memory (300.0 GiB available)

launcher        torchrun
rank            3 of 16      RANK=3, WORLD_SIZE=16
local rank      1 of 8       LOCAL_RANK=1, LOCAL_WORLD_SIZE=8
rendezvous      node1:29500  MASTER_ADDR=node1, MASTER_PORT=29500
job             job7         TORCHELASTIC_RUN_ID=job7
token           none         needed on several machines, except with mpi: BURN_MEGATRON_TOKEN or --token-file

engine threads  always available: each rank is a thread of this process
engine nccl     compiled in; 2.23.3 in /opt/libnccl.so.2
engine mpi      compiled in; Open MPI v4.1.4; /usr/bin/mpirun, mpirun (Open MPI) 4.1.4

device cpu      1 device
device wgpu     none; no wgpu device was found
                to install: apt-get install mesa-vulkan-drivers
device cuda     8 devices
CUDA driver     up to CUDA 12.8, 8 GPUs
NVRTC           12.8, /opt/libnvrtc.so.12
CUDA headers    /opt/cuda/include
cuBLASLt        12.8, /opt/libcublasLt.so.12
GPU             NVIDIA H100; the first kernel is right
matmul          cuBLASLt
attention       mma, in bf16
";

#[test]
fn a_laptop_and_a_cluster_are_described() {
    assert_eq!(bare().to_string(), BARE);
    assert_eq!(full().to_string(), FULL);
}

#[test]
fn what_is_missing_says_what_helps() {
    let mut environment = full();
    environment.engines.nccl.library = Found::Missing("no file".into());
    environment.engines.mpi.mpirun = Found::Missing("mpirun not found in PATH".into());
    let text = environment.to_string();
    // The driver supports CUDA 12.
    assert!(
        text.contains("to install: pip install nvidia-nccl-cu12, and then\n"),
        "{text}"
    );
    assert!(
        text.contains("to install: apt-get install openmpi-bin\n"),
        "{text}"
    );
    assert!(!text.contains("--features"), "{text}");
}

#[test]
fn a_contradiction_is_an_error_line() {
    let mut environment = bare();
    environment.launch = vars(&[("RANK", "4"), ("WORLD_SIZE", "4")]);
    let line = "\nlauncher        error: invalid RANK=4: expected 0 to 3, below WORLD_SIZE=4\n";
    assert!(environment.to_string().contains(line), "{environment}");
    let json: Value = serde_json::to_value(&environment).unwrap();
    assert!(
        json["launch"]["error"]
            .as_str()
            .unwrap()
            .starts_with("invalid RANK=4")
    );
}

#[test]
fn a_token_is_told_of_and_not_shown() {
    const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let mut environment = full();
    environment.launch = vars(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("BURN_MEGATRON_TOKEN", TOKEN),
    ]);
    let text = environment.to_string();
    assert!(
        text.contains("\ntoken           given   BURN_MEGATRON_TOKEN\n"),
        "{text}"
    );
    let json = serde_json::to_string(&environment).unwrap();
    for shown in [text, json] {
        assert!(!shown.contains("00112233"), "{shown}");
    }
}

#[test]
fn a_batch_script_is_told_of_srun() {
    let mut environment = bare();
    environment.launch = vars(&[
        ("SLURM_JOB_ID", "12"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "8"),
    ]);
    let line = "                inside Slurm job 12, but not one of its tasks: start the ranks with srun\n";
    assert!(environment.to_string().contains(line), "{environment}");
}

#[test]
fn json_has_the_same() {
    let json: Value = serde_json::to_value(full()).unwrap();
    let rank = &json["launch"]["rank"];
    assert_eq!(rank["launch"]["rank"], 3);
    assert_eq!(rank["launch"]["rendezvous"], "node1:29500");
    assert_eq!(rank["origins"]["rank"], "RANK=3");
    let library = &json["engines"]["nccl"]["library"]["found"];
    assert_eq!(library["version"], serde_json::json!([2, 23, 3]));
    assert_eq!(json["devices"][2]["count"], 8);
    let json = serde_json::to_value(bare()).unwrap();
    assert_eq!(json["engines"]["mpi"]["mpirun"]["missing"], "not there");
    assert!(json["launch"]["threads"].is_object());
}

#[test]
fn memory_is_read() {
    let text = "MemTotal:       24576 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n";
    let memory = Memory {
        total: 24 << 20,
        available: 1 << 20,
    };
    assert_eq!(Memory::parse(text), Some(memory));
    assert_eq!(Memory::parse("MemTotal: many kB\n"), None);
}

#[test]
fn the_facts_of_this_machine_can_be_gathered() {
    let environment = Environment::gather();
    assert_eq!(
        environment.burn.split('.').count(),
        3,
        "{}",
        environment.burn
    );
    assert!(environment.host.cores > 0 && !environment.host.name.is_empty());
    let cpu = &environment.devices[0];
    assert!(cpu.compiled && cpu.count == 1 && cpu.problem.is_none());
}

//! Tests that `burn-megatron pretrain` on a GPU, through CUDA or wgpu, has the losses of the CPU.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

#[cfg(feature = "cuda")]
use burn::tensor::{DType, Device};
use serde_json::Value;
use tempfile::TempDir;

/// A recipe of a model that uses every kernel of a training step, small enough for a software device.
const RECIPE: &str = r#"
[parallel]
tensor = 2
sequence_parallel = true

[model]
context = 32
hidden = 64
layers = 2
heads = 2
activation = "swi-glu"
norm = "rms"
positions = { rotary = { base = 10000.0 } }
bias = false
tied = true

[train]
steps = 4
micro_batch_size = 2
global_batch_size = 4
held_out_samples = 4
learning_rate = 1e-3
warmup_steps = 1

[checkpoint]
every = 2

[sample]
prompt = "fn"
tokens = 4
"#;

const STEPS: usize = 4;

const GPU: &str = if cfg!(feature = "cuda") {
    "cuda"
} else {
    "wgpu"
};

/// Creates a folder with a text and a recipe.
fn stage() -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    fs::create_dir(folder.path().join("text")).unwrap();
    for file in 0..4 {
        let text = format!("fn number_{file}() -> usize {{ {file} }}\n").repeat(40);
        fs::write(folder.path().join(format!("text/{file}.rs")), text).unwrap();
    }
    folder
}

/// Returns the losses of the steps of a run with these flags.
fn losses(stage: &Path, device: &str, run: &str, flags: &[&str]) -> Vec<f64> {
    pretrain(stage, device, run, flags).0
}

/// Returns the losses of the steps of a run, and its output.
fn pretrain(stage: &Path, device: &str, run: &str, flags: &[&str]) -> (Vec<f64>, String) {
    let run_dir = stage.join(format!("{run}-{device}"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command
        .args(["pretrain", "--verbose", "--device", device])
        .arg("--recipe")
        .arg(stage.join("recipe.toml"))
        .arg("--data")
        .arg(stage.join("text"))
        .arg("--run-dir")
        .arg(&run_dir)
        .args(flags);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{device} {flags:?}: {said}");
    let metrics = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap();
    let records = metrics.lines().map(serde_json::from_str);
    let records: Vec<Value> = records.collect::<Result<_, _>>().unwrap();
    let steps = records.iter().filter(|record| record["kind"] == "step");
    let losses = steps.map(|record| record["loss"].as_f64().unwrap_or(f64::NAN));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    (losses.collect(), printed)
}

/// Compares the losses of a run on the GPU with the losses on the CPU.
#[track_caller]
fn compare(stage: &Path, run: &str, flags: &[&str], tolerance: f64) {
    let [found, expected] = [GPU, "cpu"].map(|device| losses(stage, device, run, flags));
    println!("{run}: {found:?}, on the CPU {expected:?}");
    assert_eq!(found.len(), STEPS);
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs();
    assert!(
        found.iter().zip(&expected).all(near),
        "{run}: {found:?}, on the CPU {expected:?}"
    );
    assert!(found[STEPS - 1] < found[0], "{run}: {found:?}");
}

#[test]
fn losses_are_those_of_the_cpu() {
    let stage = stage();
    compare(stage.path(), "plain", &[], 1e-5);
}

#[test]
fn a_saved_run_goes_on() {
    let stage = stage();
    let flags = ["--tp", "1", "--dp", "2", "--sp=false", "--zero-stage", "1"];
    let whole = losses(stage.path(), GPU, "whole", &flags);
    let checkpoint = stage
        .path()
        .join(format!("whole-{GPU}/checkpoints/step-00000002"));
    let resumed = [&flags[..], &["--resume", checkpoint.to_str().unwrap()]].concat();
    for device in [GPU, "cpu"] {
        let rest = losses(stage.path(), device, "rest", &resumed);
        assert_eq!(rest.len(), STEPS - 2);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
        assert!(
            rest.iter().zip(&whole[2..]).all(near),
            "{device}: {rest:?} after {whole:?}"
        );
    }
}

#[test]
fn sixteen_bits_stay_near_the_cpu() {
    let stage = stage();
    let flags: &[&str] = match GPU {
        "cuda" => &["--precision", "bf16"],
        // A dynamic loss scale would skip the first steps.
        _ => &["--precision", "f16", "--train.loss_scale", "1024"],
    };
    compare(stage.path(), "narrow", flags, 5e-3);
}

/// Runs two tensor-parallel ranks with one head of 32 features each.
#[cfg(feature = "cuda")]
#[test]
fn attention_uses_matrix_units_in_16_bits() {
    let stage = stage();
    let run = |name, flags: &[&str]| {
        let flags = [&["--precision", "bf16", "--steps", "2"], flags].concat();
        pretrain(stage.path(), GPU, name, &flags)
    };
    let (by_mma, printed) = run("mma", &[]);
    let shown = "fused: attention by mma (the device has tensor cores for BF16)";
    assert!(printed.contains(shown), "{printed}");
    let (by_portable, printed) = run("portable", &["--kernels", "attention=portable"]);
    assert!(
        printed.contains("attention by portable (requested)"),
        "{printed}"
    );
    for (mma, portable) in by_mma.iter().zip(&by_portable) {
        assert!(
            (mma - portable).abs() <= 5e-3 * portable.abs(),
            "{mma}, {portable}"
        );
    }
}

/// wgpu does not support FP8 layers, and computes them in bf16.
#[cfg(feature = "cuda")]
#[test]
fn eight_bits_stay_near_the_cpu() {
    let stage = stage();
    for recipe in ["delayed", "blockwise"] {
        let flags = ["--precision", "bf16", "--fp8", recipe];
        compare(stage.path(), recipe, &flags, 2e-2);
    }
}

/// The third of eight micro-batches is captured.
#[cfg(feature = "cuda")]
#[test]
fn a_run_of_graphs_has_the_losses_of_one_without() {
    let stage = stage();
    let layout = [
        "--tp",
        "1",
        "--dp",
        "1",
        "--sp=false",
        "--precision",
        "bf16",
    ];
    let plain = losses(stage.path(), GPU, "plain", &layout);
    let flags = [&layout[..], &["--train.cuda_graph"]].concat();
    let (graphs, printed) = pretrain(stage.path(), GPU, "graphs", &flags);
    assert_eq!(graphs, plain);
    let printed: Vec<_> = printed.split_whitespace().collect();
    let shown = "graphs 1 captured; 5 micro-batches by a graph, 3 before";
    assert!(printed.join(" ").contains(shown), "{printed:?}");
}

/// Checks that GELU as an epilogue, with algorithms timed on this device, keeps the losses. A file from another
/// device is ignored, with a message.
#[cfg(feature = "cuda")]
#[test]
fn epilogues_by_timed_algorithms_keep_the_losses() {
    let stage = stage();
    let model = [
        "--set",
        "model.activation=gelu-tanh",
        "--set",
        "model.bias=true",
    ];
    let expected = losses(stage.path(), "cpu", "gelu", &model);
    let file = stage.path().join("algorithms.json");
    // The first MLP layer on one of two tensor-parallel ranks.
    let on = (&Device::cuda(0), DType::F32);
    let chosen = burn_megatron_cli::internal::tune(on, &[[64, 64, 128]], (8, 1)).unwrap();
    let chosen = serde_json::to_value(&chosen).unwrap();
    fs::write(&file, chosen.to_string()).unwrap();
    let products = chosen["products"].as_object().unwrap();
    for end in [" bias", " flat=", " flat+=", " bias gelu", " bias dgelu"] {
        let found = products.keys().any(|product| product.ends_with(end));
        assert!(found, "{end}: {products:?}");
    }
    let kernels = format!("epilogue_fusion=true,gemm_algorithms={}", file.display());
    let flags = [&model[..], &["--kernels", &kernels]].concat();
    let run = |name| {
        let (losses, printed) = pretrain(stage.path(), GPU, name, &flags);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
        assert_eq!(losses.len(), STEPS);
        let all_near = losses.iter().zip(&expected).all(near);
        assert!(all_near, "{name}: {losses:?}, on the CPU {expected:?}");
        printed.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let printed = run("chosen");
    let shown = format!("cublaslt algorithms of {} products from ", products.len());
    assert!(printed.contains(&shown), "{printed}");
    assert!(
        printed.contains("activation as epilogues of cuBLASLt"),
        "{printed}"
    );
    let mut foreign = chosen;
    foreign["library"]["device"] = "another device".into();
    fs::write(&file, foreign.to_string()).unwrap();
    let printed = run("foreign");
    let shown = "is ignored: it is for another device with cuBLASLt";
    assert!(printed.contains(shown), "{printed}");
}

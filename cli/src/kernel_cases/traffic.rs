//! Measures the memory traffic of the benchmarked kernels, and compares it with the minimum. This is a test, because
//! only an emulated device counts the traffic: `cargo xtask emulate traffic`.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};

use burn::tensor::{DType, Device};
use burn_megatron::kernel_selection::Operation;
use burn_megatron::kernels::attention::Portable;
use serde_json::Value;

use super::{Direction, Inputs, KernelBenchmark, Shape, subjects, work};
use crate::timing::Work;

/// The variable with the file to which an emulated device writes the counts of each launch.
const COUNTS: &str = "BURN_MEGATRON_EMULATOR_COUNTS";

/// The size of a sector in bytes. A sector is the unit of memory transfers.
const SECTOR: u64 = 32;

/// Returns a size that is large enough for a small constant overhead. The backward of norms writes a row of partial
/// sums for each resident cube.
fn shape(subject: &KernelBenchmark) -> Shape {
    let rows = match subject.operation {
        Operation::Norm => 8192,
        _ => 256,
    };
    Shape { rows, width: 2048 }
}

/// Returns the target on an H200, as a fraction of the speed of a copy. Returns `None` if the kernel is not
/// memory-bound.
fn target(subject: &KernelBenchmark, direction: Direction) -> Option<f64> {
    match (subject.operation, direction) {
        (Operation::Norm, Direction::Backward) => Some(0.75),
        (Operation::Norm | Operation::Activation | Operation::Optimizer, _) => Some(0.90),
        (Operation::Softmax | Operation::Loss | Operation::Rope, _) => Some(0.85),
        (Operation::Dropout, _) => Some(0.75),
        _ => None,
    }
}

/// Memory traffic of the launches of one run.
#[derive(Default)]
struct MemoryTraffic {
    launches: u64,
    /// The bytes of the distinct sectors of each launch: the minimum memory traffic.
    memory: u64,
    /// The bytes of the sectors of each instruction: the cache traffic.
    caches: u64,
}

impl MemoryTraffic {
    fn add(&mut self, launch: &Value) {
        let both = |name: &str| {
            let number = |side: &str| launch[name][side].as_u64().expect("a number of sectors");
            SECTOR * (number("read") + number("written"))
        };
        self.launches += 1;
        self.memory += both("touched_sectors");
        self.caches += both("global_sectors");
    }
}

/// Row of the table.
struct TrafficRow {
    name: &'static str,
    direction: Direction,
    dtype: DType,
    least: u64,
    traffic: MemoryTraffic,
    target: Option<f64>,
}

impl TrafficRow {
    /// Returns the fraction of a copy's speed that the traffic allows.
    fn share(&self) -> f64 {
        self.least as f64 / self.traffic.memory as f64
    }

    fn misses(&self) -> bool {
        self.target.is_some_and(|target| self.share() < target)
    }
}

impl Display for TrafficRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = self
            .target
            .map_or("-".into(), |target| format!("{target:.2}"));
        write!(
            f,
            "| {} | {} | {} | {} | {:.2} | {:.2} | {} |",
            self.name,
            self.direction.name(),
            format!("{:?}", self.dtype).to_lowercase(),
            self.traffic.launches,
            self.share(),
            self.traffic.caches as f64 / self.least as f64,
            target,
        )
    }
}

/// Runs the work twice, and counts the second run. The first run compiles the kernels.
fn traffic_of(device: &Device, counts: &Path, work: &Work) -> MemoryTraffic {
    work()();
    let run = work();
    device.sync().expect("the device works");
    let before = fs::read_to_string(counts).expect("launches were counted");
    run();
    device.sync().expect("the device works");
    let after = fs::read_to_string(counts).expect("launches were counted");
    let mut traffic = MemoryTraffic::default();
    for line in after[before.len()..].lines() {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        // Other lines are copies, fills and waits.
        if line.get("kernel").is_some() {
            traffic.add(&line);
        }
    }
    traffic
}

fn lines(
    subject: &KernelBenchmark,
    dtype: DType,
    device: &Device,
    counts: &Path,
) -> Vec<TrafficRow> {
    let shape = shape(subject);
    let inputs = Inputs::draw(subject, &shape, (device, dtype), Arc::new(Portable));
    let inputs = inputs.expect("inputs");
    let gradient = inputs.gradient(subject);
    let least = |direction| subject.bytes(direction, &shape, dtype);
    let some = Direction::BOTH.into_iter();
    let some = some.filter(|direction| least(*direction) > 0);
    some.map(|direction| TrafficRow {
        name: subject.name,
        direction,
        dtype: subject.dtype(0, dtype),
        least: least(direction) as u64,
        traffic: traffic_of(
            device,
            counts,
            &work(
                subject.fused,
                subject.written,
                direction,
                &inputs,
                &gradient,
            ),
        ),
        target: target(subject, direction),
    })
    .collect()
}

#[test]
fn kernels_move_little_more_than_they_must() {
    let Some(counts) = env::var_os(COUNTS).map(PathBuf::from) else {
        println!("not run: this device does not count, {COUNTS} is not set");
        return;
    };
    let device = Device::cuda(0);
    let mut missed = vec![];
    println!("| operation | direction | type | launches | at most of copy | caches | target |");
    println!("|---|---|---|---|---|---|---|");
    for dtype in [DType::F32, DType::BF16] {
        // Launches of library products are not counted.
        let ours = subjects().into_iter();
        for subject in ours.filter(|subject| subject.operation != Operation::Linear) {
            for line in lines(&subject, dtype, &device, &counts) {
                println!("{line}");
                if line.misses() {
                    missed.push(line.to_string());
                }
            }
        }
    }
    assert!(
        missed.is_empty(),
        "below the target:\n{}",
        missed.join("\n")
    );
}

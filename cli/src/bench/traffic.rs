//! What the kernels of the table move, against what they must. A test, as only an emulated device
//! counts: `cargo xtask emulate traffic`.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::{env, fs};

use burn::tensor::{DType, Device};
use burn_megatron::choice::Operation;
use serde_json::Value;

use super::case::{Direction, Inputs, Shape, Subject, work};
use super::subjects::subjects;
use super::timing::Work;

/// Where an emulated device writes the numbers of each launch.
const COUNTS: &str = "BURN_MEGATRON_EMULATOR_COUNTS";

/// Bytes of a sector, the least that memory moves.
const SECTOR: u64 = 32;

/// Large enough for what is the same at any number of rows to be little. The norms' backward leaves a
/// row of sums for each resident cube.
fn shape(subject: &Subject) -> Shape {
    let rows = match subject.operation {
        Operation::Norm => 8192,
        _ => 256,
    };
    Shape { rows, width: 2048 }
}

/// The share of a copy's speed that is aimed at on an H200. `None` for what is not bound by memory.
fn aim(subject: &Subject, direction: Direction) -> Option<f64> {
    match (subject.operation, direction) {
        (Operation::Norm, Direction::Backward) => Some(0.75),
        (Operation::Norm | Operation::Activation | Operation::Optimizer, _) => Some(0.90),
        (Operation::Softmax | Operation::Loss | Operation::Rope, _) => Some(0.85),
        (Operation::Dropout, _) => Some(0.75),
        _ => None,
    }
}

/// What the launches of one run moved.
#[derive(Default)]
struct Moved {
    launches: u64,
    /// Bytes of the different sectors of each launch: what memory moves at the least.
    memory: u64,
    /// Bytes of the sectors of each instruction: what the caches serve.
    caches: u64,
}

impl Moved {
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

/// One line of the table.
struct Line {
    name: &'static str,
    direction: Direction,
    dtype: DType,
    least: u64,
    moved: Moved,
    aim: Option<f64>,
}

impl Line {
    /// The share of a copy's speed that what is moved allows.
    fn share(&self) -> f64 {
        self.least as f64 / self.moved.memory as f64
    }

    fn misses(&self) -> bool {
        self.aim.is_some_and(|aim| self.share() < aim)
    }
}

impl Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let aim = self.aim.map_or("-".into(), |aim| format!("{aim:.2}"));
        write!(
            f,
            "| {} | {} | {} | {} | {:.2} | {:.2} | {} |",
            self.name,
            self.direction.name(),
            format!("{:?}", self.dtype).to_lowercase(),
            self.moved.launches,
            self.share(),
            self.moved.caches as f64 / self.least as f64,
            aim,
        )
    }
}

/// Runs it twice, and counts the second time: the first one compiles.
fn moved(device: &Device, counts: &Path, work: &Work) -> Moved {
    work()();
    let run = work();
    device.sync().expect("the device works");
    let before = fs::read_to_string(counts).expect("launches were counted");
    run();
    device.sync().expect("the device works");
    let after = fs::read_to_string(counts).expect("launches were counted");
    let mut moved = Moved::default();
    for line in after[before.len()..].lines() {
        moved.add(&serde_json::from_str(line).expect("a line of JSON"));
    }
    moved
}

fn lines(subject: &Subject, dtype: DType, device: &Device, counts: &Path) -> Vec<Line> {
    let dtype = if subject.always_f32 {
        DType::F32
    } else {
        dtype
    };
    let shape = shape(subject);
    let inputs = Inputs::draw(subject, &shape, device, dtype).expect("inputs");
    let gradient = inputs.gradient(subject);
    let both = Direction::BOTH.into_iter().zip(subject.traffic);
    let some = both.filter(|(_, traffic)| traffic(&shape) > 0);
    some.map(|(direction, traffic)| Line {
        name: subject.name,
        direction,
        dtype,
        least: (traffic(&shape) * dtype.size()) as u64,
        moved: moved(
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
        aim: aim(subject, direction),
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
    println!("| operation | direction | type | launches | at most of copy | caches | aim |");
    println!("|---|---|---|---|---|---|---|");
    for dtype in [DType::F32, DType::BF16] {
        // Products are the library's, whose launches are not counted.
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
        "above what the aims allow:\n{}",
        missed.join("\n")
    );
}

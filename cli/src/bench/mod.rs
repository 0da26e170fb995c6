//! `burn-megatron bench`.

pub mod args;
mod case;
pub mod checkpoint;
pub mod context;
pub mod dispatch;
mod fp8;
pub mod gemm;
mod gemm_tune;
pub mod generate;
pub mod host;
mod moe;
pub mod overlap;
mod peer;
pub mod pipeline;
pub mod plan;
#[cfg(feature = "tokenizers")]
pub mod preprocess;
pub mod step;
mod subjects;
mod table;
mod timing;
#[cfg(all(test, feature = "cuda"))]
mod traffic;

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::choice::Operation;
use burn_megatron::device::DeviceKind;

use crate::error::Error;
use args::{BenchArgs, BenchDtype};
use case::{Direction, Inputs, KernelBenchmark, Shape, work};
use subjects::subjects;
use table::{KernelReport, KernelRow};
use timing::{TimingConfig, Work, median, time_interleaved};

/// Times the kernels, and prints a table.
pub fn run(args: &BenchArgs) -> Result<ExitCode, Error> {
    let run = KernelTimer {
        device: args.device.devices()?.remove(0),
        dtype: args.dtype.into(),
        timing: TimingConfig {
            samples: args.repeats,
            warm_up: Duration::from_millis(args.warm_up_ms),
        },
    };
    if !run.device.supports_dtype(run.dtype) {
        return Err(format!("--device {} does not support {:?}", args.device, run.dtype).into());
    }
    let Chosen {
        operations,
        eight_bits,
        experts,
    } = chosen(&args.only)?;
    let cpu = args.device == DeviceKind::Cpu;
    let sizes = |own: &[Shape]| match (args.sizes.is_empty(), own) {
        (false, _) => args.sizes.clone(),
        (true, []) => grid(cpu),
        (true, own) => own.to_vec(),
    };
    let mut report = KernelReport::new(&run.device, args.device, args.dtype.name(), args.repeats);
    println!("{}", report.header());
    let mut show = |row: KernelRow| {
        println!("{}", row.line());
        report.rows.push(row);
    };
    for subject in &operations {
        for shape in sizes(&[]).iter().filter(|shape| (subject.takes)(shape)) {
            time(subject, &run, shape)?.into_iter().for_each(&mut show);
        }
    }
    for subject in &eight_bits {
        let [small, large] = subject.sizes;
        for shape in sizes(if cpu { small } else { large }) {
            let pairs = subject.pairs(&shape, &run.device, run.dtype);
            let rows = time_pairs(subject.name, pairs, &run, &shape)?;
            rows.into_iter().for_each(&mut show);
        }
    }
    for subject in &experts {
        for shape in sizes(&moe::SIZES[usize::from(!cpu)..][..1]) {
            let pairs = subject.pairs(&shape, &run.device, run.dtype);
            let rows = time_pairs(subject.name, pairs, &run, &shape)?;
            rows.into_iter().for_each(&mut show);
        }
    }
    if let Some(summary) = report.summary() {
        println!("{summary}");
    }
    if let Some(path) = &args.json {
        report.write(path)?;
        println!("written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The settings of all timings.
struct KernelTimer {
    device: Device,
    dtype: DType,
    timing: TimingConfig,
}

/// The benchmarks to run.
struct Chosen {
    operations: Vec<KernelBenchmark>,
    eight_bits: Vec<fp8::Fp8Benchmark>,
    experts: Vec<moe::MoeBenchmark>,
}

/// The benchmarks whose name or operation is in `only`, or all of them.
fn chosen(only: &[String]) -> Result<Chosen, Error> {
    let wanted = |names: [&str; 2]| {
        only.is_empty() || only.iter().any(|name| names.contains(&name.as_str()))
    };
    let all = subjects().into_iter().map(|subject| subject.name);
    let all = all.chain(fp8::subjects().into_iter().map(|subject| subject.name));
    let all = all.chain(moe::subjects().into_iter().map(|subject| subject.name));
    let all: Vec<_> = all.collect();
    let mut groups = Operation::ALL.map(Operation::name).to_vec();
    groups.extend([fp8::GROUP, moe::GROUP]);
    for name in only.iter().map(String::as_str) {
        if !all.contains(&name) && !groups.contains(&name) {
            return Err(format!(
                "invalid --only {name}: expected {}, or a group: {}",
                all.join(", "),
                groups.join(", ")
            )
            .into());
        }
    }
    let mut operations = subjects();
    operations.retain(|subject| wanted([subject.name, subject.operation.name()]));
    let mut eight_bits = fp8::subjects();
    eight_bits.retain(|subject| wanted([subject.name, fp8::GROUP]));
    let mut experts = moe::subjects();
    experts.retain(|subject| wanted([subject.name, moe::GROUP]));
    Ok(Chosen {
        operations,
        eight_bits,
        experts,
    })
}

/// The default sizes: on a CPU those of small models.
fn grid(cpu: bool) -> Vec<Shape> {
    let sizes: &[(usize, usize)] = if cpu {
        &[(1024, 96), (1024, 384), (4096, 1024), (512, 8192)]
    } else {
        &[
            (4096, 1024),
            (8192, 2048),
            (8192, 4096),
            (8192, 8192),
            (8192, 32768),
            (8192, 131072),
        ]
    };
    let shape = |(rows, width): &(usize, usize)| Shape {
        rows: *rows,
        width: *width,
    };
    sizes.iter().map(shape).collect()
}

/// Times both directions of an operation, its composition and a copy of as many bytes.
fn time(
    subject: &KernelBenchmark,
    run: &KernelTimer,
    shape: &Shape,
) -> Result<Vec<KernelRow>, Error> {
    let dtype = if subject.always_f32 {
        DType::F32
    } else {
        run.dtype
    };
    let inputs = Inputs::draw(subject, shape, &run.device, dtype)?;
    let gradient = inputs.gradient(subject);
    let mut rows = vec![];
    for (direction, traffic) in Direction::BOTH.into_iter().zip(subject.traffic) {
        let bytes = traffic(shape) * dtype.size();
        if bytes == 0 {
            continue;
        }
        let copy = copy(bytes, &run.device);
        let [fused, composed] = [subject.fused, subject.composed]
            .map(|form| work(form, subject.written, direction, &inputs, &gradient));
        let times = time_interleaved(&run.device, run.timing, &[&fused, &composed, &copy])?;
        rows.push(KernelRow {
            operation: subject.name.into(),
            direction: direction.name().into(),
            rows: shape.rows,
            width: shape.width,
            bytes,
            fused_seconds: median(&times[0]),
            composed_seconds: Some(median(&times[1])),
            copy_seconds: median(&times[2]),
        });
    }
    Ok(rows)
}

/// Times work, what it is compared with, and a copy of as many bytes.
fn time_pairs(
    name: &str,
    pairs: Vec<fp8::TimedPair>,
    run: &KernelTimer,
    shape: &Shape,
) -> Result<Vec<KernelRow>, Error> {
    let time = |pair: fp8::TimedPair| {
        let copy = copy(pair.bytes, &run.device);
        let mut works = vec![&pair.fused, &copy];
        works.extend(&pair.plain);
        let times = time_interleaved(&run.device, run.timing, &works)?;
        Ok(KernelRow {
            operation: name.into(),
            direction: pair.direction.into(),
            rows: shape.rows,
            width: shape.width,
            bytes: pair.bytes,
            fused_seconds: median(&times[0]),
            composed_seconds: times.get(2).map(|times| median(times)),
            copy_seconds: median(&times[1]),
        })
    };
    pairs.into_iter().map(time).collect()
}

/// A copy: one read and one write of f32, the highest bandwidth of this device.
fn copy(bytes: usize, device: &Device) -> Work<'static> {
    let half = Tensor::<1>::ones([(bytes / 8).max(1)], device);
    Box::new(move || {
        let half = half.clone();
        Box::new(move || drop(half.neg()))
    })
}

impl From<BenchDtype> for DType {
    fn from(dtype: BenchDtype) -> Self {
        match dtype {
            BenchDtype::F32 => Self::F32,
            BenchDtype::F16 => Self::F16,
            BenchDtype::Bf16 => Self::BF16,
        }
    }
}

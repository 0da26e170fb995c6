//! `burn-megatron bench`.

pub mod args;
mod attempt;
pub(crate) mod case;
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
pub(crate) mod subjects;
mod table;
pub(crate) mod timing;
#[cfg(all(test, feature = "cuda"))]
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::{AttentionChoice, Operation};
use burn_megatron::kernels::attention::{AttentionEngine, EngineKind, Portable, select_engine};

use crate::error::Error;
use args::{BenchArgs, BenchDtype};
use attempt::attempt;
use case::{Direction, Inputs, KernelBenchmark, Shape, work};
use subjects::{heads, subjects};
use table::{KernelReport, KernelRow};
use timing::{TimingConfig, Work, median, time_interleaved};

/// Times the kernels, and prints a table.
pub fn run(args: &BenchArgs) -> Result<ExitCode, Error> {
    let run = KernelTimer {
        device: args.device.checked()?,
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
    let mut cases = vec![];
    for subject in &operations {
        for shape in sizes(&[]) {
            if (subject.takes)(&shape) {
                let engines = run.engines(subject, &shape, &args.attention)?;
                cases.extend(engines.into_iter().map(|engine| (subject, shape, engine)));
            }
        }
    }
    let mut report = KernelReport::new(&run.device, args.device, args.dtype.name(), args.repeats);
    println!("{}", report.header());
    // After each row: a later row may not fit into the memory.
    let mut add = |name: &str, shape: Shape, rows: Result<Vec<KernelRow>, String>| {
        for line in report.add(name, shape, rows) {
            println!("{line}");
        }
        let write = |path: &PathBuf| report.write(path);
        args.json.as_ref().map_or(Ok(()), write)
    };
    for (subject, shape, engine) in cases {
        let rows = attempt(|| time(subject, &run, &shape, engine));
        add(subject.name, shape, rows)?;
    }
    for subject in &eight_bits {
        let [small, large] = subject.sizes;
        for shape in sizes(if cpu { small } else { large }) {
            let rows = attempt(|| {
                let pairs = subject.pairs(&shape, &run.device, run.dtype);
                time_pairs(subject.name, pairs, &run, &shape)
            });
            add(subject.name, shape, rows)?;
        }
    }
    for subject in &experts {
        for shape in sizes(&moe::SIZES[usize::from(!cpu)..][..1]) {
            let rows = attempt(|| {
                let pairs = subject.pairs(&shape, &run.device, run.dtype);
                time_pairs(subject.name, pairs, &run, &shape)
            });
            add(subject.name, shape, rows)?;
        }
    }
    if let Some(summary) = report.summary() {
        println!("{summary}");
    }
    if let Some(path) = &args.json {
        println!("written to {}", path.display());
    }
    let failed = report.failed.len();
    attempt::finish("bench kernels", failed, failed + report.rows.len())
}

/// The settings of all timings.
struct KernelTimer {
    device: Device,
    dtype: DType,
    timing: TimingConfig,
}

/// An engine of attention, and its name where the benchmark has several engines.
type TimedEngine = (Option<&'static str>, Arc<dyn AttentionEngine>);

impl KernelTimer {
    /// Returns the engines that a benchmark is timed with. Only attention has more than one.
    fn engines(
        &self,
        subject: &KernelBenchmark,
        shape: &Shape,
        choices: &[AttentionChoice],
    ) -> Result<Vec<TimedEngine>, Error> {
        if subject.operation != Operation::Attention {
            return Ok(vec![(None, Arc::new(Portable))]);
        }
        let heads = heads(shape);
        let mut engines: Vec<TimedEngine> = vec![];
        for choice in choices {
            let kinds = choice.engine().map(|engine| vec![engine]);
            let kinds = kinds.unwrap_or(EngineKind::ALL.to_vec());
            let heads = (heads, heads.width);
            let selected = select_engine(&kinds, &self.device, self.dtype, heads, None);
            let selected = selected.map_err(|reason| {
                let Shape { rows, width } = shape;
                format!("--attention {choice} at {rows}x{width}: {reason}; remove it or use auto")
            })?;
            let name = Some(selected.kind.name());
            if engines.iter().all(|(known, _)| *known != name) {
                engines.push((name, selected.engine));
            }
        }
        Ok(engines)
    }
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
    let operations = Operation::ALL.iter().copied();
    let mut groups: Vec<_> = operations.map(Operation::name).collect();
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
    (name, engine): TimedEngine,
) -> Result<Vec<KernelRow>, Error> {
    let inputs = Inputs::draw(subject, shape, (&run.device, run.dtype), engine)?;
    let gradient = inputs.gradient(subject);
    let mut rows = vec![];
    for direction in Direction::BOTH {
        let bytes = subject.bytes(direction, shape, run.dtype);
        if bytes == 0 {
            continue;
        }
        let copy = copy(bytes, &run.device);
        let [fused, composed] = [subject.fused, subject.composed]
            .map(|form| work(form, subject.written, direction, &inputs, &gradient));
        let times = time_interleaved(&run.device, run.timing, &[&fused, &composed, &copy])?;
        rows.push(KernelRow {
            operation: subject.name.into(),
            engine: name.map(Into::into),
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
            engine: None,
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

//! The `burn-megatron-bench kernels` benchmark: the time of each fused kernel, compared with the same computation in
//! separate Burn operations and with a copy.

pub mod args;
mod fp8;
mod moe;
mod pairs;
mod table;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::{AttentionChoice, Operation};
use burn_megatron::kernels::attention::{AttentionEngine, EngineKind, Portable, select_engine};
use burn_megatron_cli::internal::{
    Direction, Error, Inputs, KernelBenchmark, Shape, TimingConfig, Work, heads, median, subjects,
    time_interleaved, work,
};

use crate::report::Report;
use args::KernelBenchArgs;
use pairs::{PairBenchmark, TimedPair};
use table::{COLUMNS, KernelRow, KernelSettings, summary};

/// Times the kernels, and prints a table.
pub fn run(args: &KernelBenchArgs) -> Result<(), Error> {
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
    let (operations, pairs) = chosen(&args.only)?;
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
    let dtype = format!("{:?}", run.dtype).to_lowercase();
    let settings = KernelSettings::new(&run.device, args.device, dtype, args.repeats);
    let mut report = Report::begin(&settings.about(), COLUMNS, settings, &args.json);
    let mut attempt = |name: &str, shape: Shape, rows: &dyn Fn() -> Result<Vec<_>, Error>| {
        let name = format!("{name} {} x {}", shape.rows, shape.width);
        let failed = |reason| format!("{name} failed: {reason}").into();
        report.attempt(&name, failed, rows)
    };
    for (subject, shape, engine) in cases {
        let rows = || time(subject, &run, &shape, &engine);
        attempt(subject.name, shape, &rows)?;
    }
    for subject in &pairs {
        let [small, large] = subject.sizes;
        for shape in sizes(if cpu { small } else { large }) {
            let rows = || {
                let pairs = (subject.pairs)(&shape, &run.device, run.dtype);
                time_pairs(subject.name, pairs, &run, &shape)
            };
            attempt(subject.name, shape, &rows)?;
        }
    }
    let summary = summary(&report.results.rows);
    report.finish(&summary)
}

/// The settings of all measurements.
struct KernelTimer {
    device: Device,
    dtype: DType,
    timing: TimingConfig,
}

/// An attention engine, with its name if the benchmark has several engines.
type TimedEngine = (Option<&'static str>, Arc<dyn AttentionEngine>);

impl KernelTimer {
    /// Returns the engines with which a benchmark is timed. Only attention has more than one.
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

/// Returns the benchmarks whose name or group is in `only`, or all benchmarks if it is empty.
fn chosen(only: &[String]) -> Result<(Vec<KernelBenchmark>, Vec<PairBenchmark>), Error> {
    let wanted = |names: [&str; 2]| {
        only.is_empty() || only.iter().any(|name| names.contains(&name.as_str()))
    };
    let mut operations = subjects();
    let mut pairs: Vec<_> = fp8::subjects().into_iter().chain(moe::subjects()).collect();
    let names = operations.iter().map(|subject| subject.name);
    let names = names.chain(pairs.iter().map(|subject| subject.name));
    let names: Vec<_> = names.collect();
    let mut groups: Vec<_> = Operation::ALL
        .iter()
        .copied()
        .map(Operation::name)
        .collect();
    groups.extend([fp8::GROUP, moe::GROUP]);
    for name in only.iter().map(String::as_str) {
        if !names.contains(&name) && !groups.contains(&name) {
            return Err(format!(
                "invalid --only {name}: expected {}, or a group: {}",
                names.join(", "),
                groups.join(", ")
            )
            .into());
        }
    }
    operations.retain(|subject| wanted([subject.name, subject.operation.name()]));
    pairs.retain(|subject| wanted([subject.name, subject.group]));
    Ok((operations, pairs))
}

/// Returns the default sizes. On a CPU, these are sizes of small models.
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

/// Measures the forward and the backward of an operation, the same computation in separate Burn operations, and a copy
/// of the same number of bytes.
fn time(
    subject: &KernelBenchmark,
    run: &KernelTimer,
    shape: &Shape,
    (name, engine): &TimedEngine,
) -> Result<Vec<KernelRow>, Error> {
    let inputs = Inputs::draw(subject, shape, (&run.device, run.dtype), Arc::clone(engine))?;
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

/// Times work, its baseline, and a copy of the same number of bytes.
fn time_pairs(
    name: &str,
    pairs: Vec<TimedPair>,
    run: &KernelTimer,
    shape: &Shape,
) -> Result<Vec<KernelRow>, Error> {
    let time = |pair: TimedPair| {
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

/// Returns the work of copying a tensor in f32, which reads and writes every element once. It reaches the highest
/// bandwidth of the device.
fn copy(bytes: usize, device: &Device) -> Work<'static> {
    let half = Tensor::<1>::ones([(bytes / 8).max(1)], device);
    Box::new(move || {
        let half = half.clone();
        Box::new(move || drop(half.neg()))
    })
}

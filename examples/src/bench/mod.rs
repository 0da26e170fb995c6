//! `burn-megatron bench`.

mod case;
pub mod overlap;
mod subjects;
mod table;
mod timing;

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::choice::Operation;
use burn_megatron::device::DeviceKind;

use crate::cli::{BenchArgs, BenchDtype};
use crate::recipe::Error;
pub use case::Shape;
use case::{Direction, Inputs, Subject, work};
use subjects::subjects;
use table::{Report, Row};
use timing::{Effort, Work, median, take_turns};

/// Times the kernels, and prints a table.
pub fn run(args: &BenchArgs) -> Result<ExitCode, Error> {
    let run = Run {
        device: args.device.devices()?.remove(0),
        dtype: args.dtype.into(),
        effort: Effort {
            samples: args.samples,
            warm_up: Duration::from_millis(args.warm_up_ms),
        },
    };
    if !run.device.supports_dtype(run.dtype) {
        return Err(format!("{} has no {:?}", args.device, run.dtype).into());
    }
    let chosen = chosen(&args.only)?;
    let shapes = match args.sizes.is_empty() {
        true => grid(args.device == DeviceKind::Cpu),
        false => args.sizes.clone(),
    };
    let mut report = Report::new(format!("{:?}", run.device), args.dtype.name(), args.samples);
    println!("{}", report.header());
    for subject in &chosen {
        for shape in shapes.iter().filter(|shape| (subject.takes)(shape)) {
            for row in time(subject, &run, shape)? {
                println!("{row}");
                report.rows.push(row);
            }
        }
    }
    if let Some(path) = &args.json {
        report.write(path)?;
        println!("written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// How everything is timed.
struct Run {
    device: Device,
    dtype: DType,
    effort: Effort,
}

/// Those whose name or operation is among `only`, or all of them.
fn chosen(only: &[String]) -> Result<Vec<Subject>, Error> {
    let is =
        |subject: &Subject, name: &str| subject.name == name || subject.operation.name() == name;
    for name in only {
        if !subjects().iter().any(|subject| is(subject, name)) {
            let names: Vec<_> = subjects().iter().map(|subject| subject.name).collect();
            let operations = Operation::ALL.map(Operation::name).join(", ");
            return Err(format!(
                "`{name}` is not timed; {} are, or all of an operation: {operations}",
                names.join(", ")
            )
            .into());
        }
    }
    let wanted = |subject: &Subject| only.is_empty() || only.iter().any(|name| is(subject, name));
    Ok(subjects().into_iter().filter(wanted).collect())
}

/// The sizes without `--sizes`: on a CPU those of small models.
fn grid(cpu: bool) -> Vec<Shape> {
    let sizes: &[(usize, usize)] = match cpu {
        true => &[(1024, 96), (1024, 384), (4096, 1024), (512, 8192)],
        false => &[
            (4096, 1024),
            (8192, 2048),
            (8192, 4096),
            (8192, 8192),
            (8192, 32768),
            (8192, 131072),
        ],
    };
    let shape = |(rows, width): &(usize, usize)| Shape {
        rows: *rows,
        width: *width,
    };
    sizes.iter().map(shape).collect()
}

/// Both directions of an operation, beside its composition and a copy of as many bytes.
fn time(subject: &Subject, run: &Run, shape: &Shape) -> Result<Vec<Row>, Error> {
    let dtype = if subject.always_f32 {
        DType::F32
    } else {
        run.dtype
    };
    let inputs = Inputs::draw(subject, shape, &run.device, dtype)?;
    let output = (subject.fused)(&inputs);
    let gradient = output.random_like(Distribution::Normal(0.0, 1.0));
    let mut rows = vec![];
    for (direction, traffic) in Direction::BOTH.into_iter().zip(subject.traffic) {
        let bytes = traffic(shape) * dtype.size();
        if bytes == 0 {
            continue;
        }
        // One read and one write, of f32: the fastest way in which this device moves bytes.
        let half = Tensor::<1>::ones([(bytes / 8).max(1)], &run.device);
        let copy: Work = Box::new(|| {
            let half = half.clone();
            Box::new(move || drop(half.neg()))
        });
        let fused = work(subject.fused, direction, &inputs, &gradient);
        let composed = work(subject.composed, direction, &inputs, &gradient);
        let times = take_turns(&run.device, run.effort, &[&fused, &composed, &copy])?;
        rows.push(Row {
            operation: subject.name.into(),
            direction: direction.name().into(),
            rows: shape.rows,
            width: shape.width,
            bytes,
            fused_seconds: median(&times[0]),
            composed_seconds: median(&times[1]),
            copy_seconds: median(&times[2]),
        });
    }
    Ok(rows)
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

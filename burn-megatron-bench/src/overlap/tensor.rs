//! MLPs under sequence parallelism over a slow link: how much of their exchanges travels while products are computed.

use std::fmt::{self, Display};
use std::process::ExitCode;
use std::str::FromStr;
use std::thread::available_parallelism;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::testing::{SimulatedNetwork, hidden_share};
use burn_megatron::comm::{Engine, ParallelContext, Rank};
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::{ParallelConfig, TpCommOverlap};
use burn_megatron::nn::tp_comm_overlap;
use burn_megatron::nn::{Activation, ModelBuilder, ParallelMlp, ParallelMlpConfig};
use serde::Serialize;

use super::super::args::OverlapArgs;
use super::link_steps::{LinkStep, LinkSteps};
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::set_up;
use burn_megatron_cli::internal::{Columns, wrapped};

/// The split of the exchanges: `none`, `ring`, `bulk`, `ring:N` or `bulk:N`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TpCommOverlapSetting(Option<(TpCommOverlap, Option<usize>)>);

impl FromStr for TpCommOverlapSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected none, ring, bulk, or with N chunks ring:N or bulk:N";
        let method = match text.split_once(':') {
            None if text == "none" => Some(None),
            None => text.parse().ok().map(|method| Some((method, None))),
            Some((name, n)) => {
                let both = name.parse().ok().zip(n.parse().ok());
                both.map(|(method, n)| Some((method, Some(n))))
            }
        };
        let method = method.map(Self);
        let method = method.filter(|method| method.layout(2).check().is_ok());
        method.ok_or_else(|| format!("invalid overlap {text:?}: {expected}"))
    }
}

impl Display for TpCommOverlapSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&match self.0 {
            None => "none".into(),
            Some((method, None)) => method.to_string(),
            Some((method, Some(splits))) => format!("{method}:{splits}"),
        })
    }
}

impl TpCommOverlapSetting {
    fn layout(self, tensor: usize) -> ParallelConfig {
        let layout = ParallelConfig::new()
            .with_data(1)
            .with_tensor(tensor)
            .with_sequence_parallel(true);
        ParallelConfig {
            tp_comm_overlap: self.0.map(|(method, _)| method),
            tp_comm_overlap_num_splits: self.0.and_then(|(_, splits)| splits),
            ..layout
        }
    }
}

/// A line of the table: means over the ranks of the medians over the steps, times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct TensorRow {
    tensor: usize,
    method: String,
    /// Whether the times are those of a virtual clock.
    counted: bool,
    /// Bytes that a rank sends in a step.
    bytes: f64,
    calls: f64,
    step_seconds: f64,
    transfer_seconds: f64,
    blocked_seconds: f64,
    /// 1 - blocked / transfers, at least 0.
    hidden: f64,
}

const COLUMNS: Columns<9> = Columns {
    widths: [-6, -8, -7, 6, 9, 7, 7, 9, 6],
    optional: &[3],
};

impl Display for TensorRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clock = if self.counted { "counted" } else { "real" };
        f.write_str(&COLUMNS.line([
            self.tensor.to_string(),
            self.method.clone(),
            clock.into(),
            format!("{:.0}", self.calls),
            format!("{:.2}", self.bytes / 1e6),
            format!("{:.3}", self.step_seconds),
            format!("{:.3}", self.transfer_seconds),
            format!("{:.3}", self.blocked_seconds),
            format!("{:.0} %", 100.0 * self.hidden),
        ]))
    }
}

/// Times the layers with each method on each number of ranks, and prints a table.
pub fn run(args: &OverlapArgs) -> Result<ExitCode, Error> {
    let about = format!(
        "{} MLPs of {} features, {} samples of {} tokens, f32: forward and backward, {} steps after {}; 1 compute thread per \
         rank; a link on which the transfers of a step take {} of the time of its products",
        args.layers,
        args.hidden,
        args.micro_batch_size,
        args.context,
        args.steps,
        args.warm_up,
        args.share
    );
    let mut rows = vec![];
    for (index, tensor) in args.tensor_parallel.iter().enumerate() {
        let mut bench = TensorBenchmark::new(args, *tensor)?;
        let setup = set_up(&args.world, &args.nccl.0, DeviceKind::Cpu, *tensor)?;
        // A launcher may have given each process its own cores.
        let cores = available_parallelism().map_or(1, usize::from);
        bench.counted |= setup.engine == Engine::Threads && *tensor > cores;
        let prints = setup.own_rank.is_none_or(|rank| rank == 0);
        if index == 0 && prints {
            println!("{}\n\n{}", wrapped(&about), header());
        }
        let world = setup.world.compute_threads(1);
        let measured = world.run(|rank| bench.on_rank(&rank))?;
        if prints {
            for row in measured.into_iter().next().unwrap_or_default() {
                println!("{row}");
                rows.push(row);
            }
        }
    }
    if rows.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let legend = "step, link, blocked: seconds of a step; hidden: 1 - blocked / link. Of N chunks in bulk at most 1 - 1/N is \
                  hidden. A counted clock advances by products and transfers only";
    println!("\n{}", wrapped(legend));
    if let Some(path) = &args.json {
        super::write(path, &serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn header() -> String {
    COLUMNS.line([
        "tensor", "overlap", "clock", "calls", "MB sent", "step", "link", "blocked", "hidden",
    ])
}

/// The layers on a number of ranks.
struct TensorBenchmark<'a> {
    args: &'a OverlapArgs,
    tensor: usize,
    counted: bool,
}

impl<'a> TensorBenchmark<'a> {
    /// Checks the sizes.
    fn new(args: &'a OverlapArgs, tensor: usize) -> Result<Self, Error> {
        if tensor < 2 {
            return Err(format!("invalid --tensor-parallel {tensor}: expected at least 2").into());
        }
        if !args.context.is_multiple_of(tensor) {
            return Err(format!(
                "invalid --context {}: expected a multiple of --tensor-parallel {tensor}",
                args.context
            )
            .into());
        }
        for method in &args.tp_comm_overlap {
            tp_comm_overlap::check(&method.layout(tensor), args.context)?;
        }
        Ok(Self {
            args,
            tensor,
            counted: args.counted,
        })
    }

    /// The rows, which are the same on each rank.
    fn on_rank(&self, rank: &Rank) -> Result<Vec<TensorRow>, Error> {
        let whole = TpCommOverlapSetting(None);
        let steps = self.steps(rank, whole, Duration::ZERO, f64::INFINITY)?;
        let bytes_per_second = self.runs().bandwidth(rank, &steps)?;
        let methods = self.args.tp_comm_overlap.iter();
        let row = |method: &TpCommOverlapSetting| {
            let steps = self.steps(rank, *method, self.runs().latency(), bytes_per_second)?;
            self.row(rank, *method, &steps)
        };
        methods.map(row).collect()
    }

    fn runs(&self) -> LinkSteps<'a> {
        LinkSteps {
            args: self.args,
            ranks: self.tensor,
            counted: self.counted,
        }
    }

    fn steps(
        &self,
        rank: &Rank,
        method: TpCommOverlapSetting,
        latency: Duration,
        bytes_per_second: f64,
    ) -> Result<Vec<LinkStep>, Error> {
        let link = self.runs().link(latency, bytes_per_second)?;
        let groups = ParallelContext::new(&method.layout(self.tensor), rank)?;
        let network = SimulatedNetwork::over(groups.tensor().clone(), &link);
        let groups = groups.with_tensor(network);
        let device = Device::flex().autodiff();
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
        let OverlapArgs {
            layers,
            hidden,
            context,
            micro_batch_size,
            ..
        } = *self.args;
        let config = ParallelMlpConfig::new(hidden, 4 * hidden, Activation::GeluTanh);
        let mlps = (0..layers).map(|i| config.clone().with_bias(false).init(&builder.child(i)));
        let mlps = mlps.collect::<Result<Vec<_>, _>>()?;
        let shape = [micro_batch_size, context / self.tensor, hidden];
        self.runs().run(&groups, &link, || {
            let x = Tensor::ones(shape, &device).require_grad();
            let _gradients = forward(&mlps, x).sum().backward();
            Ok(())
        })
    }

    fn row(
        &self,
        rank: &Rank,
        method: TpCommOverlapSetting,
        steps: &[LinkStep],
    ) -> Result<TensorRow, Error> {
        let mean = |of: fn(&LinkStep) -> f64| self.runs().mean(rank, steps, of);
        Ok(TensorRow {
            tensor: self.tensor,
            method: method.to_string(),
            counted: self.counted,
            bytes: mean(LinkStep::bytes)?,
            calls: mean(LinkStep::calls)?,
            step_seconds: mean(|step| step.seconds)?,
            transfer_seconds: mean(LinkStep::link)?,
            blocked_seconds: mean(|step| step.sum(|transfer| transfer.waited))?,
            hidden: mean(|step| hidden_share(&step.transfers))?,
        })
    }
}

fn forward(mlps: &[ParallelMlp], x: Tensor<3>) -> Tensor<3> {
    let mlps = mlps.iter();
    mlps.fold(x, |x, mlp| x.clone() + mlp.forward(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    #[test]
    fn methods_are_read_as_they_are_written() {
        for text in ["none", "ring", "bulk", "ring:1", "bulk:8"] {
            assert_eq!(
                text.parse::<TpCommOverlapSetting>().unwrap().to_string(),
                text
            );
        }
        for text in ["", "rings", "bulk:1", "bulk:x", "ring:0", "none:2"] {
            let error = text.parse::<TpCommOverlapSetting>().unwrap_err();
            assert!(error.contains("expected none, ring, bulk"), "{error}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let refused = |flags, tensor| {
            let args = parse_text::<OverlapArgs>(flags).unwrap();
            let error = TensorBenchmark::new(&args, tensor).err().unwrap();
            error.to_string()
        };
        assert!(refused("", 1).contains("expected at least 2"));
        assert!(refused("--context 9", 2).contains("a multiple of --tensor-parallel 2"));
        let flags = "--tensor-parallel 2 --context 12 --tp-comm-overlap bulk:4";
        let error = refused(flags, 2);
        assert!(
            error.contains("cannot make 4 equal chunks of the 6 tokens"),
            "{error}"
        );
        for flags in [
            "--tensor-parallel 2 --zero-stages 1",
            "--tp-comm-overlap ring",
            "--counted",
        ] {
            assert!(parse_text::<OverlapArgs>(flags).is_err(), "{flags}");
        }
    }

    /// On the counted clock no machine is too busy.
    #[test]
    fn overlap_hides_most_of_what_is_sent() {
        let flags = "--tensor-parallel 2,4 --layers 2 --hidden 16 --context 32 --steps 1 --counted --latency-us 0";
        let args = parse_text::<OverlapArgs>(flags).unwrap();
        for tensor in &args.tensor_parallel {
            let bench = TensorBenchmark::new(&args, *tensor).unwrap();
            let setup = set_up(&args.world, &args.nccl.0, DeviceKind::Cpu, *tensor).unwrap();
            let rows = setup.world.run(|rank| bench.on_rank(&rank)).unwrap();
            let [none, ring, bulk] = &rows[0][..] else {
                panic!("{rows:?}")
            };
            assert!(none.hidden < 0.7 && none.step_seconds > ring.step_seconds);
            for row in [ring, bulk] {
                assert_eq!(row.bytes, none.bytes, "{row}");
                assert!(row.hidden >= 0.7, "{row}");
            }
            assert!(rows.iter().all(|of_rank| *of_rank == rows[0]));
        }
    }
}

//! Runs MLPs with sequence parallelism over a simulated slow link. Measures the share of their communication that
//! overlaps with matrix multiplications.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::thread::available_parallelism;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{Engine, ParallelContext, Rank};
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::{ParallelConfig, TpCommOverlap};
use burn_megatron::nn::tp_comm_overlap;
use burn_megatron::nn::{Activation, ModelBuilder, ParallelMlp, ParallelMlpConfig};
use burn_megatron_cli::internal::{Error, RankSetup, SettingFlags, set_up};
use burn_megatron_comm_testing::SimulatedNetwork;

use super::args::OverlapArgs;
use crate::layers::{COLUMNS, LEGEND, LayersRow, LayersRun};
use crate::links::{LinkSpeed, LinkStep};
use crate::report::Report;

/// The method of splitting the communication into chunks: `none`, `ring`, `bulk`, `ring:N` or `bulk:N`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TpCommOverlapSetting(Option<(TpCommOverlap, Option<usize>)>);

impl FromStr for TpCommOverlapSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected none, ring, bulk, ring:N or bulk:N (N chunks)";
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

/// Times the layers with each method on each number of ranks, and prints a table.
pub fn run(args: &OverlapArgs) -> Result<(), Error> {
    let about = format!(
        "{} MLPs of {} features, {} samples of {} tokens, forward and backward in f32; {} steps after {} warm-up \
         steps; 1 compute thread per rank; on the simulated link, the transfers of a step take {} of the time of its \
         matrix multiplications",
        args.layers,
        args.hidden,
        args.micro_batch_size,
        args.context,
        args.steps.steps,
        args.steps.warm_up,
        args.share
    );
    let mut report = None;
    for tensor in &args.tensor_parallel {
        check(args, *tensor)?;
        let setup = rank_setup(args, *tensor)?;
        // A launcher may have assigned separate cores to each process.
        let cores = available_parallelism().map_or(1, usize::from);
        let counted = args.counted || (setup.engine == Engine::Threads && *tensor > cores);
        let prints = setup.own_rank.is_none_or(|rank| rank == 0);
        if prints && report.is_none() {
            report = Some(Report::begin(&about, COLUMNS, (), &args.steps.json));
        }
        let world = setup.world.compute_threads(1);
        let rows = world.run(|rank| on_rank(args, &rank, counted))?;
        if let (true, Some(report)) = (prints, &mut report) {
            for row in rows.into_iter().next().unwrap_or_default() {
                report.add(row)?;
            }
        }
    }
    let legend = format!(
        "{LEGEND}. With bulk overlap in N chunks, at most 1 - 1/N of the transfer time is hidden"
    );
    report.map_or(Ok(()), |report| report.finish(&legend))
}

fn rank_setup(args: &OverlapArgs, tensor: usize) -> Result<RankSetup, Error> {
    set_up(
        &args.world,
        &SettingFlags::default(),
        DeviceKind::Cpu,
        tensor,
    )
}

/// Checks the sizes.
fn check(args: &OverlapArgs, tensor: usize) -> Result<(), Error> {
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
    Ok(())
}

/// Returns the rows of the table, which are the same on each rank. The first row is measured without chunks.
fn on_rank(args: &OverlapArgs, rank: &Rank, counted: bool) -> Result<Vec<LayersRow>, Error> {
    let run = args.layers(rank.size(), counted, LinkStep::waited);
    let mut methods = args.tp_comm_overlap.clone();
    methods.retain(|method| method.0.is_some());
    methods.insert(0, TpCommOverlapSetting(None));
    run.rows(rank, &methods, |method, speed| {
        steps(args, &run, rank, *method, speed)
    })
}

fn steps(
    args: &OverlapArgs,
    run: &LayersRun,
    rank: &Rank,
    method: TpCommOverlapSetting,
    speed: LinkSpeed,
) -> Result<Vec<LinkStep>, Error> {
    let link = run.rounds.link(speed)?;
    let groups = ParallelContext::new(&method.layout(run.ranks), rank)?;
    let network = SimulatedNetwork::over(groups.tensor().clone(), &link);
    let groups = groups.with_tensor(network);
    let device = Device::flex().autodiff();
    let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
    let (hidden, context) = (args.hidden, args.context);
    let config = ParallelMlpConfig::new(hidden, 4 * hidden, Activation::GeluTanh);
    let mlps = (0..args.layers).map(|i| config.clone().with_bias(false).init(&builder.child(i)));
    let mlps = mlps.collect::<Result<Vec<_>, _>>()?;
    let shape = [args.micro_batch_size, context / run.ranks, hidden];
    run.rounds.run(&groups, &link, || {
        let x = Tensor::ones(shape, &device).require_grad();
        let _gradients = forward(&mlps, x).sum().backward();
        Ok(())
    })
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
            let error = check(&args, tensor).unwrap_err();
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

    /// With the virtual clock, the load of the machine has no effect.
    #[test]
    fn overlap_hides_most_of_what_is_sent() {
        let flags = "--tensor-parallel 2,4 --layers 2 --hidden 16 --context 32 --steps 1 --counted --latency-us 0";
        let args = parse_text::<OverlapArgs>(flags).unwrap();
        for tensor in &args.tensor_parallel {
            check(&args, *tensor).unwrap();
            let world = rank_setup(&args, *tensor).unwrap().world;
            let rows = world.run(|rank| on_rank(&args, &rank, true)).unwrap();
            let [none, ring, bulk] = &rows[0][..] else {
                panic!("{rows:?}")
            };
            assert!(none.hidden < 0.7 && none.seconds_over_link > ring.seconds_over_link);
            for row in [ring, bulk] {
                assert_eq!(row.bytes, none.bytes, "{row:?}");
                assert!(row.hidden >= 0.7, "{row:?}");
            }
            assert!(rows.iter().all(|of_rank| *of_rank == rows[0]));
        }
    }
}

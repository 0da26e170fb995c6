//! The `burn-megatron-bench dispatch` benchmark: a mixture-of-experts layer on several ranks, with each dispatcher over
//! the same simulated links.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::mesh::{Axis, AxisSet, Grid, ParallelConfig};
use burn_megatron::nn::moe::{
    DispatcherKind, Fp8DispatchScales, MoeMlpConfig, RouterConfig, SharedExpertsConfig,
};
use burn_megatron::nn::{Activation, ModelBuilder};
use burn_megatron_cli::internal::{Error, at_least_one};
use burn_megatron_comm_testing::SimulatedNetwork;
use clap::Args;

use crate::args::{StepFlags, above_zero};
use crate::layers::{COLUMNS, LEGEND, LayersRow, LayersRun};
use crate::links::{INSIDE_A_NODE, LinkSpeed, LinkStep, Rounds, on_threads};
use crate::report::Report;

const RANKS: usize = 4;
const RANKS_PER_NODE: usize = 2;
const EXPERTS: usize = 32;
const EXPERTS_PER_TOKEN: usize = 8;

/// Flags of `dispatch`.
#[derive(Args)]
pub struct DispatchArgs {
    /// Number of tokens per rank.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub tokens: usize,
    /// Width of a token, and inner width of the shared expert. The other experts have half of this inner width.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub hidden: usize,
    /// Time for which the all-to-all dispatcher sends over the link between nodes, as a fraction of the time that the
    /// layer needs without a simulated link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// Flags for the number of steps and the JSON file.
    #[command(flatten)]
    pub steps: StepFlags,
}

/// A benchmark case: a dispatcher and its settings.
#[derive(Clone, Copy, Debug)]
struct DispatchCase {
    dispatcher: DispatcherKind,
    /// Whether the layout sets the number of ranks per node.
    over_nodes: bool,
    fp8: Option<Fp8DispatchScales>,
}

const fn case(
    dispatcher: DispatcherKind,
    over_nodes: bool,
    fp8: Option<Fp8DispatchScales>,
) -> DispatchCase {
    DispatchCase {
        dispatcher,
        over_nodes,
        fp8,
    }
}

const EIGHT_BITS: Option<Fp8DispatchScales> = Some(Fp8DispatchScales::E8m0);

const CASES: [DispatchCase; 6] = [
    case(DispatcherKind::AllToAll, false, None),
    case(DispatcherKind::AllGather, false, None),
    case(DispatcherKind::Flex, false, None),
    case(DispatcherKind::Flex, false, EIGHT_BITS),
    case(DispatcherKind::Flex, true, None),
    case(DispatcherKind::Flex, true, EIGHT_BITS),
];

impl fmt::Display for DispatchCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dispatcher.name())?;
        if self.over_nodes {
            f.write_str(", nodes")?;
        }
        match self.fp8 {
            Some(_) => f.write_str(", FP8"),
            None => Ok(()),
        }
    }
}

/// Measures the time of each dispatcher without a simulated link, and then over the same simulated links.
pub fn run(args: &DispatchArgs) -> Result<(), Error> {
    let bench = Benchmark(args);
    bench.layer(&CASES[0]).check(&bench.layout(false))?;
    let about = format!(
        "{EXPERTS} experts of width {} on {RANKS} ranks, {RANKS_PER_NODE} per node; {} tokens of {} features per rank, with \
         {EXPERTS_PER_TOKEN} experts and a shared expert of the same width per token; forward and backward in f32, ranks as \
         threads with one compute thread each; medians of {} steps",
        args.hidden / 2,
        args.tokens,
        args.hidden,
        args.steps.steps
    );
    let mut report = Report::begin(&about, COLUMNS, (), &args.steps.json);
    for row in bench.rows()? {
        report.add(row)?;
    }
    report.finish(&format!(
        "{LEGEND}. On the link between nodes, the transfers of the first row take {} of the time of the layer. The \
         link inside a node is {INSIDE_A_NODE} times as fast",
        args.share
    ))
}

struct Benchmark<'a>(&'a DispatchArgs);

impl Benchmark<'_> {
    fn layout(&self, over_nodes: bool) -> ParallelConfig {
        let layout = ParallelConfig::new().with_data(RANKS).with_expert(RANKS);
        if over_nodes {
            layout.with_ranks_per_node(RANKS_PER_NODE)
        } else {
            layout
        }
    }

    fn layer(&self, case: &DispatchCase) -> MoeMlpConfig {
        let hidden = self.0.hidden;
        let router = RouterConfig::new(hidden, EXPERTS, EXPERTS_PER_TOKEN);
        MoeMlpConfig::new(router, hidden / 2, Activation::SwiGlu)
            .with_shared(Some(SharedExpertsConfig::new(hidden)))
            .with_dispatcher(case.dispatcher)
            .with_fp8_dispatch(case.fp8)
    }

    fn rows(&self) -> Result<Vec<LayersRow>, Error> {
        let run = LayersRun {
            ranks: RANKS,
            rounds: Rounds::from(&self.0.steps),
            share: self.0.share,
            latency: Duration::ZERO,
            blocked: LinkStep::waited,
        };
        let mut by_rank = on_threads(RANKS, |rank| {
            run.rows(rank, &CASES, |case, speed| {
                self.steps(rank, case, run.rounds, speed)
            })
        })?;
        Ok(by_rank.swap_remove(0))
    }

    fn steps(
        &self,
        rank: &Rank,
        case: &DispatchCase,
        rounds: Rounds,
        speed: LinkSpeed,
    ) -> Result<Vec<LinkStep>, Error> {
        let groups = ParallelContext::new(&self.layout(case.over_nodes), rank)?;
        let link = speed.link(Some(RANKS_PER_NODE))?;
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        let experts = SimulatedNetwork::over(groups.group(Grid::Expert, axes)?, &link);
        let groups = groups.with_group(Grid::Expert, axes, experts);
        let device = Device::flex().autodiff();
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
        let layer = Arc::new(self.layer(case).init(&builder.child("moe"))?);
        let shape = [1, self.0.tokens, self.0.hidden];
        let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad();
        rounds.run(&groups, &link, || {
            let _gradients = layer.forward(x.clone()).sum().backward();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use burn_megatron::mesh::Mesh;
    use burn_megatron::nn::moe::{DispatchNodes, DispatchProblem};

    use super::*;
    use crate::test_flags::parse_text;

    /// The size of an element and of a routing weight (f32), in bytes.
    const ELEMENT: usize = 4;

    /// Returns the number of bytes that a rank sends according to the formula for the dispatcher.
    fn formula(bench: &Benchmark, case: &DispatchCase) -> f64 {
        let mesh = Mesh::new(&bench.layout(case.over_nodes), RANKS).unwrap();
        let problem = DispatchProblem {
            dispatcher: case.dispatcher,
            fp8: case.fp8,
            tokens: bench.0.tokens,
            experts: EXPERTS,
            per_token: EXPERTS_PER_TOKEN,
            groups: None,
            hidden: bench.0.hidden,
            expert: RANKS,
            expert_tensor: 1,
            nodes: DispatchNodes::of(&mesh, EXPERTS),
        };
        let forward = problem.forward_bytes(ELEMENT, ELEMENT).total();
        forward + problem.backward_bytes(ELEMENT, ELEMENT).total()
    }

    /// Checks the number of bytes that a small layer sends with each dispatcher. The simulated link counts the bytes,
    /// which depend on the ranks and nodes to which each token is sent.
    #[test]
    fn a_token_is_sent_to_fewer_ranks_and_nodes() {
        let text = "--tokens 256 --hidden 16 --steps 1 --warm-up 0";
        let args: DispatchArgs = parse_text(text).unwrap();
        let bench = Benchmark(&args);
        let rows = bench.rows().unwrap();
        for (row, case) in rows.iter().zip(&CASES) {
            // A random router selects the experts. The formula does not include the messages with the numbers of
            // tokens.
            let formula = formula(&bench, case);
            assert!((row.bytes / formula - 1.0).abs() < 0.2, "{row:?}");
        }
        let [all_to_all, _, flex, eight_bits, nodes, _] = &rows[..] else {
            panic!("six cases");
        };
        assert!(flex.bytes < all_to_all.bytes && eight_bits.bytes < flex.bytes);
        assert!(nodes.bytes_between_nodes < flex.bytes_between_nodes);
    }
}

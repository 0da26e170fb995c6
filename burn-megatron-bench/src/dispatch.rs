//! `burn-megatron-bench dispatch`: a layer of experts on several ranks, by each dispatcher over the same links.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::comm::testing::{SimulatedNetwork, Transfer};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::mesh::{Axis, AxisSet, Grid, Mesh, ParallelConfig};
use burn_megatron::nn::moe::{
    DispatchNodes, DispatchProblem, DispatcherKind, Fp8DispatchScales, MoeMlpConfig, RouterConfig,
    SharedExpertsConfig,
};
use burn_megatron::nn::{Activation, ModelBuilder};
use burn_megatron_cli::internal::{Error, at_least_one};
use clap::Args;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::args::{StepFlags, above_zero};
use crate::links::{
    INSIDE_A_NODE, LinkSpeed, LinkStep, Rounds, Traffic, mean, on_threads, slowest, traffic,
};
use crate::report::{Column, Report};

/// Bytes of an element and of a weight: f32.
const ELEMENT: usize = 4;

const RANKS: usize = 4;
const RANKS_PER_NODE: usize = 2;
const EXPERTS: usize = 32;
const EXPERTS_PER_TOKEN: usize = 8;

/// Flags of `dispatch`.
#[derive(Args)]
pub struct DispatchArgs {
    /// Tokens of a rank.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub tokens: usize,
    /// Features of a token, and the inner width of the shared expert. The other experts are half as wide.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub hidden: usize,
    /// Time of what the all-to-all dispatcher sends over the link between nodes, as a fraction of the time of the layer
    /// without a link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// The number of steps, and the file.
    #[command(flatten)]
    pub steps: StepFlags,
}

/// The method of sending rows.
#[derive(Clone, Copy, Debug, Serialize)]
struct DispatchCase {
    dispatcher: DispatcherKind,
    /// Whether the dispatcher knows the nodes.
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
            Some(_) => f.write_str(", 8 bits"),
            None => Ok(()),
        }
    }
}

/// A case with its figures.
#[derive(Serialize)]
struct DispatchRow {
    #[serde(flatten)]
    case: DispatchCase,
    /// Of a forward and a backward.
    seconds: f64,
    /// By a rank in a forward and a backward, the mean of all ranks.
    bytes_sent: f64,
    bytes_between_nodes: f64,
    bytes_by_formula: f64,
    seconds_over_links: f64,
    hidden: f64,
}

fn bytes(number: f64) -> String {
    HumanBytes(number as u64).to_string()
}

const COLUMNS: &[Column<DispatchRow>] = &[
    Column::new("dispatcher", -20, |row| row.case.to_string()),
    Column::new("sent", 10, |row| bytes(row.bytes_sent)),
    Column::new("between nodes", 13, |row| bytes(row.bytes_between_nodes)),
    Column::new("formula", 10, |row| bytes(row.bytes_by_formula)),
    Column::new("seconds", 8, |row| format!("{:.3}", row.seconds)),
    Column::new("over links", 10, |row| {
        format!("{:.3}", row.seconds_over_links)
    }),
    Column::new("hidden", 7, |row| format!("{:.0} %", 100.0 * row.hidden)),
];

/// Times each dispatcher without a link, then over the same links.
pub fn run(args: &DispatchArgs) -> Result<(), Error> {
    let bench = Benchmark(args);
    bench.layer(&CASES[0]).check(&bench.layout(false))?;
    let about = format!(
        "{EXPERTS} experts of width {} on {RANKS} ranks, {RANKS_PER_NODE} on a node; {EXPERTS_PER_TOKEN} for each of {} tokens \
         of a rank, of {} features, and a shared expert as wide; forward and backward in f32, ranks as threads with one \
         compute thread each; medians of {} steps",
        args.hidden / 2,
        args.tokens,
        args.hidden,
        args.steps.steps
    );
    let mut report = Report::begin(&about, COLUMNS, (), &args.steps.json);
    let mut links = None;
    for case in CASES {
        let alone = bench.time(&case, LinkSpeed::INFINITE)?;
        let slow = match links {
            Some(links) => links,
            None => alone
                .traffic
                .link(args.share, LinkSpeed::INFINITE.latency)?,
        };
        links = Some(slow);
        let over_links = bench.time(&case, slow)?;
        report.add(DispatchRow {
            case,
            seconds: alone.traffic.seconds,
            bytes_sent: alone.traffic.bytes,
            bytes_between_nodes: alone.between,
            bytes_by_formula: bench.problem(&case)?,
            seconds_over_links: over_links.traffic.seconds,
            hidden: over_links.hidden,
        })?;
    }
    report.finish(&format!(
        "sent: bytes of a rank in a forward and a backward, and those of them to other nodes; formula: sent, for choices that \
         are uniform, without counts of rows; over links: between nodes one on which the first row's bytes take {} of the time \
         of the layer, inside one that is {INSIDE_A_NODE} times as fast; hidden: 1 - blocked / link",
        args.share
    ))
}

/// The figures of a case: the median of steps of the slowest rank, and means of the ranks.
struct Timed {
    traffic: Traffic,
    between: f64,
    hidden: f64,
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

    /// The bytes that a rank sends, by the formula of the case.
    fn problem(&self, case: &DispatchCase) -> Result<f64, Error> {
        let mesh = Mesh::new(&self.layout(case.over_nodes), RANKS)?;
        let problem = DispatchProblem {
            dispatcher: case.dispatcher,
            fp8: case.fp8,
            tokens: self.0.tokens,
            experts: EXPERTS,
            per_token: EXPERTS_PER_TOKEN,
            groups: None,
            hidden: self.0.hidden,
            expert: RANKS,
            expert_tensor: 1,
            nodes: DispatchNodes::of(&mesh, EXPERTS),
        };
        let forward = problem.forward_bytes(ELEMENT, ELEMENT).total();
        Ok(forward + problem.backward_bytes(ELEMENT, ELEMENT).total())
    }

    fn time(&self, case: &DispatchCase, speed: LinkSpeed) -> Result<Timed, Error> {
        let mut ranks = on_threads(RANKS, |rank| self.time_rank(rank, case, speed))?;
        Ok(ranks.swap_remove(0))
    }

    fn time_rank(
        &self,
        rank: &Rank,
        case: &DispatchCase,
        speed: LinkSpeed,
    ) -> Result<Timed, Error> {
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
        let rounds = Rounds {
            warm_up: self.0.steps.warm_up,
            steps: self.0.steps.steps,
            counted: false,
        };
        let steps = rounds.run(&groups, &link, || {
            let _gradients = layer.forward(x.clone()).sum().backward();
            Ok(())
        })?;
        let between = |of: &LinkStep| of.transfers.iter().map(between).sum();
        Ok(Timed {
            traffic: Traffic {
                seconds: slowest(rank, &steps)?,
                ..traffic(rank, &steps)?
            },
            between: mean(rank, &steps, between)?,
            hidden: mean(rank, &steps, LinkStep::hidden)?,
        })
    }
}

/// The bytes that a transfer sends to other nodes.
fn between(transfer: &Transfer) -> f64 {
    transfer.between as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    /// The bytes of a small layer by each dispatcher, of which the ranks and nodes of a token are counted by the link.
    #[test]
    fn a_token_is_sent_to_fewer_ranks_and_nodes() {
        let text = "--tokens 256 --hidden 16 --steps 1 --warm-up 0";
        let args: DispatchArgs = parse_text(text).unwrap();
        let bench = Benchmark(&args);
        let sent = CASES.map(|case| {
            let timed = bench.time(&case, LinkSpeed::INFINITE).unwrap();
            let Timed {
                traffic, between, ..
            } = timed;
            let bytes = traffic.bytes;
            let formula = bench.problem(&case).unwrap();
            // Choices are those of a random router; counts of rows are not in the formula.
            assert!(
                (bytes / formula - 1.0).abs() < 0.2,
                "{case}: {bytes}, {formula}"
            );
            (bytes, between)
        });
        let [all_to_all, _, flex, eight_bits, nodes, _] = sent;
        assert!(flex.0 < all_to_all.0 && eight_bits.0 < flex.0);
        assert!(nodes.1 < flex.1);
    }
}

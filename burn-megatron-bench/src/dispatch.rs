//! `burn-megatron-bench dispatch`: a layer of experts on several ranks, by each dispatcher over the same links.

use std::fmt;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::comm::testing::{Link, SimulatedNetwork, Transfer, hidden_share};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::mesh::{Axis, AxisSet, Grid, Mesh, ParallelConfig};
use burn_megatron::nn::moe::{
    DispatchNodes, DispatchProblem, DispatcherKind, Fp8DispatchScales, MoeMlpConfig, RouterConfig,
    SharedExpertsConfig,
};
use burn_megatron::nn::{Activation, ModelBuilder};
use indicatif::HumanBytes;
use serde::Serialize;

use super::args::DispatchArgs;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::wrapped;

/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// Bytes of an element and of a weight: f32.
const ELEMENT: usize = 4;

/// The method of sending rows.
#[derive(Clone, Copy, Debug, Serialize)]
struct DispatchCase {
    dispatcher: DispatcherKind,
    fp8: Option<Fp8DispatchScales>,
    /// Whether the dispatcher knows the nodes.
    over_nodes: bool,
}

/// Times each dispatcher without a link, then over the same links.
pub fn run(args: &DispatchArgs) -> Result<ExitCode, Error> {
    let bench = Benchmark(args);
    bench.layer(&bench.cases()[0]).check(&bench.layout(false))?;
    let about = wrapped(&bench.describe());
    println!("{about}\n\n{}", DispatchRow::header());
    let mut rows: Vec<DispatchRow> = vec![];
    let mut links = None;
    for case in bench.cases() {
        let alone = bench.time(&case, None)?;
        let slow = *links.get_or_insert_with(|| LinkSpeeds::of(args, &alone));
        let over_links = bench.time(&case, Some(slow))?;
        let row = DispatchRow {
            case,
            seconds: alone.seconds,
            bytes_sent: alone.bytes,
            bytes_between_nodes: alone.between,
            bytes_by_formula: bench.problem(&case)?,
            seconds_over_links: over_links.seconds,
            hidden: over_links.hidden,
        };
        println!("{row}");
        rows.push(row);
    }
    let legend = format!(
        "sent: bytes of a rank in a forward and a backward, and those of them to other nodes; formula: sent, for choices that \
         are uniform, without counts of rows; over links: between nodes one on which the first row's bytes take {} of the time of \
         the layer, inside one that is {} times as fast; hidden: 1 - blocked / link",
        args.share, args.inside
    );
    println!("\n{}", wrapped(&legend));
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(ExitCode::SUCCESS)
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

impl DispatchRow {
    fn header() -> String {
        format!(
            "{:<20} {:>10} {:>13} {:>10} {:>8} {:>10} {:>7}",
            "dispatcher", "sent", "between nodes", "formula", "seconds", "over links", "hidden"
        )
    }
}

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

impl fmt::Display for DispatchRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |number: f64| HumanBytes(number as u64).to_string();
        write!(
            f,
            "{:<20} {:>10} {:>13} {:>10} {:>8.3} {:>10.3} {:>7}",
            self.case.to_string(),
            bytes(self.bytes_sent),
            bytes(self.bytes_between_nodes),
            bytes(self.bytes_by_formula),
            self.seconds,
            self.seconds_over_links,
            format!("{:.0} %", 100.0 * self.hidden),
        )
    }
}

/// Bytes per second.
#[derive(Clone, Copy)]
struct LinkSpeeds {
    between: f64,
    inside: f64,
}

impl LinkSpeeds {
    /// Returns the speeds with which the messages of a case take a share of its time.
    fn of(args: &DispatchArgs, case: &Timed) -> Self {
        let between = case.bytes / (args.share * case.seconds);
        Self {
            between,
            inside: args.inside * between,
        }
    }
}

/// The figures of a case: a median of steps of the slowest rank, and means of the ranks.
struct Timed {
    seconds: f64,
    bytes: f64,
    between: f64,
    hidden: f64,
}

/// The measured steps of a rank.
struct RankSteps {
    seconds: Vec<f64>,
    transfers: Vec<Transfer>,
}

struct Benchmark<'a>(&'a DispatchArgs);

impl Benchmark<'_> {
    fn describe(&self) -> String {
        let DispatchArgs {
            tokens,
            hidden,
            expert_width,
            experts,
            experts_per_token,
            shared_width,
            ranks,
            ranks_per_node,
            steps,
            ..
        } = self.0;
        format!(
            "{experts} experts of width {expert_width} on {ranks} ranks, {ranks_per_node} on a node; {experts_per_token} for \
             each of {tokens} tokens of a rank, of {hidden} features, beside a shared one of width {shared_width}; forward and \
             backward in f32, ranks as threads with one compute thread each; medians of {steps} steps"
        )
    }

    /// The all-to-all and the all-gather dispatcher; then the flex dispatcher over one node and several, with and without 8
    /// bits.
    fn cases(&self) -> Vec<DispatchCase> {
        let case = |dispatcher, over_nodes, fp8| DispatchCase {
            dispatcher,
            fp8,
            over_nodes,
        };
        let has_nodes = self.mesh(true).is_some_and(|mesh| {
            let all: Vec<_> = (0..self.0.ranks).collect();
            mesh.members_per_node(&all).is_some()
        });
        let flex = [false, true]
            .into_iter()
            .filter(|nodes| !nodes || has_nodes);
        let flex = flex.flat_map(|nodes| {
            let flex = |fp8| case(DispatcherKind::Flex, nodes, fp8);
            [flex(None), flex(Some(self.0.fp8_dispatch))]
        });
        let plain = [DispatcherKind::AllToAll, DispatcherKind::AllGather];
        let plain = plain.map(|dispatcher| case(dispatcher, false, None));
        plain.into_iter().chain(flex).collect()
    }

    fn layout(&self, over_nodes: bool) -> ParallelConfig {
        let layout = ParallelConfig::new()
            .with_data(self.0.ranks)
            .with_expert(self.0.ranks);
        if over_nodes {
            layout.with_ranks_per_node(self.0.ranks_per_node)
        } else {
            layout
        }
    }

    fn mesh(&self, over_nodes: bool) -> Option<Mesh> {
        Mesh::new(&self.layout(over_nodes), self.0.ranks).ok()
    }

    fn layer(&self, case: &DispatchCase) -> MoeMlpConfig {
        let DispatchArgs {
            hidden,
            expert_width,
            experts,
            experts_per_token,
            shared_width,
            ..
        } = *self.0;
        let router = RouterConfig::new(hidden, experts, experts_per_token);
        MoeMlpConfig::new(router, expert_width, Activation::SwiGlu)
            .with_shared(Some(SharedExpertsConfig::new(shared_width)))
            .with_dispatcher(case.dispatcher)
            .with_fp8_dispatch(case.fp8)
    }

    /// The bytes that a rank sends, by the formula of the case.
    fn problem(&self, case: &DispatchCase) -> Result<f64, Error> {
        let mesh = Mesh::new(&self.layout(case.over_nodes), self.0.ranks)?;
        let problem = DispatchProblem {
            dispatcher: case.dispatcher,
            fp8: case.fp8,
            tokens: self.0.tokens,
            experts: self.0.experts,
            per_token: self.0.experts_per_token,
            groups: None,
            hidden: self.0.hidden,
            expert: self.0.ranks,
            expert_tensor: 1,
            nodes: DispatchNodes::of(&mesh, self.0.experts),
        };
        let forward = problem.forward_bytes(ELEMENT, ELEMENT).total();
        Ok(forward + problem.backward_bytes(ELEMENT, ELEMENT).total())
    }

    fn time(&self, case: &DispatchCase, links: Option<LinkSpeeds>) -> Result<Timed, Error> {
        let world = World::threads(self.0.ranks)?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        let ranks = world.run(|rank| self.time_rank(&rank, case, links))?;
        let steps = (0..self.0.steps).map(|step| {
            let of_rank = ranks.iter().map(|rank| rank.seconds[step]);
            of_rank.fold(0.0, f64::max)
        });
        let mean =
            |of: &dyn Fn(&RankSteps) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
        let each = |of: fn(&Transfer) -> u64| {
            mean(&|rank| rank.transfers.iter().map(of).sum::<u64>() as f64) / self.0.steps as f64
        };
        Ok(Timed {
            seconds: median(&steps.collect::<Vec<_>>()),
            bytes: each(|transfer| transfer.bytes),
            between: each(|transfer| transfer.between),
            hidden: mean(&|rank| hidden_share(&rank.transfers)),
        })
    }

    fn time_rank(
        &self,
        rank: &Rank,
        case: &DispatchCase,
        links: Option<LinkSpeeds>,
    ) -> Result<RankSteps, Error> {
        let groups = ParallelContext::new(&self.layout(case.over_nodes), rank)?;
        let LinkSpeeds { between, inside } = links.unwrap_or(LinkSpeeds {
            between: f64::INFINITY,
            inside: f64::INFINITY,
        });
        let link = Link::with_nodes(Duration::ZERO, between, self.0.ranks_per_node, inside)?;
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        let experts = SimulatedNetwork::over(groups.group(Grid::Expert, axes)?, &link);
        let groups = groups.with_group(Grid::Expert, axes, experts);
        let device = Device::flex().autodiff();
        let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
        let layer = Arc::new(self.layer(case).init(&builder.child("moe"))?);
        let shape = [1, self.0.tokens, self.0.hidden];
        let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad();
        let mut seconds = vec![];
        for step in 0..self.0.warm_up + self.0.steps {
            groups.world().barrier()?;
            if step == self.0.warm_up {
                link.take_transfers();
            }
            let start = Instant::now();
            let _gradients = layer.forward(x.clone()).sum().backward();
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(RankSteps {
            seconds: seconds.split_off(self.0.warm_up),
            transfers: link.take_transfers(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    /// The bytes of a small layer by each dispatcher, of which the ranks and nodes of a token are counted by the link.
    #[test]
    fn a_token_is_sent_to_fewer_ranks_and_nodes() {
        let text =
            "--tokens 256 --hidden 16 --expert-width 8 --shared-width 8 --steps 1 --warm-up 0";
        let args: DispatchArgs = parse_text(text).unwrap();
        let bench = Benchmark(&args);
        let sent = bench.cases().into_iter().map(|case| {
            let Timed { bytes, between, .. } = bench.time(&case, None).unwrap();
            let formula = bench.problem(&case).unwrap();
            // Choices are those of a random router; counts of rows are not in the formula.
            assert!(
                (bytes / formula - 1.0).abs() < 0.2,
                "{case}: {bytes}, {formula}"
            );
            (bytes, between)
        });
        let [all_to_all, _, flex, eight_bits, nodes, _] = sent.collect::<Vec<_>>()[..] else {
            panic!("six cases");
        };
        assert!(flex.0 < all_to_all.0 && eight_bits.0 < flex.0);
        assert!(nodes.1 < flex.1);
    }
}

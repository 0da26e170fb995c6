//! Formulas for the communication of the expert dispatchers.

use burn_megatron::collective::ExchangeKind::{self, AllGather, AllToAll, ReduceScatter};
use burn_megatron::mesh::{Axis, AxisSet, Grid, Mesh};
use burn_megatron::nn::moe::{
    DispatchNodes, DispatchProblem, DispatchVolume, DispatcherKind, MoeMlpConfig,
};
use burn_megatron_plan::profile::TrainingPass::{Backward, Forward};
use burn_megatron_plan::profile::{ELEMENT, Exchange, GroupPart, TrainingPass};

use super::RankShare;

/// The size of an expert weight of a token, in bytes.
const WEIGHT: usize = 4;

/// Returns the collectives of an expert layer in the forward and the backward, if each rank routes `tokens` tokens.
pub(super) fn exchanges(
    config: &MoeMlpConfig,
    share: &RankShare<'_>,
    tokens: u64,
) -> Vec<Exchange> {
    let expert = share.layout.expert as u64;
    let expert_tensor = share.layout.expert_tensor_size() as u64;
    let all = expert * expert_tensor;
    let bytes = tokens * config.router.hidden as u64 * ELEMENT;
    let exchanges = match config.dispatcher {
        DispatcherKind::AllToAll => {
            // Each token is sent once per selected expert, in both directions. Ranks over which an expert is split
            // gather its tokens.
            let sent = bytes * config.router.experts_per_token as u64;
            let calls = [Forward, Forward, Backward, Backward].map(|pass| (AllToAll, pass));
            let mut all = on_experts(Axis::Expert.into(), expert, sent, calls);
            let gathered = sent * expert_tensor;
            all.extend(gathers(Axis::ExpertTensor.into(), expert_tensor, gathered));
            all
        }
        DispatcherKind::AllGather => {
            gathers([Axis::Expert, Axis::ExpertTensor].into(), all, bytes * all)
        }
        DispatcherKind::Flex => flex(config, share, tokens),
    };
    let several = exchanges.into_iter().filter(|exchange| exchange.ranks > 1);
    several.collect()
}

fn on_experts(
    axes: AxisSet,
    ranks: u64,
    bytes: u64,
    calls: [(ExchangeKind, TrainingPass); 4],
) -> Vec<Exchange> {
    let of_call = |(kind, pass)| Exchange {
        kind,
        grid: Grid::Expert,
        axes,
        part: GroupPart::Whole,
        ranks,
        bytes,
        pass,
    };
    calls.map(of_call).into()
}

/// Returns an all-gather of tokens and a reduce-scatter of their results, in the forward and the backward.
fn gathers(axes: AxisSet, ranks: u64, bytes: u64) -> Vec<Exchange> {
    let calls = [
        (AllGather, Forward),
        (ReduceScatter, Forward),
        (AllGather, Backward),
        (ReduceScatter, Backward),
    ];
    on_experts(axes, ranks, bytes, calls)
}

/// Returns the nodes of the ranks that exchange tokens, if the layout defines nodes.
fn nodes(config: &MoeMlpConfig, share: &RankShare<'_>) -> Option<DispatchNodes> {
    let layout = share.layout;
    layout.ranks_per_node?;
    let mesh = Mesh::new(layout, layout.world_size()?).ok()?;
    DispatchNodes::of(&mesh, config.router.experts)
}

/// Returns the collectives if each token is sent once per destination rank. If the layout defines nodes, tokens are
/// sent once per destination node and distributed there.
fn flex(config: &MoeMlpConfig, share: &RankShare<'_>, tokens: u64) -> Vec<Exchange> {
    let (router, nodes) = (&config.router, nodes(config, share));
    let problem = DispatchProblem {
        dispatcher: DispatcherKind::Flex,
        fp8: config.fp8_dispatch,
        tokens: tokens as usize,
        experts: router.experts,
        per_token: router.experts_per_token,
        groups: router.groups,
        hidden: router.hidden,
        expert: share.layout.expert,
        expert_tensor: share.layout.expert_tensor_size(),
        nodes,
    };
    let all = (problem.expert * problem.expert_tensor) as u64;
    let DispatchVolume { inside, between } = problem.flex_rows();
    let hops = match nodes.map(|nodes| nodes.ranks) {
        None => vec![(GroupPart::Whole, all, inside)],
        Some(ranks) => vec![
            (GroupPart::InterNode(ranks), all / ranks as u64, between),
            (GroupPart::IntraNode(ranks), ranks as u64, inside),
        ],
    };
    let row = (router.hidden as u64 * ELEMENT) as f64;
    let dispatched = problem.row_bytes(ELEMENT as usize, WEIGHT);
    let gradient = row + (problem.per_token * WEIGHT) as f64;
    let of_hop = |(part, ranks, rows): (GroupPart, u64, f64)| {
        [
            (dispatched, Forward),
            (row, Forward),
            (row, Backward),
            (gradient, Backward),
        ]
        .map(|(bytes, pass)| Exchange {
            kind: AllToAll,
            grid: Grid::Expert,
            axes: [Axis::Expert, Axis::ExpertTensor].into(),
            part,
            ranks,
            bytes: (rows * bytes) as u64,
            pass,
        })
    };
    hops.into_iter().flat_map(of_hop).collect()
}

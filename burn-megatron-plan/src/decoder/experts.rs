//! The exchanges of the dispatchers of experts.

use super::super::profile::{Exchange, GroupPart, TrainingPass};
use super::block::ELEMENT;
use super::{Experts, Share};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, AxisSet, Grid};
use burn_megatron::nn::moe::{DispatchProblem, DispatchVolume, DispatcherKind};

/// Bytes of the weight of an expert.
const WEIGHT: usize = 4;

const PASSES: [TrainingPass; 2] = [TrainingPass::Forward, TrainingPass::Backward];

/// The exchanges of a layer whose ranks route `tokens` tokens of `hidden` features each, in both passes.
pub(super) fn exchanges(sizes: &Experts, share: Share, tokens: u64, hidden: u64) -> Vec<Exchange> {
    let exchanges = match sizes.dispatcher {
        DispatcherKind::AllToAll => all_to_all(sizes, share, tokens * hidden),
        DispatcherKind::AllGather => {
            let ranks = share.expert * share.expert_tensor;
            let axes = [Axis::Expert, Axis::ExpertTensor].into();
            gathers(axes, ranks, tokens * ranks * hidden * ELEMENT)
        }
        DispatcherKind::Flex => flex(sizes, share, tokens, hidden),
    };
    let several = exchanges.into_iter().filter(|exchange| exchange.ranks > 1);
    several.collect()
}

/// A row for each token and expert; the ranks that share an expert gather its rows.
fn all_to_all(sizes: &Experts, share: Share, elements: u64) -> Vec<Exchange> {
    let sent = elements * sizes.per_token * ELEMENT;
    let each = |pass| Exchange {
        kind: ExchangeKind::AllToAll,
        grid: Grid::Expert,
        axes: Axis::Expert.into(),
        part: GroupPart::Whole,
        ranks: share.expert,
        bytes: sent,
        pass,
    };
    // There and back.
    let sent_rows = PASSES.into_iter().flat_map(|pass| [each(pass), each(pass)]);
    let gathered = gathers(
        Axis::ExpertTensor.into(),
        share.expert_tensor,
        sent * share.expert_tensor,
    );
    sent_rows.chain(gathered).collect()
}

/// A gather of rows and the sum of their results, in both passes.
fn gathers(axes: AxisSet, ranks: u64, bytes: u64) -> Vec<Exchange> {
    let each = |pass| {
        [ExchangeKind::AllGather, ExchangeKind::ReduceScatter].map(|kind| Exchange {
            kind,
            grid: Grid::Expert,
            axes,
            part: GroupPart::Whole,
            ranks,
            bytes,
            pass,
        })
    };
    PASSES.into_iter().flat_map(each).collect()
}

/// A row for each token and rank, by way of its node where nodes count.
fn flex(sizes: &Experts, share: Share, tokens: u64, hidden: u64) -> Vec<Exchange> {
    let problem = DispatchProblem {
        dispatcher: DispatcherKind::Flex,
        fp8: sizes.fp8_dispatch,
        tokens: tokens as usize,
        experts: sizes.experts as usize,
        per_token: sizes.per_token as usize,
        groups: sizes.groups,
        hidden: hidden as usize,
        expert: share.expert as usize,
        expert_tensor: share.expert_tensor as usize,
        nodes: share.nodes,
    };
    let all = share.expert * share.expert_tensor;
    let DispatchVolume { inside, between } = problem.flex_rows();
    let hops = match share.nodes {
        None => vec![(GroupPart::Whole, all, inside)],
        Some(nodes) => vec![
            (
                GroupPart::InterNode(nodes.ranks),
                all / nodes.ranks as u64,
                between,
            ),
            (
                GroupPart::IntraNode(nodes.ranks),
                nodes.ranks as u64,
                inside,
            ),
        ],
    };
    let row = (hidden * ELEMENT) as f64;
    let dispatched = problem.row_bytes(ELEMENT as usize, WEIGHT);
    let gradient = row + (problem.per_token * WEIGHT) as f64;
    let of_hop = |(part, ranks, rows): (GroupPart, u64, f64)| {
        let [forward, backward] = PASSES;
        [
            (dispatched, forward),
            (row, forward),
            (row, backward),
            (gradient, backward),
        ]
        .map(|(bytes, pass)| Exchange {
            kind: ExchangeKind::AllToAll,
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

//! Hierarchical reductions of gradients: the messages between nodes, and the sums.

use std::time::Duration;

use super::gradient_checks::{ConstantWeights, blocks, run, stage};
use super::*;
use crate::collective::to_f64;
use burn_megatron_comm_testing::{Link, SimulatedNetwork, Transfer};

/// Returns the gradients of a step in f64, to which each rank contributes `factor(rank)`, and the messages of
/// the rank.
fn step(
    [ranks, ranks_per_node]: [usize; 2],
    hierarchical_reduce: bool,
    factor: fn(usize) -> f64,
) -> Vec<(Vec<Vec<f64>>, Vec<Transfer>)> {
    let layout = ParallelConfig::new()
        .with_data(ranks)
        .with_ranks_per_node(ranks_per_node);
    let config = DataParallelConfig {
        hierarchical_reduce,
        bucket_size: Some(20),
        precision: Precision::F64,
        ..stage(0)
    };
    let rank = |rank| -> Result<_, RankError> {
        let groups = ParallelContext::new(&layout, &rank)?;
        let fast = f64::INFINITY;
        let link = Link::with_nodes(Duration::ZERO, fast, ranks_per_node, fast)?;
        let data = SimulatedNetwork::over(groups.data().clone(), &link);
        let groups = groups.with_data(data);
        let model = ParallelModule::replicated(blocks(4));
        let mut ddp = DistributedDataParallel::with(model, &groups, &config)?;
        ddp.update(|model| model.map(&mut ConstantWeights(0.25)));
        link.take_transfers();
        let loss = run(&ddp, &[0, 1, 2, 3]).mul_scalar(factor(groups.rank()));
        ddp.backward_last(loss);
        let gradients = ddp.reduce(1)?;
        let transfers = link.take_transfers();
        let whole = ddp.full_gradients(&gradients).into_iter();
        Ok((whole.map(to_f64).collect(), transfers))
    };
    World::threads(ranks).unwrap().run(rank).unwrap()
}

fn bytes(transfers: &[Transfer], op: &str) -> u64 {
    let of_op = transfers.iter().filter(|transfer| transfer.op == op);
    of_op.map(|transfer| transfer.bytes).sum()
}

#[test]
fn a_rank_sends_its_part_of_its_node_between_nodes() {
    for (ranks, per_node) in [(4, 2), (8, 2), (8, 4), (6, 3)] {
        let nodes = (ranks / per_node) as u64;
        let all = ranks as u64;
        // Sums of powers of two are exact in any order.
        let [flat, found] = [false, true]
            .map(|by_nodes| step([ranks, per_node], by_nodes, |rank| (1u64 << rank) as f64));
        for ((expected, whole), (found, parts)) in flat.iter().zip(&found) {
            assert_eq!(found, expected);
            // Each all-reduce of n bytes sends 2 n (d - 1) / d bytes.
            let n = bytes(whole, "all_reduce") * all / (2 * (all - 1));
            let part = n / per_node as u64;
            assert_eq!(bytes(parts, "all_reduce"), 2 * part * (nodes - 1) / nodes);
            let inside = n * (per_node as u64 - 1) / per_node as u64;
            assert_eq!(bytes(parts, "reduce_scatter"), inside);
            let between: u64 = parts
                .iter()
                .filter(|transfer| transfer.op != "all_gather")
                .map(|transfer| transfer.between)
                .sum();
            assert_eq!(between, 2 * part * (nodes - 1) / nodes);
            // The other bytes are the gather within a node, and the numbers that all ranks exchange.
            let control = bytes(whole, "all_gather");
            assert_eq!(bytes(parts, "all_gather"), inside + control);
        }
    }
}

/// If the numbers of ranks and nodes are powers of two, the order of the sum is the same. Otherwise it differs.
#[test]
fn a_sum_by_way_of_nodes_differs_by_its_order_alone() {
    for (ranks, per_node) in [(4, 2), (8, 4), (6, 3), (6, 2)] {
        let [flat, found] = [false, true].map(|by_nodes| {
            step([ranks, per_node], by_nodes, |rank| {
                (rank as f64 + 0.1).sin()
            })
        });
        for ((flat, _), (found, _)) in flat.iter().zip(&found) {
            if ranks.is_power_of_two() {
                assert_eq!(found, flat, "{ranks} ranks, {per_node} on a node");
            }
            for (found, flat) in found.iter().flatten().zip(flat.iter().flatten()) {
                assert!(
                    (found - flat).abs() <= 1e-12 * flat.abs(),
                    "{found}, not {flat}"
                );
            }
        }
    }
}

/// Nodes with different numbers of ranks, with one rank each, or with all ranks.
#[test]
fn without_equal_nodes_gradients_are_summed_at_once() {
    for (ranks, per_node) in [(3, 2), (2, 1), (2, 2), (6, 4)] {
        for (_, transfers) in step([ranks, per_node], true, |_| 1.0) {
            assert_eq!(bytes(&transfers, "reduce_scatter"), 0);
            assert!(bytes(&transfers, "all_reduce") > 0);
        }
    }
}

#[test]
fn gradients_that_are_sharded_have_groups_of_nodes() {
    let config = DataParallelConfig {
        hierarchical_reduce: true,
        ..stage(1)
    };
    let message = config.check(4).unwrap_err().to_string();
    assert!(
        message.contains("zero_stage = 1 shards them; set hsdp"),
        "{message}"
    );
}

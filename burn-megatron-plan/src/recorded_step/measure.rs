//! Measures the computation of a recorded operation, and finds the axes of a recorded collective.

use burn_ir::{FloatOperationIr, OperationIr, TensorIr};

use super::storage::bytes_of;
use crate::profile::{AttentionShape, GroupPart, LayerProfile, Product};
use burn_megatron::mesh::{Axis, AxisSet, Grid, Mesh};

/// Returns the grid of a process group, and the axes in which its ranks differ.
///
/// If the ranks are not a whole group of a grid, they may be a part of a group of expert ranks: either the ranks on one
/// node, or one rank on each node. Otherwise the set of axes is empty.
pub(super) fn axes_of(ranks: &[usize], mesh: &Mesh) -> (Grid, AxisSet, GroupPart) {
    let places = Grid::ALL.map(|grid| {
        let all = mesh.without_trivial_axes(grid, grid.axes());
        let axes = all.iter().filter(|axis| {
            let line = mesh.members(grid, *axis, ranks[0]);
            line.iter().all(|rank| ranks.contains(rank))
        });
        (grid, axes.collect::<AxisSet>())
    });
    let size = |(grid, axes): &(Grid, AxisSet)| -> usize {
        axes.iter().map(|axis| mesh.size(*grid, axis)).product()
    };
    let found = places.into_iter().find(|place| size(place) == ranks.len());
    match found {
        Some((grid, axes)) => (grid, axes, GroupPart::Whole),
        None => {
            part_of_experts(ranks, mesh).unwrap_or((Grid::Dense, AxisSet::EMPTY, GroupPart::Whole))
        }
    }
}

fn part_of_experts(ranks: &[usize], mesh: &Mesh) -> Option<(Grid, AxisSet, GroupPart)> {
    let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
    let all = mesh.members(Grid::Expert, axes, ranks[0]);
    let per_node = mesh.members_per_node(&all)?;
    let place = |rank: &usize| all.iter().position(|other| other == rank);
    let places: Vec<_> = ranks.iter().map(place).collect::<Option<_>>()?;
    let is_inside = places
        .iter()
        .all(|at| at / per_node == places[0] / per_node);
    let part = if is_inside {
        GroupPart::IntraNode(per_node)
    } else {
        GroupPart::InterNode(per_node)
    };
    Some((
        Grid::Expert,
        mesh.without_trivial_axes(Grid::Expert, axes),
        part,
    ))
}

/// Adds the computation of an operation of the forward to its layer.
pub(super) fn measure(layer: &mut LayerProfile, operation: &OperationIr, streams: bool) {
    let dims = |tensor: &TensorIr| -> Vec<u64> {
        tensor
            .shape
            .to_vec()
            .into_iter()
            .map(|n| n as u64)
            .collect()
    };
    match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
            let (lhs, out) = (dims(&op.lhs), dims(&op.out));
            let rank = out.len();
            layer.products.push(Product {
                batch: out[..rank - 2].iter().product(),
                m: out[rank - 2],
                n: out[rank - 1],
                k: lhs[lhs.len() - 1],
            });
        }
        OperationIr::Custom(op) if op.id == "linear" => {
            let (x, weight) = (dims(&op.inputs[0]), dims(&op.inputs[1]));
            layer.products.push(Product {
                batch: 1,
                m: x[0],
                n: weight[1],
                k: weight[0],
            });
        }
        OperationIr::Custom(op) if op.id.contains("grouped") => {
            let (x, weight) = (dims(&op.inputs[0]), dims(&op.inputs[1]));
            let (out, experts) = (dims(&op.outputs[0]), weight[0].max(1));
            layer.products.push(Product {
                batch: experts,
                m: x[0].div_ceil(experts),
                n: out[out.len() - 1],
                k: x[x.len() - 1],
            });
        }
        OperationIr::Custom(op) if op.id.contains("attention") => {
            // `[batch, queries, heads, value width]`
            let out = dims(&op.outputs[0]);
            let seq = out[1];
            layer.attention.push(AttentionShape {
                pairs: out[0] * seq * (seq + 1) / 2,
                heads: out[2],
                query_width: out[3],
                value_width: out[3],
            });
        }
        _ if streams => {
            let all = operation.inputs().chain(operation.outputs());
            layer.streamed_bytes += all.map(bytes_of).sum::<u64>();
        }
        _ => {}
    }
}

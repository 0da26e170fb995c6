//! The links between the ranks of the process groups of a mesh.

use std::borrow::Cow;

use burn_megatron::mesh::{Axis, AxisSet, Coordinates, ExpertCoordinates, Grid, Mesh};

use super::hardware::Hardware;
use super::link::{GroupLinks, gcd};
use super::profile::{Exchange, GroupPart};

/// The links between the ranks of each process group of a mesh.
#[derive(Clone, Debug)]
pub struct MeshLinks<'a> {
    mesh: Mesh,
    hardware: &'a Hardware,
    /// The links of the process groups in which most layers communicate.
    groups: Vec<((Grid, AxisSet), GroupLinks)>,
}

/// The process groups in which layers and the pipeline communicate.
const GROUPS: [(Grid, &[Axis]); 8] = [
    (Grid::Dense, &[Axis::Tensor]),
    (Grid::Dense, &[Axis::Context]),
    (Grid::Dense, &[Axis::Tensor, Axis::Context]),
    (Grid::Dense, &[Axis::Context, Axis::Data]),
    (Grid::Dense, &[Axis::Pipeline]),
    (Grid::Expert, &[Axis::Expert]),
    (Grid::Expert, &[Axis::ExpertTensor]),
    (Grid::Expert, &[Axis::Expert, Axis::ExpertTensor]),
];

/// A run of ranks, given by its number of ranks and the distance (stride) between two adjacent ranks.
type Run = (usize, usize);

impl<'a> MeshLinks<'a> {
    /// Creates the links of a mesh. Rank `i` of the mesh runs on device `i` of the hardware.
    pub fn new(mesh: &Mesh, hardware: &'a Hardware) -> Self {
        let groups = GROUPS.map(|(grid, axes)| {
            let set: AxisSet = axes.iter().copied().collect();
            let links = GroupLinks::new(hardware, &runs(mesh, grid, set));
            ((grid, set), links)
        });
        Self {
            mesh: mesh.clone(),
            hardware,
            groups: groups.into(),
        }
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the links between the ranks of a process group over the given axes.
    ///
    /// # Panics
    ///
    /// Panics if one of the axes does not belong to the grid.
    pub fn group(&self, grid: Grid, axes: AxisSet) -> Cow<'_, GroupLinks> {
        let found = self.groups.iter().find(|(key, _)| *key == (grid, axes));
        match found {
            Some((_, links)) => Cow::Borrowed(links),
            None => Cow::Owned(GroupLinks::new(
                self.hardware,
                &runs(&self.mesh, grid, axes),
            )),
        }
    }

    /// Returns the links between the ranks that take part in a collective or a message.
    ///
    /// # Panics
    ///
    /// See [`group`](Self::group).
    pub fn of(&self, exchange: &Exchange) -> Cow<'_, GroupLinks> {
        let per_node = match exchange.part {
            GroupPart::Whole => return self.group(exchange.grid, exchange.axes),
            GroupPart::IntraNode(ranks) | GroupPart::InterNode(ranks) => ranks,
        };
        let all = runs(&self.mesh, exchange.grid, exchange.axes);
        let (inside, between) = divide(&all, per_node);
        let own = match exchange.part {
            GroupPart::InterNode(_) => between,
            _ => inside,
        };
        Cow::Owned(GroupLinks::new(self.hardware, &own))
    }

    /// Returns the links of the data-parallel groups if the parameters of a grid (dense or expert) are sharded over
    /// `ranks` ranks. The first element contains the links between the ranks of a sharding group. The second element
    /// contains the links between the ranks that hold the same shard.
    pub fn sharding(&self, grid: Grid, ranks: usize) -> [GroupLinks; 2] {
        let (inner, outer) = divide(&runs(&self.mesh, grid, grid.data_axes()), ranks);
        [inner, outer].map(|runs| GroupLinks::new(self.hardware, &runs))
    }
}

/// Returns the runs of ranks that form a process group over these axes, from the innermost to the outermost.
fn runs(mesh: &Mesh, grid: Grid, axes: AxisSet) -> Vec<Run> {
    let axes = axes.iter().filter(|axis| mesh.size(grid, *axis) > 1);
    let mut runs: Vec<_> = axes
        .map(|axis| (mesh.size(grid, axis), stride(mesh, grid, axis)))
        .collect();
    runs.sort_by_key(|(_, stride)| *stride);
    runs
}

/// Returns the distance (stride) between two neighboring ranks along an axis with several ranks.
fn stride(mesh: &Mesh, grid: Grid, axis: Axis) -> usize {
    let at = |wanted| (axis == wanted) as usize;
    match grid {
        Grid::Dense => mesh.rank_at(Coordinates {
            tensor: at(Axis::Tensor),
            context: at(Axis::Context),
            data: at(Axis::Data),
            pipeline: at(Axis::Pipeline),
        }),
        Grid::Expert => mesh.expert_rank_at(ExpertCoordinates {
            expert_tensor: at(Axis::ExpertTensor),
            expert: at(Axis::Expert),
            expert_data: at(Axis::Data),
            pipeline: at(Axis::Pipeline),
        }),
    }
}

/// Splits a process group. Returns the runs of its first `ranks` ranks, and the runs of every `ranks`-th rank.
fn divide(runs: &[Run], mut ranks: usize) -> (Vec<Run>, Vec<Run>) {
    let (mut inner, mut outer) = (vec![], vec![]);
    for (size, stride) in runs {
        let own = gcd(*size, ranks);
        ranks /= own;
        inner.push((own, *stride));
        outer.push((size / own, stride * own));
    }
    let several = |runs: Vec<Run>| runs.into_iter().filter(|(size, _)| *size > 1).collect();
    (several(inner), several(outer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::mesh::ParallelConfig;

    #[test]
    fn the_order_of_the_mesh_decides_which_groups_stay_in_a_node() {
        let layout = ParallelConfig::new()
            .with_tensor(4)
            .with_context(2)
            .with_pipeline(4)
            .with_expert(16)
            .with_expert_tensor(1);
        let mesh = Mesh::new(&layout, 128).unwrap();
        let h100 = Hardware::named("H100").unwrap();
        let links = MeshLinks::new(&mesh, &h100);
        let slowest = |grid, axes: &[Axis]| {
            let group = links.group(grid, axes.iter().copied().collect());
            (group.size(), group.slowest())
        };
        assert_eq!(slowest(Grid::Dense, &[Axis::Tensor]), (4, 0));
        assert_eq!(slowest(Grid::Dense, &[Axis::Context]), (2, 0));
        assert_eq!(slowest(Grid::Dense, &[Axis::Context, Axis::Data]), (8, 1));
        assert_eq!(slowest(Grid::Dense, &[Axis::Pipeline]), (4, 1));
        assert_eq!(slowest(Grid::Expert, &[Axis::Expert]), (16, 1));
        // The first two ranks of context x data are the two ranks of the context axis, which are in one node.
        let [shard, replicas] = links.sharding(Grid::Dense, 2);
        assert_eq!((shard.size(), shard.slowest()), (2, 0));
        assert_eq!((replicas.size(), replicas.slowest()), (4, 1));
        let [shard, replicas] = links.sharding(Grid::Expert, 2);
        assert_eq!((shard.size(), replicas.size()), (2, 1));
    }
}

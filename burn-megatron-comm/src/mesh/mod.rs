//! The device mesh: the sizes of the axes, the coordinates of the ranks, and the members of the process groups.
//!
//! A [`ParallelConfig`] is the layout: the size of each axis, and how the axes are used. [`Mesh::new`] applies a layout
//! to a world of ranks and checks every size. The methods of a mesh do not communicate: all ranks build the same mesh,
//! so each rank can compute all groups locally.
//!
//! Two grids number the same ranks. The *dense* grid (tensor, context, data, pipeline) is used for all layers except
//! experts. The *expert* grid (expert-tensor, expert, data, pipeline) is used for experts. The two grids may have
//! different data sizes, but their pipelines contain the same ranks. Ranks along the leftmost axis of
//! the [`AxisOrder`] are consecutive. The groups and their order are the same as in Megatron-LM's `RankGenerator`.
//!
//! ```
//! use burn_megatron_comm::mesh::{Axis, Grid, Mesh, ParallelConfig};
//!
//! let config = ParallelConfig::new().with_tensor(2).with_pipeline(2);
//! let mesh = Mesh::new(&config, 4)?;
//! assert_eq!(mesh.members(Grid::Dense, Axis::Pipeline, 1), [1, 3]);
//! println!("{mesh}");
//! # Ok::<(), burn_megatron_comm::mesh::MeshError>(())
//! ```
//!
//! The program prints:
//!
//! ```text
//! mesh of 4 ranks: tensor 2 x context 1 x data 1 x pipeline 2, order tp-cp-ep-dp-pp
//!
//! rank  tensor  context  data  pipeline
//!    0       0        0     0         0
//!    1       1        0     0         0
//!    2       0        0     0         1
//!    3       1        0     0         1
//!
//! groups
//! tensor    [0 1] [2 3]
//! pipeline  [0 2] [1 3]
//! ```

mod as_text;
mod axis;
mod axis_set;
mod config;
mod context;
mod error;
mod layout;
mod mesh_rank;
mod rank_grid;
mod schedule;
mod split;
pub mod stages;
mod table;
mod tp_comm_overlap;
mod zero_stage;

#[cfg(test)]
mod tests;

pub use axis::{Axis, AxisOrder};
pub use axis_set::{AxisSet, Grid};
pub use config::{LayoutError, ParallelConfig};
pub use context::{ContextExchange, ContextSplit, ContextSplitError, ParseContextError};
pub use error::{MeshError, MeshFault, RequiredRanks, Suggestions};
pub use mesh_rank::{AxisRank, MeshRank};
pub use schedule::{ScheduleKind, ScheduleSource, UnknownScheduleKind};
pub use split::{divisors_near, samples_per_rank, split_evenly};
pub use tp_comm_overlap::{ParseTpCommOverlapError, TpCommOverlap};
pub use zero_stage::{ParseZeroStageError, ZeroStage};

pub(crate) use rank_grid::GroupShape;
use rank_grid::RankGrid;

/// A checked parallel layout of a world of ranks. It only stores values, is cheap to clone and is equal on every rank.
///
/// Its `Display` output is a table as in the [module documentation](self).
///
/// # Panics
///
/// Methods that take a rank panic if the rank is not less than [`world_size`](Mesh::world_size). Methods that take axes
/// panic if the grid does not have one of the axes. Such a panic indicates a programming error, because the axes that a
/// program passes do not depend on the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    config: ParallelConfig,
    world: usize,
    dense: RankGrid,
    expert: RankGrid,
}

/// The coordinates of a rank in the dense grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The index of this rank's shard of each weight matrix, less than the size of [`Axis::Tensor`].
    pub tensor: usize,
    /// The index of this rank's part of each sequence, less than the size of [`Axis::Context`].
    pub context: usize,
    /// The index of this rank's model replica, less than the size of [`Axis::Data`].
    pub data: usize,
    /// The index of this rank in its pipeline, less than the size of [`Axis::Pipeline`].
    pub pipeline: usize,
}

/// The coordinates of a rank in the expert grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExpertCoordinates {
    /// The index of this rank's shard of each expert's weight matrices, less than the size of [`Axis::ExpertTensor`].
    pub expert_tensor: usize,
    /// The index of this rank's share of the experts, less than the size of [`Axis::Expert`].
    pub expert: usize,
    /// The index of this rank's replica of the experts, less than the size of [`Axis::Data`] in the expert grid.
    pub expert_data: usize,
    /// The index of this rank in its pipeline, less than the size of [`Axis::Pipeline`]. It is the same as in
    /// [`Coordinates`].
    pub pipeline: usize,
}

impl Mesh {
    /// Creates the mesh of `config` for a world of `world_size` ranks.
    ///
    /// # Errors
    ///
    /// [`MeshError::Layout`] for a setting that conflicts with another setting or has no effect. See
    /// [`ParallelConfig::check`].
    ///
    /// [`MeshError::InvalidLayout`], with the given sizes and the valid sizes, in these cases:
    /// - The world size or the size of an axis is 0.
    /// - `data` is set, and `tensor x context x pipeline x data` differs from the world size.
    /// - `data` is not set, and `tensor x context x pipeline` does not divide the world size.
    /// - `expert_tensor x expert x pipeline` does not divide the world size.
    /// - The order omits an axis with more than one rank.
    /// - The pipelines of the two grids contain different ranks.
    /// - The two grids have different data sizes, there is more than one pipeline stage, and the order does not end
    ///   with `pp` (ignoring axes of size 1).
    pub fn new(config: &ParallelConfig, world_size: usize) -> Result<Mesh, MeshError> {
        config.check()?;
        layout::build(config, world_size).map_err(|fault| MeshError::InvalidLayout {
            fault,
            fits: Box::new(layout::suggestions(config, world_size)),
        })
    }

    /// Creates the mesh of one rank, in which every axis has size 1.
    pub fn single() -> Mesh {
        Mesh::new(&ParallelConfig::new(), 1).expect("sizes of 1 are valid in a world of 1")
    }

    /// Returns the layout, with the derived sizes of `data` and `expert_tensor` filled in and the axis order completed.
    pub fn config(&self) -> &ParallelConfig {
        &self.config
    }

    /// Returns the number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.world
    }

    /// Returns the number of ranks along `axis` of `grid`.
    ///
    /// # Panics
    ///
    /// If the grid does not have the axis.
    #[track_caller]
    pub fn size(&self, grid: Grid, axis: Axis) -> usize {
        self.grid(grid).size(axis)
    }

    /// Returns the axes of the set `axes` that have more than one rank in `grid`.
    ///
    /// # Panics
    ///
    /// If the grid does not have one of the axes.
    #[track_caller]
    pub fn without_trivial_axes(&self, grid: Grid, axes: impl Into<AxisSet>) -> AxisSet {
        let axes = axes.into().iter();
        axes.filter(|axis| self.size(grid, *axis) > 1).collect()
    }

    /// Returns the coordinates of `rank` in the dense grid.
    #[track_caller]
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let rank = self.checked(rank);
        let at = |axis| self.dense.coordinate(axis, rank);
        Coordinates {
            tensor: at(Axis::Tensor),
            context: at(Axis::Context),
            data: at(Axis::Data),
            pipeline: at(Axis::Pipeline),
        }
    }

    /// Returns the coordinates of `rank` in the expert grid.
    #[track_caller]
    pub fn expert_coordinates(&self, rank: usize) -> ExpertCoordinates {
        let rank = self.checked(rank);
        let at = |axis| self.expert.coordinate(axis, rank);
        ExpertCoordinates {
            expert_tensor: at(Axis::ExpertTensor),
            expert: at(Axis::Expert),
            expert_data: at(Axis::Data),
            pipeline: at(Axis::Pipeline),
        }
    }

    /// Returns the rank at the given coordinates of the dense grid.
    ///
    /// # Panics
    ///
    /// If a coordinate is not less than the size of its axis.
    #[track_caller]
    pub fn rank_at(&self, coordinates: Coordinates) -> usize {
        self.dense.offset(Axis::Tensor, coordinates.tensor)
            + self.dense.offset(Axis::Context, coordinates.context)
            + self.dense.offset(Axis::Data, coordinates.data)
            + self.dense.offset(Axis::Pipeline, coordinates.pipeline)
    }

    /// Returns the rank at the given coordinates of the expert grid.
    ///
    /// # Panics
    ///
    /// If a coordinate is not less than the size of its axis.
    #[track_caller]
    pub fn expert_rank_at(&self, coordinates: ExpertCoordinates) -> usize {
        self.expert
            .offset(Axis::ExpertTensor, coordinates.expert_tensor)
            + self.expert.offset(Axis::Expert, coordinates.expert)
            + self.expert.offset(Axis::Data, coordinates.expert_data)
            + self.expert.offset(Axis::Pipeline, coordinates.pipeline)
    }

    /// Returns all groups of `grid` over the set `axes`. The ranks of a group differ only in these axes.
    ///
    /// The groups and their members are in the order of the mesh. Each rank is in exactly one group. If `axes` is
    /// empty, each group contains a single rank.
    ///
    /// # Panics
    ///
    /// If the grid does not have one of the axes.
    #[track_caller]
    pub fn groups(&self, grid: Grid, axes: impl Into<AxisSet>) -> Vec<Vec<usize>> {
        self.grid(grid).group_set(axes.into()).groups()
    }

    /// Returns a value that identifies the [`groups`](Mesh::groups) over a set of axes, in either grid.
    #[track_caller]
    pub(crate) fn group_shape(&self, grid: Grid, axes: impl Into<AxisSet>) -> GroupShape {
        self.grid(grid).group_set(axes.into()).shape()
    }

    /// Returns the group in [`groups`](Mesh::groups) that contains `rank`.
    ///
    /// # Panics
    ///
    /// If the grid does not have one of the axes, or if `rank` is outside the world.
    #[track_caller]
    pub fn members(&self, grid: Grid, axes: impl Into<AxisSet>, rank: usize) -> Vec<usize> {
        let groups = self.grid(grid).group_set(axes.into());
        groups.group_of(self.checked(rank))
    }

    /// Returns the embedding group of a pipeline: the first and the last rank of the pipeline of `rank`. These ranks
    /// hold the tied embedding. If the pipeline has one stage, the group has one member.
    ///
    /// For a rank of a middle stage, returns the embedding group of its pipeline, although the rank is not a member.
    #[track_caller]
    pub fn embedding_group(&self, rank: usize) -> Vec<usize> {
        let stages = self.members(Grid::Dense, Axis::Pipeline, rank);
        match stages.as_slice() {
            [first, .., last] => vec![*first, *last],
            _ => stages,
        }
    }

    /// Returns the number of ranks in `members` on each node. `members` must be in ascending order. Returns `None` if
    /// all members are on one node, if the number of members differs between nodes, or if there is only one member per
    /// node.
    pub fn members_per_node(&self, members: &[usize]) -> Option<usize> {
        let ranks = self.config.ranks_per_node?;
        let nodes: Vec<_> = members.chunk_by(|a, b| a / ranks == b / ranks).collect();
        let own = nodes.first()?.len();
        let is_even = nodes.iter().all(|node| node.len() == own);
        (is_even && own > 1 && nodes.len() > 1).then_some(own)
    }

    fn grid(&self, grid: Grid) -> &RankGrid {
        match grid {
            Grid::Dense => &self.dense,
            Grid::Expert => &self.expert,
        }
    }

    #[track_caller]
    fn checked(&self, rank: usize) -> usize {
        assert!(
            rank < self.world,
            "rank {rank} is outside a mesh of {} ranks",
            self.world
        );
        rank
    }
}

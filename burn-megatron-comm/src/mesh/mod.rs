//! Who is where: the sizes of every axis, the coordinates of every rank, the members of every
//! group.
//!
//! A [`ParallelConfig`] says how many ways the work is divided; [`Mesh::new`] lays it over a world
//! of ranks, checks every size, and from then on answers by arithmetic alone. All ranks build the
//! same mesh and so agree on all groups without a word between them.
//!
//! Two grids number the same ranks. The *dense* grid (tensor, context, data, pipeline) places all
//! layers but the experts of a mixture; the *expert* grid (expert-tensor, expert, data, pipeline)
//! places these. Their data sizes may differ; their pipelines are the same. The left-most axis of
//! the [`AxisOrder`] has stride 1. Groups and their order are those of Megatron-LM's
//! `RankGenerator`.
//!
//! ```
//! use burn_megatron_comm::mesh::{Mesh, ParallelConfig};
//!
//! let config = ParallelConfig::new().with_tensor(2).with_pipeline(2);
//! let mesh = Mesh::new(&config, 4)?;
//! assert_eq!(mesh.next_stage(1), 3);
//! println!("{mesh}");
//! # Ok::<(), burn_megatron_comm::mesh::MeshError>(())
//! ```
//!
//! prints
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

mod axis;
mod config;
mod error;
mod grid;
mod layout;
mod place;
mod split;
mod table;

#[cfg(test)]
mod tests;

pub use axis::{Axis, AxisOrder};
pub use config::ParallelConfig;
pub use error::{Fault, Fits, MeshError, Need};
pub use place::Place;
pub use split::{divisors_near, share_batch, split_evenly};

use grid::Grid;

/// A checked layout of a world of ranks. A plain value: cheap to clone, the same on every rank.
///
/// Printing it gives the table in the [module documentation](self).
///
/// # Panics
///
/// Methods that take a rank panic where it is not below [`world_size`](Mesh::world_size). Methods
/// that take axes read them as a set, and panic where one belongs to the other grid alone: the axes
/// of a group are written in code and do not depend on a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    config: ParallelConfig,
    world: usize,
    dense: Grid,
    expert: Grid,
}

/// Where a rank stands in the dense grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Which slice of each weight matrix, below `size(Axis::Tensor)`.
    pub tensor: usize,
    /// Which slice of each sequence, below `size(Axis::Context)`.
    pub context: usize,
    /// Which copy of the model, below `size(Axis::Data)`.
    pub data: usize,
    /// Which stage of the pipeline, below `size(Axis::Pipeline)`.
    pub pipeline: usize,
}

/// Where a rank stands in the expert grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExpertCoordinates {
    /// Which slice of each expert's weight matrices, below `size(Axis::ExpertTensor)`.
    pub expert_tensor: usize,
    /// Which share of the experts, below `size(Axis::Expert)`.
    pub expert: usize,
    /// Which copy of the experts, below [`Mesh::expert_data`].
    pub expert_data: usize,
    /// Which stage of the pipeline, below `size(Axis::Pipeline)`; the same as in [`Coordinates`].
    pub pipeline: usize,
}

impl Mesh {
    /// Lays `config` over a world of `world_size` ranks.
    ///
    /// # Errors
    ///
    /// [`MeshError::Unfit`], with the sizes at hand and those that would fit, where
    /// - the world or an axis is empty;
    /// - `tensor x context x pipeline x data` is not the world, or without `data` does not divide
    ///   it;
    /// - `expert_tensor x expert x pipeline` does not divide the world;
    /// - the order leaves out an axis of more than one rank;
    /// - the two grids would disagree on the pipelines: unless the order ends with `pp` (axes of
    ///   size 1 aside) or there is one stage, their pipelines and their data sizes must be equal.
    pub fn new(config: &ParallelConfig, world_size: usize) -> Result<Mesh, MeshError> {
        layout::lay_out(config, world_size).map_err(|fault| MeshError::Unfit {
            fault,
            fits: Box::new(layout::what_fits(config, world_size)),
        })
    }

    /// The mesh of one rank, on which every axis has size 1.
    pub fn single() -> Mesh {
        Mesh::new(&ParallelConfig::new(), 1).expect("sizes of 1 fit a world of 1")
    }

    /// The configuration, with `data` and `expert_tensor` filled in and the order completed.
    pub fn config(&self) -> &ParallelConfig {
        &self.config
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world
    }

    /// The number of ranks along `axis`; for [`Axis::Data`] in the dense grid.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Expert | Axis::ExpertTensor => self.expert.size(axis),
            _ => self.dense.size(axis),
        }
    }

    /// The data size of the expert grid: how many copies of each expert there are.
    pub fn expert_data(&self) -> usize {
        self.expert.size(Axis::Data)
    }

    /// Where `rank` stands in the dense grid.
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

    /// Where `rank` stands in the expert grid.
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

    /// The rank that stands at a place of the dense grid.
    ///
    /// # Panics
    ///
    /// Where a coordinate is not below the size of its axis.
    #[track_caller]
    pub fn rank_at(&self, place: Coordinates) -> usize {
        self.dense.offset(Axis::Tensor, place.tensor)
            + self.dense.offset(Axis::Context, place.context)
            + self.dense.offset(Axis::Data, place.data)
            + self.dense.offset(Axis::Pipeline, place.pipeline)
    }

    /// The rank that stands at a place of the expert grid.
    ///
    /// # Panics
    ///
    /// Where a coordinate is not below the size of its axis.
    #[track_caller]
    pub fn expert_rank_at(&self, place: ExpertCoordinates) -> usize {
        self.expert.offset(Axis::ExpertTensor, place.expert_tensor)
            + self.expert.offset(Axis::Expert, place.expert)
            + self.expert.offset(Axis::Data, place.expert_data)
            + self.expert.offset(Axis::Pipeline, place.pipeline)
    }

    /// Every group of the dense grid over `axes`: the ranks that differ in these axes alone.
    ///
    /// `axes` is a set of [`Axis::Tensor`], [`Axis::Context`], [`Axis::Data`] and
    /// [`Axis::Pipeline`]; the order of the groups and of their members follows the order of the
    /// mesh, not that of the slice. The groups partition the world; over no axes each rank is a
    /// group.
    ///
    /// # Panics
    ///
    /// Where `axes` names [`Axis::Expert`] or [`Axis::ExpertTensor`].
    #[track_caller]
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        self.dense.family(axes).groups()
    }

    /// Every group of the expert grid over `axes`: the ranks that differ in these axes alone.
    ///
    /// `axes` is a set of [`Axis::ExpertTensor`], [`Axis::Expert`], [`Axis::Data`], which here is
    /// the data axis of the experts, and [`Axis::Pipeline`]. Otherwise as [`groups`](Mesh::groups).
    ///
    /// # Panics
    ///
    /// Where `axes` names [`Axis::Tensor`] or [`Axis::Context`].
    #[track_caller]
    pub fn expert_groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        self.expert.family(axes).groups()
    }

    /// The one of [`groups`](Mesh::groups) that contains `rank`.
    ///
    /// # Panics
    ///
    /// As `groups`, and where `rank` is outside the world.
    #[track_caller]
    pub fn members(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        self.dense.family(axes).group_of(self.checked(rank))
    }

    /// The one of [`expert_groups`](Mesh::expert_groups) that contains `rank`.
    ///
    /// # Panics
    ///
    /// As `expert_groups`, and where `rank` is outside the world.
    #[track_caller]
    pub fn expert_members(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        self.expert.family(axes).group_of(self.checked(rank))
    }

    /// The same place on the next stage of the pipeline; after the last stage comes the first.
    #[track_caller]
    pub fn next_stage(&self, rank: usize) -> usize {
        let here = self.coordinates(rank);
        let pipeline = if self.is_last_stage(rank) {
            0
        } else {
            here.pipeline + 1
        };
        self.rank_at(Coordinates { pipeline, ..here })
    }

    /// The same place on the previous stage of the pipeline; before the first stage comes the last.
    #[track_caller]
    pub fn previous_stage(&self, rank: usize) -> usize {
        let here = self.coordinates(rank);
        let pipeline = here
            .pipeline
            .checked_sub(1)
            .unwrap_or(self.size(Axis::Pipeline) - 1);
        self.rank_at(Coordinates { pipeline, ..here })
    }

    /// Whether `rank` holds the first stage, which reads the tokens.
    #[track_caller]
    pub fn is_first_stage(&self, rank: usize) -> bool {
        self.coordinates(rank).pipeline == 0
    }

    /// Whether `rank` holds the last stage, which computes the loss.
    #[track_caller]
    pub fn is_last_stage(&self, rank: usize) -> bool {
        self.coordinates(rank).pipeline + 1 == self.size(Axis::Pipeline)
    }

    /// The first and the last rank of the pipeline of `rank`: those that hold tied embeddings. With
    /// one stage the two are one rank, which is then the only member.
    ///
    /// A rank of a middle stage gets the group of its pipeline without being a member.
    #[track_caller]
    pub fn embedding_group(&self, rank: usize) -> Vec<usize> {
        let stages = self.members(&[Axis::Pipeline], rank);
        match stages.as_slice() {
            [first, .., last] => vec![*first, *last],
            _ => stages,
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

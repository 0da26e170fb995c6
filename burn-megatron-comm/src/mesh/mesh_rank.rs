//! The position of one rank in a device mesh, and its index on one axis.

use std::sync::Arc;

use super::{Axis, AxisSet, Grid, Mesh};

/// The index of a rank on an axis, and the size of the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisRank {
    /// The index of the rank on the axis.
    pub index: usize,
    /// The number of ranks on the axis.
    pub size: usize,
}

/// The position of one rank in a device mesh: its index on every axis of both grids. It is cheap to clone.
///
/// ```
/// use std::sync::Arc;
///
/// use burn_megatron_comm::mesh::{Axis, AxisRank, Grid, Mesh, MeshRank, ParallelConfig};
///
/// let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2), 4)?;
/// let rank = MeshRank::new(Arc::new(mesh), 2);
/// assert_eq!(rank.on(Grid::Dense, Axis::Tensor), AxisRank { index: 0, size: 2 });
/// assert_eq!(rank.on(Grid::Dense, Axis::Data), AxisRank { index: 1, size: 2 });
/// # Ok::<(), burn_megatron_comm::mesh::MeshError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshRank {
    mesh: Arc<Mesh>,
    rank: usize,
}

impl MeshRank {
    /// Creates the position of the rank `rank` in `mesh`.
    ///
    /// # Panics
    ///
    /// If the mesh has no such rank.
    #[track_caller]
    pub fn new(mesh: Arc<Mesh>, rank: usize) -> Self {
        mesh.checked(rank);
        Self { mesh, rank }
    }

    /// Creates the position of the only rank in a world of one rank.
    pub fn single() -> Self {
        Self::new(Arc::new(Mesh::single()), 0)
    }

    /// Returns the position of another rank in the same mesh.
    ///
    /// # Panics
    ///
    /// If the mesh has no such rank.
    #[track_caller]
    pub fn with_rank(&self, rank: usize) -> Self {
        Self::new(self.mesh.clone(), rank)
    }

    /// Returns the device mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Returns the world rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the index of this rank on an axis of a grid, and the size of the axis.
    ///
    /// # Panics
    ///
    /// If the grid does not have the axis.
    #[track_caller]
    pub fn on(&self, grid: Grid, axis: Axis) -> AxisRank {
        let ranks = self.mesh.grid(grid);
        AxisRank {
            index: ranks.coordinate(axis, self.rank),
            size: ranks.size(axis),
        }
    }

    /// Returns the index of this rank among the ranks that differ only in `axes` of a grid, and the number of these
    /// ranks.
    ///
    /// # Panics
    ///
    /// If the grid does not have one of the axes.
    #[track_caller]
    pub fn among(&self, grid: Grid, axes: impl Into<AxisSet>) -> AxisRank {
        let members = self.mesh.members(grid, axes, self.rank);
        let before = members.iter().take_while(|rank| **rank != self.rank);
        AxisRank {
            index: before.count(),
            size: members.len(),
        }
    }
}

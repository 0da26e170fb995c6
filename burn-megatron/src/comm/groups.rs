//! The place of one rank in a mesh, with a communicator for each of its groups.

use std::sync::Arc;

use super::{CommError, Communicator, Rank, Solo};
use crate::mesh::{Axis, Coordinates, Mesh, MeshError, ParallelConfig, Place};

/// What a rank knows of the others: the mesh, its own coordinates, and its groups.
///
/// There is no global state: this handle is passed to whatever is built.
#[derive(Clone, Debug)]
pub struct Groups {
    mesh: Arc<Mesh>,
    rank: usize,
    world: Arc<dyn Communicator>,
    tensor: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
}

/// Groups that cannot be formed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GroupsError {
    /// The sizes do not fit the world.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// An axis has several ranks, and nothing makes use of it yet.
    #[error("{axis} = {size}, but nothing is built yet that shares work over the {axis} axis")]
    Unused {
        /// The axis.
        axis: Axis,
        /// Its size.
        size: usize,
    },
    /// The ranks could not agree.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for GroupsError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl Groups {
    /// Lays `config` over the world of `rank`. Every rank must call it with the same config.
    ///
    /// # Errors
    ///
    /// [`GroupsError::Mesh`] when the sizes do not fit the world; [`GroupsError::Comm`] when a rank
    /// is missing or has another config.
    pub fn new(config: &ParallelConfig, rank: &Rank) -> Result<Self, GroupsError> {
        let mesh = Mesh::new(config, rank.size())?;
        for axis in [Axis::Context, Axis::Expert, Axis::Pipeline] {
            let size = mesh.size(axis);
            if size > 1 {
                return Err(GroupsError::Unused { axis, size });
            }
        }
        Ok(Self::over(mesh, rank.communicator())?)
    }

    /// The groups of `mesh` over a communicator of the whole world.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the ranks do not come or do not agree.
    pub fn over(mesh: Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        let along = |axis: Axis| world.split(&axis.to_string(), &mesh.groups(&[axis]));
        let (tensor, data) = (along(Axis::Tensor)?, along(Axis::Data)?);
        Ok(Self {
            rank: world.rank(),
            mesh: Arc::new(mesh),
            tensor,
            data,
            world,
        })
    }

    /// One rank alone, without a world.
    pub fn single() -> Self {
        let solo: Arc<dyn Communicator> = Arc::new(Solo::new("world"));
        Self {
            mesh: Arc::new(Mesh::single()),
            rank: 0,
            world: solo.clone(),
            tensor: solo.clone(),
            data: solo,
        }
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The world rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank's coordinates.
    pub fn coordinates(&self) -> Coordinates {
        self.mesh.coordinates(self.rank)
    }

    /// This rank's place on the tensor axis.
    pub fn place(&self) -> Place {
        Place {
            index: self.tensor.rank(),
            size: self.tensor.size(),
        }
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The ranks that differ from this one in the tensor axis alone.
    pub fn tensor(&self) -> &Arc<dyn Communicator> {
        &self.tensor
    }

    /// The ranks that differ from this one in the data axis alone.
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// The same groups with another communicator for the tensor axis: for wrappers that record,
    /// delay or disturb the calls of some layer.
    pub fn with_tensor(mut self, tensor: Arc<dyn Communicator>) -> Self {
        self.tensor = tensor;
        self
    }

    /// The same groups with another communicator for the data axis; see
    /// [`with_tensor`](Self::with_tensor).
    pub fn with_data(mut self, data: Arc<dyn Communicator>) -> Self {
        self.data = data;
        self
    }

    /// Cuts the tensor axis into groups of `size` neighbours. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the ranks do not come or do not agree.
    pub fn tensor_neighbours(&self, size: usize) -> Result<Arc<dyn Communicator>, CommError> {
        let ranks = self.tensor.group().ranks();
        let groups: Vec<_> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
        self.tensor.split(&format!("tensor/{size}"), &groups)
    }
}

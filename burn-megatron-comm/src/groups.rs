//! The place of one rank in a mesh, with a communicator for each of its groups.

use std::sync::Arc;

use super::{Absent, CommError, Communicator, Rank, Solo};
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
    pipeline: Arc<dyn Communicator>,
    stage: Arc<dyn Communicator>,
    ends: Arc<dyn Communicator>,
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
        Self::checked(config, rank.communicator())
    }

    /// The same over a communicator of the whole world, such as a wrapper around that of a rank.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn checked(
        config: &ParallelConfig,
        world: Arc<dyn Communicator>,
    ) -> Result<Self, GroupsError> {
        let mesh = Mesh::new(config, world.size())?;
        for axis in [Axis::Context, Axis::Expert] {
            let size = mesh.size(axis);
            if size > 1 {
                return Err(GroupsError::Unused { axis, size });
            }
        }
        Ok(Self::over(mesh, world)?)
    }

    /// The groups of `mesh` over a communicator of the whole world.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the ranks do not come or do not agree.
    pub fn over(mesh: Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        let over = |name: &str, axes: &[Axis]| world.split(name, &mesh.groups(axes));
        Ok(Self {
            rank: world.rank(),
            tensor: over("tensor", &[Axis::Tensor])?,
            data: over("data", &[Axis::Data])?,
            pipeline: over("pipeline", &[Axis::Pipeline])?,
            stage: over("stage", &[Axis::Tensor, Axis::Data])?,
            ends: world.split("ends", &ends(&mesh))?,
            mesh: Arc::new(mesh),
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
            data: solo.clone(),
            pipeline: solo.clone(),
            stage: solo.clone(),
            ends: solo,
        }
    }

    /// The place of one rank in a mesh whose ranks do not run: what is built there shows what the rank will
    /// hold, and every call is an error.
    ///
    /// # Errors
    ///
    /// None that a rank of the mesh has.
    pub fn without_world(mesh: Mesh, rank: usize) -> Result<Self, CommError> {
        let world = Absent::world(mesh.world_size(), rank);
        Self::over(mesh, Arc::new(world))
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

    /// The ranks that differ from this one in the pipeline axis alone.
    pub fn pipeline(&self) -> &Arc<dyn Communicator> {
        &self.pipeline
    }

    /// The ranks that hold the same stages: tensor and data axis.
    pub fn stage(&self) -> &Arc<dyn Communicator> {
        &self.stage
    }

    /// The first and the last rank of this pipeline; a rank between them is alone.
    pub fn ends(&self) -> &Arc<dyn Communicator> {
        &self.ends
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

/// The embedding group of each pipeline, and all other ranks alone.
fn ends(mesh: &Mesh) -> Vec<Vec<usize>> {
    let pipelines = mesh.groups(&[Axis::Pipeline]).into_iter();
    let groups = pipelines.flat_map(|pipeline| {
        let ends = mesh.embedding_group(pipeline[0]);
        let others = pipeline.into_iter().filter(|rank| !ends.contains(rank));
        let others: Vec<_> = others.map(|rank| vec![rank]).collect();
        std::iter::once(ends).chain(others)
    });
    groups.collect()
}

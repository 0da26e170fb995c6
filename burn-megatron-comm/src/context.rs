//! The coordinates of one rank in a mesh, with a communicator for each of its process groups.

use std::sync::Arc;

use crate::mesh::{Axis, AxisRank, Coordinates, Mesh, MeshError, ParallelConfig};
use crate::{CommError, Communicator, OfflineCommunicator, Rank, SingleRank};

/// The mesh, the coordinates of this rank, and the communicators of its process groups.
///
/// There is no global state: this handle is passed to the `init` of every module.
#[derive(Clone, Debug)]
pub struct ParallelContext {
    mesh: Arc<Mesh>,
    rank: usize,
    world: Arc<dyn Communicator>,
    tensor: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
    pipeline: Arc<dyn Communicator>,
    stage: Arc<dyn Communicator>,
    embedding: Arc<dyn Communicator>,
}

/// Why the process groups could not be created.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ParallelContextError {
    /// The sizes do not match the world.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// An axis has more than one rank but is not supported yet.
    #[error("invalid {axis} = {size}: expected 1, as {axis} parallelism is not supported yet")]
    Unused {
        /// The axis.
        axis: Axis,
        /// Its size.
        size: usize,
    },
    /// A split of the world failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for ParallelContextError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl ParallelContext {
    /// Creates the process groups of `config` in the world of `rank`.
    ///
    /// Collective: call on all ranks of the world, with the same config.
    ///
    /// # Errors
    ///
    /// [`ParallelContextError::Mesh`] if the sizes do not match the world; [`ParallelContextError::Comm`] if a rank is
    /// missing or has another config.
    pub fn new(config: &ParallelConfig, rank: &Rank) -> Result<Self, ParallelContextError> {
        Self::from_world(config, rank.communicator())
    }

    /// [`new`](Self::new) over a communicator of the whole world, such as a wrapper around that of a rank.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn from_world(
        config: &ParallelConfig,
        world: Arc<dyn Communicator>,
    ) -> Result<Self, ParallelContextError> {
        let mesh = Mesh::new(config, world.size())?;
        for axis in [Axis::Context, Axis::Expert] {
            let size = mesh.size(axis);
            if size > 1 {
                return Err(ParallelContextError::Unused { axis, size });
            }
        }
        Ok(Self::from_mesh(mesh, world)?)
    }

    /// The process groups of `mesh` over a communicator of the whole world. Unsupported axes are not
    /// refused.
    ///
    /// Collective: call on all ranks of the world, with the same mesh.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or has another mesh.
    pub fn from_mesh(mesh: Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        let split = |name: &str, axes: &[Axis]| world.split(name, &mesh.groups(axes));
        Ok(Self {
            rank: world.rank(),
            tensor: split("tensor", &[Axis::Tensor])?,
            data: split("data", &[Axis::Data])?,
            pipeline: split("pipeline", &[Axis::Pipeline])?,
            stage: split("stage", &[Axis::Tensor, Axis::Data])?,
            embedding: world.split("embedding", &embedding_groups(&mesh))?,
            mesh: Arc::new(mesh),
            world,
        })
    }

    /// A world of one rank.
    pub fn single() -> Self {
        let single: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
        Self {
            mesh: Arc::new(Mesh::single()),
            rank: 0,
            world: single.clone(),
            tensor: single.clone(),
            data: single.clone(),
            pipeline: single.clone(),
            stage: single.clone(),
            embedding: single,
        }
    }

    /// The context of one rank of a world that is not running: modules built with it have the shapes that
    /// the rank will hold, and every call fails.
    ///
    /// # Errors
    ///
    /// None for a rank of the mesh.
    pub fn offline(mesh: Mesh, rank: usize) -> Result<Self, CommError> {
        let world = OfflineCommunicator::world(mesh.world_size(), rank);
        Self::from_mesh(mesh, Arc::new(world))
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

    /// This rank's index on the tensor axis.
    pub fn place(&self) -> AxisRank {
        AxisRank {
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

    /// The ranks that hold the same pipeline stages: tensor and data axis.
    pub fn stage(&self) -> &Arc<dyn Communicator> {
        &self.stage
    }

    /// The embedding group: the first and the last rank of this pipeline. Every other rank is a group of its
    /// own.
    pub fn embedding(&self) -> &Arc<dyn Communicator> {
        &self.embedding
    }

    /// Replaces the communicator of the tensor axis, for instance by a wrapper that records, delays or
    /// disturbs calls.
    pub fn with_tensor(mut self, tensor: Arc<dyn Communicator>) -> Self {
        self.tensor = tensor;
        self
    }

    /// Replaces the communicator of the data axis; see [`with_tensor`](Self::with_tensor).
    pub fn with_data(mut self, data: Arc<dyn Communicator>) -> Self {
        self.data = data;
        self
    }

    /// Splits the tensor group into groups of `size` consecutive ranks.
    ///
    /// Collective: call on all ranks of the tensor group, with the same size.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or has another size.
    pub fn tensor_subgroups(&self, size: usize) -> Result<Arc<dyn Communicator>, CommError> {
        let ranks = self.tensor.group().ranks();
        let groups: Vec<_> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
        self.tensor.split(&format!("tensor/{size}"), &groups)
    }
}

/// The embedding group of each pipeline, and a group of its own for every other rank.
fn embedding_groups(mesh: &Mesh) -> Vec<Vec<usize>> {
    let pipelines = mesh.groups(&[Axis::Pipeline]).into_iter();
    let groups = pipelines.flat_map(|pipeline| {
        let embedding = mesh.embedding_group(pipeline[0]);
        let others = pipeline
            .into_iter()
            .filter(|rank| !embedding.contains(rank));
        let others: Vec<_> = others.map(|rank| vec![rank]).collect();
        std::iter::once(embedding).chain(others)
    });
    groups.collect()
}

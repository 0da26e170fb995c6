//! The coordinates of one rank in a mesh, with a communicator for each of its process groups.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

mod groups;

use crate::mesh::{
    AxisRank, Coordinates, Grid, GroupShape, Mesh, MeshError, MeshRank, ParallelConfig,
};
use crate::{CommError, Communicator, OfflineCommunicator, Rank, SingleRank};

use groups::{CONTEXT, DATA, PIPELINE, STAGE, STANDARD, Standard, TENSOR, listed_groups};

pub use groups::NodeGroups;

/// The mesh, the coordinates of this rank, and the communicators of its process groups.
///
/// There is no global state: this handle is passed to the `init` of every module. [`group`](Self::group)
/// returns the group over any set of axes; those that every run needs have an accessor.
#[derive(Clone, Debug)]
pub struct ParallelContext {
    rank: MeshRank,
    /// The groups that every run needs, by [`Standard`].
    standard: [Arc<dyn Communicator>; STANDARD.len()],
    embedding: Arc<dyn Communicator>,
    /// The groups made on demand, shared by all clones.
    others: Arc<Mutex<Groups>>,
    /// The groups inside of nodes and between nodes, by the group of which they are parts.
    nodes: Arc<Mutex<BTreeMap<GroupKey, NodeGroups>>>,
    /// Whether the world is not running, so that the groups of other ranks are not listed: there may be many.
    is_offline: bool,
}

/// The groups into which the ranks are split, and whether tokens of experts travel over them.
type GroupKey = (GroupShape, bool);

type Groups = BTreeMap<GroupKey, Arc<dyn Communicator>>;

/// Why the process groups could not be created.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ParallelContextError {
    /// The sizes do not match the world.
    #[error(transparent)]
    Mesh(#[from] MeshError),
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
    /// Creates the process groups that every run needs, of `config` in the world of `rank`.
    ///
    /// Collective: call on all ranks of the world, with the same config.
    ///
    /// # Errors
    ///
    /// [`ParallelContextError::Mesh`] if the sizes do not match the world or a setting has no effect;
    /// [`ParallelContextError::Comm`] if a rank is missing or has another config.
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
        Ok(Self::from_mesh(Mesh::new(config, world.size())?, world)?)
    }

    /// The process groups of `mesh` over a communicator of the whole world.
    ///
    /// Collective: call on all ranks of the world, with the same mesh.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or has another mesh.
    pub fn from_mesh(mesh: Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        let embedding = embedding_groups(&mesh);
        Self::with_groups(mesh, world, false, &embedding)
    }

    fn with_groups(
        mesh: Mesh,
        world: Arc<dyn Communicator>,
        is_offline: bool,
        embedding: &[Vec<usize>],
    ) -> Result<Self, CommError> {
        let split = |name, axes| {
            let groups = listed_groups(&mesh, Grid::Dense, axes, is_offline.then(|| world.rank()));
            world.split(name, &groups)
        };
        Ok(Self {
            standard: [
                split("tensor", TENSOR)?,
                split("context", CONTEXT)?,
                split("data", DATA)?,
                split("pipeline", PIPELINE)?,
                split("stage", STAGE)?,
                world.clone(),
            ],
            embedding: world.split("embedding", embedding)?,
            rank: MeshRank::new(Arc::new(mesh), world.rank()),
            others: Arc::default(),
            nodes: Arc::default(),
            is_offline,
        })
    }

    /// A world of one rank.
    pub fn single() -> Self {
        let single: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
        Self {
            rank: MeshRank::single(),
            standard: std::array::from_fn(|_| single.clone()),
            embedding: single,
            others: Arc::default(),
            nodes: Arc::default(),
            is_offline: false,
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
        let embedding = match mesh.embedding_group(rank) {
            group if group.contains(&rank) => group,
            _ => vec![rank],
        };
        Self::with_groups(mesh, Arc::new(world), true, &[embedding])
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        self.rank.mesh()
    }

    /// The layout, with `data` and `expert_tensor` filled in.
    pub fn config(&self) -> &ParallelConfig {
        self.mesh().config()
    }

    /// The world rank.
    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    /// This rank and its mesh, from which its part of each parameter follows.
    pub fn mesh_rank(&self) -> &MeshRank {
        &self.rank
    }

    /// This rank's coordinates.
    pub fn coordinates(&self) -> Coordinates {
        self.mesh().coordinates(self.rank())
    }

    /// This rank's index on the tensor axis.
    pub fn place(&self) -> AxisRank {
        AxisRank {
            index: self.tensor().rank(),
            size: self.tensor().size(),
        }
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::World)
    }

    /// The ranks that differ from this one in the tensor axis alone.
    pub fn tensor(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Tensor)
    }

    /// The ranks that differ from this one in the context axis alone: those that share its sequences.
    pub fn context(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Context)
    }

    /// The ranks that differ from this one in the data axis of the dense grid alone.
    ///
    /// Gradients are summed over the [`group`](Self::group) of a parameter's
    /// [`data_axes`](Grid::data_axes), which has more axes in the dense grid and other ranks in the expert
    /// grid.
    pub fn data(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Data)
    }

    /// The ranks that differ from this one in the pipeline axis alone.
    pub fn pipeline(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Pipeline)
    }

    /// The ranks that hold the same pipeline stages: all axes but the pipeline, of either grid.
    pub fn stage(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Stage)
    }

    /// The embedding group: the first and the last rank of this pipeline. Every other rank is a group of its
    /// own.
    pub fn embedding(&self) -> &Arc<dyn Communicator> {
        &self.embedding
    }
}

/// The embedding group of each pipeline, and a group of its own for every other rank.
fn embedding_groups(mesh: &Mesh) -> Vec<Vec<usize>> {
    let pipelines = mesh.groups(Grid::Dense, PIPELINE).into_iter();
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

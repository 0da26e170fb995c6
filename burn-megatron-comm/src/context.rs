//! The coordinates of one rank in a device mesh, with a communicator for each process group of the rank.

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

/// The device mesh, the coordinates of this rank, and the communicators of its process groups.
///
/// There is no global state: this handle is passed to the `init` method of every module. [`group`](Self::group) returns
/// the group over any set of axes. The groups that every run needs have their own methods, such as
/// [`tensor`](Self::tensor).
///
/// ```
/// use burn_megatron_comm::mesh::{Axis, Grid, ParallelConfig};
/// use burn_megatron_comm::{ParallelContext, World};
///
/// let config = ParallelConfig::new().with_tensor(2);
/// let groups = World::threads(4)?.run(|rank| {
///     let context = ParallelContext::new(&config, &rank)?;
///     let both = context.group(Grid::Dense, [Axis::Tensor, Axis::Data])?;
///     let ranks = [context.tensor(), context.data()].map(|comm| comm.group().ranks().to_vec());
///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>((ranks, both.size()))
/// })?;
/// assert_eq!(groups[3], ([vec![2, 3], vec![1, 3]], 4));
/// # Ok::<(), burn_megatron_comm::WorldError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParallelContext {
    rank: MeshRank,
    /// The groups that every run needs, indexed by [`Standard`].
    standard: [Arc<dyn Communicator>; STANDARD.len()],
    embedding: Arc<dyn Communicator>,
    /// The groups created on demand, shared by all clones.
    others: Arc<Mutex<Groups>>,
    /// The intra-node and inter-node groups, keyed by the group that they split.
    nodes: Arc<Mutex<BTreeMap<GroupKey, NodeGroups>>>,
    /// Whether the world is not running. If so, the groups of other ranks are not listed, because there may be many.
    is_offline: bool,
}

/// The groups into which the ranks are split, and whether expert tokens are sent over them.
type GroupKey = (GroupShape, bool);

type Groups = BTreeMap<GroupKey, Arc<dyn Communicator>>;

/// The reason why the process groups could not be created.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ParallelContextError {
    /// The sizes of the axes do not match the world size.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The split of the world into groups failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for ParallelContextError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl ParallelContext {
    /// Creates the process groups that every run needs, such as the tensor, data and pipeline groups.
    ///
    /// Collective: call on all ranks of the world, with the same configuration.
    ///
    /// # Errors
    ///
    /// [`ParallelContextError::Mesh`] if the axis sizes do not match the world size, or if a setting has no effect.
    /// [`ParallelContextError::Comm`] if a rank does not take part or has a different configuration.
    pub fn new(config: &ParallelConfig, rank: &Rank) -> Result<Self, ParallelContextError> {
        Self::from_world(config, rank.communicator())
    }

    /// Same as [`new`](Self::new), but uses `world` as the communicator of all ranks. `world` may be a wrapper around
    /// [`Rank::communicator`].
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

    /// Creates the process groups of `mesh`. `world` is the communicator of all ranks.
    ///
    /// Collective: call on all ranks of the world, with the same mesh.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank does not take part or has a different mesh.
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

    /// Creates the context of a world of one rank.
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

    /// Creates the context of the rank `rank` without a running world, for example to plan memory. Modules that are
    /// built with this context have the same parameter shapes as in a run on this rank. Every collective returns an
    /// error.
    ///
    /// # Errors
    ///
    /// Does not return an error if `rank` is a rank of the mesh.
    ///
    /// # Panics
    ///
    /// If `rank` is not a rank of the mesh.
    pub fn offline(mesh: Mesh, rank: usize) -> Result<Self, CommError> {
        let world = OfflineCommunicator::world(mesh.world_size(), rank);
        let embedding = match mesh.embedding_group(rank) {
            group if group.contains(&rank) => group,
            _ => vec![rank],
        };
        Self::with_groups(mesh, Arc::new(world), true, &[embedding])
    }

    /// Returns the device mesh.
    pub fn mesh(&self) -> &Mesh {
        self.rank.mesh()
    }

    /// Returns the parallel layout, with the derived sizes of `data` and `expert_tensor` filled in.
    pub fn config(&self) -> &ParallelConfig {
        self.mesh().config()
    }

    /// Returns the rank of this process or thread in the world.
    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    /// Returns the position of this rank in the mesh, which determines its shard of each parameter.
    pub fn mesh_rank(&self) -> &MeshRank {
        &self.rank
    }

    /// Returns this rank's coordinates in the dense grid.
    pub fn coordinates(&self) -> Coordinates {
        self.mesh().coordinates(self.rank())
    }

    /// Returns the index of this rank on the tensor axis, and the size of the axis.
    pub fn place(&self) -> AxisRank {
        AxisRank {
            index: self.tensor().rank(),
            size: self.tensor().size(),
        }
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::World)
    }

    /// Returns the tensor-parallel group: the ranks that differ from this rank only in the tensor coordinate.
    pub fn tensor(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Tensor)
    }

    /// Returns the context-parallel group: the ranks that differ from this rank only in the context coordinate. The
    /// ranks of this group process different parts of the same sequences.
    pub fn context(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Context)
    }

    /// Returns the data-parallel group: the ranks that differ from this rank only in the data coordinate of the dense
    /// grid.
    ///
    /// The gradients of a parameter are summed over the [`group`](Self::group) of the [`data_axes`](Grid::data_axes) of
    /// the parameter's grid. In the dense grid, the data axes include the context axis. In the expert grid, the
    /// data-parallel group contains different ranks.
    pub fn data(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Data)
    }

    /// Returns the pipeline-parallel group: the ranks that differ from this rank only in the pipeline coordinate.
    pub fn pipeline(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Pipeline)
    }

    /// Returns the group of ranks that hold the same pipeline stages as this rank. The group spans all axes except the
    /// pipeline axis, and is the same in both grids.
    pub fn stage(&self) -> &Arc<dyn Communicator> {
        self.standard_group(Standard::Stage)
    }

    /// Returns the embedding group: the first and the last rank of this pipeline. On every other rank, the group
    /// contains only that rank.
    pub fn embedding(&self) -> &Arc<dyn Communicator> {
        &self.embedding
    }
}

/// Returns the embedding group of each pipeline, and a group of one for every other rank.
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

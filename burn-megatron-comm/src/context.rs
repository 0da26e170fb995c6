//! The coordinates of one rank in a mesh, with a communicator for each of its process groups.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::mesh::{
    Axis, AxisRank, AxisSet, Coordinates, Grid, GroupShape, Mesh, MeshError, MeshRank,
    ParallelConfig,
};
use crate::subgroups::consecutive_subgroups;
use crate::{CommError, Communicator, OfflineCommunicator, Rank, SingleRank};

/// The mesh, the coordinates of this rank, and the communicators of its process groups.
///
/// There is no global state: this handle is passed to the `init` of every module. [`group`](Self::group)
/// returns the group over any set of axes; those that every run needs have an accessor.
#[derive(Clone, Debug)]
pub struct ParallelContext {
    rank: MeshRank,
    world: Arc<dyn Communicator>,
    tensor: Arc<dyn Communicator>,
    context: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
    pipeline: Arc<dyn Communicator>,
    stage: Arc<dyn Communicator>,
    embedding: Arc<dyn Communicator>,
    /// The groups made on demand, shared by all clones.
    others: Arc<Mutex<Groups>>,
    /// Those inside of nodes and between them, by the group of which they are parts.
    nodes: Arc<Mutex<BTreeMap<GroupKey, NodeGroups>>>,
    /// Whether the world is not running, so that the groups of other ranks are not listed: there may be many.
    is_offline: bool,
}

/// The groups into which the ranks are split, and whether tokens of experts travel over them.
type GroupKey = (GroupShape, bool);

type Groups = BTreeMap<GroupKey, Arc<dyn Communicator>>;

/// The parts of a group that lies on several nodes, with equally many ranks on each.
#[derive(Clone, Debug)]
pub struct NodeGroups {
    /// The ranks of the group on the node of this one.
    pub intra_node: Arc<dyn Communicator>,
    /// The ranks that have this one's place on each node.
    pub inter_node: Arc<dyn Communicator>,
}

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
            tensor: split("tensor", TENSOR)?,
            context: split("context", CONTEXT)?,
            data: split("data", DATA)?,
            pipeline: split("pipeline", PIPELINE)?,
            stage: split("stage", STAGE)?,
            embedding: world.split("embedding", embedding)?,
            rank: MeshRank::new(Arc::new(mesh), world.rank()),
            world,
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
            world: single.clone(),
            tensor: single.clone(),
            context: single.clone(),
            data: single.clone(),
            pipeline: single.clone(),
            stage: single.clone(),
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

    /// The ranks that differ from this one in the context axis alone: those that share its sequences.
    pub fn context(&self) -> &Arc<dyn Communicator> {
        &self.context
    }

    /// The ranks that differ from this one in the data axis of the dense grid alone.
    ///
    /// Gradients are summed over the [`group`](Self::group) of a parameter's
    /// [`data_axes`](Grid::data_axes), which has more axes in the dense grid and other ranks in the expert
    /// grid.
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// The ranks that differ from this one in the pipeline axis alone.
    pub fn pipeline(&self) -> &Arc<dyn Communicator> {
        &self.pipeline
    }

    /// The ranks that hold the same pipeline stages: all axes but the pipeline, of either grid.
    pub fn stage(&self) -> &Arc<dyn Communicator> {
        &self.stage
    }

    /// The embedding group: the first and the last rank of this pipeline. Every other rank is a group of its
    /// own.
    pub fn embedding(&self) -> &Arc<dyn Communicator> {
        &self.embedding
    }

    /// The ranks that differ from this one in `axes` of `grid` alone.
    ///
    /// The communicator is made by the first call and cached; clones of the context share the cache. Axes of
    /// size 1 do not count, and two sets of axes with the same groups have one communicator: without context
    /// parallelism that of context and data is [`data`](Self::data); those of tokens of experts are never shared. A new one
    /// is named by its axes in errors and reports, such as `tensor x context`, and `expert: data` in the expert grid.
    ///
    /// Collective, with the same grid and axes, in the same order among all such calls: without the pipeline
    /// axis on all ranks of the [`stage`](Self::stage), so that layers of one stage can ask for groups that
    /// other stages do not need; with it on all ranks of the world. A cached group is returned without
    /// waiting.
    ///
    /// # Errors
    ///
    /// [`CommError::InvalidCall`] if the grid does not have one of the axes; other errors if a rank is missing
    /// or asks for another group.
    pub fn group(
        &self,
        grid: Grid,
        axes: impl Into<AxisSet>,
    ) -> Result<Arc<dyn Communicator>, CommError> {
        let axes = axes.into();
        let unknown = axes.difference(grid.axes());
        if !unknown.is_empty() {
            return Err(CommError::InvalidCall {
                group: self.world.group().to_string(),
                call: format!("group {grid}: {axes}"),
                reason: format!(
                    "invalid axis {unknown}: expected axes of the {grid} grid, which has {}",
                    grid.axes()
                ),
            });
        }
        if let Some(standard) = self.standard(grid, axes) {
            return Ok(self.standard_group(standard).clone());
        }
        let key = self.key(grid, axes);
        let mut others = self.others.lock();
        if let Some(comm) = others.get(&key) {
            return Ok(comm.clone());
        }
        let own = self.is_offline.then(|| self.rank());
        let comm = self.create(grid, axes, &listed_groups(self.mesh(), grid, axes, own))?;
        others.insert(key, comm.clone());
        Ok(comm)
    }

    /// The parts of [`group`](Self::group) inside of nodes and between them; `None` if it is on one node, or if
    /// [`ranks_per_node`](ParallelConfig::ranks_per_node) is not set or the nodes have unequally many of its ranks, or
    /// one. They are cached as the group is.
    ///
    /// Collective: call on all ranks of the group.
    ///
    /// # Errors
    ///
    /// As [`group`](Self::group).
    pub fn node_groups(
        &self,
        grid: Grid,
        axes: impl Into<AxisSet>,
    ) -> Result<Option<NodeGroups>, CommError> {
        let axes = axes.into();
        let group = self.group(grid, axes)?;
        let (name, ranks) = (group.group().name(), group.group().ranks());
        let Some(own) = self.mesh().members_per_node(ranks) else {
            return Ok(None);
        };
        let key = self.key(grid, axes);
        let mut nodes = self.nodes.lock();
        if let Some(found) = nodes.get(&key) {
            return Ok(Some(found.clone()));
        }
        let names = ["in a node", "between nodes"].map(|part| format!("{name} {part}"));
        let names = names.each_ref().map(String::as_str);
        let [intra_node, inter_node] = consecutive_subgroups(&group, own, names)?;
        let found = NodeGroups {
            intra_node,
            inter_node,
        };
        nodes.insert(key, found.clone());
        Ok(Some(found))
    }

    /// Connects the groups that split a model and its gradients, which otherwise happens in the first call over each.
    /// An engine may need device memory for a connection.
    ///
    /// Collective: call on all ranks of the world, after all groups were made.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing.
    pub fn connect(&self) -> Result<(), CommError> {
        let standard = [&self.tensor, &self.context, &self.data, &self.embedding];
        let mut groups: Vec<_> = standard.into_iter().cloned().collect();
        // All ranks have the groups that they share in the order of their keys.
        groups.extend(self.others.lock().values().cloned());
        for group in self.nodes.lock().values() {
            groups.extend([group.intra_node.clone(), group.inter_node.clone()]);
        }
        for group in groups.iter().filter(|group| group.size() > 1) {
            group.start_barrier()?.wait()?;
        }
        Ok(())
    }

    fn create(
        &self,
        grid: Grid,
        axes: AxisSet,
        groups: &[Vec<usize>],
    ) -> Result<Arc<dyn Communicator>, CommError> {
        let axes = self.mesh().without_trivial_axes(grid, axes);
        let name = match grid {
            Grid::Dense => axes.to_string(),
            Grid::Expert => format!("{grid}: {axes}"),
        };
        if axes.is_empty() {
            let pool = self.world.pool().cloned().unwrap_or_default();
            return Ok(Arc::new(SingleRank::of_rank("single", self.rank(), pool)));
        }
        if axes.contains(Axis::Pipeline) {
            return self.world.split(&name, groups);
        }
        // Both grids have the same pipelines, so that each group lies inside of a stage.
        let own: HashSet<usize> = self.stage.group().ranks().iter().copied().collect();
        let inside = groups.iter().filter(|group| own.contains(&group[0]));
        self.stage
            .split(&name, &inside.cloned().collect::<Vec<_>>())
    }

    /// The standard group that has the same ranks as the group over `axes`, if one does.
    fn standard(&self, grid: Grid, axes: AxisSet) -> Option<Standard> {
        let same = |(_, other): &&(Standard, AxisSet)| grid == Grid::Dense && *other == axes;
        if let Some((standard, _)) = STANDARD.iter().find(same) {
            return Some(*standard);
        }
        let mesh = self.mesh();
        if mesh.without_trivial_axes(grid, axes).is_empty() || self.is_for_tokens(grid, axes) {
            return None;
        }
        let shape = mesh.group_shape(grid, axes);
        let same = |(_, axes): &&(Standard, AxisSet)| mesh.group_shape(Grid::Dense, *axes) == shape;
        STANDARD.iter().find(same).map(|(standard, _)| *standard)
    }

    /// Whether tokens of experts travel over these axes. Such a group has a communicator of its own, which an engine may
    /// run before sums of gradients.
    fn is_for_tokens(&self, grid: Grid, axes: AxisSet) -> bool {
        let axes = self.mesh().without_trivial_axes(grid, axes);
        axes.contains(Axis::Expert) && !axes.contains(Axis::Data)
    }

    /// By what a group that is made on demand is cached.
    fn key(&self, grid: Grid, axes: AxisSet) -> GroupKey {
        let shape = self.mesh().group_shape(grid, axes);
        (shape, self.is_for_tokens(grid, axes))
    }

    fn standard_group(&self, standard: Standard) -> &Arc<dyn Communicator> {
        match standard {
            Standard::Tensor => &self.tensor,
            Standard::Context => &self.context,
            Standard::Data => &self.data,
            Standard::Pipeline => &self.pipeline,
            Standard::Stage => &self.stage,
            Standard::World => &self.world,
        }
    }

    /// Replaces the communicator of the tensor axis, for instance by a wrapper that records, delays or
    /// disturbs calls. Clones made before keep theirs.
    pub fn with_tensor(self, tensor: Arc<dyn Communicator>) -> Self {
        self.with_group(Grid::Dense, TENSOR, tensor)
    }

    /// Replaces the communicator of the data axis of the dense grid; see [`with_tensor`](Self::with_tensor).
    pub fn with_data(self, data: Arc<dyn Communicator>) -> Self {
        self.with_group(Grid::Dense, DATA, data)
    }

    /// Replaces the communicator of all ranks; see [`with_tensor`](Self::with_tensor).
    pub fn with_world(mut self, world: Arc<dyn Communicator>) -> Self {
        self.world = world;
        self
    }

    /// Replaces the communicator that [`group`](Self::group) returns for `axes` of `grid`; see
    /// [`with_tensor`](Self::with_tensor).
    ///
    /// # Panics
    ///
    /// If the grid does not have one of the axes.
    #[track_caller]
    pub fn with_group(
        mut self,
        grid: Grid,
        axes: impl Into<AxisSet>,
        comm: Arc<dyn Communicator>,
    ) -> Self {
        let axes = axes.into();
        // They are made of the group.
        self.nodes = Arc::default();
        match self.standard(grid, axes) {
            Some(Standard::Tensor) => self.tensor = comm,
            Some(Standard::Context) => self.context = comm,
            Some(Standard::Data) => self.data = comm,
            Some(Standard::Pipeline) => self.pipeline = comm,
            Some(Standard::Stage) => self.stage = comm,
            Some(Standard::World) => self.world = comm,
            None => {
                let mut others = self.others.lock().clone();
                others.insert(self.key(grid, axes), comm);
                self.others = Arc::new(Mutex::new(others));
            }
        }
        self
    }

    /// Splits the group of an axis into groups of `size` consecutive ranks, named `tensor/2` or the like.
    ///
    /// Collective: call on all ranks of the group of the axis, with the same arguments; for the group itself
    /// see [`group`](Self::group).
    ///
    /// # Errors
    ///
    /// [`CommError`] if the grid does not have the axis, or a rank is missing or has another size.
    pub fn subgroups(
        &self,
        grid: Grid,
        axis: Axis,
        size: usize,
    ) -> Result<Arc<dyn Communicator>, CommError> {
        let comm = self.group(grid, axis)?;
        let (name, ranks) = (comm.group().name(), comm.group().ranks());
        let groups: Vec<_> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
        comm.split(&format!("{name}/{size}"), &groups)
    }
}

/// A group that every run needs, made by [`ParallelContext::new`].
#[derive(Clone, Copy, Debug)]
enum Standard {
    Tensor,
    Context,
    Data,
    Pipeline,
    Stage,
    World,
}

const TENSOR: AxisSet = AxisSet::of(Axis::Tensor);
const CONTEXT: AxisSet = AxisSet::of(Axis::Context);
const DATA: AxisSet = AxisSet::of(Axis::Data);
const PIPELINE: AxisSet = AxisSet::of(Axis::Pipeline);
const STAGE: AxisSet = Grid::Dense.axes().without(Axis::Pipeline);

/// The axes of the standard groups in the dense grid; where two have the same ranks, the first serves both.
const STANDARD: [(Standard, AxisSet); 6] = [
    (Standard::Tensor, TENSOR),
    (Standard::Context, CONTEXT),
    (Standard::Data, DATA),
    (Standard::Pipeline, PIPELINE),
    (Standard::Stage, STAGE),
    (Standard::World, Grid::Dense.axes()),
];

/// The groups over `axes`: all of them, or only that of the rank `own`.
fn listed_groups(mesh: &Mesh, grid: Grid, axes: AxisSet, own: Option<usize>) -> Vec<Vec<usize>> {
    match own {
        Some(rank) => vec![mesh.members(grid, axes, rank)],
        None => mesh.groups(grid, axes),
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

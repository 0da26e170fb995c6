//! Groups over any set of axes, made on demand.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{GroupKey, ParallelContext};
use crate::mesh::{Axis, AxisSet, Grid, Mesh};
use crate::subgroups::consecutive_subgroups;
use crate::{CommError, Communicator, SingleRank};

/// The parts of a group that lies on several nodes, with equally many ranks on each.
#[derive(Clone, Debug)]
pub struct NodeGroups {
    /// The ranks of the group on the node of this one.
    pub intra_node: Arc<dyn Communicator>,
    /// The ranks that have this one's place on each node.
    pub inter_node: Arc<dyn Communicator>,
}

impl ParallelContext {
    /// The ranks that differ from this one in `axes` of `grid` alone.
    ///
    /// The communicator is made by the first call and cached; clones of the context share the cache. Axes of
    /// size 1 do not count, and two sets of axes with the same groups have one communicator: without context
    /// parallelism, context and data have the communicator of [`data`](Self::data). A communicator for the tokens of experts
    /// is never shared. Errors and reports name a new communicator by its axes, such as `tensor x context`, and
    /// `expert: data` in the expert grid.
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
            let known = grid.axes();
            let reason = format!(
                "invalid axis {unknown}: expected axes of the {grid} grid, which has {known}"
            );
            let call = format!("group {grid}: {axes}");
            return Err(CommError::invalid_call(self.world().group(), call, reason));
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
    /// [`ranks_per_node`](crate::mesh::ParallelConfig::ranks_per_node) is not set or the nodes have
    /// unequally many of its ranks, or one. They are cached as the group is.
    ///
    /// Collective: call on all ranks of the group.
    ///
    /// # Errors
    ///
    /// See [`group`](Self::group).
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
        let standard = [self.tensor(), self.context(), self.data(), &self.embedding];
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
            let pool = self.world().pool().cloned().unwrap_or_default();
            return Ok(Arc::new(SingleRank::of_rank("single", self.rank(), pool)));
        }
        if axes.contains(Axis::Pipeline) {
            return self.world().split(&name, groups);
        }
        // Both grids have the same pipelines, so that each group lies inside of a stage.
        let own: HashSet<usize> = self.stage().group().ranks().iter().copied().collect();
        let inside = groups.iter().filter(|group| own.contains(&group[0]));
        self.stage()
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

    /// Whether tokens of experts travel over these axes. Such a group has a separate communicator, so that an engine can
    /// run its calls before sums of gradients.
    fn is_for_tokens(&self, grid: Grid, axes: AxisSet) -> bool {
        let axes = self.mesh().without_trivial_axes(grid, axes);
        axes.contains(Axis::Expert) && !axes.contains(Axis::Data)
    }

    /// Returns the key by which a group that is made on demand is cached.
    fn key(&self, grid: Grid, axes: AxisSet) -> GroupKey {
        let shape = self.mesh().group_shape(grid, axes);
        (shape, self.is_for_tokens(grid, axes))
    }

    pub(super) fn standard_group(&self, standard: Standard) -> &Arc<dyn Communicator> {
        &self.standard[standard as usize]
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
        self.standard[Standard::World as usize] = world;
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
            Some(standard) => self.standard[standard as usize] = comm,
            None => {
                let mut others = self.others.lock().clone();
                others.insert(self.key(grid, axes), comm);
                self.others = Arc::new(Mutex::new(others));
            }
        }
        self
    }
}

/// A group that every run needs, made by [`ParallelContext::new`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Standard {
    Tensor,
    Context,
    Data,
    Pipeline,
    Stage,
    World,
}

pub(super) const TENSOR: AxisSet = AxisSet::of(Axis::Tensor);
pub(super) const CONTEXT: AxisSet = AxisSet::of(Axis::Context);
pub(super) const DATA: AxisSet = AxisSet::of(Axis::Data);
pub(super) const PIPELINE: AxisSet = AxisSet::of(Axis::Pipeline);
pub(super) const STAGE: AxisSet = Grid::Dense.axes().without(Axis::Pipeline);

/// The axes of the standard groups in the dense grid; where two have the same ranks, the first serves both.
pub(super) const STANDARD: [(Standard, AxisSet); 6] = [
    (Standard::Tensor, TENSOR),
    (Standard::Context, CONTEXT),
    (Standard::Data, DATA),
    (Standard::Pipeline, PIPELINE),
    (Standard::Stage, STAGE),
    (Standard::World, Grid::Dense.axes()),
];

/// Returns the groups over `axes`: all groups, or only the group of the rank `own`.
pub(super) fn listed_groups(
    mesh: &Mesh,
    grid: Grid,
    axes: AxisSet,
    own: Option<usize>,
) -> Vec<Vec<usize>> {
    match own {
        Some(rank) => vec![mesh.members(grid, axes, rank)],
        None => mesh.groups(grid, axes),
    }
}

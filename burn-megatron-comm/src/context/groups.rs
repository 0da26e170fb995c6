//! Process groups over any set of axes, created on demand.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{GroupKey, ParallelContext};
use crate::mesh::{Axis, AxisSet, Grid, Mesh};
use crate::subgroups::consecutive_subgroups;
use crate::{CommError, Communicator, SingleRank};

/// The intra-node and inter-node parts of a group that has the same number of ranks on each of several nodes.
#[derive(Clone, Debug)]
pub struct NodeGroups {
    /// The ranks of the group that are on the same node as this rank.
    pub intra_node: Arc<dyn Communicator>,
    /// One rank of the group per node: the ranks that have the same index on their node as this rank.
    pub inter_node: Arc<dyn Communicator>,
}

impl ParallelContext {
    /// Returns the group of ranks that differ from this rank only in their coordinates on the axes `axes` of `grid`.
    ///
    /// The communicator is created by the first call and cached. Clones of the context share the cache. Axes of size 1
    /// are ignored. Two sets of axes with the same groups share a communicator. For example, without context
    /// parallelism, `context x data` returns the communicator of [`data`](Self::data). Groups that exchange expert
    /// tokens always have a separate communicator. In errors and reports, the name of a new communicator lists its
    /// axes, such as `tensor x context`, or `expert: data` for the data axis of the expert grid.
    ///
    /// Collective: all participating ranks make the same calls in the same order. If `axes` contains the pipeline axis,
    /// call on all ranks of the world. Otherwise call on all ranks of the [`stage`](Self::stage). The layers of one
    /// stage can therefore request groups that other stages do not need. A cached group is returned without
    /// communication.
    ///
    /// # Errors
    ///
    /// [`CommError::InvalidCall`] if the grid does not have one of the axes. Another [`CommError`] if a rank does not
    /// take part or requests a different group.
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

    /// Splits a [`group`](Self::group) into an intra-node and an inter-node group. Both groups are cached.
    ///
    /// Returns `None` in these cases:
    /// - [`ranks_per_node`](crate::mesh::ParallelConfig::ranks_per_node) is not set.
    /// - All ranks of the group are on one node.
    /// - The number of ranks of the group differs between nodes, or there is only one rank per node.
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

    /// Establishes the connections of the groups over which a model and its gradients are split. Without this call,
    /// each group connects at its first collective. Some engines allocate device memory when a group connects.
    ///
    /// Collective: call on all ranks of the world, after all groups have been created.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank does not take part.
    pub fn connect(&self) -> Result<(), CommError> {
        let standard = [self.tensor(), self.context(), self.data(), &self.embedding];
        let mut groups: Vec<_> = standard.into_iter().cloned().collect();
        // The shared groups are in the order of their keys, which is the same on all ranks.
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
        // Both grids have the same pipelines, so each group is within one pipeline stage.
        let own: HashSet<usize> = self.stage().group().ranks().iter().copied().collect();
        let inside = groups.iter().filter(|group| own.contains(&group[0]));
        self.stage()
            .split(&name, &inside.cloned().collect::<Vec<_>>())
    }

    /// Returns the standard group with the same ranks as the group over `axes`, or `None` if there is no such group.
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

    /// Returns whether expert tokens are exchanged over these axes. Such a group has a separate communicator, so that
    /// an engine can run the exchanges before queued gradient reductions.
    fn is_for_tokens(&self, grid: Grid, axes: AxisSet) -> bool {
        let axes = self.mesh().without_trivial_axes(grid, axes);
        axes.contains(Axis::Expert) && !axes.contains(Axis::Data)
    }

    /// Returns the cache key of a group that is created on demand.
    fn key(&self, grid: Grid, axes: AxisSet) -> GroupKey {
        let shape = self.mesh().group_shape(grid, axes);
        (shape, self.is_for_tokens(grid, axes))
    }

    pub(super) fn standard_group(&self, standard: Standard) -> &Arc<dyn Communicator> {
        &self.standard[standard as usize]
    }

    /// Splits the group of an axis into groups of `size` consecutive ranks. The groups are named, for example,
    /// `tensor/2`.
    ///
    /// Collective: call with the same arguments on all ranks of the group of the axis. If the group of the axis does
    /// not exist yet, this method creates it. In this case, all ranks that must call [`group`](Self::group) for this
    /// axis must call this method.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the grid does not have the axis, or if a rank does not take part or passes a different size.
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

    /// Replaces the communicator of the tensor axis, for example with a wrapper that records calls, delays calls or
    /// injects faults. Existing clones of the context keep their communicator.
    pub fn with_tensor(self, tensor: Arc<dyn Communicator>) -> Self {
        self.with_group(Grid::Dense, TENSOR, tensor)
    }

    /// Replaces the communicator of the data axis of the dense grid. See [`with_tensor`](Self::with_tensor).
    pub fn with_data(self, data: Arc<dyn Communicator>) -> Self {
        self.with_group(Grid::Dense, DATA, data)
    }

    /// Replaces the communicator of all ranks. See [`with_tensor`](Self::with_tensor).
    pub fn with_world(mut self, world: Arc<dyn Communicator>) -> Self {
        self.standard[Standard::World as usize] = world;
        self
    }

    /// Replaces the communicator that [`group`](Self::group) returns for `axes` of `grid`. See
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
        // The node groups are derived from the replaced group.
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

/// The axes of the standard groups in the dense grid. If two have the same ranks, the first is used for both.
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

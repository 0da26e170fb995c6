//! The process groups over which the buckets of one grid are reduced, sharded and replicated.

use std::ops::Range;
use std::sync::Arc;

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use crate::collective::Comm;
use crate::comm::{NodeGroups, ParallelContext, SingleRank, consecutive_subgroups};
use crate::mesh::{Axis, Grid};

/// The data-parallel group of one grid, split into shard groups of consecutive ranks. Each shard group holds one
/// sharded copy.
///
/// Without sharding, a shard group is one rank. Without HSDP, it is the complete data-parallel group.
#[derive(Clone, Debug)]
pub struct ShardingGroups {
    /// The ranks over which gradients are summed.
    pub data: Comm,
    /// The ranks over which one copy is sharded.
    pub shard: Comm,
    /// The ranks that hold the same shard.
    pub replicas: Comm,
    /// The node groups of `replicas`: within nodes and between nodes. Set if gradients are reduced
    /// hierarchically, which requires that `replicas` is the complete `data` group.
    pub nodes: Option<NodeGroups>,
    /// The ranks over which a weight is split: the tensor axis of the grid.
    pub tensor: Comm,
    /// The ranks that hold the other parameters of the stage: all axes of the grid except the pipeline and the
    /// axes of `data`.
    pub model: Comm,
}

impl ShardingGroups {
    /// Creates the groups of `grid`. Collective: call on all ranks of the stage.
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError::Hsdp`](super::DataParallelConfigError::Hsdp) if shard groups do not divide the
    /// data-parallel group.
    pub fn new(
        groups: &ParallelContext,
        grid: Grid,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let data = groups.group(grid, grid.data_axes())?;
        config.check_hsdp(data.size())?;
        let shard_ranks = config.shard_ranks(data.size());
        let single = |name: &str| -> Comm { Arc::new(SingleRank::new(name)) };
        let (shard, replicas) = match (shard_ranks, data.size()) {
            (1, _) => (single("shard"), data.clone()),
            (n, size) if n == size => (data.clone(), single("replicas")),
            (n, _) => consecutive_subgroups(&data, n, ["shard", "replicas"])?.into(),
        };
        let nodes = if config.hierarchical_reduce {
            groups.node_groups(grid, grid.data_axes())?
        } else {
            None
        };
        let tensor = match grid {
            Grid::Dense => Axis::Tensor,
            Grid::Expert => Axis::ExpertTensor,
        };
        Ok(Self {
            data,
            shard,
            replicas,
            nodes,
            tensor: groups.group(grid, tensor)?,
            model: groups.group(grid, grid.model_axes())?,
        })
    }

    /// Returns this rank's shard of a bucket of `elements` elements.
    pub fn shard_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(self.shard.rank(), elements / self.shard.size())
    }

    /// Returns this rank's partition of a bucket. A bucket has one equal partition per rank of the group,
    /// independent of sharding, so that each element belongs to one rank. The partition lies in the rank's
    /// shard, and depends only on its [index](Self::partition_index).
    pub fn partition_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(
            self.partition_index(self.data.rank()),
            elements / self.data.size(),
        )
    }

    /// Returns the index of the partition that belongs to a rank of the group.
    pub fn partition_index(&self, rank: usize) -> usize {
        partition_index(rank, self.shard.size(), self.replicas.size())
    }
}

/// Returns the partition index of a rank, in a data-parallel group with `replicas` copies over `shards` ranks
/// each.
pub(crate) fn partition_index(rank: usize, shards: usize, replicas: usize) -> usize {
    rank % shards * replicas + rank / shards
}

fn nth_chunk(index: usize, elements: usize) -> Range<usize> {
    index * elements..(index + 1) * elements
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::mesh::{ParallelConfig, ZeroStage};

    #[test]
    fn partitions_lie_in_shards_and_cover_each_element_once() {
        for shard_ranks in [1, 2, 3, 6] {
            let layout = ParallelConfig::new().with_data(6);
            let config = DataParallelConfig {
                zero_stage: ZeroStage::Optimizer,
                hsdp: Some(shard_ranks),
                ..DataParallelConfig::default()
            };
            let parts = World::threads(6).unwrap().run(|rank| {
                let groups = ParallelContext::new(&layout, &rank).map_err(|e| e.to_string())?;
                let sharding = ShardingGroups::new(&groups, Grid::Dense, &config)
                    .map_err(|e| e.to_string())?;
                assert_eq!(sharding.shard.size() * sharding.replicas.size(), 6);
                let (shard, partition) = (sharding.shard_range(384), sharding.partition_range(384));
                assert!(shard.start <= partition.start && partition.end <= shard.end);
                let index = sharding.partition_index(sharding.data.rank());
                assert_eq!(index * 64, partition.start);
                Ok::<_, String>(partition)
            });
            let mut parts = parts.unwrap();
            parts.sort_by_key(|part| part.start);
            let expected: Vec<_> = (0..6).map(|part| nth_chunk(part, 64)).collect();
            assert_eq!(parts, expected, "groups of {shard_ranks}");
        }
    }
}

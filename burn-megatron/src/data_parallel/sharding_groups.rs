//! The process groups over which the buckets of one grid are reduced, sharded and replicated.

use std::ops::Range;
use std::sync::Arc;

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use crate::collective::Comm;
use crate::comm::{NodeGroups, ParallelContext, SingleRank, consecutive_subgroups};
use crate::mesh::{Axis, Grid};

/// The process groups of one grid for data parallelism. The data-parallel group is split into shard groups of
/// consecutive ranks. Each shard group holds one sharded copy of the parameters.
///
/// Without sharding, a shard group consists of one rank. With sharding but without HSDP, the shard group is the
/// complete data-parallel group.
#[derive(Clone, Debug)]
pub struct ShardingGroups {
    /// The data-parallel group: the ranks over which gradients are summed.
    pub data: Comm,
    /// The shard group: the ranks over which one copy of the parameters is sharded.
    pub shard: Comm,
    /// The replica group: the ranks that hold the same shard.
    pub replicas: Comm,
    /// The groups of the ranks in `replicas` within a node and between nodes. They are set if gradients are reduced
    /// hierarchically, which requires that `replicas` is the complete `data` group.
    pub nodes: Option<NodeGroups>,
    /// The tensor-parallel group: the ranks over which a weight is split.
    pub tensor: Comm,
    /// The model-parallel group of the pipeline stage: all axes of the grid except the pipeline axis and the axes of
    /// `data`. Together, its ranks hold all parameters of the stage.
    pub model: Comm,
}

impl ShardingGroups {
    /// Creates the process groups of `grid`. Collective: call on all ranks of the pipeline stage.
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError::Hsdp`](super::DataParallelConfigError::Hsdp) if the size of a shard group does not
    /// divide the size of the data-parallel group.
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

    /// Returns the range of this rank's shard in a bucket with `elements` elements.
    pub fn shard_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(self.shard.rank(), elements / self.shard.size())
    }

    /// Returns the range of this rank's partition of a bucket. A bucket is divided into equal partitions, one for each
    /// rank of the data-parallel group, even if it is not sharded. Each element therefore belongs to exactly one rank.
    /// The partition lies in the rank's shard, and depends only on the [partition index](Self::partition_index).
    pub fn partition_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(
            self.partition_index(self.data.rank()),
            elements / self.data.size(),
        )
    }

    /// Returns the index of the partition that belongs to a rank of the data-parallel group.
    pub fn partition_index(&self, rank: usize) -> usize {
        partition_index(rank, self.shard.size(), self.replicas.size())
    }
}

/// Returns the partition index of a rank in a data-parallel group with `replicas` copies. Each copy is sharded over
/// `shards` ranks.
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

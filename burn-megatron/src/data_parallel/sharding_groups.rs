//! The process groups over which the buckets of the data axis are sharded and replicated.

use std::ops::Range;
use std::sync::Arc;

use crate::collective::Comm;
use crate::comm::{CommError, ParallelContext, SingleRank};

/// The data axis, split into shard groups of consecutive ranks. Each shard group holds one sharded copy.
///
/// Where nothing is sharded a shard group is one rank; without HSDP it is the whole axis.
#[derive(Clone, Debug)]
pub(crate) struct ShardingGroups {
    pub data: Comm,
    /// The ranks over which one copy is sharded.
    pub shard: Comm,
    /// The ranks that hold the same shard.
    pub replicas: Comm,
}

impl ShardingGroups {
    /// Splits the data axis of `groups` into shard groups of `shard_ranks` ranks, which must divide it.
    /// Collective: call on all ranks of the data axis.
    pub fn new(groups: &ParallelContext, shard_ranks: usize) -> Result<Self, CommError> {
        let data = groups.data().clone();
        let single = |name: &str| -> Comm { Arc::new(SingleRank::new(name)) };
        let (shard, replicas) = match (shard_ranks, data.size()) {
            (1, _) => (single("shard"), data.clone()),
            (n, size) if n == size => (data.clone(), single("replicas")),
            (n, size) => {
                let ranks = data.group().ranks();
                let shards: Vec<_> = ranks.chunks(n).map(<[usize]>::to_vec).collect();
                let replicas_of = |shard| ranks[shard..size].iter().step_by(n).copied().collect();
                let replicas: Vec<Vec<usize>> = (0..n).map(replicas_of).collect();
                (
                    data.split("shard", &shards)?,
                    data.split("replicas", &replicas)?,
                )
            }
        };
        Ok(Self {
            data,
            shard,
            replicas,
        })
    }

    /// This rank's shard of a bucket of `elements` elements.
    pub fn shard_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(self.shard.rank(), elements / self.shard.size())
    }

    /// This rank's partition of a bucket: one of as many equal parts as the data axis has ranks, whatever
    /// is sharded, so that each element belongs to one rank. It lies in the rank's shard, and depends on
    /// its [index](Self::partition_index) alone.
    pub fn partition_range(&self, elements: usize) -> Range<usize> {
        nth_chunk(
            self.partition_index(self.data.rank()),
            elements / self.data.size(),
        )
    }

    /// The index of the partition that belongs to a rank of the data axis.
    pub fn partition_index(&self, rank: usize) -> usize {
        let (shards, replicas) = (self.shard.size(), self.replicas.size());
        rank % shards * replicas + rank / shards
    }
}

fn nth_chunk(index: usize, elements: usize) -> Range<usize> {
    index * elements..(index + 1) * elements
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::mesh::ParallelConfig;

    #[test]
    fn partitions_lie_in_shards_and_cover_each_element_once() {
        for shard_ranks in [1, 2, 3, 6] {
            let layout = ParallelConfig::new().with_data(6);
            let parts = World::threads(6).unwrap().run(|rank| {
                let groups = ParallelContext::new(&layout, &rank).map_err(|e| e.to_string())?;
                let sharding =
                    ShardingGroups::new(&groups, shard_ranks).map_err(|e| e.to_string())?;
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

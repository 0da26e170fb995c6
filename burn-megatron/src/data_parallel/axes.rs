//! How the ranks of the data axis share a bucket.

use std::ops::Range;
use std::sync::Arc;

use crate::collective::Comm;
use crate::comm::{CommError, Groups, Solo};

/// The data axis, cut into groups of neighbours that share one sharded copy.
///
/// With nothing sharded a group is one rank; with full sharding it is the whole axis.
#[derive(Clone, Debug)]
pub(crate) struct Axes {
    pub data: Comm,
    /// The ranks that share one copy.
    pub shard: Comm,
    /// The ranks that hold the same shard.
    pub replicas: Comm,
}

impl Axes {
    /// Cuts the data axis of `groups` into groups of `shard_ranks`, which divides it; every rank of
    /// the axis must come.
    pub fn new(groups: &Groups, shard_ranks: usize) -> Result<Self, CommError> {
        let data = groups.data().clone();
        let alone = |name: &str| -> Comm { Arc::new(Solo::new(name)) };
        let (shard, replicas) = match (shard_ranks, data.size()) {
            (1, _) => (alone("shard"), data.clone()),
            (n, size) if n == size => (data.clone(), alone("replicas")),
            (n, size) => {
                let ranks = data.group().ranks();
                let shards: Vec<_> = ranks.chunks(n).map(<[usize]>::to_vec).collect();
                let of_place = |place| ranks[place..size].iter().step_by(n).copied().collect();
                let replicas: Vec<Vec<usize>> = (0..n).map(of_place).collect();
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

    /// What this rank keeps of a sharded bucket of so many elements.
    pub fn own(&self, elements: usize) -> Range<usize> {
        nth(self.shard.rank(), elements / self.shard.size())
    }

    /// The part of a bucket that this rank counts where each element is to be counted once on the
    /// data axis. It lies in what the rank keeps, and is the same stretch for [`Self::part_of`] the
    /// same part, however the axis is cut.
    pub fn counted(&self, elements: usize) -> Range<usize> {
        nth(self.part_of(self.data.rank()), elements / self.data.size())
    }

    /// Which of the equal parts of a bucket a rank of the data axis counts.
    pub fn part_of(&self, rank: usize) -> usize {
        let (shards, replicas) = (self.shard.size(), self.replicas.size());
        rank % shards * replicas + rank / shards
    }
}

fn nth(number: usize, elements: usize) -> Range<usize> {
    number * elements..(number + 1) * elements
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::mesh::ParallelConfig;

    #[test]
    fn what_is_counted_is_kept_and_is_everything_once() {
        for shard_ranks in [1, 2, 3, 6] {
            let layout = ParallelConfig::new().with_data(6);
            let parts = World::threads(6).unwrap().run(|rank| {
                let groups = Groups::new(&layout, &rank).map_err(|e| e.to_string())?;
                let axes = Axes::new(&groups, shard_ranks).map_err(|e| e.to_string())?;
                assert_eq!(axes.shard.size() * axes.replicas.size(), 6);
                let (own, counted) = (axes.own(384), axes.counted(384));
                assert!(own.start <= counted.start && counted.end <= own.end);
                let own_is_own = axes.part_of(axes.data.rank()) * 64 == counted.start;
                assert!(own_is_own);
                Ok::<_, String>(counted)
            });
            let mut parts = parts.unwrap();
            parts.sort_by_key(|part| part.start);
            let expected: Vec<_> = (0..6).map(|part| nth(part, 64)).collect();
            assert_eq!(parts, expected, "groups of {shard_ranks}");
        }
    }
}

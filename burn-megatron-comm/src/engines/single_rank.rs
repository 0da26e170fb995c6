//! The communicator of a group of one rank.

use std::sync::Arc;

use crate::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};

/// The communicator of a group of one rank. Every collective returns its input.
#[derive(Debug)]
pub struct SingleRank {
    group: Group,
    pool: Arc<BufferPool>,
}

impl SingleRank {
    /// Creates a group with the name `name` that contains only rank 0.
    pub fn new(name: impl Into<String>) -> Self {
        Self::of_rank(name, 0, Arc::default())
    }

    /// Creates a group with the name `name` that contains only the rank `rank` of a larger world. Results are allocated
    /// from `pool`.
    pub(crate) fn of_rank(name: impl Into<String>, rank: usize, pool: Arc<BufferPool>) -> Self {
        Self {
            group: Group::new(name, vec![rank], 0),
            pool,
        }
    }
}

impl Communicator for SingleRank {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        call.check(&self.group, &input)?;
        match call {
            Call::Send { .. } | Call::Receive { .. } => {
                let reason = "a group of one rank has no peer for messages";
                Err(CommError::invalid_call(&self.group, call.name(), reason))
            }
            _ => Ok(Pending::ready(input)),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        match groups {
            [group] if group == self.group.ranks() => {
                let rank = self.group.world_rank();
                Ok(Arc::new(Self::of_rank(name, rank, self.pool.clone())))
            }
            _ => {
                let ranks = self.group.ranks();
                let reason =
                    format!("invalid groups {groups:?}: expected a partition of {ranks:?}");
                Err(CommError::invalid_call(&self.group, "split", reason))
            }
        }
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(&self.pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    #[test]
    fn collectives_give_back_their_input() {
        let comm = SingleRank::new("world");
        let x = || Buffer::from(vec![1.0f32, 2.0]);
        assert_eq!(comm.all_reduce(x(), ReduceOp::Sum).unwrap(), x());
        assert_eq!(comm.reduce_scatter(x(), ReduceOp::Average).unwrap(), x());
        assert_eq!(comm.all_to_all(x(), vec![2], vec![2]).unwrap(), x());
        let part = comm.split("tensor", &[vec![0]]).unwrap();
        assert_eq!(part.size(), 1);
        assert!(Arc::ptr_eq(part.pool().unwrap(), comm.pool().unwrap()));
    }

    #[test]
    fn calls_that_need_another_rank_are_refused() {
        let comm = SingleRank::new("world");
        assert!(comm.send(Buffer::from(vec![1u8]), 0).is_err());
        assert!(comm.split("tensor", &[vec![0], vec![1]]).is_err());
        assert!(
            comm.all_to_all(Buffer::from(vec![1u8]), vec![2], vec![2])
                .is_err()
        );
    }
}

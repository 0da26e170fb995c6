//! A group of one rank, without a world around it.

use std::sync::Arc;

use super::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};

/// The communicator of a rank that is alone: every collective gives back its input.
#[derive(Debug)]
pub struct Solo {
    group: Group,
    pool: Arc<BufferPool>,
}

impl Solo {
    /// The group `name` of rank 0.
    pub fn new(name: impl Into<String>) -> Self {
        Self::with_pool(name, Arc::default())
    }

    fn with_pool(name: impl Into<String>, pool: Arc<BufferPool>) -> Self {
        Self {
            group: Group::new(name, vec![0], 0),
            pool,
        }
    }
}

impl Communicator for Solo {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        call.check(&self.group, &input)?;
        match call {
            Call::Send { .. } | Call::Receive { .. } => Err(CommError::InvalidCall {
                group: self.group.to_string(),
                call: call.name().to_string(),
                reason: "a rank that is alone has nobody to exchange messages with".to_string(),
            }),
            _ => Ok(Pending::ready(input)),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        match groups {
            [group] if group == self.group.ranks() => {
                Ok(Arc::new(Self::with_pool(name, Arc::clone(&self.pool))))
            }
            _ => Err(CommError::InvalidCall {
                group: self.group.to_string(),
                call: "split".to_string(),
                reason: format!("{groups:?} is no partition of [0]"),
            }),
        }
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(&self.pool)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReduceOp;
    use super::*;

    #[test]
    fn collectives_give_back_their_input() {
        let solo = Solo::new("world");
        let x = || Buffer::from(vec![1.0f32, 2.0]);
        assert_eq!(solo.all_reduce(x(), ReduceOp::Sum).unwrap(), x());
        assert_eq!(solo.reduce_scatter(x(), ReduceOp::Average).unwrap(), x());
        assert_eq!(solo.all_to_all(x(), vec![2], vec![2]).unwrap(), x());
        let part = solo.split("tensor", &[vec![0]]).unwrap();
        assert_eq!(part.size(), 1);
        assert!(Arc::ptr_eq(part.pool().unwrap(), solo.pool().unwrap()));
    }

    #[test]
    fn calls_that_need_another_rank_are_refused() {
        let solo = Solo::new("world");
        assert!(solo.send(Buffer::from(vec![1u8]), 0).is_err());
        assert!(solo.split("tensor", &[vec![0], vec![1]]).is_err());
        assert!(
            solo.all_to_all(Buffer::from(vec![1u8]), vec![2], vec![2])
                .is_err()
        );
    }
}

//! A group whose ranks do not run.

use std::sync::Arc;

use super::{Buffer, Call, CommError, Communicator, Group, Pending};

/// One rank's view of a group in which nobody answers: it has a size and a place, and every call is an
/// error. What is built over it shows what the rank will hold.
#[derive(Debug)]
pub struct Absent {
    group: Group,
}

impl Absent {
    /// The group of all ranks of a world of `size`, seen from `rank`.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn world(size: usize, rank: usize) -> Self {
        Self {
            group: Group::new("world", (0..size).collect(), rank),
        }
    }

    fn refuse(&self, call: &str, reason: &str) -> CommError {
        CommError::InvalidCall {
            group: self.group.to_string(),
            call: call.to_string(),
            reason: reason.to_string(),
        }
    }
}

impl Communicator for Absent {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, _input: Buffer) -> Result<Pending, CommError> {
        Err(self.refuse(call.name(), "its ranks do not run"))
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let own = self.group.world_rank();
        let found = groups.iter().find_map(|ranks| {
            let index = ranks.iter().position(|rank| *rank == own)?;
            Some(Group::new(name, ranks.clone(), index))
        });
        match found {
            Some(group) => Ok(Arc::new(Self { group })),
            None => Err(self.refuse("split", "this rank is in none of the parts")),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::mesh::{Mesh, ParallelConfig};
    use crate::{Groups, ReduceOp};

    #[test]
    fn a_rank_has_its_place_and_nobody_answers() {
        let config = ParallelConfig::new()
            .with_tensor(2)
            .with_pipeline(3)
            .with_data(2);
        let mesh = Mesh::new(&config, 12).unwrap();
        let place = mesh.coordinates(9);
        let groups = Groups::without_world(mesh, 9).unwrap();
        assert_eq!(groups.coordinates(), place);
        assert_eq!((groups.tensor().size(), groups.pipeline().size()), (2, 3));
        assert_eq!(groups.data().group().world_rank(), 9);
        let error = groups
            .world()
            .all_reduce(vec![1f32].into(), ReduceOp::Sum)
            .unwrap_err();
        assert!(
            error.to_string().contains("its ranks do not run"),
            "{error}"
        );
        assert!(groups.world().split("other", &[vec![0]]).is_err());
    }
}

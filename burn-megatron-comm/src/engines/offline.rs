//! The communicator of a world that is not running.

use std::sync::Arc;

use crate::{Buffer, Call, CommError, Communicator, Group, Pending};

/// A communicator for a rank of a group that is not running. It has a size and an index, but every operation fails.
/// Modules that are built with it have the same shapes as on that rank of a running group.
#[derive(Debug)]
pub struct OfflineCommunicator {
    group: Group,
}

impl OfflineCommunicator {
    /// Creates the communicator of the rank `rank` in a group of all `size` ranks of a world.
    ///
    /// # Panics
    /// If `rank` is not a rank of the world.
    pub fn world(size: usize, rank: usize) -> Self {
        Self {
            group: Group::new("world", (0..size).collect(), rank),
        }
    }
}

impl Communicator for OfflineCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, _input: Buffer) -> Result<Pending, CommError> {
        let reason = "the world is offline: its ranks are not running";
        Err(CommError::invalid_call(&self.group, call.name(), reason))
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        match self.group.part(name, groups) {
            Some((_, group)) => Ok(Arc::new(Self { group })),
            None => {
                let reason = "this rank is in none of the groups";
                Err(CommError::invalid_call(&self.group, "split", reason))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::mesh::{Mesh, ParallelConfig};
    use crate::{ParallelContext, ReduceOp};

    #[test]
    fn an_offline_rank_has_coordinates_and_every_call_fails() {
        let config = ParallelConfig::new()
            .with_tensor(2)
            .with_pipeline(3)
            .with_data(2);
        let mesh = Mesh::new(&config, 12).unwrap();
        let coordinates = mesh.coordinates(9);
        let groups = ParallelContext::offline(mesh, 9).unwrap();
        assert_eq!(groups.coordinates(), coordinates);
        assert_eq!((groups.tensor().size(), groups.pipeline().size()), (2, 3));
        assert_eq!(groups.data().group().world_rank(), 9);
        let error = groups
            .world()
            .all_reduce(vec![1f32].into(), ReduceOp::Sum)
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("the world is offline: its ranks are not running"),
            "{error}"
        );
        assert!(groups.world().split("other", &[vec![0]]).is_err());
    }
}

//! The rendezvous of the ranks, which the launcher holds: who has come, who lives, who failed.

use std::io;
use std::time::Duration;

use burn_megatron::comm::Coordinator;

use super::error::LaunchError;
use super::plan::{Plan, Way, address, listening_address};

/// The ranks say themselves how patient they are; a program that is no rank never comes.
const UNTIL_TOLD: Duration = Duration::from_secs(365 * 24 * 3600);

/// What the launcher needs of the rendezvous.
pub trait Watch: Send + Sync {
    /// `host:port` where the ranks reach it; they get it as `BURN_MEGATRON_RENDEZVOUS`.
    fn address(&self) -> String;

    /// Asks every rank to end the step in hand and stop; whether they are there to hear it.
    fn request_stop(&self) -> bool;

    /// Who failed, and where each rank stood, once a rank has failed.
    fn verdict(&self) -> Option<String>;

    /// The rank that failed, once one has.
    fn culprit(&self) -> Option<usize>;

    /// Tells that the process of a rank has ended, and how.
    fn process_ended(&self, rank: usize, how: &str);
}

/// The rendezvous of a run.
pub struct Lookout {
    address: String,
    /// With several launchers, the first one has it.
    coordinator: Option<Coordinator>,
}

impl Lookout {
    /// Opens the rendezvous, or finds out where it is.
    pub fn open(plan: &Plan) -> Result<Self, LaunchError> {
        let (host, port) = match &plan.way {
            Way::Own { host, port } if plan.first > 0 => {
                return Ok(Self {
                    address: address(host, *port),
                    coordinator: None,
                });
            }
            Way::Own { host, port } => (host, *port),
            Way::Mpirun { host, .. } => (host, 0),
        };
        let listens = listening_address(host, port)?;
        let token = &plan.token;
        let coordinator = Coordinator::host(listens, plan.world, token, UNTIL_TOLD, UNTIL_TOLD);
        let coordinator = coordinator.map_err(|source| match port {
            0 => LaunchError::system("no port can be had for the rendezvous")(source),
            port => taken(port, source),
        })?;
        Ok(Self {
            address: address(host, coordinator.address().port()),
            coordinator: Some(coordinator),
        })
    }
}

fn taken(port: u16, source: io::Error) -> LaunchError {
    LaunchError::PortTaken { port, source }
}

impl Watch for Lookout {
    fn address(&self) -> String {
        self.address.clone()
    }

    fn request_stop(&self) -> bool {
        self.coordinator
            .as_ref()
            .is_some_and(Coordinator::request_stop)
    }

    fn verdict(&self) -> Option<String> {
        self.coordinator.as_ref().and_then(Coordinator::verdict)
    }

    fn culprit(&self) -> Option<usize> {
        self.coordinator.as_ref().and_then(Coordinator::culprit)
    }

    fn process_ended(&self, rank: usize, how: &str) {
        if let Some(coordinator) = &self.coordinator {
            coordinator.process_ended(rank, how);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::Token;

    fn plan(first: usize, way: Way) -> Plan {
        Plan {
            command: vec!["rank".into()],
            first,
            ranks: 2,
            world: 4,
            way,
            token: Token::random().unwrap(),
        }
    }

    #[test]
    fn the_first_launcher_holds_the_rendezvous() {
        let own = |host: &str, port| Way::Own {
            host: host.into(),
            port,
        };
        let here = Lookout::open(&plan(0, own("127.0.0.1", 0))).unwrap();
        let port = here.coordinator.as_ref().unwrap().address().port();
        assert_eq!(here.address(), format!("127.0.0.1:{port}"));
        // Nobody has come who could hear it.
        assert!(!here.request_stop());
        assert_eq!(here.verdict(), None);
        let other = Lookout::open(&plan(2, own("node0", 29500))).unwrap();
        assert!(other.coordinator.is_none());
        assert_eq!(other.address(), "node0:29500");
        let error = Lookout::open(&plan(0, own("127.0.0.1", port)));
        assert!(matches!(error, Err(LaunchError::PortTaken { .. })));
    }
}

//! The rendezvous of the ranks, which the launcher hosts: which ranks have registered, which are alive, which failed.

use std::io;
use std::time::Duration;

use burn_megatron::comm::Coordinator;

use super::error::LaunchError;
use super::plan::{LaunchPlan, Starter, address, listening_address};

/// The ranks bring their own timeouts when they register; a program that is not a rank never registers.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// What the launcher needs of the rendezvous.
pub trait JobMonitor: Send + Sync {
    /// `host:port` at which the ranks connect; passed to them as `BURN_MEGATRON_RENDEZVOUS`.
    fn address(&self) -> String;

    /// Asks every rank to finish its step and stop; returns whether they are registered.
    fn request_stop(&self) -> bool;

    /// The failure report: which rank failed and what each rank was doing. `None` while no rank has failed.
    fn failure_report(&self) -> Option<String>;

    /// The rank that failed first, once one has.
    fn failed_rank(&self) -> Option<usize>;

    /// Reports that the process of a rank has exited, and how.
    fn process_ended(&self, rank: usize, how: &str);
}

/// The rendezvous of a run.
pub struct RendezvousMonitor {
    address: String,
    /// With several launchers, only the first one hosts it.
    coordinator: Option<Coordinator>,
}

impl RendezvousMonitor {
    /// Hosts the rendezvous, or takes the address of the first launcher's.
    pub fn open(plan: &LaunchPlan) -> Result<Self, LaunchError> {
        let (host, port) = match &plan.starter {
            Starter::Spawn { host, port } if plan.first > 0 => {
                return Ok(Self {
                    address: address(host, *port),
                    coordinator: None,
                });
            }
            Starter::Spawn { host, port } => (host, *port),
            Starter::Mpirun { host, .. } => (host, 0),
        };
        let listens = listening_address(host, port)?;
        let token = &plan.token;
        let coordinator = Coordinator::host(listens, plan.world, token, NO_TIMEOUT, NO_TIMEOUT);
        let coordinator = coordinator.map_err(|source| match port {
            0 => LaunchError::system("cannot open a port for the rendezvous")(source),
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

impl JobMonitor for RendezvousMonitor {
    fn address(&self) -> String {
        self.address.clone()
    }

    fn request_stop(&self) -> bool {
        self.coordinator
            .as_ref()
            .is_some_and(Coordinator::request_stop)
    }

    fn failure_report(&self) -> Option<String> {
        self.coordinator
            .as_ref()
            .and_then(Coordinator::failure_report)
    }

    fn failed_rank(&self) -> Option<usize> {
        self.coordinator.as_ref().and_then(Coordinator::failed_rank)
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

    fn plan(first: usize, starter: Starter) -> LaunchPlan {
        LaunchPlan {
            command: vec!["rank".into()],
            first,
            ranks: 2,
            world: 4,
            starter,
            token: Token::random().unwrap(),
        }
    }

    #[test]
    fn the_first_launcher_hosts_the_rendezvous() {
        let own = |host: &str, port| Starter::Spawn {
            host: host.into(),
            port,
        };
        let here = RendezvousMonitor::open(&plan(0, own("127.0.0.1", 0))).unwrap();
        let port = here.coordinator.as_ref().unwrap().address().port();
        assert_eq!(here.address(), format!("127.0.0.1:{port}"));
        // No rank has registered yet.
        assert!(!here.request_stop());
        assert_eq!(here.failure_report(), None);
        let other = RendezvousMonitor::open(&plan(2, own("node0", 29500))).unwrap();
        assert!(other.coordinator.is_none());
        assert_eq!(other.address(), "node0:29500");
        let error = RendezvousMonitor::open(&plan(0, own("127.0.0.1", port)));
        assert!(matches!(error, Err(LaunchError::PortTaken { .. })));
    }
}

//! The rendezvous of the ranks, which the launcher hosts: which ranks have registered, which are alive, which failed.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use burn_megatron::comm::{Coordinator, FailureKind, Token};

use super::error::LaunchError;

/// The ranks bring their own timeouts when they register; a program that is not a rank never registers.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The interface of the rendezvous for the launcher.
pub trait JobMonitor: Send + Sync {
    /// `host:port` at which the ranks connect; passed to them as `BURN_MEGATRON_RENDEZVOUS`.
    fn address(&self) -> String;

    /// Asks every rank to finish its step and stop; returns whether they are registered.
    fn request_stop(&self) -> bool;

    /// The failure report: which rank failed and what each rank was doing. `None` while no rank has failed.
    fn failure_report(&self) -> Option<String>;

    /// The rank that failed first, once one has.
    fn failed_rank(&self) -> Option<usize>;

    /// The kind of its failure.
    fn failure_kind(&self) -> Option<FailureKind>;

    /// Reports that the process of a rank has exited, and how.
    fn process_ended(&self, rank: usize, how: &str);
}

/// The rendezvous of a run.
pub struct RendezvousMonitor(Coordinator);

impl RendezvousMonitor {
    /// Hosts the rendezvous of the `ranks` ranks of the world `job` at 127.0.0.1; port 0 picks a free one.
    pub fn open(port: u16, ranks: usize, job: &str, token: &Token) -> Result<Self, LaunchError> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let coordinator =
            Coordinator::host(address, ranks, Some(job), token, NO_TIMEOUT, NO_TIMEOUT);
        coordinator.map(Self).map_err(|source| match port {
            0 => LaunchError::system("cannot open a port for the rendezvous")(source),
            port => LaunchError::PortTaken { port, source },
        })
    }
}

impl JobMonitor for RendezvousMonitor {
    fn address(&self) -> String {
        self.0.address().to_string()
    }

    fn request_stop(&self) -> bool {
        self.0.request_stop()
    }

    fn failure_report(&self) -> Option<String> {
        self.0.failure_report()
    }

    fn failed_rank(&self) -> Option<usize> {
        self.0.failed_rank()
    }

    fn failure_kind(&self) -> Option<FailureKind> {
        self.0.failure_kind()
    }

    fn process_ended(&self, rank: usize, how: &str) {
        self.0.process_ended(rank, how);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rendezvous_is_at_a_port_of_this_machine() {
        let token = Token::random().unwrap();
        let here = RendezvousMonitor::open(0, 2, "a.0", &token).unwrap();
        let port = here.0.address().port();
        assert_eq!(here.address(), format!("127.0.0.1:{port}"));
        // No rank has registered yet.
        assert!(!here.request_stop());
        assert_eq!(here.failure_report(), None);
        let error = RendezvousMonitor::open(port, 2, "a.0", &token);
        assert!(matches!(error, Err(LaunchError::PortTaken { .. })));
    }
}

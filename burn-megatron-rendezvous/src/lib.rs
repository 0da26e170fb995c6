//! The rendezvous of the processes of a world: the variables of launchers, authentication, heartbeats, failure reports.
//!
//! [`launch`] reads the rank of a process from the environment of its launcher. Rank 0, or the launcher, hosts a
//! [`Coordinator`], which each rank joins by a [`RendezvousClient`]; a [`Token`] authenticates both. No tensor passes the
//! rendezvous: it exchanges small values, collects heartbeats, and sends one [`FailureReport`] to all ranks.

mod auth;
mod failure_report;
pub mod launch;
mod rank_runs;
mod rendezvous;

pub use auth::{Token, TokenError};
pub use failure_report::{
    FailureReport, RankPosition, describe_rank, describe_ranks, describe_some,
};
pub use launch::{Address, AddressError, Launch, LaunchEnvError, Launcher};
pub use rank_runs::{RankRuns, list_ranks, ranks_verb};
#[doc(hidden)]
pub use rendezvous::read_session;
pub use rendezvous::{
    CallId, Coordinator, FailureCause, FailureKind, GroupId, JoinRequest, MIN_HEARTBEAT_TIMEOUT,
    MissingRanks, RankStatus, RendezvousClient, RendezvousError, RendezvousTimeouts,
    StatusProvider, resolve,
};

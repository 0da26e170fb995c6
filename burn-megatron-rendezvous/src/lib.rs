//! Rendezvous of the processes of a distributed run: launcher variables, authentication, heartbeats and failure
//! reports.
//!
//! [`launch`] reads the rank of a process from the environment variables of its launcher. Rank 0 or the launcher hosts
//! a [`Coordinator`]. Each rank connects to it with a [`RendezvousClient`]. A shared [`Token`] authenticates both
//! sides. The rendezvous transfers no tensors: it exchanges small values, collects heartbeats, and sends one
//! [`FailureReport`] to all ranks.

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

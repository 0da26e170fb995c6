//! Communication between ranks: the [`Communicator`] trait, its buffers, and its engines.
//!
//! A *rank* is one worker of a *world*. A [`Communicator`] connects the ranks of one [`Group`]. It provides the usual
//! collectives and point-to-point messages. Inputs and results are plain [`Buffer`]s. Asynchronous operations return a
//! [`Pending`] handle. Every wait has a timeout. If the operations of the ranks do not match, or if a rank is missing
//! or has failed, an operation does not hang. Instead, it returns a [`CommError`] that contains the affected ranks. The
//! [`BufferPool`] of a rank recycles communication buffers. The crate `burn-megatron-comm-testing` contains conformance
//! tests for engines, fault injection, and a simulated slow network.
//!
//! [`World::threads`] needs no setup: the ranks are threads of one process. The `threads` engine reduces in a fixed
//! order, so equal inputs give bit-identical results. Use [`World::from_env`] in a process that a launcher such as
//! torchrun started as one rank. The ranks connect to a rendezvous server, which also detects when a process dies. The
//! engines `mpi` and `threads` return bit-identical results.
//!
//! ```
//! # use burn_megatron_comm::{Buffer, CommError, ReduceOp, World};
//! let sums = World::threads(4)?.run(|rank| {
//!     let mine = Buffer::from(vec![rank.rank() as f32]);
//!     rank.communicator().all_reduce(mine, ReduceOp::Sum)
//! })?;
//! assert_eq!(sums[3], Buffer::from(vec![6.0f32]));
//! # Ok::<(), burn_megatron_comm::WorldError>(())
//! ```

mod buffer;
mod bytes;
mod call;
mod communicator;
mod context;
mod device;
mod engines;
mod error;
pub mod mesh;
mod nccl_config;
mod pending;
mod pool;
mod process;
mod report;
mod subgroups;
mod world;

pub use buffer::{Buffer, BufferError, DType, Element};
pub use burn_megatron_probe as probe;
pub use burn_megatron_rendezvous::{
    Address, AddressError, Coordinator, FailureKind, Launch, LaunchEnvError, Launcher,
    RendezvousError, Token, TokenError, launch,
};
pub use bytes::{all_gather_bytes, broadcast_bytes, broadcast_when_ready};
pub use call::{Call, ReduceOp};
pub use communicator::{Communicator, Group};
pub use context::{NodeGroups, ParallelContext, ParallelContextError};
pub use device::{DeviceCommunicator, DevicePending};
pub use engines::mpi_library_version;
pub use engines::offline::OfflineCommunicator;
pub use engines::reduce::sum_parts_in_f32;
pub use engines::single_rank::SingleRank;
pub use error::{CommError, raise};
pub use nccl_config::{
    MAX_CTAS, NcclConfig, NcclConfigError, NcclGroup, NcclGroupConfig, RegisteredBuffers,
};
pub use pending::Pending;
pub use pool::{BufferPool, MIN_POOLED_LEN};
pub use report::call_log::{CALLS_KEPT, CallRecord};
pub use subgroups::consecutive_subgroups;
pub use world::{
    Engine, MAX_COMPUTE_THREADS, MAX_THREAD_RANKS, ParseEngineError, Rank, RankPanic, World,
    WorldError,
};

// The conformance suite links this crate without its test code. The tests below compile the source of the suite, to run
// it with engines that exist only in tests.
#[cfg(test)]
extern crate self as burn_megatron_comm;
#[cfg(test)]
#[path = "../../burn-megatron-comm-testing/src/conformance/mod.rs"]
pub mod conformance;
#[cfg(test)]
mod tests;

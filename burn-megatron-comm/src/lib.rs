//! Communication between ranks: the [`Communicator`] trait, what travels through it, and its engines.
//!
//! A *rank* is one worker of a *world*. A [`Communicator`] joins the ranks of one [`Group`] and offers
//! the usual collectives and point-to-point messages on a plain [`Buffer`]. Every call returns a
//! [`Pending`] handle, and every wait has a deadline: ranks that disagree about a call, a rank that
//! never comes and a rank that fails are answered by a [`CommError`] that names them, never by a hang.
//! A rank's [`BufferPool`] keeps the memory of its calls for the next ones. [`testing`] checks what an engine
//! promises, makes its calls fail on purpose, or makes it as slow as a network.
//!
//! The engine of [`World::threads`] needs no set-up: the ranks are threads of one process. It reduces in
//! a fixed order, so that the same inputs give the same bits. [`World::from_env`] is the world of a
//! process that a launcher started as one rank; the ranks find each other at a rendezvous, which also
//! learns when one of them dies. Over MPI they compute the same bits as threads.
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

mod absent;
pub mod auth;
mod buffer;
mod bytes;
mod call;
mod communicator;
mod device;
mod error;
#[cfg(any(test, feature = "mpi"))]
mod exchange;
mod groups;
pub mod installed;
mod journal;
pub mod launch;
mod log;
pub mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
// Its user is `World::from_env`, as of the engines below.
#[cfg(any(feature = "cuda", test))]
#[allow(dead_code)]
mod nccl;
mod pending;
mod pool;
mod process;
mod reduce;
mod rendezvous;
mod solo;
pub mod testing;
mod threads;
mod world;

pub use absent::Absent;
pub use auth::{Token, TokenError};
pub use buffer::{Buffer, BufferError, DType, Element};
pub use bytes::{all_gather_bytes, broadcast_bytes, broadcast_made};
pub use call::{Call, ReduceOp};
pub use communicator::{Communicator, Group};
pub use device::{DevicePending, OnDevice};
pub use error::{CommError, raise};
pub use groups::{Groups, GroupsError};
pub use launch::{Launch, LaunchError, Launcher};
pub use log::{CALLS_KEPT, CallRecord};
pub use pending::Pending;
pub use pool::{BufferPool, LEAST_POOLED};
pub use reduce::sum_parts_in_f32;
#[doc(hidden)]
pub use rendezvous::read_session;
pub use rendezvous::{Coordinator, RendezvousError};
pub use solo::Solo;
pub use world::{
    Engine, MAX_COMPUTE_THREADS, MAX_THREAD_RANKS, Rank, RankPanic, UnknownEngine, World,
    WorldError,
};

#[cfg(test)]
mod tests;

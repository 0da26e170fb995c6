//! Runs lowered programs. A grid consists of blocks, a block of warps, and a warp of 32 lanes.

mod access;
mod asynchronous;
mod banks;
mod barrier;
mod block;
mod count;
mod fault;
mod flow;
mod grid;
mod groups;
mod lanes;
mod ledger;
mod options;
mod program;
mod shadow;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod warp;

pub(crate) use access::{Access, resolve};
pub use asynchronous::{Arrival, Asynchronous, CopyChunk, CopyDirection, Queue, Queues, thread};
pub use block::{Block, Shared};
pub use count::{Counts, Kind};
pub use fault::{Failure, Fault, FaultLocation};
pub(crate) use flow::reconvergence;
pub use grid::{Launch, run};
pub use lanes::{LANES, Lanes, Mask};
pub use options::{Checks, Options};
pub use program::{Action, Op, Parameter, Program, Reduce, Source, Special, Step, Wait};
pub use warp::Warp;

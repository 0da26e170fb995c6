//! Pipeline parallelism: the layers of a model are split into stages on different ranks.
//!
//! - [`schedule`]: the actions of each rank, in order. Pure values: generators make a schedule, one
//!   validator checks it, one simulator computes its time and bubble.
//! - [`split`]: which layers form a stage.
//! - [`engine`]: runs any valid schedule with Burn's autodiff, for any model that implements
//!   [`Stage`](engine::Stage).
//! - [`trace`]: timelines in the Chrome trace format.

pub mod engine;
pub mod schedule;
pub mod split;
pub mod trace;

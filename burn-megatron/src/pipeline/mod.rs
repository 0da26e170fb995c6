//! Pipeline parallelism: the layers of a model are split into stages on different ranks.
//!
//! - [`schedule`]: the actions of each rank, in order. Schedules are pure values: generators create a schedule,
//!   a validator checks it, and a simulator computes its time and bubble.
//! - [`split`]: the assignment of layers to stages.
//! - [`schedule_of`] and [`stages_on_rank`]: the schedule and the stages of a
//!   [`ParallelConfig`](crate::mesh::ParallelConfig).
//! - [`engine`]: runs any valid schedule with Burn's autodiff, for any model that implements
//!   [`Stage`](engine::Stage).
//! - [`trace`]: timelines in the Chrome trace format.

pub mod engine;
mod layout;
pub mod schedule;
pub mod trace;

pub use crate::mesh::stages as split;
pub use layout::{LayoutScheduleError, schedule_of, stages_of, stages_on_rank};

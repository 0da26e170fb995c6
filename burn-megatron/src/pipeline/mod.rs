//! Pipeline parallelism: the layers of a model are split into stages on different ranks.
//!
//! - [`schedule`]: a schedule lists the actions of each rank in order. Generators create schedules, a validator checks
//!   them, and a simulator computes their times and bubbles. None of them runs a model.
//! - [`split`]: assigns layers to stages.
//! - [`schedule_of`] and [`stages_on_rank`]: create the schedule and the stages of a
//!   [`ParallelConfig`](crate::mesh::ParallelConfig).
//! - [`engine`]: runs a valid schedule with Burn's autodiff, for any model that implements [`Stage`](engine::Stage).
//! - [`trace`]: writes timelines in the Chrome trace format.

pub mod engine;
mod layout;
pub mod schedule;
pub mod trace;

pub use crate::mesh::stages as split;
pub use layout::{LayoutScheduleError, schedule_of, stages_of, stages_on_rank};

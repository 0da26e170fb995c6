//! Pipeline parallelism: a model cut into stages that lie on different ranks.
//!
//! - [`schedule`] is pure: which rank does what in which order. Generators make a schedule, one
//!   validator proves it, one simulator says what it costs.
//! - [`split`] says which layers make up a stage.
//! - [`engine`] runs any valid schedule over Burn's autodiff, for any model whose parts implement
//!   [`Stage`](engine::Stage).

pub mod engine;
pub mod schedule;
pub mod split;
pub mod trace;

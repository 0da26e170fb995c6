//! The micro-batches of a step: assigns samples, reads them ahead, uploads tensors and runs the schedule.

mod context_part;
mod numbering;
mod read_ahead;
mod run;
mod schedules;
mod stages;
mod upload;

pub(crate) use context_part::ContextPart;
pub use numbering::{BatchPlan, SplitStep};
pub(crate) use schedules::MicroBatchRunner;
pub(crate) use stages::{StepLosses, TrainStages};
pub(crate) use upload::{DeviceBatch, targets};

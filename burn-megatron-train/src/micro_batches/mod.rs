//! Micro-batches: assigns samples to the micro-batches of a step, reads them ahead, uploads their tensors and runs the
//! schedule.

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

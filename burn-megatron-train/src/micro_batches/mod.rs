//! The micro-batches of a step: which samples they have, reading them ahead, their tensors, and running them.

mod numbering;
mod read_ahead;
mod run;
mod schedules;
mod upload;

pub use numbering::{BatchPlan, SplitStep};
pub(crate) use read_ahead::ContextPart;
pub(crate) use run::{StepLosses, TrainStages};
pub(crate) use schedules::MicroBatchRunner;
pub(crate) use upload::{DeviceBatch, targets};

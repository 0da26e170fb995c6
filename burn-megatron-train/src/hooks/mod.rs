//! Hooks: optional techniques that change a training step. Each technique is a [`StepHook`].
//!
//! A step of a [`Trainer`](crate::Trainer) reads batches, runs the micro-batches, reduces the gradients, decides
//! whether the step is taken, updates the weights and reports metrics. A hook changes one or more of these parts.
//! [`ORDER`] lists the hooks in the order in which they are called. A trainer has only the hooks that its settings
//! require. Unused hooks take no time.
//!
//! Add a custom hook with [`Trainer::with_hook`](crate::Trainer::with_hook):
//!
//! ```
//! use burn_megatron_train::hooks::{StepContext, StepHook, StepReport};
//! use burn_megatron::model::LanguageModel;
//! use burn_megatron_train::{TrainError, Trainer};
//!
//! /// Keeps the lowest loss.
//! struct LowestLoss(f64);
//!
//! impl<M: LanguageModel> StepHook<M> for LowestLoss {
//!     fn name(&self) -> &str {
//!         "lowest_loss"
//!     }
//!
//!     fn metrics(
//!         &mut self,
//!         _: &mut StepContext<'_, M>,
//!         report: &mut StepReport<'_>,
//!     ) -> Result<(), TrainError> {
//!         self.0 = self.0.min(report.metrics.loss);
//!         Ok(())
//!     }
//! }
//!
//! fn lowest_loss<M: LanguageModel>(trainer: Trainer<M>) -> Result<f64, TrainError> {
//!     let trainer = trainer.with_hook(LowestLoss(f64::INFINITY))?;
//!     // Train with trainer.fit(..) or trainer.step(..).
//!     Ok(trainer.hook::<LowestLoss>().map_or(f64::NAN, |hook| hook.0))
//! }
//! ```

pub(crate) mod attention_logits;
pub(crate) mod batch_warmup;
mod context;
pub(crate) mod cuda_graphs;
pub(crate) mod ema;
mod error;
mod expert_load;
mod fp8_scales;
pub(crate) mod hybrid_context;
mod list;
pub(crate) mod replay;
mod replica_check;
mod router_bias;
pub(crate) mod sequence_warmup;
mod spikes;
mod step_hook;
mod values;
mod zero_count;

pub use crate::micro_batches::{BatchPlan, SplitStep};
pub(crate) use batch_warmup::BatchSizes;
use batch_warmup::BatchWarmupHook;
pub use batch_warmup::{BatchWarmup, BatchWarmupError};
pub use context::StepContext;
pub use error::HookError;
pub(crate) use list::Hooks;
use sequence_warmup::SequenceWarmupHook;
pub(crate) use sequence_warmup::row_length;
pub use sequence_warmup::{SequenceWarmup, SequenceWarmupError};
pub use step_hook::{RemainingHooks, StepHook};
pub use values::{AddedStatistics, StepDecision, StepInput, StepReport, StepRun, StepUpdate};

/// The name in [`ORDER`] that stands for custom hooks.
const OWN: &str = "your own hooks";

/// The names of the hooks, in the order in which they are called. Custom hooks are called at the position of the entry
/// `your own hooks`, in the order in which they were added. A custom hook that has the name of a built-in hook replaces
/// the built-in hook.
pub const ORDER: [&str; 14] = [
    batch_warmup::NAME,
    sequence_warmup::NAME,
    hybrid_context::NAME,
    // Runs before `replay`, which computes a step with a spike again.
    spikes::NAME,
    // Wraps the runs of the following hooks, and compares the weights after their updates.
    replay::NAME,
    fp8_scales::NAME,
    expert_load::NAME,
    router_bias::NAME,
    zero_count::NAME,
    attention_logits::NAME,
    replica_check::NAME,
    ema::NAME,
    OWN,
    // Runs the micro-batches without calling `next`, so it must be the last hook.
    cuda_graphs::NAME,
];

//! Hybrid context parallelism: assigns the documents of a global batch to the micro-batches of the ranks of the context
//! and data axes.

use std::ops::Range;
use std::sync::Arc;

use super::{BatchPlan, StepHook};
use crate::TrainError;
use crate::config::ConfigError;
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{Grid, LayoutError};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::ReportedLayer;
use burn_megatron_data::hybrid_context::{HybridContextConfig, SampleFlops};
use burn_megatron_data::{Batch, DataError, IGNORE};

mod check;

pub(crate) use check::check;
use check::config_of;

/// The name of the hook.
pub(super) const NAME: &str = "hybrid_context";

/// The hook of hybrid context parallelism.
pub(super) struct HybridContextHook(Arc<HybridContext>);

impl HybridContextHook {
    /// Returns `None` if hybrid context parallelism is off. `length` is the number of tokens per row, and `routers` are
    /// the routers of all stages.
    ///
    /// Collective: call on all ranks of the stage.
    pub fn new(
        groups: &ParallelContext,
        model: &impl LanguageModel,
        length: usize,
        routers: &[ReportedLayer],
    ) -> Result<Option<Self>, TrainError> {
        let layout = groups.config();
        if layout.hybrid_tokens().is_none() {
            return Ok(None);
        }
        let rank = groups.group(Grid::Dense, Grid::Dense.data_axes())?.rank();
        let config = config_of(layout, flops_of(model, length));
        let hybrid = config.map(|config| Self(Arc::new(HybridContext { config, rank })));
        if hybrid.is_some() && !routers.is_empty() {
            let error = LayoutError::HybridContext {
                setting: "experts".into(),
                expected: "a model without experts, because their losses and capacities count the tokens of a \
                           micro-batch".into(),
            };
            return Err(ConfigError::from(error).into());
        }
        Ok(hybrid)
    }
}

impl<M: LanguageModel> StepHook<M> for HybridContextHook {
    fn name(&self) -> &str {
        NAME
    }

    fn batches(&self, plan: &mut BatchPlan) {
        let hybrid = self.0.clone();
        plan.split_steps(Arc::new(move |rows| hybrid.micro_batches(rows)));
    }
}

/// Plans the micro-batches of a rank from the rows of a step.
struct HybridContext {
    config: HybridContextConfig,
    /// The index of this rank among the context x data ranks.
    rank: usize,
}

/// Returns the cost of rows: a row of `s` tokens has `per_token + per_pair s / 2` FLOPs per token.
fn flops_of(model: &impl LanguageModel, length: usize) -> SampleFlops {
    let [short, long] = [1, length.max(2)].map(|seq| model.flops_per_token(seq));
    let slope = ((long - short) / (length.max(2) - 1) as f64).max(0.0);
    SampleFlops {
        per_token: short - slope,
        per_pair: 2.0 * slope,
    }
}

impl HybridContext {
    /// Returns the micro-batches of this rank for the rows of the global batch. Documents without targets are left out.
    /// All ranks have the same number of micro-batches, at least one.
    fn micro_batches(&self, rows: &Batch) -> Result<Vec<Batch>, DataError> {
        let has_targets = |document: &Range<usize>| {
            let mut targets = rows.targets[document.clone()].iter();
            targets.any(|target| *target != IGNORE)
        };
        let mut documents = rows.document_ranges();
        documents.retain(has_targets);
        let lengths: Vec<_> = documents.iter().map(Range::len).collect();
        let plan = self.config.plan(&lengths)?;
        let multiple = self.config.multiple;
        if plan.micro_batches() == 0 {
            return Ok(vec![rows.documents_in_context(&[], (0, 1), multiple)?]);
        }
        let slots = plan.of_rank(self.rank);
        let micro_batches = slots.map(|slot| {
            let own = slot.samples.iter().map(|at| documents[*at].clone());
            let own: Vec<_> = own.collect();
            let place = (self.rank - slot.ranks.start, slot.ranks.len());
            rows.documents_in_context(&own, place, multiple)
        });
        micro_batches.collect()
    }
}

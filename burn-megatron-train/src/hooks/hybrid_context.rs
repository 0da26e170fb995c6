//! Hybrid context parallelism: the documents of a global batch to micro-batches of the ranks of context x data.

use std::ops::Range;
use std::sync::Arc;

use super::{BatchPlan, StepHook};
use crate::TrainError;
use crate::config::{ConfigError, TrainConfig};
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{Grid, LayoutError, ParallelConfig};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::ReportedLayer;
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron_data::hybrid_context::{HybridContextConfig, SampleFlops};
use burn_megatron_data::{Batch, DataError, IGNORE};

/// The name of the hook.
pub(super) const NAME: &str = "hybrid_context";

/// The hook of hybrid context parallelism.
pub(super) struct HybridContextHook(Arc<HybridContext>);

impl HybridContextHook {
    /// Returns `None` if it is off. `length` is the length of a row, and `routers` are the routers of all stages.
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
                expected: "a model without them, as their losses and capacities count the tokens of a micro-batch".into(),
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

/// The plan of a rank for the rows of a step.
struct HybridContext {
    config: HybridContextConfig,
    /// This rank among those of context x data.
    rank: usize,
}

/// Checks the settings of a run on rows of `length` tokens, for a model with a context of `context`.
pub(crate) fn check(
    config: &TrainConfig,
    layout: &ParallelConfig,
    (length, context): (usize, usize),
) -> Result<(), ConfigError> {
    // Only their proportion matters, and not here.
    let flops = SampleFlops {
        per_token: 1.0,
        per_pair: 0.0,
    };
    let Some(hybrid) = config_of(layout, flops) else {
        return Ok(());
    };
    // Before anything is computed of the ranks.
    hybrid.check()?;
    let divisor = hybrid.row_divisor();
    let refused = [
        (
            config.micro_batch_size != 1,
            format!("micro_batch_size = {}", config.micro_batch_size),
            "1, as micro-batches have as many documents as max_seqlen_per_dp_cp_rank allows".into(),
        ),
        (
            config.check_replay_every.is_some(),
            "check_replay_every".into(),
            "none, as other data ranks cannot compute the documents of a group".into(),
        ),
        (
            length.next_multiple_of(divisor) > context,
            format!("rows of {length} tokens, which a group may pad to a multiple of {divisor}"),
            format!(
                "a model with a context of at least {}{}",
                length.next_multiple_of(divisor),
                match context / divisor * divisor {
                    0 => String::new(),
                    most => format!(", or rows of at most {most}"),
                }
            ),
        ),
    ];
    if let Some((_, setting, expected)) = refused.into_iter().find(|(is_set, ..)| *is_set) {
        return Err(LayoutError::HybridContext { setting, expected }.into());
    }
    Ok(hybrid.check_length("a row", length)?)
}

fn config_of(layout: &ParallelConfig, flops: SampleFlops) -> Option<HybridContextConfig> {
    let tokens = layout.hybrid_tokens()?;
    Some(HybridContextConfig {
        ranks: layout.data_parallel_size(),
        max_seqlen_per_dp_cp_rank: tokens,
        multiple: if layout.sequence_parallel {
            sequence_multiple(layout)
        } else {
            1
        },
        flops,
    })
}

/// Returns the cost of a model's rows: the FLOPs per token of a row of `s` tokens are `per_token + per_pair s / 2`.
fn flops_of(model: &impl LanguageModel, length: usize) -> SampleFlops {
    let [short, long] = [1, length.max(2)].map(|seq| model.flops_per_token(seq));
    let slope = ((long - short) / (length.max(2) - 1) as f64).max(0.0);
    SampleFlops {
        per_token: short - slope,
        per_pair: 2.0 * slope,
    }
}

impl HybridContext {
    /// The micro-batches of this rank, of the rows of the global batch. Documents without targets are left out. All ranks
    /// have the same number of micro-batches, at least one.
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

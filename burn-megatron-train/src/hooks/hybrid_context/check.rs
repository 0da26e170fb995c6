//! The settings that conflict with hybrid context parallelism.

use crate::config::{ConfigError, TrainConfig};
use burn_megatron::mesh::{LayoutError, ParallelConfig};
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron_data::hybrid_context::{HybridContextConfig, SampleFlops};

/// Checks the settings of a run on rows of `length` tokens, for a model with a context of `context` tokens.
pub(crate) fn check(
    config: &TrainConfig,
    layout: &ParallelConfig,
    (length, context): (usize, usize),
) -> Result<(), ConfigError> {
    // The checks do not depend on these costs.
    let flops = SampleFlops {
        per_token: 1.0,
        per_pair: 0.0,
    };
    let Some(hybrid) = config_of(layout, flops) else {
        return Ok(());
    };
    // Must run before anything is computed from the number of ranks.
    hybrid.check()?;
    let divisor = hybrid.row_divisor();
    let refused = [
        (
            config.micro_batch_size != 1,
            format!("micro_batch_size = {}", config.micro_batch_size),
            "1, because max_seqlen_per_dp_cp_rank determines the number of documents of a micro-batch".into(),
        ),
        (
            config.check_replay_every.is_some(),
            "check_replay_every".into(),
            "none, because other data ranks cannot compute the documents of a group".into(),
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

/// Returns the settings of hybrid context parallelism; `None` if it is off.
pub(super) fn config_of(
    layout: &ParallelConfig,
    flops: SampleFlops,
) -> Option<HybridContextConfig> {
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

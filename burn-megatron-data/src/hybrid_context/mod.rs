//! Hybrid context parallelism: the number of ranks that share a sample depends on the length of the sample.
//!
//! If sample lengths differ a lot, a fixed size of the context group is too small for the longest samples or too large
//! for most samples. If it is too large, the ranks exchange keys and values of short samples unnecessarily.
//! [`HybridContextConfig::plan`] computes [slots](HybridContextSlot) from the sample lengths of a step. The slots
//! assign samples to ranks and micro-batches. The ranks are the ranks of the context and data axes, where the context
//! index varies fastest.
//!
//! As in Megatron (`pipeline_parallel/hybrid_cp_schedule.py`), the number of ranks in a group is a power of two. Unlike
//! in Megatron, every rank has the same number of micro-batches, and a group of `2^k` ranks starts at a multiple of
//! `2^k`. Therefore two groups are either disjoint, or one of them contains the other. Ranks that run their
//! micro-batches in order then cannot deadlock, even in pipelines.

mod assign;
#[cfg(test)]
mod tests;

use std::ops::Range;

use burn_megatron::mesh::ContextSplit;

/// The configuration of hybrid context parallelism: the limits of a plan and the cost of a sample.
///
/// ```
/// use burn_megatron_data::hybrid_context::{HybridContextConfig, SampleFlops};
///
/// let config = HybridContextConfig {
///     ranks: 4,
///     max_seqlen_per_dp_cp_rank: 1024,
///     multiple: 1,
///     flops: SampleFlops { per_token: 1.0, per_pair: 1.0 },
/// };
/// let plan = config.plan(&[2000, 600, 600])?;
/// // A sample with more than 1024 tokens is on a group of at least 2 ranks.
/// let mut slots = (0..plan.micro_batches()).flat_map(|micro_batch| plan.slots(micro_batch));
/// let slot = slots.find(|slot| slot.samples.contains(&0)).unwrap();
/// assert!(slot.ranks.len() >= 2);
/// // All ranks together hold 4096 tokens.
/// assert!(config.check_length("document 7", 5000).is_err());
/// # Ok::<(), burn_megatron_data::hybrid_context::HybridContextError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HybridContextConfig {
    /// The number of ranks of the context and data axes together, which must be a power of two.
    pub ranks: usize,
    /// The maximum number of tokens per rank in a micro-batch, including padding.
    pub max_seqlen_per_dp_cp_rank: usize,
    /// The required divisor of the number of tokens per rank in a micro-batch. With sequence parallelism, it is the
    /// number of tensor ranks, which split these tokens. Without sequence parallelism, it is 1.
    pub multiple: usize,
    /// The cost of a sample in FLOPs.
    pub flops: SampleFlops,
}

/// The cost of a sample in floating-point operations (FLOPs). With causal attention, a sample of `s` tokens costs `s`
/// times [`per_token`](Self::per_token) plus `s (s + 1) / 2` times [`per_pair`](Self::per_pair).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleFlops {
    /// The number of FLOPs per token, except for attention.
    pub per_token: f64,
    /// The number of FLOPs of attention for each pair of a query and a key.
    pub per_pair: f64,
}

/// A slot of a plan: a group of ranks, and the samples that the group computes in one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HybridContextSlot {
    /// The ranks of the group. The number of ranks is a power of two, and the index of the first rank is a multiple of
    /// this number.
    pub ranks: Range<usize>,
    /// The indices of the samples, which are packed into one sequence. With more than one rank, each sample is padded
    /// to a multiple of `2 ranks` tokens. The list is empty if there are too few samples. The slot then has a single
    /// rank, which computes padding.
    pub samples: Vec<usize>,
}

/// The plan of a step, which assigns samples to ranks and micro-batches.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridContextPlan {
    /// The slots of each micro-batch, in the order of their ranks.
    micro_batches: Vec<Vec<HybridContextSlot>>,
    /// The FLOPs per rank.
    flops: Vec<f64>,
}

/// The error that is returned if a step cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HybridContextError {
    /// The number of ranks is not a power of two.
    #[error(
        "invalid context x data = {ranks} ranks for hybrid context parallelism: expected a power of two, such as {}",
        powers_near(*ranks)
    )]
    Ranks {
        /// The number of ranks of the context and data axes together.
        ranks: usize,
    },
    /// The maximum number of tokens per rank is not a multiple of the required divisor.
    #[error(
        "invalid max_seqlen_per_dp_cp_rank = {tokens}: expected a multiple of {multiple}, such as {}",
        (tokens / multiple).max(1) * multiple
    )]
    MaxSeqlen {
        /// The maximum number of tokens per rank in a micro-batch.
        tokens: usize,
        /// The required divisor of `tokens`.
        multiple: usize,
    },
    /// The cost of a sample is negative or not finite.
    #[error(
        "invalid FLOPs of a sample, {} per token and {} per pair of query and key: expected finite numbers, above 0 \
         per token and at least 0 per pair",
        .0.per_token, .0.per_pair
    )]
    Flops(SampleFlops),
    /// A sample has no tokens.
    #[error("sample {sample} has no tokens: expected at least 1")]
    EmptySample {
        /// The index of the sample.
        sample: usize,
    },
    /// A sample has too many tokens for all ranks together.
    #[error(
        "{what} has {length} tokens, and {ranks} ranks of context x data hold {} with max_seqlen_per_dp_cp_rank = \
         {tokens}: use shorter samples, max_seqlen_per_dp_cp_rank = {} or more, or {} ranks",
        ranks * tokens,
        length.div_ceil(*ranks).next_multiple_of(*multiple),
        length.div_ceil(*tokens).next_power_of_two()
    )]
    TooLong {
        /// A description of the sample.
        what: String,
        /// The number of tokens of the sample.
        length: usize,
        /// The number of ranks of the context and data axes together.
        ranks: usize,
        /// The maximum number of tokens per rank in a micro-batch.
        tokens: usize,
        /// The required divisor of `tokens`.
        multiple: usize,
    },
}

fn powers_near(ranks: usize) -> String {
    match ranks.checked_next_power_of_two() {
        Some(above) if above > 1 => format!("{} or {above}", above / 2),
        _ => "1".into(),
    }
}

impl SampleFlops {
    /// Returns the cost of a sample of `tokens` tokens, in FLOPs.
    pub fn of(self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        self.per_token * tokens + self.per_pair * tokens * (tokens + 1.0) / 2.0
    }
}

impl HybridContextConfig {
    /// Returns the maximum number of tokens of a micro-batch on a group of `ranks` ranks.
    pub(crate) fn capacity(&self, ranks: usize) -> usize {
        ranks * self.max_seqlen_per_dp_cp_rank
    }

    /// Checks the settings that do not depend on samples.
    ///
    /// # Errors
    ///
    /// [`HybridContextError`] if the number of ranks is not a power of two, if the ranks cannot split
    /// [`max_seqlen_per_dp_cp_rank`](field@Self::max_seqlen_per_dp_cp_rank) tokens, or if the costs are invalid.
    pub fn check(&self) -> Result<(), HybridContextError> {
        if !self.ranks.is_power_of_two() {
            return Err(HybridContextError::Ranks { ranks: self.ranks });
        }
        let (tokens, multiple) = (self.max_seqlen_per_dp_cp_rank, self.row_multiple());
        if tokens == 0 || !tokens.is_multiple_of(multiple) {
            return Err(HybridContextError::MaxSeqlen { tokens, multiple });
        }
        let costs = [self.flops.per_token, self.flops.per_pair];
        let valid = costs.iter().all(|cost| cost.is_finite() && *cost >= 0.0);
        if !valid || self.flops.per_token == 0.0 {
            return Err(HybridContextError::Flops(self.flops));
        }
        Ok(())
    }

    /// Plans a step: assigns samples with the given lengths to ranks and micro-batches. The result depends only on the
    /// lengths, so it is the same on all ranks.
    ///
    /// A sample is assigned to the smallest group that has room for the sample, or to a larger group if this balances
    /// the load. Without padding, the FLOPs of two ranks differ by at most 5 % of the mean. The difference can be
    /// larger if samples have fewer than two tokens per rank, because such samples cannot be split further.
    ///
    /// # Errors
    ///
    /// [`HybridContextError`] for an invalid configuration (see [`check`](Self::check)), or for a sample that is empty
    /// or too long.
    pub fn plan(&self, lengths: &[usize]) -> Result<HybridContextPlan, HybridContextError> {
        self.check()?;
        for (sample, &length) in lengths.iter().enumerate() {
            if length == 0 {
                return Err(HybridContextError::EmptySample { sample });
            }
            self.check_length(&format!("sample {sample}"), length)?;
        }
        let micro_batches = assign::assign(self, lengths);
        let mut flops = vec![0.0; self.ranks];
        for slot in micro_batches.iter().flatten() {
            let size = slot.ranks.len();
            let padded = slot.samples.iter().map(|at| padded(lengths[*at], size));
            let of_slot: f64 = padded.map(|tokens| self.flops.of(tokens)).sum();
            let of_ranks = flops[slot.ranks.clone()].iter_mut();
            of_ranks.for_each(|flops| *flops += of_slot / size as f64);
        }
        Ok(HybridContextPlan {
            micro_batches,
            flops,
        })
    }

    /// Checks that all ranks together can hold `what`, a sample of `length` tokens.
    ///
    /// # Errors
    ///
    /// [`HybridContextError::TooLong`] if the sample is too long.
    pub fn check_length(&self, what: &str, length: usize) -> Result<(), HybridContextError> {
        let (ranks, tokens) = (self.ranks, self.max_seqlen_per_dp_cp_rank);
        if length.div_ceil(ranks) <= tokens {
            return Ok(());
        }
        Err(HybridContextError::TooLong {
            what: what.into(),
            length,
            ranks,
            tokens,
            multiple: self.row_multiple(),
        })
    }

    /// Returns the required divisor of the padded length of a sequence. If it divides the length, any group of ranks
    /// can split the sequence.
    pub fn row_divisor(&self) -> usize {
        self.ranks * self.row_multiple()
    }

    /// Returns the divisor of the tokens per rank, for any group of ranks.
    fn row_multiple(&self) -> usize {
        ContextSplit::ZigzagPerDocument.divisor(2, self.multiple.max(1)) / 2
    }

    /// Returns the number of ranks of the smallest group that holds a sample of `length` tokens.
    fn smallest_group(&self, length: usize) -> usize {
        length
            .div_ceil(self.max_seqlen_per_dp_cp_rank)
            .next_power_of_two()
    }
}

/// Returns the number of tokens that a group of `ranks` ranks computes for a sample of `length` tokens.
fn padded(length: usize, ranks: usize) -> usize {
    length.next_multiple_of(ContextSplit::ZigzagPerDocument.divisor(ranks, 1))
}

impl HybridContextPlan {
    /// Returns the number of micro-batches of every rank. It is 0 if there are no samples.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches.len()
    }

    /// Returns the slots of a micro-batch, in the order of their ranks. Each rank is in exactly one slot.
    ///
    /// # Panics
    ///
    /// Panics if there is no such micro-batch.
    pub fn slots(&self, micro_batch: usize) -> &[HybridContextSlot] {
        &self.micro_batches[micro_batch]
    }

    /// Returns the slots of one rank, one slot for each micro-batch.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = &HybridContextSlot> {
        let all = self.micro_batches.iter().flatten();
        all.filter(move |slot| slot.ranks.contains(&rank))
    }

    /// Returns the number of FLOPs of each rank in the step, including padding.
    pub fn flops(&self) -> &[f64] {
        &self.flops
    }

    /// Returns the load imbalance of the ranks, from 0 to 1: the relative difference between the largest and the
    /// smallest number of FLOPs of a rank.
    pub fn imbalance(&self) -> f64 {
        let most = self.flops.iter().copied().fold(0.0, f64::max);
        let fewest = self.flops.iter().copied().fold(f64::INFINITY, f64::min);
        if most > 0.0 {
            (most - fewest) / most
        } else {
            0.0
        }
    }
}

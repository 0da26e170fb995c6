//! Hybrid context parallelism: the ranks that share a sample are chosen by its length.
//!
//! With samples of very different lengths, one size of context groups is too small for the longest or too large for most:
//! short samples then exchange keys and values for nothing. [`HybridContextConfig::plan`] is a pure function from the lengths
//! of a step to [slots](HybridContextSlot): which ranks hold which samples, in which micro-batch. It numbers the ranks of
//! context x data, context first. As Megatron's (`pipeline_parallel/hybrid_cp_schedule.py`), it uses groups of powers of two;
//! unlike it, every rank has the same number of micro-batches, and the groups of each micro-batch are aligned: a group of
//! `2^k` ranks starts at a multiple of `2^k`. Two groups are then disjoint or one contains the other, so that ranks that enter
//! groups in the order of their micro-batches never wait for each other in a circle, in pipelines neither.

mod assign;
#[cfg(test)]
mod tests;

use std::ops::Range;

use burn_megatron::mesh::ContextSplit;

/// The limits and costs for which a plan is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HybridContextConfig {
    /// The ranks of context x data, a power of two.
    pub ranks: usize,
    /// The most tokens of one rank in a micro-batch, padding included.
    pub max_seqlen_per_dp_cp_rank: usize,
    /// The number of tokens of a rank in a micro-batch must be a multiple of this, as tensor ranks share them under
    /// sequence parallelism; 1 without.
    pub multiple: usize,
    /// The cost of a sample.
    pub flops: SampleFlops,
}

/// The cost of a sample: a causal sample of `s` tokens costs `s` times [`per_token`](Self::per_token) and `s (s + 1) /
/// 2` times [`per_pair`](Self::per_pair).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleFlops {
    /// FLOPs of a token outside of attention.
    pub per_token: f64,
    /// FLOPs of attention of one query to one key.
    pub per_pair: f64,
}

/// The samples that one group of ranks computes in one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HybridContextSlot {
    /// The group: a power of two of ranks, which starts at a multiple of its size.
    pub ranks: Range<usize>,
    /// The indices of its samples, packed into one row: each is padded to a multiple of `2 ranks` on more than one rank.
    /// Empty where there are too few samples; then it is one rank, which computes padding to keep the count.
    pub samples: Vec<usize>,
}

/// Which ranks hold which samples of a step, in which micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridContextPlan {
    /// By micro-batch, the slots in the order of their ranks.
    micro_batches: Vec<Vec<HybridContextSlot>>,
    /// By rank.
    flops: Vec<f64>,
}

/// A plan that cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HybridContextError {
    /// The groups are powers of two.
    #[error(
        "hybrid context parallelism over context x data = {ranks} ranks: expected a power of two, such as {}",
        powers_near(*ranks)
    )]
    Ranks {
        /// The ranks of context x data.
        ranks: usize,
    },
    /// A number of tokens that groups cannot split.
    #[error(
        "invalid max_seqlen_per_dp_cp_rank = {tokens}: expected a multiple of {multiple}, such as {}",
        (tokens / multiple).max(1) * multiple
    )]
    MaxSeqlen {
        /// The most tokens of one rank in a micro-batch.
        tokens: usize,
        /// Of which they must be a multiple.
        multiple: usize,
    },
    /// Costs that are not.
    #[error(
        "invalid FLOPs of a sample, {} per token and {} per pair of query and key: expected finite numbers of at least 0, \
         and the first above it",
        .0.per_token, .0.per_pair
    )]
    Flops(SampleFlops),
    /// A sample without tokens.
    #[error("sample {sample} has no tokens: expected at least 1")]
    EmptySample {
        /// Its index.
        sample: usize,
    },
    /// A sample that all ranks together cannot hold.
    #[error(
        "{what} has {length} tokens, and {ranks} ranks of context x data hold {}, as max_seqlen_per_dp_cp_rank = \
         {tokens}: expected samples of at most that, max_seqlen_per_dp_cp_rank = {} or more, or {} ranks",
        ranks * tokens,
        length.div_ceil(*ranks).next_multiple_of(*multiple),
        length.div_ceil(*tokens).next_power_of_two()
    )]
    TooLong {
        /// The sample.
        what: String,
        /// Its tokens.
        length: usize,
        /// The ranks of context x data.
        ranks: usize,
        /// The most tokens of one rank in a micro-batch.
        tokens: usize,
        /// Of which they are a multiple.
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
    /// Of a sample of so many tokens.
    pub fn of(self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        self.per_token * tokens + self.per_pair * tokens * (tokens + 1.0) / 2.0
    }
}

impl HybridContextConfig {
    /// Returns the most tokens of a micro-batch on a group of `ranks` ranks.
    pub(crate) fn capacity(&self, ranks: usize) -> usize {
        ranks * self.max_seqlen_per_dp_cp_rank
    }

    /// Checks what does not depend on the samples.
    ///
    /// # Errors
    ///
    /// [`HybridContextError`] for ranks that are no power of two, a
    /// [`max_seqlen_per_dp_cp_rank`](field@Self::max_seqlen_per_dp_cp_rank) that they cannot split, or invalid costs.
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

    /// The slots of samples of these lengths. The same on all ranks, for the same lengths.
    ///
    /// A sample is held by the smallest group that has room for it, and by a larger one where that is needed for balance:
    /// the FLOPs of two ranks differ by at most 5 % of the mean, but for padding and samples too short to be split further
    /// (of fewer than two tokens per rank).
    ///
    /// # Errors
    ///
    /// [`HybridContextError`]; see [`check`](Self::check).
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

    /// Checks that all ranks together hold `what`, a sample of `length` tokens.
    ///
    /// # Errors
    ///
    /// [`HybridContextError::TooLong`].
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

    /// Returns the number to a multiple of which the tokens of a row of all ranks, and so of any group, can be padded.
    pub fn row_divisor(&self) -> usize {
        self.ranks * self.row_multiple()
    }

    /// Returns the number of which the tokens of a rank of any group must be a multiple.
    fn row_multiple(&self) -> usize {
        ContextSplit::ZigzagPerDocument.divisor(2, self.multiple.max(1)) / 2
    }

    /// The ranks of the smallest group that holds a sample of `length` tokens.
    fn smallest_group(&self, length: usize) -> usize {
        length
            .div_ceil(self.max_seqlen_per_dp_cp_rank)
            .next_power_of_two()
    }
}

/// The tokens that a group of `ranks` computes for a sample of `length`.
fn padded(length: usize, ranks: usize) -> usize {
    length.next_multiple_of(ContextSplit::ZigzagPerDocument.divisor(ranks, 1))
}

impl HybridContextPlan {
    /// The micro-batches of every rank; none without samples.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches.len()
    }

    /// The slots of a micro-batch, in the order of their ranks: each rank is in one of them.
    ///
    /// # Panics
    ///
    /// If there is no such micro-batch.
    pub fn slots(&self, micro_batch: usize) -> &[HybridContextSlot] {
        &self.micro_batches[micro_batch]
    }

    /// The slots of a rank, by micro-batch.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = &HybridContextSlot> {
        let all = self.micro_batches.iter().flatten();
        all.filter(move |slot| slot.ranks.contains(&rank))
    }

    /// The FLOPs of each rank in the step, those of padded samples included.
    pub fn flops(&self) -> &[f64] {
        &self.flops
    }

    /// By how much the rank with the fewest FLOPs is below the one with the most, from 0 to 1.
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

//! What a rank's training state takes in bytes, before any of it is allocated.
//!
//! With `p` and `g` bytes for an element of the parameters and of the gradients, `s` for its
//! optimizer state (the moments, a 4-byte master where it is another than the parameter, and a 4-byte
//! copy of a 16-bit gradient where one is kept), and buckets cut over `d` ranks, a parameter takes
//!
//! | stage | bytes | 16-bit, f32 gradients, Adam | f32, Adam |
//! |---|---|---|---|
//! | 0 | `p + g + s` | 18 | 16 |
//! | 1 | `p + g + s / d` | `6 + 12 / d` | `8 + 8 / d` |
//! | 2 | `p + (g + s) / d` | `2 + 16 / d` | `4 + 12 / d` |
//! | 3 | `(p + g + s) / d` | `18 / d` | `16 / d` |
//!
//! A weight that is gathered in 8 bits is kept in two copies, rowwise and columnwise, with their scales
//! instead of the `p` bytes, and has a master whatever its type is: stage 1 takes
//! `2 + g + (4 + 2 * 4) / d` bytes, stage 2 `2 + (g + 12) / d`.
//!
//! Source: ZeRO (Rajbhandari et al., 2020, section 3 and figure 1). What is counted are the
//! elements of a [`BufferLayout`], padding included. Activations are not in it.

use serde::{Deserialize, Serialize};

use super::config::{DataParallelConfig, Moments};
use super::layout::{BufferKey, BufferLayout, FlatBuffer};
use crate::comm::DType;

pub mod machine;
mod stage;
mod table;
#[cfg(test)]
mod tests;
mod transient;

pub use stage::{UnknownStage, ZeroStage};
pub use table::human;
use transient::{size, transient};

/// What is kept per parameter, and what of it is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRules {
    /// What the ranks share.
    pub stage: ZeroStage,
    /// The ranks that share one copy, where they are fewer than a bucket is cut over (hybrid
    /// sharding).
    pub shards: Option<usize>,
    /// Whether parameters of less than 32 bits have f32 masters. Wider ones are their own.
    pub masters: bool,
    /// Whether the optimizer keeps f32 copies of gradients of less than 32 bits.
    pub gradient_copies: bool,
    /// The moments of the optimizer: 2 for Adam.
    pub moments: u8,
    /// The type of the moments.
    pub moment: DType,
}

impl MemoryRules {
    /// Adam with f32 moments, f32 masters, and no copies of the gradients.
    pub fn adam(stage: ZeroStage) -> Self {
        Self {
            stage,
            shards: None,
            masters: true,
            gradient_copies: false,
            moments: 2,
            moment: DType::F32,
        }
    }

    /// The rules of a run whose copies are shared by `shards` ranks each.
    pub fn of(config: &DataParallelConfig, shards: usize) -> Self {
        Self {
            shards: Some(shards),
            moment: match config.moments {
                Moments::F32 => DType::F32,
                Moments::Bf16 => DType::BF16,
            },
            ..Self::adam(config.zero_stage)
        }
    }

    /// Bytes of one moment of an element: f64 has moments of its own type.
    fn moment_bytes(&self, key: BufferKey) -> u128 {
        match (self.moment, key.gradient) {
            (DType::F32, DType::F64) => size(DType::F64),
            (moment, _) => size(moment),
        }
    }

    /// Elements that one rank owns.
    fn shard_elements(&self, buffer: &FlatBuffer) -> usize {
        let shards = self.shards;
        shards.map_or_else(
            || buffer.shard_elements(),
            |shards| buffer.elements / shards,
        )
    }

    /// Bytes of optimizer state per element.
    fn state_bytes(&self, key: BufferKey) -> u128 {
        let wide = size(DType::F32);
        let extra = |asked: bool, dtype: DType| match asked && size(dtype) < wide {
            true => wide,
            false => 0,
        };
        let master = match key.quantized {
            // Codes are no masters, and values that codes are made of do not stay.
            true if self.masters => size(key.gradient),
            _ => extra(self.masters, key.parameter),
        };
        master
            + extra(self.gradient_copies, key.gradient)
            + u128::from(self.moments) * self.moment_bytes(key)
    }
}

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A stage shares what the layout does not cut.
    #[error(
        "ZeRO stage {stage} shares buckets among ranks, but this layout does not cut them; lay the \
         buffers out with sharded rules, or take stage 0"
    )]
    NotCut {
        /// The stage.
        stage: ZeroStage,
    },
    /// More bytes than a `u64` counts.
    #[error(
        "the state of one rank takes {bytes} bytes, more than 64 bits count; split the model over \
         more ranks"
    )]
    Uncountable {
        /// The total.
        bytes: u128,
    },
}

/// Bytes of one rank, as computed or as measured.
///
/// Printed as a table with a row per category and a total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Parameters in the type in which they are computed with: all, or the rank's shard in stage
    /// 3. The masters of f32 parameters are these, and count here alone. Weights that are kept in 8
    /// bits count with both copies and their scales.
    pub parameters: u64,
    /// Summed gradients: all, or the rank's shard from stage 2 on.
    pub gradients: u64,
    /// Masters of 16-bit parameters, f32 copies of 16-bit gradients, and moments: all, or the rank's
    /// shard from stage 1 on.
    pub optimizer: u64,
    /// What comes and goes: the largest sum of what collectives and gathered blocks hold at once.
    ///
    /// - Stage 0: none, since gradients are summed where they lie.
    /// - Stage 1: the rank's shard of the largest bucket, while it is stepped; or the codes of all weights
    ///   that are gathered in 8 bits, until the copies are made of them, if that is more. Values that
    ///   are gathered to be quantised are not in it: they come, a bucket at a time, where the gradients
    ///   of that bucket were.
    /// - Stage 2: the larger of that and the full gradients of two neighbouring buckets of each
    ///   buffer, of which one is filled while the other is reduced, and of all shared buckets,
    ///   which are filled from the first to the last block of backward. The step comes after
    ///   backward, so the two do not add up.
    /// - Stage 3: those gradients, and the gathered parameters of the two largest neighbouring
    ///   parts of the model: the one that is computed with and the one fetched ahead. Backward
    ///   holds both at once.
    pub buffers: u64,
}

impl MemoryPlan {
    /// What the state of one rank of `layout` takes. The rank shares it with as many ranks as the
    /// buckets are cut over.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotCut`] from stage 1 on if the layout does not cut its buckets;
    /// [`MemoryError::Uncountable`] if the total does not fit into 64 bits.
    pub fn new(layout: &BufferLayout, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let stage = rules.stage;
        if stage > ZeroStage::Replicated && !layout.rules().sharded {
            return Err(MemoryError::NotCut { stage });
        }
        let held = |buffer: &FlatBuffer, sharded_from: ZeroStage| match stage >= sharded_from {
            true => rules.shard_elements(buffer) as u128,
            false => buffer.elements as u128,
        };
        let sum = |bytes: &dyn Fn(&FlatBuffer) -> u128| layout.buffers.iter().map(bytes).sum();
        let parameters = sum(&|buffer| match buffer.key.quantized {
            true => buffer.quantized_bytes as u128,
            false => held(buffer, ZeroStage::Parameters) * size(buffer.key.parameter),
        });
        let gradients =
            sum(&|buffer| held(buffer, ZeroStage::Gradients) * size(buffer.key.gradient));
        let optimizer =
            sum(&|buffer| held(buffer, ZeroStage::Optimizer) * rules.state_bytes(buffer.key));
        let all = [parameters, gradients, optimizer, transient(layout, rules)];
        let bytes = all.iter().sum();
        if bytes > u128::from(u64::MAX) {
            return Err(MemoryError::Uncountable { bytes });
        }
        let [parameters, gradients, optimizer, buffers] = all.map(|bytes| bytes as u64);
        Ok(Self {
            parameters,
            gradients,
            optimizer,
            buffers,
        })
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        let rows = [
            self.parameters,
            self.gradients,
            self.optimizer,
            self.buffers,
        ];
        rows.into_iter().fold(0, u64::saturating_add)
    }
}

//! The Muon optimizer (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>). It orthogonalizes the momentum
//! of each hidden weight matrix, so that the singular values of the update are about equal. AdamW updates all other
//! parameters.
//!
//! The momentum is sharded: each rank stores the momentum of its shards. In each step, one rank per matrix gathers the
//! complete matrix, orthogonalizes it, and returns the parts to the other ranks ([`exchange`]). Therefore the update in
//! any layout is the same as on a single rank. The parts of a fused weight (queries, keys and values; gate and up; each
//! expert) are separate matrices. This matches Moonlight (arXiv:2502.16982), whose modules store these parts
//! separately.

use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_megatron_kernels::flat;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::element_wise::ElementWise;
use super::error::OptimizerError;
use super::group_segments::{self, GroupSegment};
use super::groups::{self, GroupError, GroupOptimizer, ParameterGroup};
use super::rules::{AdamWConfig, RuleConfig};
use super::setting::{self, Setting};
use super::state::{FIRST, OptimizerState, SECOND, StateKind};
use crate::data_parallel::{
    BucketShard, DistributedDataParallel, Gradients, MemoryCategory, TrackedAllocation,
};
use crate::nn::ParameterEntry;

mod exchange;
mod newton_schulz;
#[cfg(test)]
mod tests;

use exchange::MatrixExchange;
pub use newton_schulz::orthogonalize;

/// Prefix of a matrix's path in the key of its momentum.
const MOMENTUM: &str = "muon.momentum/";

/// Settings of Muon. They include the settings of AdamW, which updates the parameters that are not hidden matrices:
/// embeddings, the output weight, norms and biases. A parameter group can select either optimizer for its parameters.
/// Both optimizers use the learning rate of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// The decay factor of the momentum: `m = momentum m + (1 - momentum) g`.
    pub momentum: f64,
    /// Whether to use Nesterov momentum. Nesterov momentum orthogonalizes `momentum m + (1 - momentum) g` instead of
    /// `m`.
    pub nesterov: bool,
    /// The number of Newton-Schulz iterations.
    pub ns_steps: usize,
    /// The scale factor of the update.
    pub scale: MuonScale,
    /// The decoupled weight decay of the matrices that Muon updates.
    pub weight_decay: f64,
    /// The settings of AdamW, which must not contain parameter groups.
    pub adamw: AdamWConfig,
    /// Parameter groups, which set another weight decay, learning rate or optimizer for some parameters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

/// The scale factor of an orthogonalized update of a matrix with `input` rows and `output` columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MuonScale {
    /// The factor `sqrt(max(1, output / input))` of the original Muon.
    Original,
    /// The factor `0.2 sqrt(max(input, output))` of Moonlight. The updates have about the same RMS as AdamW updates, so
    /// that both optimizers can use the same learning rate.
    #[default]
    MatchRmsAdamw,
}

impl MuonScale {
    /// Returns the scale factor of the update of a matrix `[input, output]`.
    pub fn factor(self, [input, output]: [usize; 2]) -> f64 {
        match self {
            Self::Original => (output as f64 / input as f64).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * (input.max(output) as f64).sqrt(),
        }
    }
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            ns_steps: 5,
            scale: MuonScale::default(),
            weight_decay: 0.1,
            adamw: AdamWConfig::default(),
            groups: vec![],
        }
    }
}

impl MuonConfig {
    pub(super) fn settings(&self) -> Vec<Setting> {
        let steps = (1..100).contains(&self.ns_steps);
        let mut settings = vec![
            setting::beta("momentum", self.momentum),
            Setting::new("ns_steps", self.ns_steps as f64, steps, "from 1 to 99"),
            setting::factor("weight_decay", self.weight_decay),
        ];
        settings.extend(self.adamw.settings());
        settings
    }

    /// Returns an error for groups in the settings of AdamW, which would have no effect.
    pub(super) fn check_adamw(&self) -> Result<(), GroupError> {
        match self.adamw.groups.first() {
            Some(group) => Err(GroupError::OfAdamW {
                pattern: group.pattern.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Returns for each parameter whether Muon updates it.
    fn choose(&self, entries: &[ParameterEntry]) -> Result<Vec<bool>, GroupError> {
        let parameters = entries.iter().map(|entry| (&entry.path[..], entry.decay));
        let multipliers = groups::resolve(&self.groups, parameters)?;
        let choose = |(entry, multipliers): (&ParameterEntry, groups::Multipliers)| {
            let is_matrix = (2..=3).contains(&entry.shape.len());
            match multipliers.optimizer {
                Some(GroupOptimizer::AdamW) => Ok(false),
                Some(GroupOptimizer::Muon) if !is_matrix => Err(GroupError::NotMatrix {
                    path: entry.path.clone(),
                    shape: entry.shape.clone(),
                }),
                Some(GroupOptimizer::Muon) if entry.is_tied() => Err(GroupError::Tied {
                    path: entry.path.clone(),
                }),
                Some(GroupOptimizer::Muon) => Ok(true),
                None => Ok(entry.hidden && is_matrix && !entry.is_tied()),
            }
        };
        entries.iter().zip(multipliers).map(choose).collect()
    }
}

/// The Muon optimizer for the hidden matrices of a model, with Burn's AdamW for the other parameters.
pub struct ParallelMuon {
    config: MuonConfig,
    rest: ElementWise<burn::optim::AdamW>,
    /// The segments of each bucket.
    matrices: Vec<Vec<MatrixSegment>>,
    /// Whether Muon updates each parameter.
    chosen: Vec<bool>,
    exchange: MatrixExchange,
    /// The dtype in which matrices are orthogonalized.
    dtype: DType,
    _allocation: TrackedAllocation,
}

/// This rank's shard of a parameter that Muon updates.
struct MatrixSegment {
    segment: GroupSegment,
    momentum: Tensor<1>,
}

impl ParallelMuon {
    /// Builds the optimizer for the parameters of a model. Collective: call on all ranks.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid setting or group, a group that matches no parameter of the model, or optimizer
    /// state in host memory.
    pub fn new<M: Module>(
        config: &MuonConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        setting::check(config.settings())?;
        config.check_adamw()?;
        let chosen = config.choose(ddp.table().entries())?;
        let segments = group_segments::bucket_segments(&config.groups, ddp)?;
        let (mut rest, mut matrices, mut bytes) = (vec![], vec![], 0);
        for (segments, shard) in segments.into_iter().zip(ddp.shards()) {
            let (own, others): (Vec<_>, Vec<_>) = segments
                .into_iter()
                .partition(|segment| chosen[segment.index]);
            rest.push(others);
            let of = |segment: GroupSegment| MatrixSegment {
                momentum: Tensor::zeros([segment.range.len()], (&shard.device, shard.dtype)),
                segment,
            };
            let own: Vec<_> = own.into_iter().map(of).collect();
            let elements = own.iter().map(|matrix| matrix.segment.range.len());
            bytes += elements.sum::<usize>() * shard.dtype.size();
            matrices.push(own);
        }
        let masters = ddp.master_dtypes().zip(&chosen);
        let mut of_matrices = masters.filter(|(_, chosen)| **chosen);
        let is_f64 = of_matrices.any(|(dtype, _)| dtype == DType::F64);
        Ok(Self {
            config: config.clone(),
            rest: ElementWise::of_segments(|decay| config.adamw.build(decay), rest, ddp)?,
            exchange: MatrixExchange::new(&chosen, ddp)?,
            _allocation: ddp.usage().track(MemoryCategory::Optimizer, bytes),
            matrices,
            chosen,
            dtype: if is_f64 { DType::F64 } else { DType::F32 },
        })
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if a collective fails.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        let factor = gradients.factor();
        let mut updates = self.updates(&gradients, ddp).into_iter();
        // The last bucket is stepped first, so the updates are collected by bucket.
        let mut by_bucket: Vec<Vec<_>> = vec![];
        for matrices in &self.matrices {
            by_bucket.push(updates.by_ref().take(matrices.len()).collect());
        }
        let decay = learning_rate * self.config.weight_decay;
        ddp.step_device_buckets(gradients, |bucket| {
            let number = bucket.number;
            let mut stepped = self.rest.step_bucket(learning_rate, factor, bucket);
            let matrices = self.matrices[number].iter();
            for (matrix, update) in matrices.zip(std::mem::take(&mut by_bucket[number])) {
                let GroupSegment {
                    range,
                    rate,
                    decay: times,
                    ..
                } = &matrix.segment;
                let value = stepped.master.clone().slice([range.clone()]);
                let value = value.mul_scalar(1.0 - decay * rate * times)
                    - update.mul_scalar(learning_rate * rate);
                stepped.master = flat::accumulate(stepped.master, range.start, value, false);
            }
            stepped
        });
    }

    /// Adds the gradients to the momentum. Returns the update of each segment for learning rate 1, without
    /// weight decay.
    fn updates<M: Module>(
        &mut self,
        gradients: &Gradients,
        ddp: &DistributedDataParallel<M>,
    ) -> Vec<Tensor<1>> {
        let (factor, momentum) = (gradients.factor(), self.config.momentum);
        let wide = FloatDType::from(self.dtype);
        let (mut directions, mut lengths) = (vec![], vec![]);
        for (matrices, sum) in self.matrices.iter_mut().zip(gradients.sums()) {
            for matrix in matrices {
                let range = matrix.segment.range.clone();
                let gradient: Tensor<1> = sum.clone().slice([range.clone()]);
                let new = gradient.mul_scalar(factor * (1.0 - momentum));
                matrix.momentum = matrix.momentum.clone().mul_scalar(momentum) + new.clone();
                let direction = if self.config.nesterov {
                    matrix.momentum.clone().mul_scalar(momentum) + new
                } else {
                    matrix.momentum.clone()
                };
                directions.push(direction.cast(wide));
                lengths.push((range.len(), matrix.momentum.dtype()));
            }
        }
        if directions.is_empty() {
            directions.push(Tensor::empty([0], (ddp.device(), self.dtype)));
        }
        let MuonConfig {
            ns_steps, scale, ..
        } = self.config;
        let updates = self.exchange.apply(Tensor::cat(directions, 0), |matrix| {
            let factor = scale.factor(matrix.dims());
            orthogonalize(matrix, ns_steps).mul_scalar(factor)
        });
        let mut start = 0;
        let part = |(length, dtype): (usize, DType)| {
            start += length;
            let part = updates.clone().narrow(0, start - length, length);
            part.cast(FloatDType::from(dtype))
        };
        lengths.into_iter().map(part).collect()
    }
}

impl OptimizerState for ParallelMuon {
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind> {
        let kind = |prefix: &str, is_muon: bool| StateKind {
            prefix: prefix.into(),
            types: masters
                .iter()
                .zip(&self.chosen)
                .map(|(dtype, chosen)| (*chosen == is_muon).then_some(*dtype))
                .collect(),
        };
        vec![
            kind(MOMENTUM, true),
            kind(FIRST, false),
            kind(SECOND, false),
        ]
    }

    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>> {
        let zeros = || Tensor::zeros([shard.range.len()], (&shard.device, shard.dtype));
        let write = |momentum: Tensor<1>, matrix: &MatrixSegment| {
            let start = matrix.segment.range.start;
            flat::accumulate(momentum, start, matrix.momentum.clone(), false)
        };
        let momentum = self.matrices[bucket].iter().fold(zeros(), write);
        let [first, second] = self.rest.moments(bucket, [zeros(), zeros()]);
        vec![momentum, first, second]
    }

    fn restore(&mut self, bucket: usize, _: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64) {
        let Ok([momentum, first, second]) = <[Tensor<1>; 3]>::try_from(tensors) else {
            unreachable!("the state has three tensors")
        };
        for matrix in &mut self.matrices[bucket] {
            matrix.momentum = momentum.clone().slice([matrix.segment.range.clone()]);
        }
        self.rest.restore_moments(bucket, &[first, second], steps);
    }
}

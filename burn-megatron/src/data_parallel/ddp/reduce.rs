//! Ends a step: sums the gradients over the ranks and checks them.

use burn::module::Module;
use burn::tensor::Tensor;

use super::DistributedDataParallel;
use crate::collective::to_f64;
use crate::data_parallel::error::DataParallelError;
use crate::data_parallel::gradient_check::InvalidGradient;
use crate::data_parallel::gradients::{Gradients, ReductionRecord};
use crate::mesh::{Grid, ZeroStage};

impl<M: Module> DistributedDataParallel<M> {
    /// Ends the step: sums the gradients over the ranks and divides them by the total number of tokens on all ranks.
    ///
    /// `tokens` is the number of tokens in the micro-batches of *this* rank, so ranks with more tokens have a larger
    /// weight. A rank that ran no micro-batch passes 0 and contributes zeros. A parameter on which the loss does not
    /// depend has a zero gradient. A warning that names the parameter is logged once. Collective: call on all ranks.
    ///
    /// If an error is returned, the step also ends: its gradients are discarded, and later gradients of the step are
    /// ignored.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] if a backward is missing, if the ranks used the parameters in different orders, or if a
    /// collective fails.
    pub fn reduce(&mut self, tokens: u64) -> Result<Gradients, DataParallelError> {
        let (mut gradients, record) = self.reduce_unscaled()?;
        gradients.tokens = self.total_tokens(tokens, record.fingerprints)?;
        gradients.scale(1.0 / gradients.tokens.max(1) as f64);
        let measured = record.measured.map(to_f64);
        gradients.invalid_gradients =
            measured.map_or(vec![], |measured| self.invalid_gradients(&measured));
        Ok(gradients)
    }

    /// Ends the step like [`reduce`](Self::reduce), but does not sum the number of tokens over the ranks and does not
    /// read from the device. In the returned gradients the factor is 1, the number of tokens is 0, and the list of
    /// invalid gradients is empty.
    pub fn reduce_unscaled(&mut self) -> Result<(Gradients, ReductionRecord), DataParallelError> {
        let _span = tracing::debug_span!("reduce_gradients").entered();
        let prefetches = self.buffers.parameters().end_step();
        let frozen = self.buffers.frozen.as_ref();
        let of_frozen = frozen.map_or(0, |frozen| frozen.buckets().end_step());
        let prefetches = prefetches ^ of_frozen.rotate_left(1);
        let mut reduced = self.buffers.gradients().finish()?;
        self.model_parallel.apply(&mut reduced.shards);
        let record = ReductionRecord {
            measured: reduced.measured,
            fingerprints: [prefetches, reduced.fingerprint],
        };
        Ok((Gradients::unscaled(reduced.shards), record))
    }

    /// Returns the number of tokens on all ranks. With ZeRO-2 and ZeRO-3, `fingerprints` must be equal on all ranks.
    fn total_tokens(&self, tokens: u64, fingerprints: [u64; 2]) -> Result<u64, DataParallelError> {
        let data = &self.buffers.plan.dense.data;
        let own = [tokens, fingerprints[0], fingerprints[1]].map(|x| x as i64);
        let all: Vec<i64> = data.all_gather(own.to_vec().into())?.into_vec();
        let differs = |other: &[i64]| other[1..] != own[1..];
        if let Some(other) = all.chunks(3).position(differs) {
            self.check_order(data.group().ranks()[other])?;
        }
        Ok(all.chunks(3).map(|rank| rank[0] as u64).sum())
    }

    /// Returns an error if the ZeRO stage requires this rank and rank `other` of the data axis to use their
    /// parameters in the same order.
    pub(crate) fn check_order(&self, other: usize) -> Result<(), DataParallelError> {
        let (rank, stage) = (self.groups.rank(), self.config().zero_stage);
        if stage < ZeroStage::Gradients {
            return Ok(());
        }
        Err(DataParallelError::OrderMismatch { rank, other, stage })
    }

    /// Returns the sum of squares, `[1]`, of the elements of a grid that this rank counts, from the measurements of a
    /// [`ReductionRecord`]. Returns `None` if the reduced gradients differ from the measured gradients.
    pub(crate) fn measured_squares(&self, measured: &Tensor<1>, grid: Grid) -> Option<Tensor<1>> {
        let shares = self.measured_shares.iter().find(|shares| shares.0 == grid);
        // A single unit adds the terms, so their order is fixed.
        shares.map(|(_, shares)| (measured.clone() * shares.clone()).sum_dim(0))
    }

    /// Returns the largest valid measurement of a [`ReductionRecord`].
    pub(crate) fn largest_valid_gradient(&self) -> f64 {
        let check = self.buffers.gradients().check.clone();
        check.map_or(f64::INFINITY, |check| check.largest_valid())
    }

    /// Returns the invalid gradients of this rank, from the measurements of a [`ReductionRecord`].
    pub(crate) fn invalid_gradients(&self, measured: &[f64]) -> Vec<InvalidGradient> {
        let check = self.buffers.gradients().check.clone();
        check.map_or(vec![], |check| check.invalid(measured, &self.buffers.plan))
    }
}

//! The ranks that exchange tokens, and the row counts that they exchange first.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::moe::statistics::count_experts;
use burn_megatron_kernels::record;

use crate::collective::{CollectiveOp, Comm, invalid, or_raise, start, to_f64};
use crate::comm::{Buffer, Call, CommError, ParallelContext};
use crate::mesh::{Axis, AxisSet, Grid};

/// The maximum number of tokens of a rank, because row counts are exchanged in f32.
const MAX_TOKENS: usize = 1 << 24;

/// The ranks that exchange tokens, which are the ranks of the expert and expert-tensor axes.
#[derive(Debug)]
pub(super) struct ExpertRanks {
    pub comm: Comm,
    /// The number of experts of the model.
    pub experts: usize,
    /// The first expert of this rank.
    pub first: usize,
    /// The number of experts of this rank.
    pub local: usize,
    /// The index in `comm`, given the indices on the expert axis and the expert-tensor axis.
    pub places: Vec<Vec<usize>>,
}

impl ExpertRanks {
    /// Returns the axes of the ranks.
    pub fn axes() -> AxisSet {
        AxisSet::from([Axis::Expert, Axis::ExpertTensor])
    }

    pub fn new(experts: usize, groups: &ParallelContext) -> Result<Self, CommError> {
        let on = |axis| groups.mesh_rank().on(Grid::Expert, axis);
        let (expert, tensor) = (on(Axis::Expert), on(Axis::ExpertTensor));
        let local = experts / expert.size;
        let comm = groups.group(Grid::Expert, Self::axes())?;
        let mut places = vec![vec![0; tensor.size]; expert.size];
        for (index, rank) in comm.group().ranks().iter().enumerate() {
            let at = groups.mesh().expert_coordinates(*rank);
            places[at.expert][at.expert_tensor] = index;
        }
        Ok(Self {
            comm,
            experts,
            first: expert.index * local,
            local,
            places,
        })
    }

    /// Returns the experts of this rank.
    pub fn own_experts(&self) -> Range<usize> {
        self.first..self.first + self.local
    }

    /// Starts gathering the counts of all ranks. All ranks have the same number of counts. The columns `here` count
    /// rows for this rank.
    pub fn start_counts(&self, counts: Vec<i64>, here: Range<usize>) -> PendingCounts {
        let len = counts.len();
        if let Some(settings) = record::shape_settings() {
            let all = self.expected(&counts, settings.expert_imbalance, here);
            return Box::new(|| all);
        }
        if self.comm.size() == 1 || len == 0 {
            let all = vec![counts; self.comm.size()];
            return Box::new(|| all);
        }
        let pending = or_raise(self.comm.start(Call::AllGather, Buffer::I64(counts)));
        Box::new(move || by_rank(&or_raise(pending.wait()).into_vec(), len))
    }

    /// Starts gathering counts on the device. If the communication engine supports device tensors, the counts are
    /// copied to the host after they have been gathered. Each count must be below 2^24, because counts are exchanged in
    /// f32.
    pub fn start_counts_on_device(&self, counts: Tensor<1, Int>) -> PendingCounts {
        let len = counts.dims()[0];
        let counts = counts.float().cast(FloatDType::F32);
        let gathered = start(counts, &CollectiveOp::Gather { dim: 0 }, &self.comm);
        Box::new(move || {
            let all = to_f64(gathered.wait()).into_iter();
            let all: Vec<_> = all.map(|count| count as i64).collect();
            by_rank(&all, len)
        })
    }

    /// Returns the expected row counts of all ranks if their tokens choose experts with the same frequencies as the
    /// tokens of this rank. The columns `here`, which count rows for this rank, are larger, so that this rank gets
    /// `imbalance` times the rows of an average rank.
    pub fn expected(
        &self,
        own: &[i64],
        imbalance: f64,
        here: impl IntoIterator<Item = usize>,
    ) -> Vec<Vec<i64>> {
        let ranks = self.comm.size();
        let others = (ranks as f64).mul_add(imbalance, -1.0) / (ranks as f64 - 1.0).max(1.0);
        let mut other = own.to_vec();
        for column in here {
            other[column] = (own[column] as f64 * others).ceil() as i64;
        }
        let mut all = vec![other; ranks];
        all[self.comm.rank()] = own.to_vec();
        all
    }
}

/// Waits for the counts of all ranks, and for the device.
pub(super) type PendingCounts = Box<dyn FnOnce() -> Vec<Vec<i64>>>;

/// Splits the counts of all ranks into `len` counts per rank.
fn by_rank(all: &[i64], len: usize) -> Vec<Vec<i64>> {
    all.chunks(len).map(<[i64]>::to_vec).collect()
}

/// Counts the choices of each of `columns` columns. A token chooses a column at most once.
pub(super) fn count(indices: Tensor<2, Int>, columns: usize) -> Tensor<1, Int> {
    let [tokens, _] = indices.dims();
    if tokens > MAX_TOKENS {
        invalid(format!(
            "{tokens} tokens of a rank for a dispatcher of experts: expected at most {MAX_TOKENS}"
        ));
    }
    if indices.shape().num_elements() == 0 {
        return Tensor::zeros([columns], (&indices.device(), DType::I32));
    }
    count_experts(indices, columns, 1).reshape([columns])
}

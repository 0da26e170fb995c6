//! Dispatchers: bring tokens to the ranks of their experts, and the results back.

mod all_gather;
mod all_to_all;

use std::fmt;

use burn::tensor::Tensor;
use burn_megatron_kernels::moe::permutation::RowLayout;
use burn_megatron_kernels::record;
use serde::{Deserialize, Serialize};

use super::experts::ExpertRows;
use super::router::Routing;
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, ParallelContext, raise};
use crate::mesh::{Axis, AxisSet, Grid};

use all_gather::AllGather;
use all_to_all::AllToAll;

/// How tokens reach the ranks of their experts.
///
/// `R` ranks of the expert axis exchange the rows of `T` tokens of each rank, with `k` experts per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DispatcherKind {
    /// A token is sent to each of its experts: `2 T k (R - 1) / R` rows each way.
    AllToAll,
    /// Every token is sent to every rank, which drops those of other experts: `2 T (R - 1)` rows each way, fewer
    /// from `k = R` on.
    AllGather,
}

/// Brings tokens to their experts and back; every rank of expert x expert-tensor has tokens of its own.
///
/// Rows of an expert are in the order of the ranks that they come from, and of their tokens there. So where these
/// ranks read consecutive tokens, as those of the data axis do, the order is that of the global batch, and the
/// gradients of an expert have the same bits in every split over the expert axis.
pub trait Dispatcher: fmt::Debug + Send + Sync {
    /// The rows of this rank's experts, of tokens `[tokens, hidden]` of all ranks. Calls `meanwhile` once, if it can
    /// while rows are under way.
    ///
    /// Collective: call on all ranks of expert x expert-tensor.
    fn dispatch(&self, x: Tensor<2>, routing: &Routing, meanwhile: Meanwhile) -> Dispatched;
}

/// Work that does not depend on the dispatched rows.
pub type Meanwhile = Box<dyn FnOnce() + Send>;

/// Tokens at their experts.
pub struct Dispatched {
    /// The rows of this rank's experts.
    pub rows: ExpertRows,
    combine: Box<dyn FnOnce(Tensor<2>) -> Tensor<2>>,
}

impl Dispatched {
    /// With the function that takes the results `[rows, hidden]`, partial sums over the expert-tensor axis, back to
    /// the ranks of their tokens and sums those of each token.
    pub fn new(rows: ExpertRows, combine: impl FnOnce(Tensor<2>) -> Tensor<2> + 'static) -> Self {
        let combine = Box::new(combine);
        Self { rows, combine }
    }

    /// Applies the experts, and returns the sums of their results for the tokens of this rank:
    /// `[tokens, hidden]`.
    ///
    /// Collective: call on all ranks of expert x expert-tensor.
    pub fn apply(self, experts: impl FnOnce(ExpertRows) -> Tensor<2>) -> Tensor<2> {
        (self.combine)(experts(self.rows))
    }
}

impl fmt::Debug for Dispatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatched")
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

impl DispatcherKind {
    /// The dispatcher of `experts` experts in the layout of `groups`, which gives each expert as many rows as the
    /// layout says.
    ///
    /// Collective: call on all ranks of the pipeline stage.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a group cannot be created.
    pub(super) fn init(
        self,
        experts: usize,
        groups: &ParallelContext,
    ) -> Result<Box<dyn Dispatcher>, CommError> {
        let places = ExpertRanks::new(experts, groups)?;
        Ok(match self {
            Self::AllToAll => Box::new(AllToAll::new(places, groups)?),
            Self::AllGather => Box::new(AllGather::new(places)),
        })
    }
}

/// The ranks that exchange tokens: those of expert x expert-tensor.
#[derive(Debug)]
struct ExpertRanks {
    comm: Comm,
    /// The experts of the model.
    experts: usize,
    /// The first expert of this rank.
    first: usize,
    /// The experts of this rank.
    local: usize,
}

impl ExpertRanks {
    fn new(experts: usize, groups: &ParallelContext) -> Result<Self, CommError> {
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        let own = groups.mesh_rank().on(Grid::Expert, Axis::Expert);
        let local = experts / own.size;
        Ok(Self {
            comm: groups.group(Grid::Expert, axes)?,
            experts,
            first: own.index * local,
            local,
        })
    }

    /// The integers of all ranks, which have equally many.
    fn gather(&self, values: Vec<i64>) -> Vec<Vec<i64>> {
        let len = values.len();
        if let Some(settings) = record::shape_settings() {
            return self.expected(values, settings.expert_imbalance);
        }
        if self.comm.size() == 1 || len == 0 {
            return vec![values; self.comm.size()];
        }
        let all = self.comm.all_gather(Buffer::I64(values));
        let all: Vec<i64> = all.unwrap_or_else(|error| raise(error)).into_vec();
        all.chunks(len).map(<[i64]>::to_vec).collect()
    }
}

impl ExpertRanks {
    /// What ranks give whose tokens choose like those of this rank, but for the experts of this rank: they choose those
    /// more often, so that it has `imbalance` times the rows of an average rank.
    fn expected(&self, own: Vec<i64>, imbalance: f64) -> Vec<Vec<i64>> {
        let ranks = self.comm.size();
        let others = (ranks as f64).mul_add(imbalance, -1.0) / (ranks as f64 - 1.0).max(1.0);
        let mut other = own.clone();
        if own.len() == self.experts {
            for rows in &mut other[self.first..self.first + self.local] {
                *rows = (*rows as f64 * others).ceil() as i64;
            }
        }
        let mut all = vec![other; ranks];
        all[self.comm.rank()] = own;
        all
    }
}

impl Routing {
    fn rows(&self) -> RowLayout {
        match self.rows_per_expert {
            None => RowLayout::Kept,
            Some(rows) => RowLayout::Capacity(rows),
        }
    }
}

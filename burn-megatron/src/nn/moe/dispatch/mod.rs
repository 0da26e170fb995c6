//! Token dispatchers, which send tokens to the ranks of their experts and return the results.

mod all_gather;
mod all_to_all;
mod dispatcher;
mod exchange;
mod flex;
mod fp8;
mod hop;
mod ranks;
mod volume;

use burn_megatron_kernels::moe::permutation::RowLayout;

use super::router::Routing;
use crate::comm::{CommError, ParallelContext};
use all_gather::AllGather;
use all_to_all::AllToAll;
pub use dispatcher::{Dispatched, Dispatcher, DispatcherKind, PendingDispatch};
pub use exchange::Exchanges;
pub(in crate::nn::moe) use exchange::Meanwhile;
use flex::Flex;
pub use fp8::Fp8DispatchScales;
use ranks::ExpertRanks;
pub use volume::{DispatchNodes, DispatchProblem, DispatchVolume, expected_destinations};

impl DispatcherKind {
    /// Creates the dispatcher for `experts` experts in the layout of `groups`. The routing of each forward pass
    /// determines the number of rows per expert. With `fp8`, which requires the flex dispatcher, rows are sent in FP8.
    ///
    /// This call is collective: make it on all ranks of the pipeline stage.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a group cannot be created.
    pub(super) fn init(
        self,
        experts: usize,
        fp8: Option<Fp8DispatchScales>,
        groups: &ParallelContext,
    ) -> Result<Box<dyn Dispatcher>, CommError> {
        let ranks = ExpertRanks::new(experts, groups)?;
        Ok(match self {
            Self::AllToAll => Box::new(AllToAll::new(ranks, groups)?),
            Self::AllGather => Box::new(AllGather::new(ranks)),
            Self::Flex => Box::new(Flex::new(ranks, groups, fp8)?),
        })
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

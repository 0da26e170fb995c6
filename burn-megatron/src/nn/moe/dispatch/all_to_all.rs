//! The all-to-all dispatcher, which sends each token to its experts.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use burn_megatron_kernels::moe::permutation::{
    RowLayout, RowMap, permute, permute_weights, unpermute,
};
use burn_megatron_kernels::record;

use super::dispatcher::{Dispatched, Dispatcher, PendingDispatch};
use super::exchange::{Exchanges, HopRows, RowExchange};
use super::ranks::{ExpertRanks, count};
use crate::collective::{Comm, gather_rows, reduce_scatter_rows};
use crate::comm::{CommError, ParallelContext};
use crate::mesh::{Axis, Grid};
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The all-to-all dispatcher (Megatron's `MoEAlltoAllTokenDispatcher`).
///
/// Rows are sent to the expert ranks with the same expert-tensor index. The expert-tensor ranks, which each hold a
/// part of every expert, then gather the rows.
#[derive(Clone, Debug)]
pub(super) struct AllToAll {
    ranks: Arc<ExpertRanks>,
    expert: Comm,
    expert_tensor: Comm,
}

impl AllToAll {
    pub fn new(ranks: ExpertRanks, groups: &ParallelContext) -> Result<Self, CommError> {
        Ok(Self {
            ranks: Arc::new(ranks),
            expert: groups.group(Grid::Expert, Axis::Expert)?,
            expert_tensor: groups.group(Grid::Expert, Axis::ExpertTensor)?,
        })
    }

    /// Returns the exchange, given the number of rows of each expert on each rank.
    fn exchange(&self, sizes: &[Vec<i64>]) -> Exchange {
        let local = self.ranks.local;
        let here = |source: &usize| &sizes[*source][self.ranks.own_experts()];
        let rows = |source: &usize| here(source).iter().sum::<i64>() as usize;
        let (index, tensor) = (self.expert_tensor.rank(), 0..self.expert_tensor.size());
        let own = &sizes[self.ranks.comm.rank()];
        let sent = own.chunks(local).map(|sizes| sizes.iter().sum::<i64>());
        let from = |tensor: usize| self.ranks.places.iter().map(move |ranks| &ranks[tensor]);
        let (mut keys, mut group_sizes) = (vec![], vec![0; local]);
        for source in tensor.clone().flat_map(from) {
            for (expert, size) in here(source).iter().enumerate() {
                let key = (expert * sizes.len() + source) as i64;
                keys.extend(vec![key; *size as usize]);
                group_sizes[expert] += *size as usize;
            }
        }
        Exchange {
            rows: HopRows {
                send: sent.map(|rows| rows as usize).collect(),
                receive: from(index).map(rows).collect(),
            },
            gathered: tensor.map(|index| from(index).map(rows).sum()).collect(),
            keys,
            group_sizes,
        }
    }
}

/// An exchange of rows between ranks.
struct Exchange {
    /// The numbers of rows that are exchanged with each rank of the expert axis.
    rows: HopRows,
    /// The number of rows that each rank of the expert-tensor axis receives.
    gathered: Vec<usize>,
    /// The local expert and the source rank of each row in arrival order, encoded as one number.
    keys: Vec<i64>,
    /// The number of rows of each local expert.
    group_sizes: Vec<usize>,
}

impl Dispatcher for AllToAll {
    fn start(&self, routing: &Routing) -> PendingDispatch {
        let Routing {
            weights, indices, ..
        } = routing.clone();
        let (own, experts, layout) = (self.clone(), self.ranks.experts, routing.rows());
        let is_known = layout != RowLayout::Kept || self.ranks.comm.size() == 1;
        let (map, sizes) = if is_known || record::is_recording() {
            let map = RowMap::new(indices.clone(), experts, layout);
            let sizes = map.group_sizes().into_iter().map(|size| size as i64);
            let here = self.ranks.own_experts();
            let sizes = self.ranks.start_counts(sizes.collect(), here);
            (Some(map), sizes)
        } else {
            // This rank's counts are copied to the host together with the counts of the other ranks, so that there is
            // only one synchronization with the device.
            let sizes = count(indices.clone(), experts);
            (None, self.ranks.start_counts_on_device(sizes))
        };
        PendingDispatch::new(move |x, exchanges| {
            exchanges.cover_counts();
            let exchange = own.exchange(&sizes());
            let map = map.unwrap_or_else(|| {
                let rows = RowLayout::Rows(exchange.rows.send.iter().sum());
                RowMap::new(indices, experts, rows)
            });
            own.dispatch((x, weights), map, exchange, exchanges)
        })
    }
}

impl AllToAll {
    fn dispatch(
        self,
        (x, weights): (Tensor<2>, Tensor<2>),
        map: RowMap,
        exchange: Exchange,
        exchanges: &mut Exchanges<'_>,
    ) -> Dispatched {
        let device = x.device();
        let (hop, gathered) = (exchange.rows, exchange.gathered);
        let (rows, groups) = (
            exchange.keys.len(),
            self.ranks.local * self.ranks.comm.size(),
        );
        let keys = Tensor::from_data(TensorData::new(exchange.keys, [rows, 1]), &device);
        // The host already has the number of rows, so no data is copied to the host.
        let order = RowMap::new(keys, groups, RowLayout::Rows(rows));

        let (expert, tensor) = (self.expert, self.expert_tensor);
        let weights = permute_weights(weights, &map).unsqueeze_dim(1);
        let sent = RowExchange::new(hop.clone(), &expert);
        let [rows, weights] = exchanges.run([permute(x, &map), weights], sent);
        let rows = gather_rows(rows, &gathered, &tensor);
        let weights = gather_rows(weights, &gathered, &tensor);
        let rows = ExpertRows {
            rows: permute(rows, &order),
            weights: permute_weights(weights, &order),
            group_sizes: exchange.group_sizes,
        };
        Dispatched::new(rows, move |y, exchanges| {
            let y = unpermute(y, &order);
            let y = reduce_scatter_rows(y, &gathered, &tensor);
            let back = RowExchange::of_results(hop, &expert);
            let [y] = exchanges.run([y], back);
            unpermute(y, &map)
        })
    }
}

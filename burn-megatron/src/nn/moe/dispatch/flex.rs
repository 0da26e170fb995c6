//! The flex dispatcher, which sends each token once to each rank that has one of its experts.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::destinations::{ExpertPlacement, destinations};
use burn_megatron_kernels::moe::permutation::{
    RowLayout, RowMap, permute, permute_weights, unpermute,
};
use burn_megatron_kernels::record;

use super::dispatcher::{Dispatched, Dispatcher, PendingDispatch};
use super::exchange::{Exchanges, HopRows};
use super::fp8::Fp8DispatchScales;
use super::hop::{Hop, Tokens};
use super::ranks::{ExpertRanks, PendingCounts, count};
use super::volume::chosen;
use crate::comm::{CommError, ParallelContext};
use crate::mesh::Grid;
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The flex dispatcher (Megatron's `MoEFlexTokenDispatcher`, DeepEP). A token is sent once to a rank, together with the
/// weights of its experts. The receiving rank copies the token for each of its experts. Before the results are sent
/// back, the receiving rank sums the results of its experts.
///
/// With several nodes a token is sent once to each node, to the rank with the same index in the node. This rank
/// forwards the token to the other ranks of the node. Each rank that shares an expert gets the tokens of the expert,
/// and the partial results of these ranks are summed when they are sent back.
#[derive(Clone, Debug)]
pub(super) struct Flex {
    ranks: Arc<ExpertRanks>,
    /// The placement with single ranks as destinations.
    all: ExpertPlacement,
    /// The exchanges: one, or two (between nodes and inside a node).
    hops: Vec<Hop>,
    /// The number of ranks per node.
    per_node: usize,
}

impl Flex {
    pub fn new(
        ranks: ExpertRanks,
        groups: &ParallelContext,
        fp8: Option<Fp8DispatchScales>,
    ) -> Result<Self, CommError> {
        let places = &ranks.places;
        let size = ranks.comm.size();
        let all = ExpertPlacement {
            experts: ranks.experts,
            experts_per_rank: ranks.local,
            stride: places.get(1).map_or(0, |place| place[0]),
            parts: places[0].len(),
            part_stride: places[0].get(1).copied().unwrap_or(0),
            first: 0,
            size: 1,
            count: size,
        };
        let hop = |comm, ranks| Hop { comm, ranks, fp8 };
        let nodes = groups.node_groups(Grid::Expert, ExpertRanks::axes())?;
        let (hops, per_node) = match nodes {
            None => (vec![hop(ranks.comm.clone(), all)], size),
            Some(nodes) => {
                let per_node = nodes.intra_node.size();
                let between = ExpertPlacement {
                    size: per_node,
                    count: size / per_node,
                    ..all
                };
                let inside = ExpertPlacement {
                    first: ranks.comm.rank() / per_node * per_node,
                    count: per_node,
                    ..all
                };
                let hops = vec![
                    hop(nodes.inter_node, between),
                    hop(nodes.intra_node, inside),
                ];
                (hops, per_node)
            }
        };
        Ok(Self {
            ranks: Arc::new(ranks),
            all,
            hops,
            per_node,
        })
    }

    /// Starts gathering the counts of each rank: the rows of each expert, the rows to each rank, and the rows to each
    /// node.
    fn start_counts(&self, indices: Tensor<2, Int>, first_hop: &Tensor<2, Int>) -> PendingCounts {
        let [tokens, top_k] = indices.dims();
        if let Some(settings) = record::shape_settings() {
            let own = self.expected([tokens, top_k]);
            let (size, rank) = (self.all.count, self.ranks.comm.rank());
            let mut columns = vec![self.all.experts + rank];
            if self.is_hierarchical() {
                columns.push(self.all.experts + size + rank / self.per_node);
            }
            let here = self.ranks.own_experts().chain(columns);
            let all = self.ranks.expected(&own, settings.expert_imbalance, here);
            return Box::new(|| all);
        }
        let mut counts = vec![count(indices.clone(), self.all.experts)];
        if self.is_hierarchical() {
            let of_ranks = destinations(indices, self.all);
            counts.push(count(of_ranks, self.all.count));
        }
        counts.push(count(first_hop.clone(), self.hops[0].ranks.count));
        self.ranks.start_counts_on_device(Tensor::cat(counts, 0))
    }

    /// Returns the counts of a rank whose tokens choose experts uniformly.
    fn expected(&self, [tokens, top_k]: [usize; 2]) -> Vec<i64> {
        let (experts, on_rank, ranks) =
            (self.all.experts, self.all.experts_per_rank, self.all.count);
        let rows = |own| (tokens as f64 * chosen(experts, top_k, own)).ceil() as i64;
        let each = (tokens * top_k).div_ceil(experts) as i64;
        let mut all = vec![each; experts];
        all.resize(experts + ranks, rows(on_rank));
        if self.is_hierarchical() {
            let on_node = self.per_node.div_ceil(self.all.parts) * on_rank;
            let nodes = ranks / self.per_node;
            all.resize(all.len() + nodes, rows(on_node.min(experts)));
        }
        all
    }

    fn is_hierarchical(&self) -> bool {
        self.hops.len() > 1
    }

    /// Returns the numbers of rows of each exchange, given the counts of all ranks.
    fn rows(&self, counts: &[Vec<i64>]) -> Vec<HopRows> {
        let (own, size, experts) = (self.ranks.comm.rank(), self.all.count, self.all.experts);
        let to_rank = |source: usize, rank: usize| counts[source][experts + rank] as usize;
        if !self.is_hierarchical() {
            return vec![HopRows {
                send: (0..size).map(|rank| to_rank(own, rank)).collect(),
                receive: (0..size).map(|source| to_rank(source, own)).collect(),
            }];
        }
        let (node, place) = (own / self.per_node, own % self.per_node);
        let nodes = size / self.per_node;
        let to_node = |source: usize, node: usize| counts[source][experts + size + node] as usize;
        let at = |node: usize, place: usize| node * self.per_node + place;
        // The number of rows that the rank at `place` of this node received from the same place of all nodes, and
        // forwards to `rank`.
        let passed = |place: usize, rank: usize| -> usize {
            let sources = (0..nodes).map(|node| at(node, place));
            sources.map(|source| to_rank(source, rank)).sum()
        };
        let places = 0..self.per_node;
        vec![
            HopRows {
                send: (0..nodes).map(|to| to_node(own, to)).collect(),
                receive: (0..nodes)
                    .map(|from| to_node(at(from, place), node))
                    .collect(),
            },
            HopRows {
                send: places
                    .clone()
                    .map(|to| passed(place, at(node, to)))
                    .collect(),
                receive: places.map(|from| passed(from, own)).collect(),
            },
        ]
    }

    /// Returns the number of rows of each expert of this rank.
    fn group_sizes(&self, counts: &[Vec<i64>]) -> Vec<usize> {
        let rows = |expert: usize| counts.iter().map(|of_rank| of_rank[expert] as usize).sum();
        self.ranks.own_experts().map(rows).collect()
    }

    fn dispatch(
        self,
        mut tokens: Tokens,
        first_hop: Tensor<2, Int>,
        counts: &[Vec<i64>],
        exchanges: &mut Exchanges<'_>,
    ) -> Dispatched {
        let (mut sent, mut first_hop) = (vec![], Some(first_hop));
        for (hop, rows) in self.hops.iter().zip(self.rows(counts)) {
            let to = first_hop
                .take()
                .unwrap_or_else(|| hop.destinations(tokens.indices.clone()));
            let (received, back) = hop.send(tokens, to, rows, exchanges);
            tokens = received;
            sent.push(back);
        }
        let group_sizes = self.group_sizes(counts);
        let own = tokens.indices.sub_scalar(self.ranks.first as i64);
        let rows = RowLayout::Rows(group_sizes.iter().sum());
        let copies = RowMap::new(own, self.ranks.local, rows);
        let rows = ExpertRows {
            rows: permute(tokens.x, &copies),
            weights: permute_weights(tokens.weights, &copies),
            group_sizes,
        };
        Dispatched::new(rows, move |y, exchanges| {
            let y = unpermute(y, &copies);
            let sent = sent.into_iter().rev();
            sent.fold(y, |y, back| back(y, exchanges))
        })
    }
}

impl Dispatcher for Flex {
    fn start(&self, routing: &Routing) -> PendingDispatch {
        let indices = routing.indices.clone();
        let first_hop = self.hops[0].destinations(indices.clone());
        let counts = self.start_counts(indices.clone(), &first_hop);
        let (flex, weights) = (self.clone(), routing.weights.clone());
        PendingDispatch::new(move |x, exchanges| {
            let tokens = Tokens {
                x,
                indices,
                weights,
            };
            exchanges.cover_counts();
            flex.dispatch(tokens, first_hop, &counts(), exchanges)
        })
    }
}

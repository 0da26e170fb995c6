//! How much a dispatcher sends: pure functions of the sizes, for experts that tokens choose uniformly at random.

use super::ranks::ExpertRanks;
use super::{DispatcherKind, Fp8DispatchScales};
use crate::mesh::{Axis, Grid, Mesh};

/// Bytes of the number of an expert that is sent beside a row.
const INDEX_BYTES: f64 = 4.0;

/// The mean number of destinations of a token, `n (1 - C(E - E / n, k) / C(E, k))`, where `n` destinations share `E`
/// experts evenly: the rows that a token has when each destination gets it once.
pub fn expected_destinations(experts: usize, per_token: usize, destinations: usize) -> f64 {
    let own = experts / destinations.max(1);
    destinations as f64 * chosen(experts, per_token, own)
}

/// The probability that a token chooses at least one of `own` of the experts.
pub(super) fn chosen(experts: usize, per_token: usize, own: usize) -> f64 {
    let none = |slot: usize| {
        let left = (experts - slot) as f64;
        (left - own as f64).max(0.0) / left
    };
    1.0 - (0..per_token.min(experts)).map(none).product::<f64>()
}

/// A layer of experts and its ranks, of which each has as many tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatchProblem {
    /// How rows are sent.
    pub dispatcher: DispatcherKind,
    /// Whether the rows of the dispatch are in 8 bits.
    pub fp8: Option<Fp8DispatchScales>,
    /// The tokens of a rank.
    pub tokens: usize,
    /// The experts of all ranks.
    pub experts: usize,
    /// Those of a token.
    pub per_token: usize,
    /// Features of a token.
    pub hidden: usize,
    /// Ranks of the expert axis.
    pub expert: usize,
    /// Ranks that share an expert.
    pub expert_tensor: usize,
    /// The nodes that a hierarchical dispatch knows.
    pub nodes: Option<DispatchNodes>,
}

/// The nodes of the ranks of expert x expert-tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchNodes {
    /// The ranks of each.
    pub ranks: usize,
    /// The experts of each.
    pub experts: usize,
}

/// Numbers of a rank, each way: in the dispatch, and again in the combine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DispatchVolume {
    /// Rows, or bytes, that it sends to other ranks of its node; to all, if nodes are not known.
    pub inside: f64,
    /// Those that it sends to other nodes.
    pub between: f64,
}

impl DispatchNodes {
    /// Those of a mesh, for so many experts; `None` where nodes do not count: see
    /// [`Mesh::members_per_node`].
    pub fn of(mesh: &Mesh, experts: usize) -> Option<Self> {
        let members = mesh.members(Grid::Expert, ExpertRanks::axes(), 0);
        let ranks = mesh.members_per_node(&members)?;
        let on_node = members[..ranks].iter();
        let mut own: Vec<_> = on_node
            .map(|rank| mesh.expert_coordinates(*rank).expert)
            .collect();
        own.sort_unstable();
        own.dedup();
        Some(Self {
            ranks,
            experts: own.len() * (experts / mesh.size(Grid::Expert, Axis::Expert)),
        })
    }
}

impl DispatchVolume {
    fn times(self, factor: f64) -> Self {
        Self {
            inside: self.inside * factor,
            between: self.between * factor,
        }
    }

    /// Those to all other ranks.
    pub fn total(self) -> f64 {
        self.inside + self.between
    }
}

impl DispatchProblem {
    /// The rows that a rank sends to others, each way.
    ///
    /// `T k (R - 1) / R` and, where `p` ranks share an expert, `T k (p - 1)` for the all-to-all dispatcher, `T (R p - 1)`
    /// for the all-gather dispatcher; for the flex dispatcher `T p d(R) (R p - 1) / (R p)` with the
    /// [mean number](expected_destinations) `d(R)` of ranks of a token. With `N` nodes of `l` ranks it sends
    /// `T d(N) (N - 1) / N` rows between nodes and `T p d(R) (l - 1) / l` inside.
    pub fn rows(&self) -> DispatchVolume {
        let (tokens, k) = (self.tokens as f64, self.per_token as f64);
        let (expert, parts) = (self.expert as f64, self.expert_tensor as f64);
        let ranks = expert * parts;
        let others = |n: f64| (n - 1.0) / n;
        let flat = |rows| DispatchVolume {
            inside: rows,
            between: 0.0,
        };
        match (self.dispatcher, self.nodes) {
            (DispatcherKind::AllToAll, _) => {
                flat(tokens * k * others(expert) + tokens * k * (parts - 1.0))
            }
            (DispatcherKind::AllGather, _) => flat(tokens * (ranks - 1.0)),
            (DispatcherKind::Flex, nodes) => {
                let ranks = nodes.map_or(ranks, |nodes| nodes.ranks as f64);
                let count = nodes.map_or(1.0, |nodes| expert * parts / nodes.ranks as f64);
                let DispatchVolume { inside, between } = self.flex_rows();
                DispatchVolume {
                    inside: inside * others(ranks),
                    between: between * others(count),
                }
            }
        }
    }

    /// The rows of each exchange of the flex dispatcher, those that stay on the rank included.
    pub(crate) fn flex_rows(&self) -> DispatchVolume {
        let parts = self.expert_tensor as f64;
        let ranks = parts * expected_destinations(self.experts, self.per_token, self.expert);
        let nodes = self.nodes.map_or(0.0, |nodes| {
            let count = (self.expert * self.expert_tensor / nodes.ranks) as f64;
            count * chosen(self.experts, self.per_token, nodes.experts)
        });
        DispatchVolume {
            inside: self.tokens as f64 * ranks,
            between: self.tokens as f64 * nodes,
        }
    }

    /// The bytes of a row in the dispatch of the forward, with tokens of `element` bytes and weights of `weight` bytes.
    ///
    /// The all-to-all dispatcher sends a weight with each row, the others those of all experts of the token and their
    /// numbers.
    pub fn row_bytes(&self, element: usize, weight: usize) -> f64 {
        let k = self.per_token as f64;
        let row = match self.fp8 {
            None => (self.hidden * element) as f64,
            Some(scales) => scales.row_bytes(self.hidden) as f64,
        };
        row + match self.dispatcher {
            DispatcherKind::AllToAll => weight as f64,
            DispatcherKind::AllGather | DispatcherKind::Flex => k * (weight as f64 + INDEX_BYTES),
        }
    }

    /// The bytes that a rank sends to others in the forward: the dispatch and the combine, without the counts of rows.
    pub fn forward_bytes(&self, element: usize, weight: usize) -> DispatchVolume {
        let combine = (self.hidden * element) as f64;
        self.rows().times(self.row_bytes(element, weight) + combine)
    }

    /// Those of the backward: gradients of the outputs, of the tokens in the type of the model, and of the weights.
    pub fn backward_bytes(&self, element: usize, weight: usize) -> DispatchVolume {
        let row = (2 * self.hidden * element) as f64;
        let weights = match self.dispatcher {
            DispatcherKind::AllToAll => weight,
            DispatcherKind::AllGather | DispatcherKind::Flex => self.per_token * weight,
        };
        self.rows().times(row + weights as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By an inclusion of all subsets, and as Megatron-LM's flex dispatcher was measured.
    #[test]
    fn the_ranks_of_a_token() {
        for (experts, per_token, ranks, expected) in [
            (256, 8, 8, 5.295),
            (256, 8, 32, 7.267),
            (256, 8, 64, 7.676),
            (128, 8, 8, 5.339),
            (64, 8, 8, 5.433),
            (8, 2, 8, 2.0),
            (8, 8, 4, 4.0),
            (8, 1, 4, 1.0),
            (4, 2, 1, 1.0),
        ] {
            let found = expected_destinations(experts, per_token, ranks);
            assert!(
                (found - expected).abs() < 5e-4,
                "{experts} {per_token} {ranks}: {found}"
            );
        }
    }

    fn problem(dispatcher: DispatcherKind) -> DispatchProblem {
        DispatchProblem {
            dispatcher,
            fp8: None,
            tokens: 1000,
            experts: 64,
            per_token: 8,
            hidden: 100,
            expert: 8,
            expert_tensor: 1,
            nodes: None,
        }
    }

    #[test]
    fn one_row_for_a_rank_saves_a_third_of_eight() {
        use DispatcherKind::{AllGather, AllToAll, Flex};
        let [each, all, flex] = [AllToAll, AllGather, Flex].map(|kind| problem(kind).rows());
        assert_eq!((each.inside, all.inside), (7000.0, 7000.0));
        assert!((flex.inside - 5433.0 * 7.0 / 8.0).abs() < 0.5, "{flex:?}");
        let nodes = Some(DispatchNodes {
            ranks: 4,
            experts: 32,
        });
        let DispatchVolume { inside, between } = DispatchProblem {
            nodes,
            ..problem(Flex)
        }
        .rows();
        assert!((inside - 5433.0 * 3.0 / 4.0).abs() < 0.5, "{inside}");
        let two = expected_destinations(64, 8, 2);
        assert!((between - 1000.0 * two / 2.0).abs() < 1e-9, "{between}");
    }
}

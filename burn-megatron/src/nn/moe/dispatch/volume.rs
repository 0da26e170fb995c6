//! Communication volumes of the dispatchers, computed from the sizes of the layer and the layout. The formulas assume
//! that tokens choose experts uniformly at random.

use std::ops::Range;

use super::dispatcher::DispatcherKind;
use super::fp8::Fp8DispatchScales;
use super::ranks::ExpertRanks;
use crate::mesh::{Axis, Grid, Mesh};
use crate::nn::moe::router::ExpertGroups;

/// The number of bytes of an expert index that is sent with a row.
const INDEX_BYTES: f64 = 4.0;

/// Returns the mean number of destinations of a token: `n (1 - C(E - E / n, k) / C(E, k))`. The token chooses `k` of
/// `E` experts, which are divided evenly over `n` destinations. A token is sent at most once to each destination.
pub fn expected_destinations(experts: usize, per_token: usize, destinations: usize) -> f64 {
    let own = experts / destinations.max(1);
    destinations as f64 * chosen(experts, per_token, own)
}

/// Returns the probability that a token chooses at least one of `own` of the experts.
pub(super) fn chosen(experts: usize, per_token: usize, own: usize) -> f64 {
    let none = |slot: usize| {
        let left = (experts - slot) as f64;
        (left - own as f64).max(0.0) / left
    };
    1.0 - (0..per_token.min(experts)).map(none).product::<f64>()
}

/// Returns the probability that a token chooses at least one of the experts `own`. The token first chooses groups
/// uniformly, and then experts of these groups.
fn chosen_in_groups(
    experts: usize,
    per_token: usize,
    groups: ExpertGroups,
    own: Range<usize>,
) -> f64 {
    let size = experts / groups.groups;
    let pool = size * groups.chosen;
    // ways[count][found] is the probability that `count` groups are chosen and that `found` of their experts are
    // among `own`. Groups are drawn without replacement: the probability of the next group is the number of remaining
    // choices divided by the number of remaining groups.
    let mut ways = vec![vec![0.0; own.len() + 1]; groups.chosen + 1];
    ways[0][0] = 1.0;
    for group in 0..groups.groups {
        let of_group = group * size..(group + 1) * size;
        let shared = own.end.min(of_group.end);
        let shared = shared.saturating_sub(own.start.max(of_group.start));
        let left = (groups.groups - group) as f64;
        for count in (0..=groups.chosen).rev() {
            let taken = (groups.chosen - count) as f64 / left;
            for found in (0..=own.len()).rev() {
                let probability = std::mem::take(&mut ways[count][found]);
                if probability == 0.0 {
                    continue;
                }
                ways[count][found] = probability * (1.0 - taken);
                if taken > 0.0 {
                    ways[count + 1][found + shared] += probability * taken;
                }
            }
        }
    }
    let of_all = ways[groups.chosen].iter().enumerate();
    of_all
        .map(|(found, probability)| probability * chosen(pool, per_token, found))
        .sum()
}

/// The sizes of an MoE layer and of its parallel layout. The communication volume of the dispatch is computed from
/// these sizes. Each rank has the same number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatchProblem {
    /// The kind of the token dispatcher.
    pub dispatcher: DispatcherKind,
    /// The dtype of the scales if rows are dispatched in FP8. `None` if rows are not dispatched in FP8.
    pub fp8: Option<Fp8DispatchScales>,
    /// The number of tokens per rank.
    pub tokens: usize,
    /// The number of experts over all ranks.
    pub experts: usize,
    /// The number of experts per token.
    pub per_token: usize,
    /// The groups from which a token chooses its experts. With one group per node, the groups limit the number of nodes
    /// to which a token is sent.
    pub groups: Option<ExpertGroups>,
    /// The number of features per token.
    pub hidden: usize,
    /// The number of ranks on the expert axis.
    pub expert: usize,
    /// The number of ranks that share an expert (the size of the expert-tensor axis).
    pub expert_tensor: usize,
    /// The nodes of a hierarchical dispatch. `None` if the dispatch does not take nodes into account.
    pub nodes: Option<DispatchNodes>,
}

/// The division of the ranks of the expert and expert-tensor axes into nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchNodes {
    /// The number of ranks per node.
    pub ranks: usize,
    /// The number of experts per node.
    pub experts: usize,
}

/// The communication volume of a rank in one direction, in rows or in bytes. The dispatch and the combine each have
/// this volume.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DispatchVolume {
    /// The rows or bytes that are sent to other ranks of the same node. If the dispatch does not take nodes into
    /// account, this is the volume to all other ranks.
    pub inside: f64,
    /// The rows or bytes that are sent to other nodes.
    pub between: f64,
}

impl DispatchNodes {
    /// Returns the division of the ranks of `mesh` into nodes for a model with `experts` experts, or `None` if the
    /// dispatch does not take nodes into account. See [`Mesh::members_per_node`].
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

    /// Returns the total volume that is sent to other ranks: the volume inside the node plus the volume between nodes.
    pub fn total(self) -> f64 {
        self.inside + self.between
    }
}

impl DispatchProblem {
    /// Returns the number of rows that a rank sends to other ranks in one direction. With `T` tokens per rank, `k`
    /// experts per token, `R` expert ranks and `p` ranks per expert, the number of rows is:
    ///
    /// - all-to-all: `T k (R - 1) / R + T k (p - 1)`;
    /// - all-gather: `T (R p - 1)`;
    /// - flex: `T p d(R) (R p - 1) / (R p)`, where `d(R)` is the [mean number](expected_destinations) of expert ranks
    ///   to which a token is sent;
    /// - flex with `N` nodes of `l` ranks each: `T d(N) (N - 1) / N` between nodes, and `T p d(R) (l - 1) / l` inside
    ///   nodes.
    ///
    /// With [groups](field@Self::groups), `d` is the mean for tokens that first choose groups, and then choose experts
    /// in these groups.
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

    /// Returns the numbers of rows in the exchanges of the flex dispatcher: the exchange between nodes, and the
    /// exchange inside nodes. The numbers include rows that stay on the rank.
    pub fn flex_rows(&self) -> DispatchVolume {
        let (parts, local) = (self.expert_tensor, self.experts / self.expert);
        // The probability that a token reaches a destination with experts from `first` on.
        let reached = |first: usize, count: usize| match self.groups {
            None => chosen(self.experts, self.per_token, count),
            Some(groups) => {
                chosen_in_groups(self.experts, self.per_token, groups, first..first + count)
            }
        };
        let of_rank = |rank: usize| reached(rank * local, local);
        let ranks = parts as f64 * (0..self.expert).map(of_rank).sum::<f64>();
        let nodes = self.nodes.map_or(0.0, |nodes| {
            let of_node = |node: usize| reached(node * nodes.ranks / parts * local, nodes.experts);
            let count = self.expert * parts / nodes.ranks;
            (0..count).map(of_node).sum()
        });
        DispatchVolume {
            inside: self.tokens as f64 * ranks,
            between: self.tokens as f64 * nodes,
        }
    }

    /// Returns the number of bytes per row in the dispatch of the forward pass. `element` is the number of bytes per
    /// feature, and `weight` is the number of bytes per expert weight.
    ///
    /// The all-to-all dispatcher sends one weight with each row. The other dispatchers send the weights and indices of
    /// all experts of the token.
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

    /// Returns the number of bytes that a rank sends in the forward pass, in the dispatch and the combine. Row counts
    /// are not included.
    pub fn forward_bytes(&self, element: usize, weight: usize) -> DispatchVolume {
        let combine = (self.hidden * element) as f64;
        self.rows().times(self.row_bytes(element, weight) + combine)
    }

    /// Returns the number of bytes that a rank sends in the backward pass: the gradients of the outputs, of the tokens
    /// (in the dtype of the model) and of the weights.
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
    use crate::nn::moe::GroupScore;

    /// Compares with an enumeration of all subsets, and with measurements of Megatron-LM's flex dispatcher.
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
            groups: None,
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
    /// Returns a layer of DeepSeek-V3 on 8 nodes of 8 ranks. Each token chooses 8 of the 256 experts, on 4 nodes.
    fn deepseek_v3(fp8: Option<Fp8DispatchScales>) -> DispatchProblem {
        DispatchProblem {
            dispatcher: DispatcherKind::Flex,
            fp8,
            tokens: 4096,
            experts: 256,
            per_token: 8,
            groups: Some(ExpertGroups {
                groups: 8,
                chosen: 4,
                score: GroupScore::SumOf(2),
            }),
            hidden: 7168,
            expert: 64,
            expert_tensor: 1,
            nodes: Some(DispatchNodes {
                ranks: 8,
                experts: 32,
            }),
        }
    }

    /// A row has 7168 codes, a scale of 4 bytes or 1 byte per 128 codes, and 8 expert indices and weights.
    #[test]
    fn rows_of_deepseek_v3_in_8_bits() {
        const CHOICES: f64 = 8.0 * 8.0;
        for (fp8, expected) in [
            (None, 14_336.0),
            (Some(Fp8DispatchScales::F32), 7_392.0),
            (Some(Fp8DispatchScales::E8m0), 7_224.0),
        ] {
            let found = deepseek_v3(fp8).row_bytes(2, 4);
            assert_eq!(found, expected + CHOICES, "{fp8:?}");
        }
    }

    /// The 117 MB of codes (4096 x 7168 x 4) assume that each token is sent to all of its 4 nodes. If experts are
    /// chosen uniformly, a token has no expert on a given node in 9 % of the cases: `C(96, 8) / C(128, 8)`. One of the
    /// 8 nodes is the node of the token itself.
    #[test]
    fn what_deepseek_v3_sends_between_nodes() {
        let problem = deepseek_v3(Some(Fp8DispatchScales::F32));
        let reached = 1.0
            - (0..8)
                .map(|i| (96.0 - f64::from(i)) / (128.0 - f64::from(i)))
                .product::<f64>();
        let rows = 4096.0 * 4.0 * reached;
        let near = |found: f64, expected: f64| {
            assert!(
                (found / expected - 1.0).abs() < 1e-12,
                "{found}, not {expected}"
            )
        };
        near(problem.flex_rows().between, rows);
        near(problem.rows().between, rows * 7.0 / 8.0);
        // If a token chooses all experts of its nodes, all nodes are reached.
        let all = DispatchProblem {
            per_token: 128,
            ..problem
        };
        let codes = all.flex_rows().between * 7168.0;
        near(codes, 117_440_512.0);
        // Without the limit, a token has experts on 5.295 of the nodes.
        let free = DispatchProblem {
            groups: None,
            ..problem
        };
        assert!((free.flex_rows().between / 4096.0 - 5.295).abs() < 5e-4);
    }

    /// Compares with a count of all choices of 2 of 3 groups and of 2 of their experts. Destinations are a part of a
    /// group, several groups, and parts of two groups.
    #[test]
    fn the_destinations_of_a_token_that_chooses_groups_first() {
        let groups = ExpertGroups {
            groups: 3,
            chosen: 2,
            score: GroupScore::Max,
        };
        for own in [0..1, 2..4, 4..8, 3..6, 1..8, 0..12] {
            let (mut all, mut reached) = (0, 0);
            for left_out in 0..3 {
                let pool: Vec<usize> = (0..12).filter(|expert| expert / 4 != left_out).collect();
                for (at, first) in pool.iter().enumerate() {
                    for second in &pool[at + 1..] {
                        all += 1;
                        reached += usize::from(own.contains(first) || own.contains(second));
                    }
                }
            }
            let found = chosen_in_groups(12, 2, groups, own.clone());
            let expected = reached as f64 / all as f64;
            assert!(
                (found - expected).abs() < 1e-12,
                "{own:?}: {found}, not {expected}"
            );
        }
    }
}

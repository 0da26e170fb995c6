//! Computes the time of a collective with an alpha-beta model (latency plus bytes divided by bandwidth) of the links
//! between the ranks of a group.
//!
//! A link connects groups of consecutive ranks. For example, the first 8 ranks are on the first node if a node has 8
//! devices. If a group has several ranks on each node, it uses the link inside the nodes and the link between the nodes
//! at the same time. The data that a node receives from other nodes is divided over the ranks of the group on this
//! node. A ring of `n` ranks has `n - 1` steps.

use super::hardware::Hardware;
use burn_megatron::collective::ExchangeKind;

/// The links between the ranks of a process group, from which the time of a collective is computed.
///
/// ```
/// use burn_megatron::collective::ExchangeKind;
/// use burn_megatron_plan::hardware::Hardware;
/// use burn_megatron_plan::GroupLinks;
///
/// let hardware = Hardware::named("H100")?;
/// // 8 consecutive ranks are one node. Every 8th rank is on another node.
/// let within_node = GroupLinks::new(&hardware, &[(8, 1)]);
/// let between_nodes = GroupLinks::new(&hardware, &[(8, 8)]);
/// assert_eq!((within_node.size(), between_nodes.size()), (8, 8));
/// let seconds = |links: &GroupLinks| links.seconds(&hardware, ExchangeKind::AllReduce, 1e9);
/// assert!(seconds(&within_node) < seconds(&between_nodes));
/// # Ok::<(), burn_megatron_plan::hardware::HardwareError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLinks {
    /// For each link, the number of ranks of the process group that the link connects with each other, for example on
    /// one node. The last link connects the whole group.
    members: Vec<usize>,
}

/// Returns the number of bytes that a rank sends in a collective or a message of `bytes` bytes. In a message, a rank
/// sends all bytes. In a ring collective or an all-to-all over `n` ranks, a rank sends `bytes (n - 1) / n`. In an
/// all-reduce, it sends twice this number.
pub fn sent_bytes(kind: ExchangeKind, bytes: f64, ranks: usize) -> f64 {
    let others = (ranks - 1) as f64 / ranks as f64;
    match kind {
        ExchangeKind::AllReduce => 2.0 * others * bytes,
        ExchangeKind::AllGather | ExchangeKind::ReduceScatter | ExchangeKind::AllToAll => {
            others * bytes
        }
        ExchangeKind::SendReceive => bytes,
    }
}

impl GroupLinks {
    /// Creates the links of a group of ranks. `levels` describes the ranks of the group. Each level is a pair: the
    /// number of ranks, and the distance (stride) between two adjacent ranks. The first level is the innermost.
    pub fn new(hardware: &Hardware, levels: &[(usize, usize)]) -> Self {
        let members = hardware.links.iter().map(|link| {
            let inside = link.devices.unwrap_or(usize::MAX);
            let of_level = levels.iter().map(|(size, stride)| match inside {
                usize::MAX => *size,
                // If the ranks cannot be divided evenly into domains, some neighbors are in different domains.
                _ if inside.is_multiple_of(*stride) => gcd(*size, inside / stride),
                _ => 1,
            });
            of_level.product()
        });
        Self {
            members: members.collect(),
        }
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.members.last().copied().unwrap_or(1)
    }

    /// Returns the index in [`Hardware::links`] of the slowest link that the group uses.
    pub fn slowest(&self) -> usize {
        let size = self.size();
        let found = self.members.iter().position(|members| *members == size);
        found.unwrap_or(0)
    }

    /// Returns the time of a collective or a message of `bytes` bytes, in seconds. For an all-gather or a
    /// reduce-scatter, `bytes` is the size of the whole tensor.
    pub fn seconds(&self, hardware: &Hardware, kind: ExchangeKind, bytes: f64) -> f64 {
        let size = self.size();
        if size <= 1 {
            return 0.0;
        }
        let slowest = &hardware.links[self.slowest()];
        if kind == ExchangeKind::SendReceive {
            return slowest.latency + bytes / slowest.bandwidth;
        }
        let (mut below, mut transfer, mut latency) = (1, 0f64, 0.0);
        for (link, members) in hardware.links.iter().zip(&self.members) {
            if *members == below {
                continue;
            }
            let crossing = (members - below) as f64 / size as f64 * bytes;
            let (own, steps) = match kind {
                // Each rank sends different data to every other rank.
                ExchangeKind::AllToAll => (crossing, 1),
                // The data that a domain receives is divided over the ranks in the domain.
                _ => {
                    let ring = (members / below - 1) as f64 / (members / below) as f64;
                    (bytes * ring / below as f64, members / below - 1)
                }
            };
            transfer = transfer.max(own / link.bandwidth);
            latency += steps as f64 * link.latency;
            below = *members;
        }
        let twice = if kind == ExchangeKind::AllReduce {
            2.0
        } else {
            1.0
        };
        twice * (transfer + latency)
    }
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(levels: &[(usize, usize)], kind: ExchangeKind, bytes: f64) -> f64 {
        let h100 = Hardware::named("H100").unwrap();
        GroupLinks::new(&h100, levels).seconds(&h100, kind, bytes)
    }

    #[test]
    fn a_ring_in_a_node_moves_its_part_over_the_fast_link() {
        let found = seconds(&[(8, 1)], ExchangeKind::AllGather, 370e9);
        assert!((found - (7.0 / 8.0 + 7.0 * 3.4e-6)).abs() < 1e-9);
        let twice = seconds(&[(8, 1)], ExchangeKind::AllReduce, 370e9);
        assert!((twice / found - 2.0).abs() < 1e-12);
        let half = seconds(&[(4, 2)], ExchangeKind::ReduceScatter, 370e9);
        assert!((half - (0.75 + 3.0 * 3.4e-6)).abs() < 1e-9);
        assert_eq!(seconds(&[(1, 1)], ExchangeKind::AllGather, 1e9), 0.0);
    }

    #[test]
    fn a_group_over_nodes_is_as_fast_as_its_members_in_a_node_together() {
        // One rank on each of 4 nodes, and 8 ranks on each of 4 nodes.
        let one = seconds(&[(4, 8)], ExchangeKind::AllGather, 46e9);
        assert!((one - (0.75 + 3.0 * 14e-6)).abs() < 1e-9);
        let eight = seconds(&[(32, 1)], ExchangeKind::AllGather, 46e9);
        let inside: f64 = 46e9 * 7.0 / 8.0 / 370e9;
        let between = 0.75 / 8.0;
        let latency = 7.0 * 3.4e-6 + 3.0 * 14e-6;
        assert!((eight - (inside.max(between) + latency)).abs() < 1e-9);
        // In an all-to-all, each rank sends different data to every other rank.
        let rows = seconds(&[(32, 1)], ExchangeKind::AllToAll, 46e9);
        assert!((rows - (24.0 / 32.0 + 17.4e-6)).abs() < 1e-9, "{rows}");
    }

    #[test]
    fn a_group_across_the_border_of_a_node_is_as_slow_as_the_link_between_nodes() {
        let h100 = Hardware::named("H100").unwrap();
        let of = |levels: &[(usize, usize)]| GroupLinks::new(&h100, levels).slowest();
        assert_eq!([of(&[(8, 1)]), of(&[(16, 1)]), of(&[(2, 8)])], [0, 1, 1]);
        // Ranks 0, 3, 6 and 9: the last rank is in the next node.
        assert_eq!(of(&[(4, 3)]), 1);
        // Groups of 2 tensor-parallel and 4 data-parallel ranks, with 2 pipeline ranks between them.
        assert_eq!(of(&[(2, 1), (4, 4)]), 1);
        assert_eq!(of(&[(2, 1), (2, 4)]), 0);
    }
}

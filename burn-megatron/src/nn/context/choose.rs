//! The communication costs of the context-parallel exchanges (ring, all-gather, all-to-all and hierarchical), and the
//! choice between these exchanges. Layers and the planner use this module.

use crate::mesh::{ContextExchange, ParallelConfig};

use super::attention::check_heads;
use burn_megatron_kernels::attention::Heads;

/// The sizes of one attention layer under context parallelism, from which the costs of an exchange are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeProblem {
    /// The number of tokens of one sequence, or the total number of tokens of all sequences of a micro-batch.
    pub tokens: usize,
    /// The query heads and key-value heads of a tensor rank.
    pub heads: Heads,
    /// The number of ranks on the context axis.
    pub ranks: usize,
    /// The number of ranks in each all-to-all of the hierarchical exchange. `None` excludes the hierarchical exchange
    /// from the choice.
    pub inner: Option<usize>,
    /// The number of bytes per element in the forward pass.
    pub bytes: usize,
    /// The number of bytes per element of the gradients of keys and values that are exchanged.
    pub gradient_bytes: usize,
}

/// The cost of an exchange for one rank and one layer: the bytes sent, and the memory for the exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExchangeCost {
    /// Bytes sent in the forward pass.
    pub forward: f64,
    /// Bytes sent in the backward pass.
    pub backward: f64,
    /// Bytes of temporary memory in the forward pass, in addition to inputs and outputs. This memory holds keys and
    /// values of other ranks, or heads for the tokens of other ranks.
    pub transient: f64,
}

/// The compute throughput and the link bandwidth that are used to compare exchanges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// The compute throughput of attention, in floating-point operations per second.
    pub flops_per_second: f64,
    /// The bandwidth at which a rank sends, in bytes per second.
    pub bytes_per_second: f64,
}

impl LinkSpeed {
    /// The speed of an H100 with NVLink: 400e12 floating-point operations per second, and 400e9 bytes per second.
    pub const NVLINK: Self = Self {
        flops_per_second: 400e12,
        bytes_per_second: 400e9,
    };
}

impl ExchangeProblem {
    /// Creates the exchange problem of an attention layer in the parallel layout `layout`. `heads` describes the heads
    /// of a tensor rank, and `bytes` is the number of bytes per element.
    pub fn of_layout(layout: &ParallelConfig, heads: Heads, tokens: usize, bytes: usize) -> Self {
        Self {
            tokens,
            heads,
            ranks: layout.context,
            inner: layout.context_inner,
            bytes,
            gradient_bytes: if layout.context_narrow_gradients {
                bytes
            } else {
                bytes.max(4)
            },
        }
    }

    /// Returns the requested exchange. If no exchange is requested, returns the exchange that [`choose`](Self::choose)
    /// selects. `fused` is true if attention is fused.
    ///
    /// # Errors
    ///
    /// A message with the reason why the requested exchange cannot be used, and the valid values.
    pub fn resolve(
        &self,
        requested: Option<ContextExchange>,
        fused: bool,
    ) -> Result<ContextExchange, String> {
        let choose = || self.choose(LinkSpeed::NVLINK, fused);
        let exchange = requested.unwrap_or_else(choose);
        let is_ring = matches!(
            exchange,
            ContextExchange::Ring | ContextExchange::Hierarchical
        );
        if is_ring && !fused {
            return Err(format!(
                "context_exchange = {exchange} requires fused attention, but this layer holds its scores in memory (it \
                 has dropout, a soft cap or wide heads, or the kernel is turned off): expected all-gather or all-to-all"
            ));
        }
        let checked = self.check(exchange);
        checked.map_err(|reason| format!("context_exchange = {exchange}: {reason}"))?;
        Ok(exchange)
    }

    /// Checks that this layer and layout support the exchange.
    ///
    /// # Errors
    ///
    /// A message with the reason why the exchange cannot be used, and the valid values.
    pub fn check(&self, exchange: ContextExchange) -> Result<(), String> {
        check_heads(self.heads, self.neighbours(exchange))
    }

    /// Returns the number of ranks in each all-to-all of the exchange, or 1 if the exchange has no all-to-all.
    pub fn neighbours(&self, exchange: ContextExchange) -> usize {
        match exchange {
            ContextExchange::Ring | ContextExchange::AllGather => 1,
            ContextExchange::AllToAll => self.ranks,
            ContextExchange::Hierarchical => self.inner.unwrap_or(1),
        }
    }

    /// Returns the number of bytes that a rank sends for the exchange, and the number of bytes that it holds in memory.
    /// The table counts elements for `s` tokens, `c` ranks, `q` query heads, `kv` key-value heads, and `d` features per
    /// head:
    ///
    /// | exchange | sent in the forward pass | sent in the backward pass | held in memory |
    /// |---|---|---|---|
    /// | ring | `2 kv d s (c - 1) / c` | keys and values again, and their gradients | two blocks of `2 kv d s / c` |
    /// | all-gather | the same | the same | `2 kv d s` |
    /// | all-to-all | `(2 q + 2 kv) d s (c - 1) / c^2` | the same | `(2 q + 2 kv) d s / c` |
    ///
    /// The hierarchical exchange combines an all-to-all between `inner` ranks and a ring between groups of `inner`
    /// ranks. The ring exchanges `1 / inner` of the heads. If an all-to-all has more ranks than key-value heads, each
    /// rank gets a copy of one key-value head. In the formulas, `kv` is then the number of ranks.
    pub fn cost(&self, exchange: ContextExchange) -> ExchangeCost {
        let inner = self.neighbours(exchange);
        let outer = self.ranks / inner;
        let (tokens, width) = (self.tokens as f64, self.heads.width as f64);
        let (bytes, gradient_bytes) = (self.bytes as f64, self.gradient_bytes as f64);
        let groups = self.heads.groups.next_multiple_of(inner) as f64;
        let local = tokens / self.ranks as f64;

        let heads = 2.0 * self.heads.heads as f64 + 2.0 * groups;
        let exchanged = heads * width * local * bytes;
        let of_heads = exchanged * (inner - 1) as f64 / inner as f64;
        // Keys and values of one group of neighbours.
        let block = 2.0 * groups / inner as f64 * width * tokens / outer as f64;
        let steps = (outer - 1) as f64;
        let held = match (exchange, outer) {
            (_, 1) => 0.0,
            (ContextExchange::AllGather, _) => block * outer as f64,
            _ => 2.0 * block,
        };
        ExchangeCost {
            forward: of_heads + steps * block * bytes,
            backward: of_heads + steps * block * (bytes + gradient_bytes),
            transient: held * bytes + if inner > 1 { exchanged } else { 0.0 },
        }
    }

    /// Returns the exposed communication time in seconds: the time for which a rank waits in one forward and one
    /// backward pass.
    ///
    /// A ring overlaps the transfer of a block with the computation of the previous block. In causal attention over `s`
    /// tokens, a token attends to `s / 2` tokens on average. On each rank this costs `4 (s / c) (s / 2) q d`
    /// floating-point operations in the forward pass, and 2.5 times this number in the backward pass.
    pub fn exposed(&self, exchange: ContextExchange, speed: LinkSpeed) -> f64 {
        let cost = self.cost(exchange);
        let inner = self.neighbours(exchange);
        let outer = self.ranks / inner;
        let is_ring = !matches!(exchange, ContextExchange::AllGather) && outer > 1;
        if !is_ring {
            return (cost.forward + cost.backward) / speed.bytes_per_second;
        }
        let alone = Self {
            ranks: inner,
            tokens: self.tokens / outer,
            ..*self
        };
        let of_heads = match inner {
            1 => ExchangeCost::default(),
            _ => alone.cost(ContextExchange::AllToAll),
        };
        let (tokens, features) = (
            self.tokens as f64,
            (self.heads.heads * self.heads.width) as f64,
        );
        let flops = 4.0 * tokens / self.ranks as f64 * tokens / 2.0 * features;
        let steps = (outer - 1) as f64 / outer as f64;
        let waits = |bytes: f64, flops: f64| {
            (bytes / speed.bytes_per_second - steps * flops / speed.flops_per_second).max(0.0)
        };
        (of_heads.forward + of_heads.backward) / speed.bytes_per_second
            + waits(cost.forward - of_heads.forward, flops)
            + waits(cost.backward - of_heads.backward, 2.5 * flops)
    }

    /// Returns the supported exchange with the least [exposed](Self::exposed) communication time. The candidates are
    /// ring, all-gather and all-to-all, and also the hierarchical exchange if `inner` is set. If two times are equal,
    /// the candidate that is earlier in this list is chosen. A ring requires fused attention.
    pub fn choose(&self, speed: LinkSpeed, fused: bool) -> ContextExchange {
        let all = ContextExchange::ALL.into_iter();
        let usable = all.filter(|exchange| match exchange {
            ContextExchange::Ring => fused,
            ContextExchange::Hierarchical => fused && self.inner.is_some(),
            ContextExchange::AllGather | ContextExchange::AllToAll => true,
        });
        let usable = usable.filter(|exchange| self.check(*exchange).is_ok());
        let time = |exchange: &ContextExchange| self.exposed(*exchange, speed);
        let best = usable.min_by(|one, two| time(one).total_cmp(&time(two)));
        best.unwrap_or(ContextExchange::AllGather)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the problem of Llama 3 8B.
    fn problem(tokens: usize, groups: usize, ranks: usize) -> ExchangeProblem {
        ExchangeProblem {
            tokens,
            heads: Heads {
                heads: 32,
                groups,
                width: 128,
            },
            ranks,
            inner: None,
            bytes: 2,
            gradient_bytes: 2,
        }
    }

    /// Compares with the published volumes for 131072 tokens on 8 ranks: ring 469.8 MB, all-to-all 293.6 MB.
    #[test]
    fn volumes_are_the_known_ones() {
        let llama = problem(131_072, 8, 8);
        let megabytes = |bytes: f64| (bytes / 1e5).round() / 10.0;
        let ring = llama.cost(ContextExchange::Ring);
        assert_eq!(megabytes(ring.forward), 469.8);
        assert_eq!(ring.backward, 2.0 * ring.forward);
        assert_eq!(megabytes(ring.transient), 134.2);
        let gather = llama.cost(ContextExchange::AllGather);
        assert_eq!(
            (gather.forward, gather.backward),
            (ring.forward, ring.backward)
        );
        assert_eq!(megabytes(gather.transient), 536.9);
        let heads = llama.cost(ContextExchange::AllToAll);
        assert_eq!(megabytes(heads.forward), 293.6);
        assert_eq!(heads.backward, heads.forward);
        // With multi-head attention the all-to-all sends `c / 2` times less.
        let many = problem(131_072, 32, 8);
        let ratio =
            many.cost(ContextExchange::Ring).forward / many.cost(ContextExchange::AllToAll).forward;
        assert_eq!(ratio, 4.0);
        let f32_gradients = ExchangeProblem {
            gradient_bytes: 4,
            ..llama
        };
        assert_eq!(
            f32_gradients.cost(ContextExchange::Ring).backward,
            3.0 * ring.forward
        );
    }

    #[test]
    fn a_hierarchical_exchange_is_an_all_to_all_and_a_ring() {
        let whole = ExchangeProblem {
            inner: Some(4),
            ..problem(4096, 8, 8)
        };
        let cost = whole.cost(ContextExchange::Hierarchical);
        let inside = problem(2048, 8, 4).cost(ContextExchange::AllToAll);
        let between = problem(4096, 2, 2).cost(ContextExchange::Ring);
        assert_eq!(cost.forward, inside.forward + between.forward);
        assert_eq!(cost.backward, inside.backward + between.backward);
    }

    /// A ring with `s / c >= 2 kv / q F / B` tokens per rank hides the communication of its forward pass. With one
    /// group per four heads, this is 500 tokens on NVLink.
    #[test]
    fn a_ring_hides_its_transfers_behind_enough_tokens() {
        let nvlink = LinkSpeed::NVLINK;
        let waits = |tokens| problem(tokens, 8, 8).exposed(ContextExchange::Ring, nvlink);
        assert!(waits(8 * 400) > 0.0);
        assert_eq!(waits(8 * 512), 0.0);
    }

    #[test]
    fn the_exchange_that_waits_least_is_chosen() {
        let choose = |problem: ExchangeProblem| problem.choose(LinkSpeed::NVLINK, true);
        assert_eq!(choose(problem(131_072, 8, 8)), ContextExchange::Ring);
        assert_eq!(choose(problem(1024, 8, 8)), ContextExchange::AllToAll);
        // 32 heads cannot be split over 5 ranks.
        assert_eq!(choose(problem(1000, 8, 5)), ContextExchange::Ring);
        let unfused = problem(131_072, 8, 8).choose(LinkSpeed::NVLINK, false);
        assert_eq!(unfused, ContextExchange::AllToAll);
        assert_eq!(
            problem(1000, 8, 5).choose(LinkSpeed::NVLINK, false),
            ContextExchange::AllGather
        );
    }

    #[test]
    fn heads_that_cannot_be_split_are_refused_with_what_fits() {
        let refused = problem(1024, 8, 12).check(ContextExchange::AllToAll);
        insta::assert_snapshot!(
            refused.unwrap_err(),
            @"an all-to-all of 12 ranks cannot split 32 heads and 8 groups of keys and values of a tensor rank: use \
              one of 1, 2, 4, 8, 16, 32 ranks"
        );
        assert!(problem(1024, 8, 12).check(ContextExchange::Ring).is_ok());
        assert!(
            problem(1024, 8, 16)
                .check(ContextExchange::AllToAll)
                .is_ok()
        );
    }
}

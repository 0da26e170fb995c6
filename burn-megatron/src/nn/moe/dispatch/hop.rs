//! One exchange of rows. Each pair of a token and a destination is a row. When results are sent back, the rows of each
//! token are summed.

use burn::tensor::{FloatDType, Int, Tensor};
use burn_megatron_kernels::moe::destinations::{ExpertPlacement, destinations};
use burn_megatron_kernels::moe::permutation::{RowLayout, RowMap, permute, unpermute};

use super::dispatcher::CombineFn;
use super::exchange::{Exchanges, HopRows, RowExchange};
use super::fp8::Fp8DispatchScales;
use crate::collective::{Comm, start};

/// Tokens with their choices of experts.
pub(super) struct Tokens {
    /// The tokens: `[tokens, hidden]`.
    pub x: Tensor<2>,
    /// The expert indices: `[tokens, k]`, not tracked by autodiff.
    pub indices: Tensor<2, Int>,
    /// The weights: `[tokens, k]`.
    pub weights: Tensor<2>,
}

/// The ranks of an exchange.
#[derive(Clone, Debug)]
pub(super) struct Hop {
    pub comm: Comm,
    /// The placement of experts, whose destinations are the ranks of `comm`.
    pub ranks: ExpertPlacement,
    pub fp8: Option<Fp8DispatchScales>,
}

impl Hop {
    /// Returns the destination of each choice, or -1 if an earlier choice of the token has the same destination.
    pub fn destinations(&self, indices: Tensor<2, Int>) -> Tensor<2, Int> {
        destinations(indices, self.ranks)
    }

    /// Sends each token once to each of its `destinations`, with all its choices. Returns the tokens that arrive,
    /// ordered by source rank. Rows are written once, in send order. The returned closure sends the results of the
    /// arrived tokens back, and sums the rows of each sent token.
    pub fn send(
        &self,
        tokens: Tokens,
        destinations: Tensor<2, Int>,
        rows: HopRows,
        exchanges: &mut Exchanges<'_>,
    ) -> (Tokens, Box<CombineFn>) {
        if self.comm.size() == 1 && self.fp8.is_none() {
            exchanges.run_meanwhile();
            return (tokens, Box::new(|y, _| y));
        }
        let sent = rows.send.iter().sum();
        // The host already has the number of rows, so no data is copied to the host.
        let map = RowMap::new(destinations, self.ranks.count, RowLayout::Rows(sent));
        // Expert indices are represented exactly in f32.
        let indices = tokens.indices.float().cast(FloatDType::F32);
        let indices = start(permute(indices, &map), &rows.op(), &self.comm);
        let mut exchange = RowExchange::new(rows.clone(), &self.comm);
        exchange.fp8 = self.fp8.map(|scales| (scales, map.clone()));
        let x = match self.fp8 {
            None => permute(tokens.x, &map),
            Some(_) => tokens.x,
        };
        let [x, weights] = exchanges.run([x, permute(tokens.weights, &map)], exchange);
        let received = Tokens {
            x,
            indices: indices.wait().int(),
            weights,
        };
        let back = RowExchange::of_results(rows, &self.comm);
        let combine = move |y, exchanges: &mut Exchanges<'_>| {
            let [y] = exchanges.run([y], back);
            unpermute(y, &map)
        };
        (received, Box::new(combine))
    }
}

//! One exchange of rows: a row for each pair of a token and a destination, and the sum on the way back.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_megatron_kernels::moe::destinations::{ExpertPlacement, destinations};
use burn_megatron_kernels::moe::permutation::{RowLayout, RowMap, permute, unpermute};
use burn_megatron_kernels::{MultiFunction, apply_multi};
use parking_lot::Mutex;

use super::fp8::PendingFp8Rows;
use super::{Fp8DispatchScales, Meanwhile};
use crate::collective::{CollectiveOp, Comm, PendingTensor, all_to_all, start};

/// Tokens with their choices.
pub(super) struct Tokens {
    /// `[tokens, hidden]`
    pub x: Tensor<2>,
    /// `[tokens, k]`: numbers of experts, without autodiff.
    pub indices: Tensor<2, Int>,
    /// `[tokens, k]`
    pub weights: Tensor<2>,
}

/// The ranks of an exchange.
#[derive(Clone, Debug)]
pub(super) struct Hop {
    pub comm: Comm,
    /// Of which the destinations are the ranks of `comm`.
    pub ranks: ExpertPlacement,
    pub fp8: Option<Fp8DispatchScales>,
}

/// The rows of an exchange, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HopRows {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

/// What takes the results of an exchange back; nothing where a rank is alone.
pub(super) struct SentRows(Option<(RowMap, HopRows, Comm)>);

impl Hop {
    /// The destination of each choice; -1 for all but the first of a destination.
    pub fn destinations(&self, indices: Tensor<2, Int>) -> Tensor<2, Int> {
        destinations(indices, self.ranks)
    }

    /// Sends each token to its `destinations` once, with all its choices, and returns those that arrive, in the order of
    /// the ranks that sent them. Rows are written once, in the order in which they are sent; `meanwhile` is done while they are
    /// under way.
    pub fn send(
        &self,
        tokens: Tokens,
        destinations: Tensor<2, Int>,
        rows: HopRows,
        meanwhile: Option<Meanwhile>,
    ) -> (Tokens, SentRows) {
        if self.comm.size() == 1 && self.fp8.is_none() {
            meanwhile.into_iter().for_each(|work| work());
            return (tokens, SentRows(None));
        }
        let sent = rows.send.iter().sum();
        // The host knows the number of rows, so nothing is copied to it.
        let map = RowMap::new(destinations, self.ranks.count, RowLayout::Rows(sent));
        // In f32, which is exact for so few experts.
        let indices = tokens.indices.float().cast(FloatDType::F32);
        let op = CollectiveOp::AllToAll {
            send: rows.send.clone(),
            receive: rows.receive.clone(),
        };
        let indices = start(permute(indices, &map), &op, &self.comm);
        let exchange = RowExchange {
            comm: self.comm.clone(),
            rows: rows.clone(),
            fp8: self.fp8,
            meanwhile: Mutex::new(meanwhile),
        };
        let inputs = [tokens.x, tokens.weights].map(|x| permute(x, &map).into_dispatch());
        let [x, weights] = apply_multi(inputs.into(), exchange);
        let received = Tokens {
            x,
            indices: indices.wait().int(),
            weights,
        };
        (received, SentRows(Some((map, rows, self.comm.clone()))))
    }
}

impl SentRows {
    /// The sum of the rows of each token that was sent, from the results of those that arrived.
    pub fn back(self, y: Tensor<2>) -> Tensor<2> {
        match self.0 {
            Some((map, HopRows { send, receive }, comm)) => {
                unpermute(all_to_all(y, receive, send, &comm), &map)
            }
            None => y,
        }
    }
}

/// Sends rows and weights at once; the backward sends both gradients back.
struct RowExchange {
    comm: Comm,
    rows: HopRows,
    /// Of the forward alone.
    fp8: Option<Fp8DispatchScales>,
    /// What is computed while they are under way.
    meanwhile: Mutex<Option<Meanwhile>>,
}

/// Rows under way.
enum PendingRows {
    Plain(PendingTensor<2>),
    Fp8(PendingFp8Rows),
}

impl MultiFunction for RowExchange {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let HopRows { send, receive } = &self.rows;
        let mut inputs = inputs.into_iter().map(Tensor::<2>::from_dispatch);
        let (Some(x), Some(weights)) = (inputs.next(), inputs.next()) else {
            unreachable!("rows and their weights")
        };
        let op = CollectiveOp::AllToAll {
            send: send.clone(),
            receive: receive.clone(),
        };
        let x = match self.fp8 {
            None => PendingRows::Plain(start(x, &op, &self.comm)),
            Some(scales) => {
                let rows = PendingFp8Rows::start(x, scales, [send, receive], &self.comm);
                PendingRows::Fp8(rows)
            }
        };
        let weights = start(weights, &op, &self.comm);
        if let Some(meanwhile) = self.meanwhile.lock().take() {
            meanwhile();
        }
        let x = match x {
            PendingRows::Plain(pending) => pending.wait(),
            PendingRows::Fp8(pending) => pending.wait(),
        };
        (
            vec![x.into_dispatch(), weights.wait().into_dispatch()],
            vec![],
        )
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let HopRows { send, receive } = &self.rows;
        let op = CollectiveOp::AllToAll {
            send: receive.clone(),
            receive: send.clone(),
        };
        let started: Vec<_> = gradients
            .into_iter()
            .zip(needed)
            .map(|(gradient, needed)| {
                let gradient = Tensor::<2>::from_dispatch(gradient.filter(|_| *needed)?);
                Some(start(gradient, &op, &self.comm))
            })
            .collect();
        let waited = |pending: Option<PendingTensor<2>>| Some(pending?.wait().into_dispatch());
        started.into_iter().map(waited).collect()
    }
}

impl fmt::Debug for RowExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowExchange")
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

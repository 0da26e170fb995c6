//! The row exchanges in the forward pass of an MoE layer.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::moe::permutation::{RowMap, unpermute};
use burn_megatron_kernels::{MultiFunction, apply_multi};
use parking_lot::Mutex;

use super::fp8::{Fp8DispatchScales, start_fp8_rows};
use crate::collective::{CollectiveOp, Comm, PendingTensor, start};
use crate::nn::ScheduleNodes;
use crate::nn::schedule_nodes::{Exchange, PendingExchange};

/// Work that does not depend on the dispatched rows.
pub(in crate::nn::moe) type Meanwhile = Box<dyn FnOnce() + Send>;

/// The row exchanges in a forward pass of an MoE layer. Each exchange is an operation in a single autodiff graph, or
/// separates two [schedule nodes](ScheduleNodes).
#[derive(Default)]
pub struct Exchanges<'a> {
    /// The schedule nodes that the exchanges separate, if the forward pass has nodes.
    pub(in crate::nn::moe) nodes: Option<&'a ScheduleNodes>,
    /// The work that runs while the first rows are exchanged.
    pub(in crate::nn::moe) meanwhile: Option<Meanwhile>,
    /// Other tensors of the layer, `[batch, seq, hidden]`, that are used after its exchanges. Some may be `None`.
    pub(in crate::nn::moe) carried: Vec<Option<Tensor<3>>>,
}

impl Exchanges<'_> {
    /// Returns the carried tensors of the current node.
    pub(in crate::nn::moe) fn into_carried<const K: usize>(self) -> [Option<Tensor<3>>; K] {
        let mut carried = self.carried.into_iter();
        std::array::from_fn(|_| carried.next().flatten())
    }

    /// Runs the pending work that does not depend on the exchanged rows, if it has not run yet.
    pub fn run_meanwhile(&mut self) {
        if let Some(work) = self.meanwhile.take() {
            work();
        }
    }

    /// Runs a part of the backward pass of another micro-batch, if one is scheduled to overlap with this forward pass.
    /// A dispatcher calls this method before it waits for row counts.
    pub fn cover_counts(&self) {
        if let Some(nodes) = self.nodes {
            nodes.cover_counts();
        }
    }

    /// Exchanges `rows` and returns the rows that arrive. Each tensor has one row for each row that the exchange
    /// sends, or for each token.
    pub(super) fn run<const K: usize>(
        &mut self,
        rows: [Tensor<2>; K],
        mut exchange: RowExchange,
    ) -> [Tensor<2>; K] {
        if exchange.comm.size() == 1 && exchange.fp8.is_none() {
            self.run_meanwhile();
            return rows;
        }
        let Some(nodes) = self.nodes else {
            exchange.meanwhile = Mutex::new(self.meanwhile.take());
            return apply_multi(rows.map(Tensor::into_dispatch).into(), exchange);
        };
        self.run_meanwhile();
        let arrived = nodes.cross(rows.into(), exchange, &mut self.carried);
        match <[_; K]>::try_from(arrived) {
            Ok(arrived) => arrived,
            Err(_) => unreachable!("each tensor arrives"),
        }
    }
}

/// Waits for the rows of one tensor.
type PendingRows = Box<dyn FnOnce() -> Tensor<2> + Send>;

/// The numbers of rows of an exchange, for each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HopRows {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

impl HopRows {
    /// Returns the numbers of rows in the reverse direction.
    pub fn reversed(self) -> Self {
        Self {
            send: self.receive,
            receive: self.send,
        }
    }

    pub fn op(&self) -> CollectiveOp {
        CollectiveOp::AllToAll {
            send: self.send.clone(),
            receive: self.receive.clone(),
        }
    }
}

/// Exchanges rows of several tensors. The backward pass sends the gradients back.
pub(super) struct RowExchange {
    comm: Comm,
    rows: HopRows,
    /// FP8 settings for the forward pass of the first tensor. The tensor holds tokens, and the rows of the map are sent
    /// in FP8.
    pub fp8: Option<(Fp8DispatchScales, RowMap)>,
    /// Whether the rows are results of experts that are sent back. The next layer may send tokens after this exchange.
    pub are_results: bool,
    /// The computation that runs during the exchange.
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl RowExchange {
    pub fn new(rows: HopRows, comm: &Comm) -> Self {
        Self {
            comm: comm.clone(),
            rows,
            fp8: None,
            are_results: false,
            meanwhile: Mutex::default(),
        }
    }

    /// Creates the exchange of the results of these rows in the reverse direction.
    pub fn of_results(rows: HopRows, comm: &Comm) -> Self {
        Self {
            are_results: true,
            ..Self::new(rows.reversed(), comm)
        }
    }
}

impl MultiFunction for RowExchange {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let arrive = self.start(inputs.into_iter().map(Tensor::from_dispatch).collect());
        if let Some(meanwhile) = self.meanwhile.lock().take() {
            meanwhile();
        }
        let arrived = arrive().into_iter().flatten();
        (arrived.map(Tensor::into_dispatch).collect(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradients = gradients.into_iter().zip(needed);
        let gradients = gradients.map(|(gradient, needed)| {
            let gradient = gradient.filter(|_| *needed)?;
            Some(Tensor::from_dispatch(gradient))
        });
        let arrived = self.start_backward(gradients.collect())().into_iter();
        arrived
            .map(|gradient| Some(gradient?.into_dispatch()))
            .collect()
    }
}

impl Exchange for RowExchange {
    fn start(&self, rows: Vec<Tensor<2>>) -> PendingExchange {
        let HopRows { send, receive } = &self.rows;
        let start = |(index, rows): (usize, Tensor<2>)| -> PendingRows {
            match &self.fp8 {
                Some((scales, map)) if index == 0 => {
                    let counts = [&send[..], &receive[..]];
                    Box::new(start_fp8_rows(rows, *scales, map, counts, &self.comm))
                }
                _ => {
                    let rows = start(rows, &self.rows.op(), &self.comm);
                    Box::new(|| rows.wait())
                }
            }
        };
        let started: Vec<_> = rows.into_iter().enumerate().map(start).collect();
        Box::new(|| started.into_iter().map(|wait| Some(wait())).collect())
    }

    /// For tokens that were sent in FP8, returns the sums over their rows.
    fn start_backward(&self, gradients: Vec<Option<Tensor<2>>>) -> PendingExchange {
        let op = self.rows.clone().reversed().op();
        let gradients = gradients.into_iter();
        let started = gradients.map(|gradient| Some(start(gradient?, &op, &self.comm)));
        let started: Vec<Option<PendingTensor<2>>> = started.collect();
        let map = self.fp8.as_ref().map(|(_, map)| map.clone());
        Box::new(move || {
            let arrived = started.into_iter().map(|pending| Some(pending?.wait()));
            let mut arrived: Vec<Option<Tensor<2>>> = arrived.collect();
            if let (Some(map), Some(first)) = (map, arrived.first_mut()) {
                *first = first.take().map(|rows| unpermute(rows, &map));
            }
            arrived
        })
    }

    fn precedes_counts(&self) -> bool {
        self.are_results
    }
}

impl fmt::Debug for RowExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowExchange")
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Exchanges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchanges")
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

//! Methods of expert selection that do not depend only on the scores of a single token.

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_megatron_kernels::philox::{Stream, uniform};
use burn_megatron_kernels::record;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::collective::Comm;
use crate::comm::{Buffer, raise};
use crate::nn::{AxisRank, DropoutPosition};

/// The method that a router uses to select the experts of a token. All methods compute the weights of the experts, and
/// the gradients of the weights, from the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouterChoice {
    /// Selects the experts with the highest scores.
    Scores,
    /// In training, selects experts by a Sinkhorn assignment of the tokens of a micro-batch, which gives all experts
    /// nearly the same load (Clark et al. 2022, arXiv:2202.01169, as in Megatron-LM). The assignment is computed on the
    /// host. Outside training, selects the experts with the highest scores.
    Sinkhorn,
    /// Selects experts in round-robin order, by the position of the token in its document and independent of the
    /// scores. The load is nearly even if documents are long. This method is for benchmarks.
    RoundRobin,
}

/// The position of the tokens of a rank in the global batch.
#[derive(Clone, Debug)]
pub(super) struct TokenPosition {
    pub position: DropoutPosition,
    /// This rank's part of the sequence.
    pub place: AxisRank,
}

impl TokenPosition {
    /// Returns the indices of this rank's tokens `[batch, seq]` in the global batch, as runs of a first index and a
    /// length.
    fn runs(&self, [batch, seq]: [usize; 2]) -> Vec<(u64, usize)> {
        let AxisRank { index, size } = self.place;
        let position = self.position.get();
        let first_sample = position.first_sample;
        let Some(shard) = position.shard else {
            let row = |row: u64| (first_sample + row) * (seq * size) as u64 + (seq * index) as u64;
            return (0..batch as u64).map(|number| (row(number), seq)).collect();
        };
        let before = first_sample * shard.row_of_places() as u64;
        let own = shard.tokens().chunks(seq * size);
        let own = own.flat_map(|row| &row[seq * index..][..seq]);
        let place = |token: &usize| shard.place(*token).unwrap_or(0) as u64;
        own.map(|token| (before + place(token), 1)).collect()
    }

    /// Returns random factors for a tensor `[batch, seq, hidden]`, drawn from a uniform distribution between
    /// `1 - jitter` and `1 + jitter`. The factors do not depend on the layout.
    pub fn jitter(&self, shape: [usize; 3], jitter: f64, key: u64) -> Vec<f32> {
        let [batch, seq, hidden] = shape;
        let stream = Stream::new(key, self.position.get().step);
        let mut factors = Vec::with_capacity(batch * seq * hidden);
        for (first, count) in self.runs([batch, seq]) {
            stream.words(first * hidden as u64, count * hidden, |_, word| {
                factors.push((1.0 + jitter * (2.0 * uniform(word) - 1.0)) as f32);
            });
        }
        factors
    }
}

/// Returns `k` experts in round-robin order for tokens at these positions of their documents.
pub(super) fn round_robin(positions: Vec<usize>, k: usize, experts: usize) -> Vec<i64> {
    let of_token = |position: usize| (0..k).map(move |choice| position * k + choice);
    let all = positions.into_iter().flat_map(of_token);
    all.map(|pair| (pair % experts) as i64).collect()
}

/// Returns the experts `[tokens, k]` of this rank's tokens, best first. All real tokens of the ranks of `comm` are
/// assigned together. These ranks have parts of the same `batch` sequences. `is_real` is false for padding, whose
/// choices have no meaning. This call is collective over `comm`.
pub(super) fn sinkhorn_choices(
    logits: Tensor<2>,
    is_real: Option<&[bool]>,
    (batch, k): (usize, usize),
    comm: &Comm,
) -> Tensor<2, Int> {
    let [tokens, experts] = logits.dims();
    if record::is_recording() {
        // The choice of experts does not change any shape.
        return Tensor::zeros([tokens, k], &logits.device());
    }
    let device = logits.device().inner();
    let own = logits.inner().into_data().convert_dtype(DType::F64);
    let own: Vec<f64> = match own.try_into_vec() {
        Ok(own) => own,
        Err(error) => unreachable!("logits are floats: {error}"),
    };
    let own = with_padding(own, is_real, experts);
    let all = match comm.size() {
        1 => own,
        ranks => {
            let gathered = comm.all_gather(Buffer::F64(own));
            let gathered: Vec<f64> = gathered.unwrap_or_else(|error| raise(error)).into_vec();
            by_sequence(&gathered, batch, ranks)
        }
    };
    let assignment = assignment_of_real(&all, experts);
    // The part of this rank, sequence by sequence.
    let part = tokens / batch;
    let first = |sequence: usize| (sequence * comm.size() + comm.rank()) * part;
    let own = (0..batch).flat_map(|sequence| first(sequence)..first(sequence) + part);
    let choices = own.flat_map(|token| best(&assignment[token * experts..][..experts], k));
    let choices: Vec<i64> = choices.collect();
    Tensor::from_data(TensorData::new(choices, [tokens, k]), &device)
}

/// Returns the logits `[tokens, experts]` with one more column: 1 for a real token, 0 for padding.
fn with_padding(logits: Vec<f64>, is_real: Option<&[bool]>, experts: usize) -> Vec<f64> {
    let rows = logits.chunks(experts).enumerate();
    let is_real = |token: usize| is_real.is_none_or(|real| real[token]);
    let row = |(token, row): (usize, &[f64])| {
        let real = if is_real(token) { 1.0 } else { 0.0 };
        row.iter().copied().chain([real]).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}

/// Returns the [`sinkhorn`] assignment of the real tokens, and zeros for padding. The rows `[tokens, experts + 1]`
/// are from [`with_padding`].
fn assignment_of_real(rows: &[f64], experts: usize) -> Vec<f64> {
    let is_real = |row: &&[f64]| row[experts] != 0.0;
    let real = rows.chunks(experts + 1).filter(is_real);
    let real: Vec<f64> = real.flat_map(|row| &row[..experts]).copied().collect();
    let assigned = sinkhorn(&real, experts);
    let (mut assigned, zeros) = (assigned.chunks(experts), vec![0.0; experts]);
    let of_row = |row: &[f64]| match row[experts] {
        0.0 => &zeros[..],
        _ => assigned.next().unwrap_or(&zeros),
    };
    rows.chunks(experts + 1).flat_map(of_row).copied().collect()
}

/// Reorders the rows of all ranks by sequence. Each rank has a part of every sequence.
fn by_sequence(gathered: &[f64], batch: usize, ranks: usize) -> Vec<f64> {
    let part = gathered.len() / (batch * ranks);
    let of = |sequence: usize, rank: usize| &gathered[(rank * batch + sequence) * part..][..part];
    let parts = (0..batch).flat_map(|sequence| (0..ranks).map(move |rank| of(sequence, rank)));
    parts.flatten().copied().collect()
}

/// A small constant that keeps sums from underflowing to 0.
const SMALLEST: f64 = 1e-8;

/// The mean change of the expert factors at which the iteration ends.
const TOLERANCE: f64 = 1e-4;

/// The maximum number of iterations, for logits that do not converge, such as non-finite logits.
const MOST_ITERATIONS: usize = 1000;

/// Returns `exp(logits)` `[tokens, experts]`, scaled by a factor for each token and each expert. Rows then sum to
/// `1 / tokens`, and columns to `1 / experts`.
pub(super) fn sinkhorn(logits: &[f64], experts: usize) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut costs: Vec<f64> = logits.iter().map(|z| (z - largest).exp()).collect();
    let tokens = costs.len() / experts;
    let mut of_experts = vec![1.0; experts];
    let mut of_tokens = vec![0.0; tokens];
    for _ in 0..MOST_ITERATIONS {
        let mut columns = vec![0.0; experts];
        for (row, of_token) in costs.chunks(experts).zip(&mut of_tokens) {
            let sum: f64 = row.iter().zip(&of_experts).map(|(c, d)| c * d).sum();
            *of_token = 1.0 / (tokens as f64 * (sum + SMALLEST));
            for (column, cost) in columns.iter_mut().zip(row) {
                *column += cost * *of_token;
            }
        }
        let next: Vec<f64> = columns
            .iter()
            .map(|sum| 1.0 / (experts as f64 * (sum + SMALLEST)))
            .collect();
        let change = next.iter().zip(&of_experts).map(|(a, b)| (a - b).abs());
        let change = change.sum::<f64>() / experts as f64;
        of_experts = next;
        if change <= TOLERANCE {
            break;
        }
    }
    for (row, of_token) in costs.chunks_mut(experts).zip(&of_tokens) {
        for (cost, of_expert) in row.iter_mut().zip(&of_experts) {
            *cost *= of_token * of_expert;
        }
    }
    costs
}

/// Returns the indices of the `k` largest values, largest first. Ties are resolved by index.
fn best(values: &[f64], k: usize) -> impl Iterator<Item = i64> + use<> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.into_iter().take(k).map(|expert| expert as i64)
}

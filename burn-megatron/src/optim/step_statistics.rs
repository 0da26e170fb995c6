//! The statistics of a training step. Each rank contributes one row of numbers, and the rows are gathered on the
//! device. From the rows, the device computes whether the step is taken. The host reads the rows once.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron_kernels::adamw::outcome::{columns, elements, statistics_dtype};
use burn_megatron_kernels::adamw::{AdamWStep, OutcomeRule, SumOrder, step_outcome};

use super::norm::{rounds_norm, squares};
use crate::collective::{start_all_gather, to_f64};
use crate::comm::ParallelContext;
use crate::data_parallel::{
    DataParallelError, DistributedDataParallel, Gradients, InvalidGradient, ReductionRecord,
    partition_index,
};
use crate::mesh::{Axis, AxisSet, Grid};

/// The column that is 1 if the rank requests to stop the run.
const STOP: usize = columns::COUNT;
/// The first column of a hash of the gathered and reduced buckets, in parts of 16 bits, which f32 represents
/// exactly.
const FINGERPRINT: usize = STOP + 1;
const FINGERPRINT_PARTS: usize = 4;
/// The column of the first loss.
const LOSSES: usize = FINGERPRINT + FINGERPRINT_PARTS;

/// The contribution of one rank to the statistics of a step.
pub struct RankStatistics {
    /// The measurements and fingerprints of the gradient reduction.
    pub record: ReductionRecord,
    /// The number of tokens in this rank's micro-batches.
    pub tokens: u64,
    /// The losses of this rank's micro-batches, as flat tensors with [`loss_count`](Self::loss_count) elements in
    /// total. The list is empty on ranks without the last pipeline stage.
    pub losses: Vec<Tensor<1>>,
    /// The number of losses on each rank that has the last pipeline stage.
    pub loss_count: usize,
    /// Whether this rank requests to stop the run.
    pub stop: bool,
    /// Additional flat tensors with their names. Their values must be equal on all ranks that read them: see
    /// [`StepReading::added`].
    pub added: Vec<(&'static str, Tensor<1>)>,
}

/// The settings that determine the outcome of a step. The outcome may also depend on the outcome of the previous step.
pub struct OutcomeSettings {
    /// The order in which the squares of the gradient norm are summed: see [`order_of_squares`].
    pub squares: Arc<SumOrder>,
    /// The maximum gradient norm, to which gradients are clipped.
    pub clip: f64,
    /// The loss scales: see [`OutcomeRule::loss_scales`].
    pub loss_scales: [f64; 3],
    /// The hyperparameters: see [`OutcomeRule::steps`].
    pub steps: [AdamWStep; 2],
}

/// The statistics of a step. They stay on the device until [`reading`](Self::reading) is called.
pub struct StepStatistics {
    /// The outcome of the step, on the device: see [`step_outcome`].
    pub outcome: Tensor<1>,
    /// The rows of all ranks.
    rows: Tensor<1>,
    measured: Option<Tensor<1>>,
    added: Vec<(&'static str, Tensor<1>)>,
    columns: usize,
    largest_valid: f64,
    reading: OnceCell<StepReading>,
}

/// The statistics of a step in host memory.
#[derive(Clone, Debug)]
pub struct StepReading {
    /// The kind of outcome, which includes whether the step was taken. It is one of the values in [`elements`].
    pub kind: f64,
    /// The gradient norm before clipping.
    pub norm: f64,
    /// The factor that is applied to the gradient sums, including the clipping factor.
    pub factor: f64,
    /// The factor that would be applied to the gradient sums without clipping.
    pub unclipped: f64,
    /// The total number of tokens on all ranks.
    pub tokens: u64,
    /// The losses of each world rank.
    losses: Vec<Vec<f64>>,
    /// The first rank that has an invalid gradient, or `None` if no rank has one.
    pub first_invalid: Option<usize>,
    /// Whether at least one rank requests to stop the run.
    pub stop: bool,
    /// The invalid gradients of this rank.
    pub invalid_gradients: Vec<InvalidGradient>,
    /// The values of the added tensors, by name.
    added: BTreeMap<&'static str, Vec<f64>>,
    fingerprints: Vec<Vec<f64>>,
}

impl StepReading {
    /// Whether the step was taken.
    pub fn is_taken(&self) -> bool {
        self.kind == elements::TAKEN
    }

    /// Whether the step had no token with a loss.
    pub fn is_without_targets(&self) -> bool {
        self.kind == elements::NO_TARGETS
    }

    /// Returns the values of the [added](RankStatistics::added) tensor with this name, or an empty slice if there is no
    /// such tensor.
    pub fn added(&self, name: &str) -> &[f64] {
        self.added.get(name).map_or(&[], Vec::as_slice)
    }

    /// Applies `of` to the losses of each rank, and sums the results over the pipeline, context and data axes of this
    /// rank.
    pub fn losses(&self, groups: &ParallelContext, of: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
        let by_rank: Vec<Vec<f64>> = self.losses.iter().map(|losses| of(losses)).collect();
        let order = order_of_losses(groups);
        let sum = |at: usize| {
            let values: Vec<f64> = by_rank.iter().map(|losses| losses[at]).collect();
            order.sum(&values)
        };
        (0..by_rank[0].len()).map(sum).collect()
    }

    /// Checks that all ranks of the data axis used their parameters in the same order.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::OrderMismatch`] if a rank used its parameters in another order.
    pub fn check_order<M: Module>(
        &self,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<(), DataParallelError> {
        let groups = ddp.groups();
        let own = &self.fingerprints[groups.rank()];
        let mesh = groups.mesh();
        let peers = mesh.members(Grid::Dense, Grid::Dense.data_axes(), groups.rank());
        let differs = |rank: &usize| self.fingerprints[*rank] != *own;
        let other = peers.into_iter().find(differs);
        other.map_or(Ok(()), |other| ddp.check_order(other))
    }
}

impl StepStatistics {
    /// Gathers the statistics of a step and computes whether the step is taken. `before` is the outcome of the previous
    /// step, if the host has not read it yet. All values stay on the device. Collective: call on all ranks of the
    /// world.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the collective fails.
    pub fn gather<M: Module>(
        own: RankStatistics,
        gradients: &Gradients,
        ddp: &DistributedDataParallel<M>,
        before: Option<Tensor<1>>,
        settings: OutcomeSettings,
    ) -> Self {
        let world = ddp.groups().world();
        let device = ddp.device();
        let columns = LOSSES + own.loss_count;
        let measured = own.record.measured.clone();
        let added = own.added.clone();
        let row = own.row(gradients, ddp);
        let rows = match world.size() {
            1 => row,
            _ => start_all_gather(row, 0, world).wait(),
        };
        let options = (device, statistics_dtype(device));
        let before = before.unwrap_or_else(|| Tensor::zeros([elements::COUNT], options));
        let largest_valid = ddp.largest_valid_gradient();
        let rule = OutcomeRule {
            columns,
            losses: LOSSES,
            squares: settings.squares,
            rounds_norm: rounds_norm(gradients, ddp),
            limit: largest_valid,
            clip: settings.clip,
            loss_scales: settings.loss_scales,
            steps: settings.steps,
        };
        Self {
            outcome: step_outcome(rows.clone(), before, rule),
            rows,
            measured,
            added,
            columns,
            largest_valid,
            reading: OnceCell::new(),
        }
    }

    /// Returns the [added](RankStatistics::added) tensor with this name, or `None` if there is no such tensor.
    pub fn added(&self, name: &str) -> Option<&Tensor<1>> {
        let found = self.added.iter().find(|(added, _)| *added == name);
        found.map(|(_, tensor)| tensor)
    }

    /// Returns a tensor `[1]` on the device that is 1 if the step is taken, otherwise 0.
    pub fn taken(&self) -> Tensor<1> {
        let kind = self.outcome.clone().narrow(0, 0, 1);
        let dtype = kind.dtype();
        kind.equal_elem(elements::TAKEN).float().cast(dtype)
    }

    /// Returns the statistics in host memory. The first call waits for the device and copies the statistics in one
    /// transfer.
    pub fn reading<M: Module>(&self, ddp: &DistributedDataParallel<M>) -> &StepReading {
        self.reading.get_or_init(|| self.read(ddp))
    }

    fn read<M: Module>(&self, ddp: &DistributedDataParallel<M>) -> StepReading {
        let _span = tracing::debug_span!("read_step_statistics").entered();
        let parts = [self.outcome.clone(), self.rows.clone()].into_iter();
        let added = self.added.iter().map(|(_, tensor)| tensor.clone());
        let parts = parts.chain(added).chain(self.measured.clone());
        let all = to_f64(Tensor::cat(parts.collect(), 0));
        let (outcome, rest) = all.split_at(elements::COUNT);
        let (rows, rest) = rest.split_at(self.rows.dims()[0]);
        let (mut measured, mut added) = (rest, BTreeMap::new());
        for (name, tensor) in &self.added {
            let (own, rest) = measured.split_at(tensor.dims()[0]);
            added.insert(*name, own.to_vec());
            measured = rest;
        }
        let rows: Vec<&[f64]> = rows.chunks(self.columns).collect();
        let tokens = |row: &&[f64]| {
            row[columns::TOKENS_HIGH] as u64 * columns::TOKENS_UNIT
                + row[columns::TOKENS_LOW] as u64
        };
        let is_invalid = |row: &&[f64]| {
            let largest = row[columns::LARGEST];
            !largest.is_finite() || largest > self.largest_valid
        };
        let part = |from: usize, to: usize| rows.iter().map(|row| row[from..to].to_vec()).collect();
        StepReading {
            kind: outcome[elements::KIND],
            norm: outcome[elements::NORM],
            factor: outcome[elements::FACTOR],
            unclipped: outcome[elements::UNCLIPPED],
            tokens: rows.iter().map(tokens).sum(),
            losses: part(LOSSES, self.columns),
            first_invalid: rows.iter().position(is_invalid),
            stop: rows.iter().any(|row| row[STOP] != 0.0),
            invalid_gradients: match measured {
                [] => vec![],
                measured => ddp.invalid_gradients(measured),
            },
            added,
            fingerprints: part(FINGERPRINT, LOSSES),
        }
    }
}

impl RankStatistics {
    /// Returns the row of this rank.
    fn row<M: Module>(self, gradients: &Gradients, ddp: &DistributedDataParallel<M>) -> Tensor<1> {
        let device = ddp.device();
        let dtype = statistics_dtype(device);
        let zeros = |count: usize| Tensor::zeros([count], (device, dtype));
        let measured = self.record.measured;
        // On the CPU the bits of the norm do not depend on how the gradients are sharded.
        let of_measured = measured.as_ref().filter(|_| *device != Device::flex());
        let norm = tracing::debug_span!("gradient_norm");
        let of_grid = |grid| {
            let _span = norm.enter();
            let known = of_measured.and_then(|measured| ddp.measured_squares(measured, grid));
            let squares = known.or_else(|| squares(gradients, ddp, grid));
            squares.map_or_else(|| zeros(1), |squares| squares.cast(dtype))
        };
        let [dense, expert] = [Grid::Dense, Grid::Expert].map(of_grid);
        let known = known_columns(
            self.tokens,
            self.stop,
            self.record.fingerprints,
            ddp.groups(),
        );
        let mut parts = vec![
            measured.map_or_else(|| zeros(1), |measured| measured.narrow(0, 0, 1)),
            dense,
            expert,
            Tensor::from_data(
                TensorData::new(known, [LOSSES - columns::TOKENS_HIGH]),
                (device, dtype),
            ),
        ];
        if self.losses.is_empty() {
            parts.push(zeros(self.loss_count));
        } else {
            parts.extend(self.losses.into_iter().map(|losses| losses.cast(dtype)));
        }
        Tensor::cat(parts, 0)
    }
}

/// Returns the columns known on the host, starting with the tokens. Only one of the ranks with the same tokens
/// counts them.
fn known_columns(
    tokens: u64,
    stop: bool,
    [gathered, reduced]: [u64; 2],
    groups: &ParallelContext,
) -> Vec<f64> {
    let place = groups.mesh_rank();
    let is_first = place.among(Grid::Dense, Grid::Dense.model_axes()).index == 0
        && place.on(Grid::Dense, Axis::Pipeline).index == 0;
    let tokens = if is_first { tokens } else { 0 };
    let unit = columns::TOKENS_UNIT;
    let fingerprint = gathered.rotate_left(32) ^ reduced;
    let part = |index: usize| ((fingerprint >> (16 * index)) & 0xffff) as f64;
    let mut known = vec![
        (tokens / unit) as f64,
        (tokens % unit) as f64,
        f64::from(u8::from(stop)),
    ];
    known.extend((0..FINGERPRINT_PARTS).map(part));
    known
}

/// Returns the order in which the losses of the ranks are summed: first over the pipeline.
fn order_of_losses(groups: &ParallelContext) -> SumOrder {
    let members = |axes: AxisSet, rank| groups.mesh().members(Grid::Dense, axes, rank);
    let pipeline = |rank| {
        let ranks = members(Axis::Pipeline.into(), rank).into_iter();
        SumOrder::Pairwise(ranks.map(SumOrder::Element).collect())
    };
    let data = members(Grid::Dense.data_axes(), groups.rank()).into_iter();
    SumOrder::Pairwise(data.map(pipeline).collect())
}

/// Returns the order in which the CPU sums the squares of all ranks for the gradient norm. The sum runs first over the
/// partitions of a data-parallel group, then over the model-parallel ranks, the grids and the pipeline stages. With
/// this order, the bits of the sum do not depend on how the gradients are sharded. Other devices use another order.
pub fn order_of_squares<M: Module>(
    ddp: &DistributedDataParallel<M>,
    loss_count: usize,
) -> SumOrder {
    if *ddp.device() != Device::flex() {
        return SumOrder::InOrder(vec![]);
    }
    let (groups, config, columns) = (ddp.groups(), ddp.config(), LOSSES + loss_count);
    let place = |rank: usize| groups.mesh_rank().with_rank(rank);
    let stages = place(0).on(Grid::Dense, Axis::Pipeline).size;
    let of_grid = |stage: usize, grid: Grid, column: usize| {
        let key = |rank: usize| {
            let data = place(rank).among(grid, grid.data_axes());
            let shards = config.shard_ranks(data.size);
            let partition = partition_index(data.index, shards, data.size / shards);
            (
                place(rank).among(grid, grid.model_axes()).index,
                partition,
                rank,
            )
        };
        let ranks = 0..groups.mesh().world_size();
        let of_stage =
            ranks.filter(|rank| place(*rank).on(Grid::Dense, Axis::Pipeline).index == stage);
        let mut keys: Vec<_> = of_stage.map(key).collect();
        keys.sort_unstable();
        let element = |key: &(usize, usize, usize)| SumOrder::Element(key.2 * columns + column);
        let models = keys.chunk_by(|a, b| a.0 == b.0);
        let models = models.map(|data| SumOrder::InOrder(data.iter().map(element).collect()));
        SumOrder::Pairwise(models.collect())
    };
    let grids = |stage| {
        SumOrder::InOrder(vec![
            of_grid(stage, Grid::Dense, columns::SQUARES),
            of_grid(stage, Grid::Expert, columns::SQUARES + 1),
        ])
    };
    SumOrder::Pairwise((0..stages).map(grids).collect())
}

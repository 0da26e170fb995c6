//! Maximum, sum of exponentials and sum of each row in a single read.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::STATISTICS;
use super::super::ops::LossOp;
use super::{LOADS_PER_STEP, LossLaunch, token_of};
use crate::cube::{cube_max, cube_sum, empty, lane_max, lane_sum, launch};

/// A unit's running statistics of its row: the maximum, and per lane the sum of `exp(x - maximum)`
/// and the sum of `x`.
#[derive(CubeType)]
struct OnlineSoftmax<N: Size> {
    max: f32,
    exponentials: Vector<f32, N>,
    sum: Vector<f32, N>,
}

#[cube]
impl<N: Size> OnlineSoftmax<N> {
    /// Adds `count` more vectors. Sums are rescaled only if the maximum grows.
    fn read<F: Float>(
        &mut self,
        logits: &Tensor<Vector<F, N>>,
        at: usize,
        step: usize,
        #[comptime] count: usize,
    ) {
        let mut values = Array::<Vector<f32, N>>::new(count);
        #[unroll]
        for i in 0..count {
            values[i] = Vector::cast_from(logits[at + i * step]);
        }
        let mut larger = values[0];
        #[unroll]
        for i in 1..count {
            larger = max(larger, values[i]);
        }
        let largest = lane_max(larger);
        if largest > self.max {
            self.exponentials *= Vector::new((self.max - largest).exp());
            self.max = largest;
        }
        #[unroll]
        for i in 0..count {
            self.exponentials += (values[i] - Vector::new(self.max)).exp();
            self.sum += values[i];
        }
    }

    /// Adds the lanes of one vector that lie in `start..end`.
    fn read_lanes<F: Float>(
        &mut self,
        logits: &Tensor<Vector<F, N>>,
        at: usize,
        start: usize,
        end: usize,
    ) {
        let values = Vector::<f32, N>::cast_from(logits[at]);
        #[unroll]
        for lane in 0..N::value() {
            let position = at * N::value() + lane;
            if position >= start && position < end {
                let x = values.extract(lane);
                if x > self.max {
                    self.exponentials *= Vector::new((self.max - x).exp());
                    self.max = x;
                }
                let more = self.exponentials.extract(lane) + (x - self.max).exp();
                self.exponentials.insert(lane, more);
                let more = self.sum.extract(lane) + x;
                self.sum.insert(lane, more);
            }
        }
    }
}

/// The statistics of a row. Only the first unit has the logit of the target.
#[derive(CubeType)]
pub(super) struct RowStatistics {
    pub largest: f32,
    pub exponentials: f32,
    pub target: f32,
    pub sum: f32,
}

/// Reads the row that starts at element `start`. All units of the cube must call it. The row may be
/// overwritten afterwards.
#[cube]
pub(super) fn row_statistics<F: Float, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    start: usize,
    token: u32,
    valid: u32,
    first: u32,
    #[comptime] units: u32,
    #[comptime] planes: bool,
) -> RowStatistics {
    let lanes = N::value();
    let end = start + valid as usize;
    let mut online = OnlineSoftmax::<N> {
        max: f32::min_value(),
        exponentials: Vector::new(0.0),
        sum: Vector::new(0.0),
    };

    // Complete vectors of the row. The division is by a constant.
    let head = start / lanes + (start % lanes != 0) as usize;
    let tail = end / lanes;
    let step = units as usize;
    let mut at = UNIT_POS as usize;
    if tail > head {
        let count = tail - head;
        while at + comptime!((LOADS_PER_STEP - 1) * units as usize) < count {
            online.read::<F>(logits, head + at, step, LOADS_PER_STEP);
            at += comptime!(LOADS_PER_STEP * units as usize);
        }
        while at < count {
            online.read::<F>(logits, head + at, step, 1usize);
            at += step;
        }
    }
    // The remainders at both ends, which may be in the same vector.
    let cut = start % lanes != 0;
    if UNIT_POS == 0 && cut && end > start {
        online.read_lanes::<F>(logits, start / lanes, start, end);
    }
    let same = cut && tail == start / lanes;
    if UNIT_POS == 1 && end % lanes != 0 && end > start && !same {
        online.read_lanes::<F>(logits, tail, start, end);
    }
    let mut target = 0.0f32;
    if UNIT_POS == 0 && token >= first && token - first < valid {
        let position = start + (token - first) as usize;
        let values = Vector::<f32, N>::cast_from(logits[position / lanes]);
        #[unroll]
        for lane in 0..lanes {
            if lane == position % lanes {
                target = values.extract(lane);
            }
        }
    }

    let largest = cube_max(online.max, units, planes);
    let own = lane_sum(online.exponentials) * (online.max - largest).exp();
    RowStatistics {
        largest,
        exponentials: cube_sum(own, units, planes),
        target,
        sum: cube_sum(lane_sum(online.sum), units, planes),
    }
}

/// Computes the statistics with one cube per row: `logits` is `[rows, width]` and `output`
/// `[rows, 4]`.
#[cube(launch_unchecked)]
pub(super) fn statistics_kernel<F: Float, I: Int, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    targets: &Tensor<I>,
    output: &mut Tensor<f32>,
    rows: u32,
    width: u32,
    valid: u32,
    first: u32,
    tokens: u32,
    #[comptime] ignore: Option<i64>,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F, I)] _types: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row < rows as usize {
        let token = token_of::<I>(targets[row], tokens, ignore);
        let start = row * width as usize;
        let own = row_statistics::<F, N>(logits, start, token, valid, first, units, planes);
        if UNIT_POS == 0 {
            let at = row * STATISTICS;
            output[at] = own.largest;
            output[at + 1] = own.exponentials;
            output[at + 2] = own.target;
            output[at + 3] = own.sum;
        }
    }
}

/// Computes the statistics from logits and targets.
pub(in crate::cross_entropy) fn statistics(op: &LossOp, inputs: [CubeTensor; 2]) -> CubeTensor {
    let [logits, targets] = inputs;
    let vocabulary = &op.vocabulary;
    let launch = LossLaunch::new(op, &logits, &targets);
    let output = empty(&logits, [launch.rows, STATISTICS], DType::F32);
    if launch.rows == 0 {
        return output;
    }
    unsafe {
        launch!(
            statistics_kernel,
            [launch.client, launch.rows, launch.plan.units],
            [launch.vector],
            [logits, targets, &output],
            (launch.rows as u32, launch.width as u32),
            (vocabulary.valid, vocabulary.first, vocabulary.tokens),
            (
                launch.ignore,
                launch.plan.units,
                launch.plan.planes(),
                launch.types
            )
        );
    }
    output
}

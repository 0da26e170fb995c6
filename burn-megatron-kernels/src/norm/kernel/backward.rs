//! The kernels of the backward pass. One kernel computes the input gradient and partial sums of the parameter
//! gradients. The other kernel computes only partial sums.

use cubecl::prelude::*;

use super::forward::factor;
use super::layout::{RowLayout, row_sum};
use crate::cube::lane_sum;

/// The compile-time parameters of the backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct NormBackwardVariant {
    /// Whether the mean was subtracted.
    pub centred: bool,
    /// Whether the factor is the weight plus one.
    pub zero_centered: bool,
    /// Whether the gradient of the input is computed.
    pub input: bool,
    /// Whether the gradient of the input is added to an existing gradient.
    pub onto: bool,
    /// Whether the gradients of the weight and of the bias are summed.
    pub weight: bool,
    pub bias: bool,
    /// Whether the gradient of the input is summed over rows, for a bias of the input.
    pub x_bias: bool,
}

impl NormBackwardVariant {
    /// Returns the number of parameter gradients that are summed.
    pub(super) fn sums(&self) -> usize {
        let all = [self.weight, self.bias, self.x_bias];
        all.into_iter().filter(|wanted| *wanted).count()
    }
}

/// The saved statistics of a row.
#[derive(CubeType, Clone, Copy)]
struct RowStatistics {
    rstd: f32,
    mean: f32,
    rest: f32,
}

#[cube]
impl RowStatistics {
    fn read(statistics: &Tensor<f32>, row: usize, #[comptime] centred: bool) -> RowStatistics {
        if comptime!(centred) {
            RowStatistics {
                rstd: statistics[row * 3],
                mean: statistics[row * 3 + 1],
                rest: statistics[row * 3 + 2],
            }
        } else {
            RowStatistics {
                rstd: statistics[row],
                mean: 0.0f32,
                rest: 0.0f32,
            }
        }
    }

    /// Returns the normalized values of a vector.
    fn normalised<S: Float, N: Size>(
        &self,
        source: Vector<S, N>,
        #[comptime] centred: bool,
    ) -> Vector<f32, N> {
        let mut value = Vector::<f32, N>::cast_from(source);
        if comptime!(centred) {
            value = value - Vector::new(self.mean) - Vector::new(self.rest);
        }
        value * Vector::new(self.rstd)
    }
}

/// Returns whether a vector belongs to an `active` row. If the answer is known at compile time, no branch separates the
/// loads. Loops over small vectors keep their branch, because a compiler would otherwise unroll them until registers
/// run out.
#[cube]
fn is_inside<N: Size>(active: bool, column: usize, #[comptime] layout: RowLayout) -> bool {
    let lanes = N::value();
    let mut inside = active && column < comptime!(layout.columns);
    if comptime!(layout.is_whole() && (layout.in_registers || lanes >= 8)) {
        inside = true;
    }
    inside
}

/// Loads a vector of a row from registers, or from memory.
#[cube]
fn reload<F: Float, N: Size>(
    kept: &Array<Vector<F, N>>,
    tensor: &Tensor<Vector<F, N>>,
    step: usize,
    at: usize,
    #[comptime] in_registers: bool,
) -> Vector<F, N> {
    if comptime!(in_registers) {
        kept[step]
    } else {
        tensor[at]
    }
}

/// Computes `dx = (g - mean(g) - x mean(g x)) rstd (+ so_far)`. `g` is `gradient * weight`, and `x` holds the
/// normalized values. The term `mean(g)` is used only if `centred` is true.
///
/// A cube processes every `cubes`-th block of rows. It writes unrounded sums of `gradient x`, of `gradient` and of `dx`
/// to its part of `partials` `[cubes, sums, columns]`. Gradients that are not requested are neither read nor written.
#[cube(launch_unchecked)]
pub(super) fn norm_backward<Y: Float, S: Float, W: Float, N: Size>(
    source: &Tensor<Vector<S, N>>,
    statistics: &Tensor<f32>,
    gradient: &Tensor<Vector<Y, N>>,
    weight: &Tensor<Vector<W, N>>,
    so_far: &Tensor<Vector<S, N>>,
    dx: &mut Tensor<Vector<S, N>>,
    partials: &mut Tensor<Vector<f32, N>>,
    rows: u32,
    cubes: u32,
    #[comptime] variant: NormBackwardVariant,
    #[comptime] layout: RowLayout,
    #[define(Y, S, W)] _types: [ElemType; 3],
) {
    let lanes = comptime!(layout.lanes);
    let columns = comptime!(layout.columns);
    let in_registers = comptime!(layout.in_registers);
    let steps = comptime!(layout.steps());
    let lane = (UNIT_POS % lanes) as usize;
    let block_rows = comptime!(layout.rows());
    let blocks = (rows as usize).div_ceil(block_rows);
    let count = f32::cast_from(columns * N::value());

    let mut kept = Array::<Vector<S, N>>::new(comptime!(layout.kept()));
    let mut kept_gradient = Array::<Vector<Y, N>>::new(comptime!(layout.kept()));
    let mut of_weight = Array::<Vector<f32, N>>::new(comptime!(layout.kept()));
    let mut of_bias = Array::<Vector<f32, N>>::new(comptime!(layout.kept()));
    let mut of_x_bias = Array::<Vector<f32, N>>::new(comptime!(layout.kept()));
    #[unroll]
    for step in 0..comptime!(layout.kept()) {
        of_weight[step] = Vector::new(0.0);
        of_bias[step] = Vector::new(0.0);
        of_x_bias[step] = Vector::new(0.0);
    }

    // The loads come before the branch on the bounds. After the branch, a compiler would neither combine the loads nor
    // keep their vectors intact. If the vector is out of bounds, the first vector is loaded and not used.
    let mut block = CUBE_POS;
    while block < blocks {
        // A cube with a single row has no rows out of bounds, so no branch is needed. This saves registers if the row
        // is kept in registers. Loops over longer rows need more registers without the branch.
        let mut row = block * block_rows;
        let mut active = true;
        if comptime!(!(layout.is_alone() && in_registers)) {
            row += (UNIT_POS / lanes) as usize;
            active = row < rows as usize;
        }
        let base = row * columns;
        let row_statistics =
            RowStatistics::read(statistics, select(active, row, 0usize), variant.centred);
        if comptime!(in_registers) {
            // All loads come before the first use, so that one wait is enough.
            #[unroll]
            for step in 0..steps {
                let column = lane + step * lanes as usize;
                let inside = is_inside::<N>(active, column, layout);
                let at = select(inside, base + column, 0usize);
                kept[step] = source[at];
                kept_gradient[step] = gradient[at];
            }
        }
        let mut along = Vector::<f32, N>::new(0.0);
        let mut all = Vector::<f32, N>::new(0.0);
        #[unroll(in_registers)]
        for step in 0..steps {
            let column = lane + step * lanes as usize;
            let inside = is_inside::<N>(active, column, layout);
            let at = select(inside, base + column, 0usize);
            let raw = reload(&kept, source, step, at, in_registers);
            let raw_gradient = reload(&kept_gradient, gradient, step, at, in_registers);
            if inside {
                let value = row_statistics.normalised(raw, variant.centred);
                let change = Vector::<f32, N>::cast_from(raw_gradient);
                if comptime!(in_registers) {
                    if comptime!(variant.weight) {
                        of_weight[step] += change * value;
                    }
                    if comptime!(variant.bias) {
                        of_bias[step] += change;
                    }
                }
                let product = change * factor(weight, column, variant.zero_centered);
                along += product * value;
                all += product;
            }
        }
        if comptime!(variant.input) {
            let along = Vector::<f32, N>::new(row_sum(lane_sum(along), layout) / count);
            let mut mean = Vector::<f32, N>::new(0.0);
            if comptime!(variant.centred) {
                mean = Vector::new(row_sum(lane_sum(all), layout) / count);
            }
            #[unroll(in_registers)]
            for step in 0..steps {
                let column = lane + step * lanes as usize;
                let inside = is_inside::<N>(active, column, layout);
                let at = select(inside, base + column, 0usize);
                let raw = reload(&kept, source, step, at, in_registers);
                let raw_gradient = reload(&kept_gradient, gradient, step, at, in_registers);
                if inside {
                    let value = row_statistics.normalised(raw, variant.centred);
                    let change = Vector::<f32, N>::cast_from(raw_gradient);
                    // The product is rounded as in the mean. If a compiler fused this product with the difference, its
                    // rounding error times `rstd` would remain where the result must be zero.
                    let factor = factor(weight, column, variant.zero_centered);
                    let product = fma(change, factor, Vector::new(0.0));
                    let mut result =
                        (product - mean - value * along) * Vector::new(row_statistics.rstd);
                    if comptime!(variant.onto) {
                        result += Vector::<f32, N>::cast_from(so_far[at]);
                    }
                    dx[at] = Vector::cast_from(result);
                    if comptime!(in_registers && variant.x_bias) {
                        of_x_bias[step] += result;
                    }
                }
            }
        }
        block += cubes as usize;
    }

    if comptime!(in_registers) {
        let part = CUBE_POS * comptime!(variant.sums());
        if comptime!(variant.weight) {
            write_part(&of_weight, partials, part, layout);
        }
        if comptime!(variant.bias) {
            let part = part + comptime!(usize::from(variant.weight));
            write_part(&of_bias, partials, part, layout);
        }
        if comptime!(variant.x_bias) {
            let part = part + comptime!(variant.sums() - 1);
            write_part(&of_x_bias, partials, part, layout);
        }
    }
}

/// Writes the sums of a cube's rows to a part `[columns]`. All units of the cube must call this function.
#[cube]
fn write_part<N: Size>(
    own: &Array<Vector<f32, N>>,
    partials: &mut Tensor<Vector<f32, N>>,
    part: usize,
    #[comptime] layout: RowLayout,
) {
    let lanes = comptime!(layout.lanes);
    let columns = comptime!(layout.columns);
    let lane = (UNIT_POS % lanes) as usize;
    #[unroll]
    for step in 0..comptime!(layout.steps()) {
        let column = lane + step * lanes as usize;
        let total = across_rows(own[step], layout);
        if UNIT_POS < lanes && column < columns {
            partials[part * columns + column] = total;
        }
    }
}

/// Returns the sum over the rows of a cube. Only the units of the first row get the sum. All units of the cube must
/// call this function.
#[cube]
fn across_rows<N: Size>(own: Vector<f32, N>, #[comptime] layout: RowLayout) -> Vector<f32, N> {
    let lanes = comptime!(layout.lanes);
    let mut total = own;
    if comptime!(layout.lanes < layout.units) {
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(layout.units as usize));
        shared[UNIT_POS as usize] = own;
        sync_cube();
        if UNIT_POS < lanes {
            for other in 1..comptime!(layout.units / layout.lanes) {
                total += shared[(UNIT_POS + other * lanes) as usize];
            }
        }
        sync_cube();
    }
    total
}

/// Computes only the partial sums of the parameter gradients, for rows that do not fit in registers. A unit processes
/// one column of a strip of rows. `partials` is `[strips, weight and bias, columns]`.
#[cube(launch_unchecked)]
pub(super) fn norm_partials<Y: Float, S: Float, N: Size>(
    source: &Tensor<Vector<S, N>>,
    statistics: &Tensor<f32>,
    gradient: &Tensor<Vector<Y, N>>,
    partials: &mut Tensor<Vector<f32, N>>,
    rows: u32,
    strips: u32,
    #[comptime] variant: NormBackwardVariant,
    #[comptime] columns: usize,
    #[comptime] units: u32,
    #[define(Y, S)] _types: [ElemType; 2],
) {
    let blocks = comptime!(columns.div_ceil(units as usize));
    let strip = CUBE_POS / blocks;
    let column = (CUBE_POS % blocks) * units as usize + UNIT_POS as usize;
    if strip < strips as usize && column < columns {
        let mut of_weight = Vector::<f32, N>::new(0.0);
        let mut of_bias = Vector::<f32, N>::new(0.0);
        let mut row = strip;
        while row < rows as usize {
            let at = row * columns + column;
            let change = Vector::<f32, N>::cast_from(gradient[at]);
            let row_statistics = RowStatistics::read(statistics, row, variant.centred);
            of_weight += change * row_statistics.normalised(source[at], variant.centred);
            of_bias += change;
            row += strips as usize;
        }
        let part = strip * comptime!(usize::from(variant.weight) + usize::from(variant.bias));
        if comptime!(variant.weight) {
            partials[part * columns + column] = of_weight;
        }
        if comptime!(variant.bias) {
            let part = part + comptime!(usize::from(variant.weight));
            partials[part * columns + column] = of_bias;
        }
    }
}
